"""``p.grad`` of a sharded parameter: this rank's rows of the reduced gradient, as FSDP2 gives them.

They are copied out of the daemon when somebody asks for them, once until the step. What the program
has in its hands is written back before the daemon uses the gradient, and gets the new values when
the daemon has changed it. Nobody who does not ask pays for it.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..errors import InvalidArgument
from ._guard import Guard
from ._shard import GRADIENT, Piece, as_dtensor

Mesh = Callable[[], Any]


class Gradient:
    """That of one parameter. ``dropped``: the program has set it to None."""

    def __init__(self, guard: Guard, refused: Callable[[], str], missed: Callable[[bool], None]
                 ) -> None:
        """@refused: why it cannot be read now; empty: it can. @missed: somebody looks for it where
        there is none, or (True) drops it."""
        self._guard = Guard.make(guard._name, "gradient", guard.shape, guard.dtype)
        self._parameter, self._refused, self._missed = guard, refused, missed
        self.piece: Piece | None = None
        self._mesh: Mesh | None = None
        self._there = self._reduced = self.dropped = False
        self._local: torch.Tensor | None = None
        self._seen: Any = None

    def place(self, piece: Piece, mesh: Mesh) -> None:
        """Where the daemon has it. @mesh: gives torch's; None: it is a plain tensor."""
        self.piece, self._mesh = piece, mesh

    def show(self, there: bool, reduced: bool) -> None:
        """Is there one, and is it reduced? What the program has got stays until there is none."""
        if not (there and reduced):
            self._local = self._seen = self._guard._local = None
        self._there, self._reduced, self.dropped = there, there and reduced, False

    # ------------------------------------------------------------------ the program

    def get(self) -> Any:
        """As p.grad."""
        if not self._there:
            self._missed(False)
            return None
        self._guard._why = self._refused()
        if not self._reduced:
            self._guard._why = "it was not reduced yet, and is of this rank's inputs alone"
        if self._guard._why or self.piece is None:
            return self._guard
        if self._seen is None:
            self._take()
        return self._seen

    def rows(self) -> torch.Tensor | None:
        """This rank's rows, to be read; None: there is no reduced one."""
        if not self._reduced or self.piece is None:
            return None
        if self._local is not None:
            return self._local
        return self.piece.read(GRADIENT)

    def _take(self) -> None:
        assert self.piece is not None and self._mesh is not None
        mesh = self._mesh()
        local = self.piece.read(GRADIENT)
        if mesh is not None:
            self._seen = as_dtensor(mesh, local, self._parameter.shape)
        elif self.piece.shape == self._parameter.shape:
            self._seen = local
        else:
            self._seen = self._guard
            self._guard._local = local
            self._guard._why = ("torch.distributed is not initialised, so it cannot be a DTensor: "
                                "call torch.distributed.init_process_group(), or take this rank's "
                                "rows by to_local()")
        self._local = local

    def set(self, value: Any) -> None:
        """As p.grad = @value. InvalidArgument: it is no gradient of this parameter."""
        if value is None:
            self._missed(True)
            self.dropped = self._there
            self.drop()
            return
        if value is self._seen or (value is self._guard and self._there):
            return
        name = self._parameter._name
        if tuple(getattr(value, "shape", ())) != tuple(self._parameter.shape):
            raise InvalidArgument(
                f"the gradient of '{name}' is set to {type(value).__name__} of shape "
                f"{list(getattr(value, 'shape', ()))}, but the parameter has "
                f"{list(self._parameter.shape)}", "grad")
        there = self.get()
        if there is None or there is self._guard:
            raise InvalidArgument(
                f"the gradient of '{name}' is set, but the daemon has no reduced gradient of it: "
                "it has one from backward to the step, and unless p.grad was set to None", "grad")
        with torch.no_grad():
            there.copy_(value)

    def drop(self) -> None:
        """There is none any more for the program."""
        self._local = self._seen = self._guard._local = None
        self._there = self._reduced = False

    # ------------------------------------------------------------------- the daemon

    def push(self) -> None:
        """The daemon is about to use it: it gets what the program has made of it."""
        if self._local is not None and self.piece is not None:
            self.piece.write(GRADIENT, self._local)

    def pull(self) -> None:
        """The daemon has changed it: the program sees that."""
        if self._local is not None and self.piece is not None:
            self.piece.read(GRADIENT, self._local)


__all__ = ["Gradient"]
