"""This rank's rows of whole tensors, and back: what sharded state dicts consist of.

Where torch.distributed is initialised they are DTensors as FSDP2's, Shard(0) over the ranks; else
:class:`Rows`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import FailedPrecondition, InvalidArgument
from . import _shard
from ._mesh import Mesh, world
from ._tree import Tree, its_tree
from ._unit import Parameter, ShardedUnit


@dataclass(eq=False)
class Rows:
    """Rows ``first``, ``first + 1``... of a tensor of ``shape``, as one rank has them. torch.save
    and torch.load take it, also with weights_only."""

    rows: torch.Tensor
    first: int
    shape: tuple[int, ...]


torch.serialization.add_safe_globals([Rows])


def plain(name: str) -> str:
    """A parameter's name in a state dict: PyTorch's checkpoint wrappers take themselves out."""
    return name.replace("_checkpoint_wrapped_module.", "")


def mesh_of(tree: Tree) -> Mesh:
    """Which ranks share the model, and how."""
    member = tree.client.member
    assert member is not None
    return tree.mesh or world(member.world_size)


def _device_mesh(tree: Tree) -> Any:
    """torch's mesh of these ranks; None: torch.distributed is not initialised."""
    return _shard.device_mesh(tree.client, mesh_of(tree))


def extent(unit: ShardedUnit, p: Parameter) -> tuple[int, int]:
    """This rank's rows of @p: the first, and how many. All of it, if it is on every rank."""
    if unit.replicated:
        return 0, p.shape[0] if p.shape else 1
    tree = its_tree(unit)
    return _shard.extent(tree.client, mesh_of(tree), p.shape)


def take(unit: ShardedUnit, p: Parameter, whole: torch.Tensor) -> Any:
    """A copy of this rank's rows of @whole, which has the shape of @p."""
    if unit.replicated or not p.shape:
        return whole.detach().clone()
    first, n = extent(unit, p)
    return wrap(unit, p, whole.detach()[first:first + n].clone())


def wrap(unit: ShardedUnit, p: Parameter, local: torch.Tensor) -> Any:
    """This rank's rows of something of the shape of @p, as they are in a sharded state dict."""
    mesh = _device_mesh(its_tree(unit))
    if mesh is None:
        return Rows(local, extent(unit, p)[0], tuple(p.shape))
    return _shard.as_dtensor(mesh, local, p.shape)


_PYTORCHS = "torch.distributed.checkpoint.state_dict"


def for_pytorch() -> bool:
    """Is this called by get_state_dict, set_state_dict or one of their kind of
    torch.distributed.checkpoint? They say nothing of what they want: they take what FSDP2's
    modules and their optimizers have, rows, of an optimizer that never stepped, too."""
    frame = sys._getframe(1) if _PYTORCHS in sys.modules else None
    while frame is not None and frame.f_globals.get("__name__") != _PYTORCHS:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def rows_for_pytorch() -> bool:
    """The same, and can rows be DTensors?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and for_pytorch()


def is_sharded(value: Any) -> bool:
    """Is it one rank's part of a tensor?"""
    return isinstance(value, Rows) or hasattr(value, "full_tensor")


def check(p: Parameter, value: Any, what: str) -> None:
    """InvalidArgument: @value, of the name @what, is nothing that @p could become."""
    if not isinstance(value, (torch.Tensor, Rows)):
        raise InvalidArgument(f"'{what}' is a {type(value).__name__}, must be a tensor", what)
    if tuple(value.shape) != tuple(p.shape):
        raise InvalidArgument(f"'{what}' has the shape {list(value.shape)}, but parameter "
                              f"'{p.name}' has {list(p.shape)}", what)


def check_own(unit: ShardedUnit, p: Parameter, value: Any) -> None:
    """InvalidArgument: @value is Rows that are not this rank's."""
    if not isinstance(value, Rows):
        return
    if unit.tree is None:
        raise FailedPrecondition("the model is not sharded yet: build the optimizer before "
                                 "loading rows")
    first, n = extent(unit, p)
    if (value.first, len(value.rows)) != (first, n):
        raise InvalidArgument(
            f"the state has rows {value.first} to {value.first + len(value.rows)} of '{p.name}', "
            f"but this rank has {first} to {first + n}: it was saved by another rank, or with "
            "another number of ranks; save with full=True to change that number")


def _put_rows(unit: ShardedUnit, p: Parameter, value: Rows, whole: torch.Tensor) -> None:
    check_own(unit, p, value)
    first, n = extent(unit, p)
    whole[first:first + n].copy_(value.rows)


def put(unit: ShardedUnit, p: Parameter, value: Any, whole: torch.Tensor) -> None:
    """Make @whole, or at least this rank's rows of it, what @value is: a whole tensor, a DTensor
    (collective over its mesh, unless it is cut as the unit is) or Rows."""
    with torch.no_grad():
        if isinstance(value, Rows):
            _put_rows(unit, p, value, whole)
        elif not hasattr(value, "full_tensor"):
            whole.copy_(value)
        elif _is_cut_alike(unit, p, value):
            first, n = extent(unit, p)
            whole[first:first + n].copy_(value.to_local())
        else:
            whole.copy_(value.full_tensor())


def _is_cut_alike(unit: ShardedUnit, p: Parameter, value: Any) -> bool:
    """The same on all ranks."""
    if unit.tree is None or unit.replicated or not p.shape:
        return False
    mesh = _device_mesh(its_tree(unit))
    return bool(value.device_mesh == mesh and tuple(value.placements) == _shard.placements(mesh))


__all__ = ["Rows", "check", "check_own", "extent", "for_pytorch", "is_sharded", "mesh_of", "plain",
           "put", "rows_for_pytorch", "take", "wrap"]
