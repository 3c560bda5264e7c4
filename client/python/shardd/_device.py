"""Where memory that the daemon lends is: on the host, or on a GPU.

For GPUs shardd.h offers addresses, copies, and ops ordered with a stream. DLPack needs two more
things: the GPU's number in this process, and the consumer's stream ordered behind ours. Both come
from libcuda, which libshardd has loaded before.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import os
from collections.abc import Iterator
from typing import Any, Callable, Protocol

from . import _library
from .errors import FailedPrecondition, Internal

_DISABLE_TIMING = 2
_TO_DEVICE, _FROM_DEVICE = 1, 2  # enum shardd_direction
_LEGACY, _PER_THREAD = 1, 2  # CUDA's default streams, as DLPack and cuda.h number them


class Where(Protocol):
    """``name``: "host:0", a GPU's id. ``dlpack``: DLPack's device."""

    name: str
    dlpack: tuple[int, int]

    def hold(self, address: int, nbytes: int) -> Any:
        """What stands for the memory, and is kept alive by whoever looks at it."""

    def read(self, address: int, nbytes: int) -> bytes:
        """A copy."""

    def write(self, address: int, data: memoryview) -> None:
        """Copy flat bytes there."""

    def order(self, stream: Any, behind: int | None) -> None:
        """Make later work on the consumer's @stream (numbered as in DLPack) run after the work
        that is on the stream @behind. None: there is nothing to wait for."""


class Host:
    """Memory that the processor reads."""

    name, dlpack = "host:0", (1, 0)

    def hold(self, address: int, nbytes: int) -> Any:
        """The bytes themselves, with the buffer protocol."""
        return (C.c_ubyte * nbytes).from_address(address)

    def read(self, address: int, nbytes: int) -> bytes:
        """A copy."""
        return C.string_at(address, nbytes)

    def write(self, address: int, data: memoryview) -> None:
        """Copy flat bytes there."""
        memoryview(self.hold(address, data.nbytes)).cast("B")[:] = data

    def order(self, stream: Any, behind: int | None) -> None:
        """The processor waits for nothing."""


HOST = Host()


class Lent:
    """Stands for memory on a GPU: nothing that could be read."""


# ------------------------------------------------------------------------- libcuda

_libcuda: C.CDLL | None = None


def _cuda() -> C.CDLL:
    """The library that libshardd has loaded."""
    global _libcuda
    if _libcuda is None:
        _libcuda = C.CDLL(os.environ.get("SHARDD_LIBCUDA") or "libcuda.so.1")
    return _libcuda


def _check(result: int, what: str) -> None:
    if result:
        text = C.c_char_p()
        _cuda().cuGetErrorName(result, C.byref(text))
        name = text.value.decode() if text.value else f"CUDA's error {result}"
        raise Internal(f"{what}: {name}", domain="cuda", native=result)


def _uuid(device: int) -> str:
    """As nvidia-smi prints it."""
    raw = (C.c_ubyte * 16)()
    _check(_cuda().cuDeviceGetUuid_v2(raw, device), "cannot read the UUID of a GPU")
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def uuid(number: int) -> str:
    """Of a GPU of this process."""
    device = C.c_int()
    _check(_cuda().cuInit(0), "cannot start the CUDA driver")
    _check(_cuda().cuDeviceGet(C.byref(device), number), f"there is no GPU {number}")
    return _uuid(device.value)


def _find(uuid: str) -> tuple[int, int]:
    """(number in this process, CUdevice)."""
    n, device = C.c_int(), C.c_int()
    _check(_cuda().cuDeviceGetCount(C.byref(n)), "cannot list the GPUs")
    for number in range(n.value):
        _check(_cuda().cuDeviceGet(C.byref(device), number), "cannot list the GPUs")
        if _uuid(device.value) == uuid:
            return number, device.value
    raise FailedPrecondition(
        f"the daemon put this rank on GPU {uuid}, which is not visible in this process "
        f"(CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})")


def _current() -> C.c_void_p:
    context = C.c_void_p()
    _check(_cuda().cuCtxGetCurrent(C.byref(context)), "cannot read the current CUDA context")
    return context


def _device_of_current() -> int:
    device = C.c_int()
    _check(_cuda().cuCtxGetDevice(C.byref(device)), "cannot read the current CUDA context")
    return device.value


class Gpu:
    """Memory on the GPU of a client that has joined, or that reads. ``number``: of the GPU in this
    process."""

    def __init__(self, handle: Callable[[], C.c_void_p], name: str, uuid: str) -> None:
        """By the thread that has joined: its context is the client's, else the primary one is.
        @handle: the client's, or FailedPrecondition; it does not keep the client alive."""
        self.name, self._handle = name, handle
        self.number, self._device = _find(uuid)
        self.dlpack = (2, self.number)  # kDLCUDA
        self._context, self._retained = _current(), False
        if not self._context or _device_of_current() != self._device:
            _check(_cuda().cuDevicePrimaryCtxRetain(C.byref(self._context), self._device),
                   f"{name} has no primary context")
            self._retained = True

    def close(self) -> None:
        """The client is closed."""
        if self._retained:
            self._retained = False
            _cuda().cuDevicePrimaryCtxRelease_v2(self._device)

    def hold(self, address: int, nbytes: int) -> Any:
        """An object without any bytes: the processor cannot read these."""
        return Lent()

    def read(self, address: int, nbytes: int) -> bytes:
        """A copy, after what is on this thread's stream."""
        made = C.create_string_buffer(max(1, nbytes))
        _library.call("copy", self._handle(), _FROM_DEVICE, made, address, nbytes)
        return made.raw[:nbytes]

    def write(self, address: int, data: memoryview) -> None:
        """Copy bytes there, after what is on this thread's stream."""
        _library.call("copy", self._handle(), _TO_DEVICE, address, data.tobytes(), data.nbytes)

    def order(self, stream: Any, behind: int | None) -> None:
        """See Where. @stream: None and 1: CUDA's default stream, 2: the thread's, -1: do nothing,
        else a stream's handle."""
        if stream is not None and (not isinstance(stream, int) or stream < -1 or stream == 0):
            raise BufferError(f"stream is {stream!r}, must be None, -1, 1, 2 or a CUDA stream's "
                              "handle (0 could mean either of CUDA's default streams)")
        then = _LEGACY if stream is None else stream
        if behind is None or then in (-1, behind or _LEGACY):
            return
        with self.entered():
            self._wait(behind or _LEGACY, then)

    def _wait(self, first: int, then: int) -> None:
        event, cuda = C.c_void_p(), _cuda()
        _check(cuda.cuEventCreate(C.byref(event), _DISABLE_TIMING), "cannot create an event")
        try:
            _check(cuda.cuEventRecord(event, C.c_void_p(first)),
                   f"cannot record an event on stream {first:#x}")
            _check(cuda.cuStreamWaitEvent(C.c_void_p(then), event, 0),
                   f"cannot make stream {then:#x} wait")
        finally:
            cuda.cuEventDestroy_v2(event)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the client's context is this thread's."""
        before = _current()
        _check(_cuda().cuCtxSetCurrent(self._context), f"the context on {self.name} is gone")
        try:
            yield
        finally:
            _cuda().cuCtxSetCurrent(before)


__all__ = ["HOST", "Gpu", "Host", "Lent", "Where", "uuid"]
