"""Memory that the daemon lends: seen by the buffer protocol and DLPack, never copied.

A :class:`Memory` is a piece of a mapping. What looks at it (memoryviews, NumPy arrays,
PyTorch tensors) keeps an inner object alive; so when the memory is to be given back we know
whether anything still looks at it, and refuse with :class:`shardd.InUse` instead of leaving
a view whose contents change or vanish. Afterwards every use of the Memory raises.
"""

from __future__ import annotations

import ctypes as C
import gc
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from .errors import FailedPrecondition, InUse


class Dtype(IntEnum):
    """Types of elements, with shardd.h's numbers."""

    FP32 = 1
    BF16 = 2
    FP16 = 3
    FP64 = 4
    INT64 = 5
    INT32 = 6
    UINT8 = 7

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _TYPES[self][0]


# bytes, format of the buffer protocol (of 16-bit numbers their bits), DLPack's (code, bits)
_TYPES: dict[Dtype, tuple[int, str, tuple[int, int]]] = {
    Dtype.FP32: (4, "f", (2, 32)), Dtype.BF16: (2, "H", (4, 16)), Dtype.FP16: (2, "H", (2, 16)),
    Dtype.FP64: (8, "d", (2, 64)), Dtype.INT64: (8, "q", (0, 64)), Dtype.INT32: (4, "i", (0, 32)),
    Dtype.UINT8: (1, "B", (1, 8)),
}


class _Mapped:
    """The bytes behind one or more Memory objects, as long as they are lent."""

    def __init__(self, address: int, nbytes: int, what: str) -> None:
        self.what = what
        self.address = address
        self.nbytes = nbytes
        self.array: Any = (C.c_ubyte * nbytes).from_address(address)

    def look(self) -> Any:
        if self.array is None:
            raise FailedPrecondition(f"{self.what} was given back to the daemon: ask for it again")
        return self.array

    def end(self) -> None:
        """Whoever asks from now on is refused. InUse: something looks at it; nothing changed."""
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


class Memory:
    """Elements that the daemon lends, row-major.

    ``shape``: of elements of ``dtype``. ``writable``: writing to other memory ends the process
    (it is mapped for reading only), so views of it are read-only where their kind knows that.
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
        """Where the first one is in this process. FailedPrecondition: given back."""
        self._mapped.look()
        return self._mapped.address + self._offset

    @property
    def released(self) -> bool:
        """Was it given back?"""
        return self._mapped.array is None

    def part(self, first: int, shape: Sequence[int]) -> Memory:
        """The elements from index @first of the flat memory on, as @shape."""
        part = Memory(self._mapped, self._offset + first * self.dtype.itemsize, shape, self.dtype,
                      self.writable)
        if first < 0 or first + part.elements > self.elements:
            raise IndexError(f"elements {first} to {first + part.elements} of {self.elements}")
        return part

    def view(self) -> memoryview:
        """A memoryview of this shape; bf16 and fp16 as their bits, unsigned 16-bit numbers."""
        flat = memoryview(self._mapped.look()).cast("B")
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
        """For numpy.asarray: without a copy, unless one is asked for."""
        import numpy

        seen = numpy.asarray(self.view()).reshape(self.shape)
        if self.dtype == Dtype.FP16:
            seen = seen.view(numpy.float16)
        return numpy.array(seen, dtype=dtype) if copy or dtype not in (None, seen.dtype) else seen

    def numpy(self) -> Any:
        """A NumPy array of this memory. bf16: its bits as uint16."""
        return self.__array__()

    def tobytes(self) -> bytes:
        """A copy."""
        return self.view().tobytes()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
                   copy: Any = None) -> Any:
        """For torch.from_dlpack and numpy.from_dlpack: without a copy.

        Read-only memory needs a consumer that knows DLPack 1.0's flag for it; to others it is
        a BufferError, since they would write.
        """
        from . import _dlpack

        if dl_device not in (None, (1, 0)):
            raise BufferError(f"this memory is on device (1, 0), not {dl_device}")
        if copy:
            raise BufferError("ask for a view and copy that")
        versioned = max_version is not None and max_version[0] >= 1
        if not self.writable and not versioned:
            raise BufferError("read-only memory, and the consumer does not know read-only memory")
        return _dlpack.capsule(self.address, self.shape, _TYPES[self.dtype][2],
                               self._mapped.look(), versioned, self.writable)

    def __repr__(self) -> str:
        state = "given back" if self.released else "writable" if self.writable else "read-only"
        return f"<shardd.Memory {self.dtype.name} {list(self.shape)} {self._mapped.what}, {state}>"
