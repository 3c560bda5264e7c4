"""State dicts of an optimizer of torch.optim that runs on the shards.

Its state is in the ranks' processes: of a parameter each has that of its rows, and what is no
tensor of the parameter's shape (the number of steps) is the same on all. Rank 0 has rows of every
parameter, others may have none: what there is, is what it has.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgument, Unimplemented
from ..memory import Dtype
from . import _device, _rows
from ._device import tensor_at
from ._tree import Tree
from ._unit import Parameter, ShardedUnit

if TYPE_CHECKING:
    from .optim import Sharded

State = dict[str, Any]


def _broadcast(tree: Tree, data: bytearray, root: int, first: int, n: int) -> None:
    """@root's bytes [@first, @first + @n) of @data become everybody's (collective)."""
    with tree.client.alloc((max(1, len(data)),), Dtype.UINT8) as lent:
        flat = tensor_at(lent.memory.address, max(1, len(data)), torch.uint8)
        own = torch.frombuffer(data, dtype=torch.uint8)
        flat[:len(data)].copy_(own)
        tree.client.do("broadcast", tree.group, lent.id, first, n, root)
        own[first:first + n].copy_(flat[first:first + n])
        del flat


def _said(tree: Tree, value: Any) -> Any:
    """What the first rank says (collective)."""
    packed = pickle.dumps(value)
    size = bytearray(len(packed).to_bytes(8, "little"))
    _broadcast(tree, size, tree.first_rank, 0, 8)
    n = int.from_bytes(size, "little")
    data = bytearray(packed[:n].ljust(n, b"\0"))
    _broadcast(tree, data, tree.first_rank, 0, n)
    return pickle.loads(bytes(data))


def _trained(optimizer: Sharded) -> list[tuple[ShardedUnit, Parameter, torch.Tensor]]:
    """With each parameter what the inner optimizer has in its place."""
    found: list[tuple[ShardedUnit, Parameter, torch.Tensor]] = []
    for unit in optimizer._model.units:
        for p in unit.trained:
            if unit.replicated or not p.shape:
                raise Unimplemented(f"'{p.name}' is not cut by rows, of a replicated model or a "
                                    "scalar: such an optimizer's state cannot be saved")
            found.append((unit, p, optimizer._of[id(p.guard)]))
    return found


def _is_cut(value: Any, stand_in: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == stand_in.shape


def _describe(optimizer: Sharded) -> list[State]:
    """Of every parameter: the types of what is cut by rows, and all else as it is."""
    return [{key: value.dtype if _is_cut(value, stand_in) else (value,)
             for key, value in optimizer.inner.state.get(stand_in, {}).items()}
            for _, _, stand_in in _trained(optimizer)]


def _whole(unit: ShardedUnit, p: Parameter, rows: torch.Tensor) -> torch.Tensor:
    """All ranks' @rows (collective)."""
    assert unit.tree is not None
    mesh, nbytes = _rows.mesh_of(unit.tree), p.shape.numel() * rows.dtype.itemsize
    if not nbytes:
        return torch.empty(p.shape, dtype=rows.dtype, device=_device.here)
    data, each = bytearray(nbytes), nbytes // p.shape[0]
    flat = torch.frombuffer(data, dtype=torch.uint8)
    first, n = _rows.extent(unit, p)
    flat[first * each:(first + n) * each].copy_(rows.contiguous().reshape(-1).view(torch.uint8))
    per = -(-p.shape[0] // mesh.shard)
    for position in range(mesh.shard):
        begin, end = (min(i * per, p.shape[0]) for i in (position, position + 1))
        if begin < end:
            _broadcast(unit.tree, data, mesh.ranks[position], begin * each, (end - begin) * each)
    whole = torch.frombuffer(data, dtype=rows.dtype).view(p.shape)
    return whole.clone().to(_device.here)


def read(optimizer: Sharded, full: bool) -> dict[int, State]:
    """By the id of a parameter its state (collective)."""
    optimizer._model.release_all()
    found = {}
    described = _said(optimizer._model, _describe(optimizer))
    for (unit, p, stand_in), there in zip(_trained(optimizer), described):
        own, n = optimizer.inner.state.get(stand_in, {}), _rows.extent(unit, p)[1]
        state: State = {}
        for key, said in there.items():
            if isinstance(said, tuple):
                state[key] = said[0]
                continue
            empty = torch.zeros((n, *p.shape[1:]), dtype=said, device=_device.here)
            rows = own[key].view(empty.shape) if key in own else empty
            state[key] = _whole(unit, p, rows) if full else _rows.wrap(unit, p, rows.clone())
        if state:
            found[id(p.guard)] = state
    return found


def groups(optimizer: Sharded, name: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The parameter groups; @name: of a parameter, by id."""
    return [{**{k: v for k, v in group.items() if k != "params"},
             "params": [name[id(p)] for p in guards]}
            for group, guards in zip(optimizer.param_groups, optimizer.guards)]


def _local(unit: ShardedUnit, p: Parameter, stand_in: torch.Tensor, state: Mapping[str, Any],
           ) -> State:
    """This rank's part of a parameter's @state."""
    made: State = {}
    for key, value in state.items():
        if not isinstance(value, _rows.Rows) and not (
                isinstance(value, torch.Tensor) and value.dim()):
            made[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        _rows.check(p, value, f"{key} of {p.name}")
        source = value.rows if isinstance(value, _rows.Rows) else value
        whole = torch.zeros(p.shape, dtype=source.dtype, device=_device.here)
        _rows.put(unit, p, value, whole)
        first, n = _rows.extent(unit, p)
        made[key] = whole[first:first + n].clone().view(stand_in.shape)
    return made


def load(optimizer: Sharded, saved: Mapping[str, Any]) -> None:
    """Everything of @saved, by number or by name (collective)."""
    optimizer._model.release_all()
    if [len(g["params"]) for g in saved["param_groups"]] != list(map(len, optimizer.guards)):
        raise InvalidArgument("the state has other parameter groups than this optimizer",
                              "param_groups")
    by_id = {id(p): saved["state"].get(key) or {}
             for group, guards in zip(saved["param_groups"], optimizer.guards)
             for key, p in zip(group["params"], guards)}
    made = [(stand_in, _local(unit, p, stand_in, by_id[id(p.guard)]))
            for unit, p, stand_in in _trained(optimizer)]
    for stand_in, state in made:
        optimizer.inner.state[stand_in] = state
    for group, other in zip(optimizer.param_groups, saved["param_groups"]):
        group.update({k: v for k, v in other.items() if k not in ("params", "param_names")})


__all__ = ["groups", "load", "read"]
