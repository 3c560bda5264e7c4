"""Copies of generations in this process's own memory, for hosts without the daemon.

::

    with shardd.Client("/run/remote.sock") as client:    # ssh -L, see docs/publish.md
        weights = shardd.fetch_generation("engine", "1000/train", client, wait=60)
        print(weights.step, torch.from_dlpack(weights["model.norm.weight"]))

The bytes are sent over gRPC and checked block by block. A reader on the daemon's host uses
:class:`shardd.Live` instead, which does not copy.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator, Mapping
from typing import Any

from . import _abi, _library
from .client import Client
from .errors import FailedPrecondition, InUse, NotFound
from .memory import Dtype, Memory, _Mapped


class _Owner:
    """Owns the memory, which is freed when nothing refers to it."""

    def __init__(self) -> None:
        self.handle = C.c_void_p()

    def __del__(self) -> None:
        if self.handle:
            _library.library().shardd_fetched_free(self.handle)


class _Seen(_Mapped):
    """A tensor's bytes. A reference to them keeps the memory of all tensors."""

    def __init__(self, address: int, nbytes: int, what: str, owner: _Owner) -> None:
        super().__init__(address, nbytes, what)
        self.array._owner = owner


class FetchedGeneration(Mapping[str, Memory]):
    """The tensors of one generation, by name, each a :class:`Memory`. ``number``: later generations
    have larger numbers. ``step``: the committed step. ``checksum``: CRC-32C of the CRC-32Cs of its
    blocks."""

    def __init__(self, name: str, owner: _Owner, found: Any) -> None:
        self.number, self.step = int(found.number), int(found.step)
        self.checksum = int(found.checksum)
        self._name = name
        self._owner: _Owner | None = owner
        self._whole = True
        self._places = {
            t.name.decode(): (t.data or 0, int(t.bytes), tuple(t.shape[:t.dims]), Dtype(t.dtype))
            for t in found.tensors[:found.n_tensors]}
        self._lent: dict[str, Memory] = {}

    def __getitem__(self, name: str) -> Memory:
        if self._owner is None:
            raise FailedPrecondition(f"the memory of generation {self.number} of '{self._name}' "
                                     "has another one now")
        if not self._whole:
            raise FailedPrecondition(f"the memory of generation {self.number} of '{self._name}' "
                                     "has parts of another one: fetching that one has failed")
        if name not in self._lent:
            if name not in self._places:
                raise NotFound(f"publication '{self._name}' has no tensor '{name}'")
            address, nbytes, shape, dtype = self._places[name]
            seen = _Seen(address, nbytes, f"'{name}' of generation {self.number}", self._owner)
            self._lent[name] = Memory(seen, 0, shape, dtype, True)
        return self._lent[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def _give(self) -> _Owner:
        """Release the memory for another generation. InUse: something still refers to it."""
        if self._owner is None:
            raise FailedPrecondition(f"the memory of generation {self.number} of '{self._name}' "
                                     "has another one now")
        owner, self._owner = self._owner, None
        try:
            for memory in self._lent.values():
                memory._mapped.end()
        except InUse:
            self._take_back(owner, self.number if self._whole else 0)
            raise
        return owner

    def _take_back(self, owner: _Owner, number: int) -> None:
        """Take the memory back after a failed fetch. It has generation @number as a whole; 0:
        none."""
        self._owner, self._whole = owner, number == self.number
        for memory in self._lent.values() if self._whole else ():
            memory._mapped.revive()
            memory._mapped.array._owner = owner

    def __repr__(self) -> str:
        return f"<shardd.FetchedGeneration {self.number} of step {self.step}, {len(self)} tensors>"


def fetch_generation(name: str, job: str, client: Client, wait: float = 0, newer_than: int = 0,
                     bytes_per_second: int = 0, into: FetchedGeneration | None = None,
                     ) -> FetchedGeneration:
    """Copy the newest generation of publication @name of @job into this process.

    @wait: seconds to wait for a generation with a number above @newer_than. @bytes_per_second: the
    limit, 65536 or more; 0: only the daemon's limit. @into: the result of an earlier call. Its
    memory is reused, and @into becomes invalid. After an error that came before any bytes, such as
    DeadlineExceeded, @into stays valid. If the publication has deltas and @into is the previous
    generation, the daemon sends only the delta. InUse: something still refers to the memory of
    @into; nothing has changed. NotFound: there is no such generation. After a lost connection the
    call continues where it stopped.
    """
    options = _abi.FetchOptions(C.sizeof(_abi.FetchOptions),
                                _library.number(newer_than, "newer_than"),
                                _library.milliseconds(wait),
                                _library.number(bytes_per_second, "bytes_per_second"))
    owner = _Owner() if into is None else into._give()
    found = _abi.Generation()
    try:
        _library.call("publication_fetch", client.handle, job.encode(), name.encode(),
                      C.byref(options), C.byref(owner.handle), C.byref(found))
    except BaseException:
        if into is not None:
            into._take_back(owner, int(found.number))
        raise
    return FetchedGeneration(name, owner, found)


__all__ = ["FetchedGeneration", "fetch_generation"]
