"""The buffers of a replicated module, which become those of one rank.

They are in the module, where forward changes them; to be sent they are copied into memory of this
rank's own that the daemon has, and out of it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as _keep_versions

from ..client import WORLD
from ..errors import FailedPrecondition
from ._session import tensor_at
from ._tree import Tree
from ._unit import ShardedUnit


class Buffers:
    """Those of @module; @unit: the one that is registered with room for them. @in_forward: not only
    at the beginning.

    DDP's rule: a forward synchronises them if the last one that ended had gradients that were
    meant to be reduced, whatever this one is; so does the first."""

    def __init__(self, module: nn.Module, unit: ShardedUnit, in_forward: bool,
                 ignored: Collection[str] = ()) -> None:
        """@ignored: names of buffers of which every rank has its own."""
        self._module, self._unit, self.in_forward = module, unit, in_forward
        self._ignored, self._due = frozenset(ignored), True
        unit.buffer_bytes = sum(b.nbytes for b in self._all())
        self._flat: torch.Tensor | None = None
        self._epoch = -1  # for which _flat holds

    def _room(self, tree: Tree) -> torch.Tensor:
        member, unit = tree.client.member, self._unit.unit
        assert member is not None and unit is not None
        if self._flat is None or self._epoch != member.epoch:
            address = tree.client.submit("unit_buffers", unit.id, finish=lambda r: r.data).wait()
            self._flat = tensor_at(address or 0, self._unit.buffer_bytes, torch.uint8)
            self._epoch = member.epoch
        return self._flat

    def _all(self) -> list[torch.Tensor]:
        return [b for name, b in self._module.named_buffers() if name not in self._ignored]

    def _now(self) -> list[torch.Tensor]:
        buffers = [b for b in self._all() if b.numel()]
        if sum(b.nbytes for b in buffers) != self._unit.buffer_bytes:
            raise FailedPrecondition(
                "a buffer was added, removed or resized after replicate: the daemon has room "
                "for the original ones; create buffers before, or give broadcast_buffers=False")
        return buffers

    def begin(self, tree: Tree) -> None:
        """The model is registered: rank 0's become everybody's (collective). Not in a job that has
        the parameters already, where perhaps only this rank begins."""
        if not any(unit.found for unit in tree.units):
            self.broadcast(tree, 0)

    def before(self, tree: Tree, root: int) -> None:
        """A forward begins (collective, if it synchronises them)."""
        if self.in_forward and self._due:
            self.broadcast(tree, root, tree.uneven)

    def after(self, tree: Tree) -> None:
        """A forward has ended, without an exception."""
        self._due = torch.is_grad_enabled() and tree.sync

    def broadcast(self, tree: Tree, root: int, written_by_all: bool = False) -> None:
        """All ranks' become @root's (collective); inside join, if @root has no more inputs, those
        of the last rank that has: then all write theirs."""
        member, unit = tree.client.member, self._unit.unit
        buffers = self._now()
        if not buffers or member is None or unit is None or member.world_size == 1:
            return
        # what backward needs of them is what they were in the forward, as with DDP
        with torch.no_grad(), _keep_versions(tuple(buffers)):
            flat = self._room(tree)
            if written_by_all or member.rank == root:
                torch.cat([_bytes(b).to(flat.device) for b in buffers], out=flat)
            tree.client.do("broadcast_buffers", unit.id, WORLD, root)
            at = 0
            for b in buffers if written_by_all or member.rank != root else []:
                part = flat[at:at + b.nbytes].clone()
                b.copy_(part.view(b.dtype).view(b.shape))
                at += b.nbytes


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().reshape(-1).view(torch.uint8)
