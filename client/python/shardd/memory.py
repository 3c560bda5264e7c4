"""Memory that the daemon lends: accessible by the buffer protocol and DLPack, never copied.

A :class:`Memory` is a piece of a mapping. Its users (memoryviews, NumPy arrays, PyTorch tensors)
keep an inner object alive. So it is known whether the memory is still in use when it is given back;
that is then refused with :class:`shardd.InUse`, since the contents of a view would change or
vanish. After the memory is given back, every use of the Memory raises.

On a GPU the same holds, without the buffer protocol: the processor cannot read the memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from ._device import HOST, Where
from .errors import FailedPrecondition, InUse, InvalidArgument


class Dtype(IntEnum):
    """Types of elements, with shardd.h's numbers."""

    FP32 = 1
    BF16 = 2
    FP16 = 3
    FP64 = 4
    INT64 = 5
    INT32 = 6
    UINT8 = 7
    E4M3 = 8  # only of published tensors

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _TYPES[self][0]


# bytes, format of the buffer protocol (of 16-bit numbers and e4m3 their bits), DLPack's
# (code, bits), of e4m3 as bits, too: few consumers know its code
_TYPES: dict[Dtype, tuple[int, str, tuple[int, int]]] = {
    Dtype.FP32: (4, "f", (2, 32)), Dtype.BF16: (2, "H", (4, 16)), Dtype.FP16: (2, "H", (2, 16)),
    Dtype.FP64: (8, "d", (2, 64)), Dtype.INT64: (8, "q", (0, 64)), Dtype.INT32: (4, "i", (0, 32)),
    Dtype.UINT8: (1, "B", (1, 8)), Dtype.E4M3: (1, "B", (1, 8)),
}


class _Mapped:
    """The bytes behind one or more Memory objects, while they are lent. ``stream``: on a GPU, the
    stream on which they are valid; None: they are valid everywhere."""

    def __init__(self, address: int, nbytes: int, what: str, where: Where = HOST,
                 stream: int | None = None) -> None:
        self.what, self.where, self.stream = what, where, stream
        self.address = address
        self.nbytes = nbytes
        self.array: Any = where.hold(address, nbytes)

    def lent_again(self) -> _Mapped:
        """The same bytes, lent again."""
        return _Mapped(self.address, self.nbytes, self.what, self.where, self.stream)

    def look(self) -> Any:
        if self.array is None:
            raise FailedPrecondition(f"{self.what} was given back to the daemon: ask for it again")
        return self.array

    def end(self) -> None:
        """Refuse all later uses. InUse: something still uses it; nothing changed."""
        if self.array is None:
            return
        seen = weakref.ref(self.array)
        self.array = None
        if seen() is not None:
            gc.collect()
        if seen() is not None:
            self.array = seen()
            raise InUse(f"{self.what} cannot be given back: a memoryview, an array or a tensor "
                        "still looks at it; delete it, or copy what you need")

    def revive(self) -> None:
        """It was not given back after all: undo :meth:`end`, for all that refer to it."""
        if self.array is None:
            self.array = self.where.hold(self.address, self.nbytes)


