"""Uses of a unit's parameters while it is released, explained.

Tensors of a released unit's storage still exist: those that forward has kept and those that
autograd has saved. The storage then has addresses at which each access faults, and libshardd's
handler of SIGSEGV knows which parameters they stand for. In forward and backward a read gives zeros
until this package raises an error; elsewhere the process ends, after a line on standard error.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import weakref
from typing import Any

from .. import _abi, _library
from ..errors import FailedPrecondition
from . import _device

_fault = _abi.RegionFault()  # the handler writes to it: never freed


class Region:
    """The addresses that stand for one unit's memory."""

    def __init__(self, unit: str, nbytes: int, parts: list[tuple[str, int, int]]) -> None:
        """@parts: name, first byte and number of bytes of each parameter."""
        made = (_abi.RegionPart * max(1, len(parts)))()
        for part, (name, offset, length) in zip(made, parts):
            part.name, part.offset, part.bytes = name.encode(), offset, length
        options = _abi.RegionOptions(C.sizeof(_abi.RegionOptions), unit.encode(), nbytes, made,
                                     len(parts), C.pointer(_fault))
        self._handle, at = C.c_void_p(), C.c_void_p()
        _library.call("region_new", C.byref(options), C.byref(self._handle), C.byref(at))
        self._at, self._nbytes, self._lent = at.value or 0, nbytes, False
        _regions.add(self)

    def storage(self) -> Any:
        """One that faults."""
        return _device.storage_at(self._at, self._nbytes)

    def lent(self, address: int | None) -> None:
        """The unit's memory is there now; None: nowhere."""
        self._lent = address is not None
        state = _abi.REGION_GATHERED if self._lent else _abi.REGION_RELEASED
        _library.library().shardd_region_set(self._handle, state, address)

    def close(self) -> None:
        """Fault again."""
        if not self._lent:
            self.lent(None)

    def __del__(self) -> None:
        if self._handle:
            _library.library().shardd_region_set(self._handle, _abi.REGION_ENDED, None)


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


def expect(expected: bool) -> None:
    """Does :func:`check` follow, so that a read can go on until then?"""
    _fault.expected = expected


def check() -> None:
    """FailedPrecondition: something has read a released unit since the last call."""
    if not _fault.happened:
        return
    text, _fault.happened = _fault.text.decode(errors="replace"), 0
    for region in list(_regions):
        with contextlib.suppress(ReferenceError):
            region.close()
    raise FailedPrecondition(text)
