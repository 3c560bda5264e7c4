"""Tickets: a submitted op returns one to wait on."""

from __future__ import annotations

import ctypes as C
import errno
import math
import time
from typing import Any, Callable, Generic, TypeVar

from . import _abi, _library
from ._connection import Connection
from .errors import DaemonRestarted, WaitTimeout, from_code

T = TypeVar("T")

_SLICE = 0.1  # seconds, the longest call into the library that a signal waits for
_STALL = 10.0  # seconds after which a wait is reported; then after twice the time, and so on


def _is_not_yet(result: int, error: _abi.Error) -> bool:
    return result == -4 and error.native == errno.EAGAIN


class Ticket(Generic[T]):
    """A submitted op; it ends with one :meth:`wait` that returns, or a :meth:`done` that is True.

    With a stream (:meth:`Client.set_stream`) it ends when the daemon has queued the op; later work
    on the stream runs after the op. Two threads must not wait for the same ticket.
    """

    __slots__ = ("_client", "_done", "_finish", "_number", "_stream", "_value", "name")

    def __init__(self, client: Connection, name: str, number: int,
                 finish: Callable[[_abi.Result], T], stream: int | None = None) -> None:
        self._client, self.name, self._number, self._finish = client, name, number, finish
        self._stream = stream
        self._done = False
        self._value: Any = None

    def _ended(self, result: int, error: _abi.Error, r: _abi.Result) -> None:
        if _is_not_yet(result, error):
            raise WaitTimeout(error.text.decode(), native=error.native, call=self.name)
        self._done = True
        if result < 0:
            self._value = from_code(result, error.text.decode(errors="replace"),
                                    error.field.decode(), error.domain.decode(), error.native,
                                    self.name)
            if isinstance(self._value, DaemonRestarted) and self._client.restart_advice:
                self._value = self._value.advised(self._client.restart_advice)
        else:
            r.stream = self._stream
            self._value = self._finish(r)

    def _wait_until(self, end: float | None, r: _abi.Result, error: _abi.Error) -> int:
        """In slices: between them the interpreter runs the handlers of signals."""
        began, report = time.monotonic(), _STALL
        while True:
            left = _SLICE if end is None else min(_SLICE, max(0.0, end - time.monotonic()))
            result = int(_library.library().shardd_wait(
                self._client.handle, self._number, math.ceil(left * 1000), C.byref(r),
                C.byref(error)))
            if not _is_not_yet(result, error) or (end is not None and time.monotonic() >= end):
                return result
            waited = time.monotonic() - began
            if waited >= report:
                report *= 2
                left = math.inf if end is None else end - time.monotonic()
                self._client.stalled(f"{self.name} has not ended after {waited:.0f} s"
                                     f"{self._client.who()}", left)

    def done(self) -> bool:
        """Has the op ended, successfully or not? Never blocks."""
        if self._done:
            return True
        error, r = _abi.Error(), _abi.Result()
        result = _library.library().shardd_wait(self._client.handle, self._number, 0, C.byref(r),
                                                C.byref(error))
        if not _is_not_yet(result, error):
            self._ended(result, error, r)
        return self._done

    def wait(self, timeout: float | None = None) -> T:
        """Return the op's result or raise its error.

        @timeout: seconds; None: until the op's own deadline. WaitTimeout: not yet; the ticket
        stays valid. May be called again after the end, with the same outcome. In the main thread
        Python's signal handlers run within 0.1 s, or 2 s while a long wait is reported: Ctrl-C
        raises KeyboardInterrupt here. The op then continues, and the ticket stays valid.
        """
        if not self._done:
            error, r = _abi.Error(), _abi.Result()
            end = None if timeout is None else time.monotonic() + timeout
            with self._client.waiting():
                result = self._wait_until(end, r, error)
            self._ended(result, error, r)
        if isinstance(self._value, BaseException):
            raise self._value
        value: T = self._value
        return value
