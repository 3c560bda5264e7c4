"""Deltas: the changes from one generation of a publication to the next.

::

    copies = {name: bytearray(memory.view()) for name, memory in live.acquire().items()}
    ...
    delta = live.acquire(wait=60).delta()    # NotFound: read the whole generation
    delta.apply(copies)

Deltas are for programs that have weights in their own memory, such as engines. Hold the generation
while you use its delta. ``bytes(delta)`` is a copy, which you can store or send.
"""

from __future__ import annotations

import ctypes as C
import functools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

from . import _abi, _library
from .errors import FailedPrecondition, InvalidArgument
from .memory import Dtype

_HEAD_WORDS = 16
_MAGIC = 0x44444853  # DELTA_MAGIC
_BYTES = {Dtype.FP32: 4, Dtype.BF16: 2, Dtype.FP16: 2, Dtype.E4M3: 1}

# (name, type, bytes) of a tensor; for a further name also the name of its tensor
Place = Union[tuple[str, Dtype, int], tuple[str, Dtype, int, str]]


def _view(name: str, copy: Any) -> memoryview:
    try:
        return memoryview(copy).cast("B")
    except TypeError as error:
        raise InvalidArgument(f"the copy of '{name}' is a {type(copy).__name__}, which has no "
                              "buffer of bytes: give a bytearray, an array, or for a PyTorch "
                              "tensor x x.view(torch.uint8).numpy()", "copies") from error


