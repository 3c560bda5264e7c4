"""State dicts of an optimizer of torch.optim that runs on the shards.

Its state is in the ranks' processes: of a parameter each has that of its share (_share.py), and
what is no tensor of the parameter's shape (the number of steps) is the same on all that have
some of it. A rank may have nothing of a parameter: what there is, is what the first one has that
does. Of an optimizer of whole tensors one rank has all of a parameter, and what is of another
shape (factors of rows and columns) is what that rank has.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..memory import Dtype
from . import _device, _rows, _share
from ._device import tensor_at
from ._optim_state import matching
from ._tree import Tree, its_tree
from ._unit import Parameter, ShardedUnit

State = dict[str, Any]


class OnShares(Protocol):
    """What this file needs of an optimizer whose inner one runs on shares: a Sharded. ``_of``: by
    the id of a guard what the inner one has in its place. ``guards``: by group."""

    param_groups: list[dict[str, Any]]
    guards: list[list[Any]]
    inner: torch.optim.Optimizer
    _of: dict[int, nn.Parameter]
    _model: Tree

    @property
    def whole(self) -> bool:
        """Does the inner one step whole tensors?"""

    def extents(self, unit: ShardedUnit, p: Parameter) -> list[tuple[int, int]]:
        """Of each rank: the first element of @p of which it has the state, and how many."""

    def own(self, unit: ShardedUnit, p: Parameter) -> tuple[int, int]:
        """This rank's."""


def _share_out(tree: Tree, whole: torch.Tensor, pieces: Iterable[tuple[int, int, int]]) -> None:
    """@pieces: (rank, first, n): that rank's elements of @whole become everybody's (collective)."""
    if not whole.numel():
        return
    own, each = whole.view(-1).view(torch.uint8), whole.itemsize
    with tree.client.alloc((whole.nbytes,), Dtype.UINT8) as lent:
        flat = tensor_at(lent.memory.address, whole.nbytes, torch.uint8)
        flat.copy_(own)
        for root, first, n in pieces:
            if n:
                tree.client.do("broadcast", tree.group, lent.id, first * each, n * each, root)
        own.copy_(flat)
        del flat


def _said(tree: Tree, value: Any, root: int) -> Any:
    """What rank @root says (collective)."""
    packed = pickle.dumps(value)
    size = torch.tensor([len(packed)])
    _share_out(tree, size, [(root, 0, 1)])
    n = int(size)
    data = torch.frombuffer(bytearray(packed[:n].ljust(n, b"\0")), dtype=torch.uint8)
    _share_out(tree, data, [(root, 0, n)])
    return pickle.loads(bytes(data.tolist()))


def _trained(optimizer: OnShares) -> list[tuple[ShardedUnit, Parameter, torch.Tensor]]:
    """With each parameter what the inner optimizer has in its place."""
    return [(unit, p, optimizer._of[id(p.guard)])
            for unit in optimizer._model.units for p in unit.trained
            if id(p.guard) in optimizer._of]


def is_cut(value: Any, stand_in: torch.Tensor) -> bool:
    """Is it of each element of the share, and not of the parameter?"""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == stand_in.shape


def _describe(optimizer: OnShares) -> list[State]:
    """Of every parameter, as the first rank that has some of it says (collective): the types of
    what is cut, and all else as it is."""
    tree = optimizer._model
    ranks, trained = _rows.mesh_of(tree).ranks, _trained(optimizer)
    own = [{key: value.dtype if is_cut(value, stand_in) else (value,)
            for key, value in optimizer.inner.state.get(stand_in, {}).items()}
           for _, _, stand_in in trained]
    first = [next((r for r, (_, n) in zip(ranks, optimizer.extents(unit, p)) if n), ranks[0])
             for unit, p, _ in trained]
    said = {root: _said(tree, own, root) for root in sorted(set(first))}
    return [said[root][i] for i, root in enumerate(first)]


def _whole(optimizer: OnShares, unit: ShardedUnit, p: Parameter,
           part: torch.Tensor) -> torch.Tensor:
    """All ranks' @part of something of the shape of @p (collective)."""
    tree = its_tree(unit)
    whole = torch.empty(p.shape, dtype=part.dtype, device=_device.here)
    first, n = optimizer.own(unit, p)
    whole.view(-1)[first:first + n].copy_(part.reshape(-1))
    _share_out(tree, whole, [(root, *piece) for root, piece in zip(
        _rows.mesh_of(tree).ranks, optimizer.extents(unit, p))])
    return whole


def _taken(optimizer: OnShares, unit: ShardedUnit, p: Parameter, part: torch.Tensor,
           full: bool) -> Any:
    """@part, as it is in a state dict (collective)."""
    if full or not p.shape or optimizer.whole or not _share.by_rows(unit):
        whole = _whole(optimizer, unit, p, part)
        return whole if full else _rows.take(unit, p, whole)
    rows = part.numel() // p.shape[1:].numel() if part.numel() else 0
    return _rows.wrap(unit, p, part.view(rows, *p.shape[1:]).clone())