class Memory:
    """Elements that the daemon lends, row-major.

    ``shape``: of elements of ``dtype``. ``writable``: if it is false, the memory is mapped
    read-only and writing to it ends the process; views of it are read-only if their kind can be.
    """

    def __init__(self, mapped: _Mapped, offset: int, shape: Sequence[int], dtype: Dtype,
                 writable: bool) -> None:
        self._mapped, self._offset = mapped, offset
        self.shape, self.dtype, self.writable = tuple(shape), dtype, writable

    @property
    def elements(self) -> int:
        """How many."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.dtype.itemsize

    @property
    def address(self) -> int:
        """The address of the first element in this process. FailedPrecondition: given back."""
        self._mapped.look()
        return self._mapped.address + self._offset

    @property
    def device(self) -> tuple[int, int]:
        """DLPack's: (1, 0) the host, (2, n) GPU n of this process."""
        return self._mapped.where.dlpack

    @property
    def stream(self) -> int | None:
        """The CUDA stream on which the contents are valid: that of the op that lent the memory
        (:meth:`Client.set_stream`). None: they are valid everywhere."""
        return self._mapped.stream

    @property
    def released(self) -> bool:
        """Was it given back?"""
        return self._mapped.array is None

    def part(self, first: int, shape: Sequence[int]) -> Memory:
        """The elements from index @first of the flat memory on, as @shape."""
        part = Memory(self._mapped, self._offset + first * self.dtype.itemsize, shape, self.dtype,
                      self.writable)
        if first < 0 or first + part.elements > self.elements:
            raise IndexError(f"elements {first} to {first + part.elements} are out of range "
                             f"(0..{self.elements})")
        return part

    def view(self) -> memoryview:
        """A memoryview of this shape; bf16 and fp16 as their bits, unsigned 16-bit numbers.
        BufferError: the memory is on a GPU."""
        seen = self._mapped.look()
        if self.device != HOST.dlpack:
            raise BufferError(
                f"{self._mapped.what} is on {self._mapped.where.name}, where the processor cannot "
                "read it: copy with tobytes() and write(), or use from_dlpack() of PyTorch or CuPy")
        flat = memoryview(seen).cast("B")
        if not self.writable:
            flat = flat.toreadonly()
        flat = flat[self._offset:self._offset + self.nbytes]
        form: Any = _TYPES[self.dtype][1]
        # memoryview refuses shapes without a dimension and with a zero in them
        shape = (list(self.shape) or [1]) if self.elements else [0]
        typed: memoryview = flat.cast(form, shape)
        return typed

    def __buffer__(self, flags: int) -> memoryview:
        """The buffer protocol, from Python 3.12 on; before that use :meth:`view`."""
        return self.view()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """For numpy.asarray: makes a copy only on request."""
        import numpy

        seen = numpy.asarray(self.view()).reshape(self.shape)
        if self.dtype == Dtype.FP16:
            seen = seen.view(numpy.float16)
        return numpy.array(seen, dtype=dtype) if copy or dtype not in (None, seen.dtype) else seen

    def numpy(self) -> Any:
        """A NumPy array of this memory. bf16: its bits as uint16; e4m3: as uint8."""
        return self.__array__()

    def tobytes(self) -> bytes:
        """Return a copy; from a GPU, after the work on this thread's stream."""
        address = self.address
        return self._mapped.where.read(address, self.nbytes)

    def write(self, data: Any) -> None:
        """Copy @data (an object with the buffer protocol and the same number of bytes) into this
        memory; to a GPU, after the work on this thread's stream. BufferError: it is read-only."""
        address, given = self.address, memoryview(data)
        if not self.writable:
            raise BufferError(f"{self._mapped.what} is read-only")
        if given.nbytes != self.nbytes:
            raise InvalidArgument(f"the data has {given.nbytes} bytes, must have {self.nbytes}, "
                                  f"the size of {self._mapped.what}", "data")
        self._mapped.where.write(address, memoryview(given.tobytes()))

    def device_view(self) -> DeviceView:
        """For CuPy and Numba: see :class:`DeviceView`. BufferError: it is host memory."""
        return DeviceView(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: Any = None) -> Any:
        """For torch.from_dlpack and numpy.from_dlpack: without a copy.

        Read-only memory needs a consumer that supports DLPack 1.0's read-only flag; others get a
        BufferError, since they could write. On a GPU the consumer's @stream waits for
        :attr:`stream`, as in the array API standard: None and 1 are CUDA's default stream, 2 is
        the thread's own, -1 means no wait, other values are a stream's handle.
        """
        from . import _dlpack

        look, where = self._mapped.look(), self._mapped.where
        if dl_device is not None and tuple(dl_device) != where.dlpack:
            raise BufferError(f"this memory is on device {where.dlpack}, not {tuple(dl_device)}")
        if copy:
            raise BufferError("DLPack gives no copy: take a view and copy that")
        versioned = max_version is not None and max_version[0] >= 1
        if not self.writable and not versioned:
            raise BufferError("this memory is read-only, and the consumer does not support "
                              "read-only memory")
        where.order(stream, self._mapped.stream)
        return _dlpack.capsule(self.address, self.shape, _TYPES[self.dtype][2], where.dlpack,
                               look, versioned, self.writable)

    def __repr__(self) -> str:
        state = "given back" if self.released else "writable" if self.writable else "read-only"
        return f"<shardd.Memory {self.dtype.name} {list(self.shape)} {self._mapped.what}, {state}>"


class DeviceView:
    """Memory on a GPU for libraries with ``__cuda_array_interface__`` but without DLPack. Like a
    memoryview it counts as a use of the memory. bf16 as its bits, unsigned 16-bit numbers."""

    def __init__(self, memory: Memory) -> None:
        self._held, mapped = memory._mapped.look(), memory._mapped
        if memory.device == HOST.dlpack:
            raise BufferError(f"{mapped.what} is host memory: use view()")
        form = _TYPES[memory.dtype][1] if memory.dtype != Dtype.FP16 else "e"
        kind = {"f": "f", "d": "f", "e": "f", "q": "i", "i": "i"}.get(form, "u")
        stream = mapped.stream
        self.__cuda_array_interface__ = {
            "shape": memory.shape, "typestr": f"<{kind}{memory.dtype.itemsize}", "strides": None,
            "data": (memory.address if memory.elements else 0, not memory.writable),
            "version": 3, "stream": None if stream is None else stream or 1}
