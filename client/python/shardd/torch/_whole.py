"""Optimizers that need whole tensors: each parameter is stepped by one rank, its owner.

The ranks exchange their shares of a unit's parameters and gradients, the owner of each parameter
steps it, and its new values go to all ranks, each of which keeps its share.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import nn

from ..memory import Dtype
from . import _device, _rows, _share
from ._device import tensor_at
from ._tree import Tree, its_tree
from ._unit import Parameter, ShardedUnit

_Range = tuple[int, int]


class Owners:
    """Which rank steps which parameter. The same on all ranks."""

    def __init__(self, tree: Tree) -> None:
        """The largest first, each to the rank that has the least."""
        self._ranks = _rows.mesh_of(tree).ranks
        self._here = _share.position(tree.units[0])
        loads = [0] * len(self._ranks)
        self._of: dict[int, int] = {}  # by the id of a guard, the position in the mesh
        for p in sorted((p for u in tree.units for p in u.trained),
                        key=lambda p: -p.shape.numel()):
            position = loads.index(min(loads))
            loads[position] += p.shape.numel()
            self._of[id(p.guard)] = position

    def extents(self, p: Parameter) -> list[_Range]:
        """Of each rank of the mesh: the first element, and how many. All, or none."""
        owner = self._of[id(p.guard)]
        return [(0, p.shape.numel() if i == owner else 0) for i in range(len(self._ranks))]

    def has(self, p: Parameter) -> bool:
        """Does this rank step @p?"""
        return self._of[id(p.guard)] == self._here

    def step(self, unit: ShardedUnit, share: torch.Tensor | None, gradient: torch.Tensor | None,
             stand_ins: dict[int, nn.Parameter], step: Callable[[], None]) -> None:
        """Step @unit (collective). @share, @gradient: this rank's elements of all its parameters,
        in their order; None: it has none. @stand_ins: by the id of a guard; those of the
        parameters that are this rank's are whole while @step runs."""
        used = [p for p in unit.trained if p.reduced]
        elements = sum(p.shape.numel() for p in used)
        if not elements:
            return
        at = {unit.params[index]: place for index, _, _, place in
              (unit.pieces() if share is not None else ())}
        pieces = [[(p, *extent) for p in used
                   for extent in [_share.extents(unit, p)[i]] if extent[1]]
                  for i in range(len(self._ranks))]
        client = its_tree(unit).client
        with client.alloc((2 * elements,), Dtype.FP32) as lent:
            flat = tensor_at(lent.memory.address, 2 * elements, torch.float32)
            mine = pieces[self._here]
            first = 2 * sum(n for before in pieces[:self._here] for _, _, n in before)
            for source in (share, gradient):
                for p, _, n in mine:
                    assert source is not None
                    flat[first:first + n].copy_(source[at[p]:at[p] + n])
                    first += n
            self._exchange(unit, lent.id, [2 * sum(n for _, _, n in one) for one in pieces])
            wholes = self._assemble(flat, pieces)
            for p, (values, gradients) in wholes.items():
                stand_ins[id(p.guard)].data = values
                stand_ins[id(p.guard)].grad = gradients
            step()
            self._tell(unit, lent.id, flat, used, {
                p: stand_ins[id(p.guard)].data for p in wholes})
            self._keep(flat, used, mine, at, share)
            del flat

    def _exchange(self, unit: ShardedUnit, buffer: int, sizes: list[int]) -> None:
        tree, first = its_tree(unit), 0
        for rank, n in zip(self._ranks, sizes):
            if n:
                tree.client.do("broadcast", tree.group, buffer, 4 * first, 4 * n, rank)
            first += n

    def _assemble(self, flat: torch.Tensor, pieces: list[list[tuple[Parameter, int, int]]]
                  ) -> dict[Parameter, tuple[torch.Tensor, torch.Tensor]]:
        """Values and gradients of the parameters that are this rank's."""
        made: dict[Parameter, tuple[torch.Tensor, torch.Tensor]] = {}
        at = 0
        for one in pieces:
            for kind in (0, 1):
                for p, first, n in one:
                    if self.has(p):
                        if p not in made:
                            made[p] = (torch.empty(p.shape, device=_device.here),
                                       torch.empty(p.shape, device=_device.here))
                        made[p][kind].view(-1)[first:first + n].copy_(flat[at:at + n])
                    at += n
        return made

    def _by_owner(self, used: list[Parameter]) -> list[Parameter]:
        return sorted(used, key=lambda p: self._of[id(p.guard)])

    def _tell(self, unit: ShardedUnit, buffer: int, flat: torch.Tensor, used: list[Parameter],
              stepped: dict[Parameter, torch.Tensor]) -> None:
        at = 0
        for p in self._by_owner(used):
            n = p.shape.numel()
            if p in stepped:
                flat[at:at + n].view(p.shape).copy_(stepped[p])
            at += n
        self._exchange(unit, buffer, [sum(p.shape.numel() for p in used
                                          if self._of[id(p.guard)] == i)
                                      for i in range(len(self._ranks))])

    def _keep(self, flat: torch.Tensor, used: list[Parameter],
              mine: list[tuple[Parameter, int, int]], at: dict[Parameter, int],
              share: torch.Tensor | None) -> None:
        start, where = {p: (first, n) for p, first, n in mine}, 0
        for p in self._by_owner(used):
            if p in start:
                first, n = start[p]
                assert share is not None
                share[at[p]:at[p] + n].copy_(flat[where + first:where + first + n])
            where += p.shape.numel()


__all__ = ["Owners"]