def read(optimizer: OnShares, full: bool) -> dict[int, State]:
    """By the id of a parameter its state (collective)."""
    optimizer._model.release_all()
    found = {}
    for (unit, p, stand_in), there in zip(_trained(optimizer), _describe(optimizer)):
        own, n = optimizer.inner.state.get(stand_in, {}), optimizer.own(unit, p)[1]
        state = {key: said[0] if isinstance(said, tuple) else _taken(
                     optimizer, unit, p, own[key] if key in own else
                     torch.zeros(n, dtype=said, device=_device.here), full)
                 for key, said in there.items()}
        if state:
            found[id(p.guard)] = state
    return found


def groups(optimizer: OnShares, name: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The parameter groups; @name: of a parameter, by id."""
    return [{**{k: v for k, v in group.items() if k != "params"},
             "params": [name[id(p)] for p in guards]}
            for group, guards in zip(optimizer.param_groups, optimizer.guards)]


def _numbers(trained: list[tuple[ShardedUnit, Parameter, torch.Tensor]],
             by_id: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """The keys of what is one number for all of a parameter, to be told from the state of a
    parameter that is a number itself."""
    return {"step", *(key for _, p, _ in trained if p.shape for key, value in
                      by_id[id(p.guard)].items()
                      if isinstance(value, torch.Tensor) and not value.dim())}


def _put(unit: ShardedUnit, p: Parameter, value: Any, whole: torch.Tensor, all_of_it: bool) -> None:
    """Make @whole, or at least this rank's share of it, what @value is (collective)."""
    tree = its_tree(unit)
    if (_share.by_rows(unit) and not all_of_it) or not _rows.is_sharded(value):
        _rows.put(unit, p, value, whole)
    elif not isinstance(value, _rows.Rows):
        whole.copy_(value.full_tensor())
    else:  # the share is of other rows, too, which other ranks have
        _rows.put(unit, p, value, whole)
        mesh, row = _rows.mesh_of(tree), p.shape[1:].numel()
        per = -(-p.shape[0] // mesh.shard)
        _share_out(tree, whole, [
            (mesh.ranks[i], first * row, n * row) for i in range(mesh.shard)
            for first, n in [_share.cut(p.shape[0], per, i)]])


def _of_elements(p: Parameter, key: str, value: Any, numbers: set[str], all_of_it: bool) -> bool:
    """Is it of each element of the parameter?"""
    if all_of_it and not isinstance(value, _rows.Rows) and (
            not p.shape or getattr(value, "shape", None) != p.shape):
        return False
    return isinstance(value, _rows.Rows) or (isinstance(value, torch.Tensor) and (
        value.dim() > 0 or (not p.shape and key not in numbers)))


def _check(unit: ShardedUnit, p: Parameter, state: Mapping[str, Any], numbers: set[str],
           all_of_it: bool) -> None:
    for key, value in state.items():
        if _of_elements(p, key, value, numbers, all_of_it):
            _rows.check(p, value, f"{key} of {p.name}")
            _rows.check_own(unit, p, value)


def _local(optimizer: OnShares, unit: ShardedUnit, p: Parameter, stand_in: torch.Tensor,
           state: Mapping[str, Any], numbers: set[str]) -> State:
    """This rank's part of a parameter's @state (collective)."""
    made: State = {}
    for key, value in state.items():
        if not _of_elements(p, key, value, numbers, optimizer.whole):
            made[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        source = value.rows if isinstance(value, _rows.Rows) else value
        whole = torch.zeros(p.shape, dtype=source.dtype, device=_device.here)
        _put(unit, p, value, whole, optimizer.whole)
        first, n = optimizer.own(unit, p)
        made[key] = whole.reshape(-1)[first:first + n].clone().view(stand_in.shape)
    return {} if optimizer.whole and not stand_in.numel() else made


def load(optimizer: OnShares, saved: Mapping[str, Any]) -> None:
    """Everything of @saved, by number or by name (collective)."""
    optimizer._model.release_all()
    trained = _trained(optimizer)
    with optimizer._model.all_or_none("load the optimizer's state"):
        matched = matching(optimizer, optimizer.guards, saved["param_groups"])
        by_id = {id(p): saved["state"].get(key) or {}
                 for (_, keys), guards in zip(matched, optimizer.guards)
                 for key, p in zip(keys, guards)}
        numbers = _numbers(trained, by_id)
        for unit, p, _ in trained:
            _check(unit, p, by_id[id(p.guard)], numbers, optimizer.whole)
    made = [(stand_in, _local(optimizer, unit, p, stand_in, by_id[id(p.guard)], numbers))
            for unit, p, stand_in in trained]
    for stand_in, state in made:
        optimizer.inner.state[stand_in] = state
    for group, (other, _) in zip(optimizer.param_groups, matched):
        group.update({k: copy.deepcopy(v) for k, v in other.items()
                      if k not in ("params", "param_names")})


__all__ = ["groups", "is_cut", "load", "read"]