class Delta:
    """A delta. ``base``: the number of the generation that it is applied to. ``number``: the number
    of the resulting generation. ``changed`` and ``elements``: the numbers of changed values and of
    all values. ``nbytes``: its size."""

    _held: Callable[[], bool] | None  # None: the bytes are its own

    def __init__(self, data: Any, places: Sequence[Place]) -> None:
        """@data: the bytes of a delta. They are not trusted, and are copied. @places: the
        :attr:`places` of the delta that the bytes are from: (name, type, bytes) of each tensor of
        the generation, in order. For a further name (``also``), the fourth item is the name of its
        tensor."""
        view = memoryview(data).cast("B")
        self._held = None
        self._begin((C.c_char * view.nbytes).from_buffer_copy(view), places)

    @classmethod
    def _at(cls, address: int, nbytes: int, places: Sequence[Place],
            held: Callable[[], bool]) -> Delta:
        """The delta at @address, without a copy. @held: is its generation still leased?"""
        found = cls.__new__(cls)
        found._held = held
        found._begin((C.c_char * nbytes).from_address(address), places)
        return found

    def _begin(self, data: Any, places: Sequence[Place]) -> None:
        self.nbytes = C.sizeof(data)
        if self.nbytes < 8 * _HEAD_WORDS:
            raise InvalidArgument(f"a delta has at least {8 * _HEAD_WORDS} bytes, this one has "
                                  f"{self.nbytes}", "data")
        self._data, self._places = data, [place[:3] for place in places]
        index = {place[0]: i for i, place in enumerate(places)}
        names = [place[-1] if len(place) > 3 else place[0] for place in places]
        self._owners = [index.get(str(name), -1) for name in names]
        if -1 in self._owners:
            wrong = self._owners.index(-1)
            raise InvalidArgument(f"'{places[wrong][0]}' is a further name of '{names[wrong]}', "
                                  "which is not there", "places")
        head = memoryview(data).cast("B")[:8 * _HEAD_WORDS].cast("Q")
        if head[0] & 0xffffffff != _MAGIC:
            raise InvalidArgument("the bytes are not a delta: they do not begin as one", "data")
        self.number, self.step, self.base, self.base_step = map(int, head[1:5])
        self.changed, self.elements = int(head[8]), int(head[9])

    @property
    def places(self) -> list[Place]:
        """The tensors of the generation, as the constructor takes them."""
        return [place if owner == i else (*place, self._places[owner][0])
                for i, (place, owner) in enumerate(zip(self._places, self._owners))]

    def _address(self) -> C.c_void_p:
        return C.c_void_p(C.addressof(self._data))

    @functools.cached_property
    def _indices(self) -> dict[str, int]:
        return {place[0]: i for i, place in enumerate(self._places)}

    @functools.cached_property
    def _tensors(self) -> Any:
        tensors = (_abi.PublishedTensor * len(self._places))()
        for tensor, (name, dtype, nbytes) in zip(tensors, self._places):
            tensor.name, tensor.dtype, tensor.bytes = name.encode(), int(dtype), nbytes
        return tensors

    @functools.cached_property
    def _named(self) -> Any:
        """As _tensors, with data pointers that only tell which names are of one tensor."""
        tensors = type(self._tensors).from_buffer_copy(self._tensors)
        for tensor, owner in zip(tensors, self._owners):
            tensor.data = owner + 1
        return tensors

    def __bytes__(self) -> bytes:
        self._check_held()
        return bytes(self._data)

    def apply(self, copies: Mapping[str, Any], check: bool = True) -> None:
        """Update copies of the base to the generation. @copies: writable buffers by tensor name, of
        all tensors. A further name of a tensor (``also``) may have the same buffer, a separate
        buffer, or none. @check: first compare the checksum of the copies with that of the base.
        False: do not compare, and leave out tensors that are not in @copies. Copies of another
        generation then become a mixture of generations. DataLoss: a checksum is wrong, and nothing
        was written: read the whole generation."""
        self._check_held()
        tensors = self._named
        addresses = (C.c_void_p * len(self._places))()
        held = []
        for i, (name, _, nbytes) in enumerate(self._places):
            if name in copies:
                view = _view(name, copies[name])
                if view.nbytes != nbytes or view.readonly:
                    raise InvalidArgument(f"the copy of '{name}' has {view.nbytes} bytes"
                                          f"{', read-only' if view.readonly else ''}; {nbytes} "
                                          "writable ones are needed", "copies")
                held.append((C.c_char * nbytes).from_buffer(view))
                addresses[i] = C.addressof(held[-1])
        for name in copies:
            if name not in self._indices:
                raise InvalidArgument(f"the generation has no tensor '{name}'", "copies")
        _library.call("delta_apply", self._address(), self.nbytes, tensors, len(self._places),
                      addresses, int(check))

    def _check_held(self) -> None:
        if self._held is not None and not self._held():
            raise FailedPrecondition(f"generation {self.number} was given back, and the memory of "
                                     "its delta may be another one's: use a delta while you hold "
                                     "its generation, or keep bytes(delta)")

    def values(self, name: str) -> tuple[array[int], bytearray]:
        """Return the flat indices of the changed values of a tensor, ascending, and the values in
        the same order, in the tensor's type. A further name gives those of its tensor. All indices
        are inside the tensor, even if the delta is damaged."""
        self._check_held()
        if name not in self._indices:
            raise InvalidArgument(f"the generation has no tensor '{name}'", "name")
        index, n, tensors = self._owners[self._indices[name]], C.c_uint64(), self._tensors
        _library.call("delta_values", self._address(), self.nbytes, tensors, len(tensors), index,
                      None, None, 0, C.byref(n))
        indices = array("Q", bytes(8 * n.value))
        values = bytearray(n.value * _BYTES[self._places[index][1]])
        if n.value:
            _library.call("delta_values", self._address(), self.nbytes, tensors, len(tensors),
                          index, C.c_void_p(indices.buffer_info()[0]),
                          C.c_void_p(C.addressof(C.c_char.from_buffer(values))), n.value,
                          C.byref(n))
        return indices, values

    def __repr__(self) -> str:
        return (f"<shardd.Delta from generation {self.base} to {self.number}: {self.changed} of "
                f"{self.elements} values, {self.nbytes} bytes>")


__all__ = ["Delta"]
