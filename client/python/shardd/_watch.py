"""A thread that waits for generations."""

from __future__ import annotations

import ctypes as C
import threading
from typing import Any, Callable

from . import _abi, _library
from .client import Client
from .errors import Aborted, DeadlineExceeded, SharddError

LOOK_MS = 200  # how long a wait lasts before it looks whether it is to end


class Watch:
    """Calls a function for new generations of a publication, on a separate thread. ``error``: the
    exception that has ended the thread, or None."""

    def __init__(self, job: str, name: str, callback: Callable[[int, int], object],
                 socket: str | None = None, newer_than: int = 0, **options: Any) -> None:
        self.error: Exception | None = None
        self._callback, self._last = callback, newer_than
        self._client = Client(socket, **options)
        self._handle = C.c_void_p()
        self._ends = threading.Event()
        try:
            _library.call("live_open", self._client.handle, job.encode(), name.encode(), 0,
                          C.byref(self._handle))
        except BaseException:
            self._client.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"shardd-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        found = _abi.Generation()
        while not self._ends.is_set():
            try:
                _library.call("live_acquire", self._handle, LOOK_MS, C.byref(found))
            except (Aborted, DeadlineExceeded):
                continue  # there is another daemon, or nothing newer
            except SharddError as error:  # threading.excepthook tells it
                self.error = error
                raise
            if found.number > self._last:
                self._last = int(found.number)
                try:
                    self._callback(self._last, int(found.step))
                except Exception as error:
                    self.error = error
                    raise

    def stop(self) -> None:
        """End the thread. Wait for a callback that runs, unless the callback itself calls this.
        Calling this twice is allowed."""
        self._ends.set()
        if self._thread is threading.current_thread():
            return
        self._thread.join()
        handle, self._handle = self._handle, C.c_void_p()
        if handle.value and not self._client.forked:
            _library.library().shardd_live_close(handle)
        self._client.close()


__all__ = ["Watch"]
