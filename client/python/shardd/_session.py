"""A session: a connection whose ops are submitted, each ordered with its thread's stream."""

from __future__ import annotations

import contextlib
import ctypes as C
import threading
from typing import Any, Callable, TypeVar

from . import _abi, _library
from ._connection import Connection
from ._device import Gpu
from ._reconnect import ConnectionEvent
from .memory import _Mapped
from .ticket import Ticket

T = TypeVar("T")


class Session(Connection):
    """What a :class:`shardd.Client` is to its units and buffers: it submits their ops."""

    def __init__(self, socket: str | None, name: str | None, device: str | None,
                 connect_timeout: float, reconnect: float | None,
                 on_connection: Callable[[ConnectionEvent], None] | None,
                 on_stall: Callable[[str], None] | None) -> None:
        """As :class:`shardd.Client`."""
        self._streams = threading.local()  # now: that of a thread
        self._follow: Callable[[], int | None] | None = None
        super().__init__(socket, name, device, connect_timeout, reconnect, on_connection,
                         on_stall)

    def submit(self, op: str, *arguments: Any, finish: Callable[[_abi.Result], T],
               **options: Any) -> Ticket[T]:
        """Submit an op by ``shardd_submit_OP``; @finish makes the ticket's value of the result.
        @arguments, @options: fields of the op's options, in their order or by name."""
        number = C.c_uint64()
        stream = self._stream()
        made = _abi.options(op, *arguments, **options)
        _library.call("submit_" + op, self.handle, C.byref(made), C.byref(number))
        return Ticket(self, op, number.value, finish, stream)

    def do(self, op: str, *arguments: Any, **options: Any) -> None:
        """Submit an op without a value and wait for its end."""
        self.submit(op, *arguments, finish=lambda r: None, **options).wait()

    def mapped(self, r: _abi.Result, what: str) -> _Mapped:
        """The memory of an op's result; @what names it in messages."""
        return _Mapped(r.data or 0, r.bytes, what, self.where, r.stream)

    def set_stream(self, stream: int | None) -> None:
        """GPUs: order the ops that this thread submits from now on with the CUDA stream @stream, a
        handle (``.cuda_stream`` of a PyTorch stream; 0: CUDA's default stream).

        An op begins after the work that is on the stream when it is submitted. Its ticket ends when
        the daemon has queued it; later work on the stream runs after the op, and the CPU does not
        wait for the device. None: tickets end when ops have been executed, and data that this
        process's kernels write must be complete before an op that reads it is submitted.

        FailedPrecondition: the memory is not on a GPU. InvalidArgument: a stream of another
        context.
        """
        if stream is None:
            _library.call("set_stream", self.handle, _abi.NO_STREAM)
        else:
            # The default stream is that of the current context.
            with self.where.entered() if isinstance(self.where, Gpu) else contextlib.nullcontext():
                _library.call("set_stream", self.handle, stream)
        self._streams.now = stream

    def follow_stream(self, current: Callable[[], int | None] | None) -> None:
        """Call @current for the stream before every op, in the submitting thread, instead of
        :meth:`set_stream`. None: stop this; threads keep their current stream."""
        self._follow = current

    def _stream(self) -> int | None:
        """This thread's."""
        now: int | None = getattr(self._streams, "now", None)
        if self._follow is not None:
            wanted = self._follow()
            if wanted != now:
                self.set_stream(wanted)
                now = wanted
        return now


__all__ = ["Session"]
