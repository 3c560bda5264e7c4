"""A sharded parameter outside of forward and backward: this rank's rows, to compute with.

An operation on a guard gets a copy of the rows out of the daemon, as the DTensor that FSDP2 has
there; what it writes goes back at once. Nothing is kept, so nothing can be stale. Before the daemon
has the parameters, operations are on the rows of those that the program has built.
"""

from __future__ import annotations

from typing import Any, Callable, Protocol

import torch

from ..errors import FailedPrecondition
from ._shard import PARAMETERS, Piece, as_dtensor


class Source(Protocol):
    """Where a guard has its values from."""

    def take(self) -> tuple[Any, torch.Tensor]:
        """The tensor to compute with, and the memory of this rank's rows that it shows.
        FailedPrecondition: they cannot be had now."""

    def check_write(self) -> None:
        """FailedPrecondition: they cannot be written now (collective, if it is the first write)."""

    def put(self, rows: torch.Tensor) -> None:
        """The rows that take gave, changed."""


class Values:
    """Those of one parameter. ``touched``: written to before the daemon had them."""

    def __init__(self, name: str, shape: torch.Size) -> None:
        self._name, self._shape = name, shape
        self.piece: Piece | None = None
        self._mesh: Callable[[], Any] | None = None
        self._refused: Callable[[], str] = lambda: ""
        self._reads: Callable[[], None] = lambda: None
        self._writes: Callable[[], None] = lambda: None
        self._early: Callable[[], tuple[Any, torch.Tensor]] | None = None
        self.touched = False

    def begin(self, early: Callable[[], tuple[Any, torch.Tensor]],
              refused: Callable[[], str]) -> None:
        """@early: take, until the daemon has them. @refused: why they cannot be had now."""
        self._early, self._refused = early, refused

    def place(self, piece: Piece, mesh: Callable[[], Any], reads: Callable[[], None],
              writes: Callable[[], None]) -> None:
        """The daemon has them. @reads, @writes: called before every read, and every write."""
        self.piece, self._mesh, self._reads, self._writes = piece, mesh, reads, writes
        self._early = None

    def _check(self) -> None:
        why = self._refused()
        if why:
            raise FailedPrecondition(f"parameter '{self._name}' is sharded, and its values cannot "
                                     f"be had here: {why}")

    def take(self) -> tuple[Any, torch.Tensor]:
        """See Source."""
        self._check()
        if self._early is not None:
            return self._early()
        assert self.piece is not None and self._mesh is not None
        mesh = self._mesh()
        if mesh is None and self.piece.shape != self._shape:
            raise FailedPrecondition(
                f"parameter '{self._name}' is sharded over several ranks and torch.distributed is "
                "not initialised, so its rows cannot be a DTensor: call "
                "torch.distributed.init_process_group(), or use "
                "shardd.torch.summon_full_params(model)")
        self._reads()
        rows = self.piece.read(PARAMETERS)
        return rows if mesh is None else as_dtensor(mesh, rows, self._shape), rows

    def check_write(self) -> None:
        """See Source."""
        self._check()
        if self._early is None:
            self._writes()

    def put(self, rows: torch.Tensor) -> None:
        """See Source."""
        if self._early is not None:
            self.touched = True
        else:
            assert self.piece is not None
            self.piece.write(PARAMETERS, rows)


class View:
    """What @function makes of the values of @base: p.view(-1), p[2:], p.to_local(). It is made for
    every use, so it follows the parameter as a view does."""

    def __init__(self, name: str, base: Source, function: Callable[[Any], Any]) -> None:
        self._name, self._base, self._function = name, base, function

    def take(self) -> tuple[Any, torch.Tensor]:
        """See Source."""
        value, rows = self._base.take()
        return self._function(value), rows

    def check_write(self) -> None:
        """See Source."""
        self._base.check_write()

    def put(self, rows: torch.Tensor) -> None:
        """See Source."""
        self._base.put(rows)


def shows(value: Any, rows: torch.Tensor) -> bool:
    """Has @value the memory of @rows?"""
    local = getattr(value, "_local_tensor", value)
    return bool(local.untyped_storage()._cdata == rows.untyped_storage()._cdata)


__all__ = ["Source", "Values", "View", "shows"]
