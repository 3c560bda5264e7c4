"""Optimizers of torch.optim beside each other, or after another one: each steps its own parameters.

The daemon steps all of a unit, with one optimizer that is known when it gets the model. Several
optimizers of one model, one of some parameters only, and one that is built later step here: each
rank copies its rows of the parameters and of their reduced gradients out of the daemon, steps them,
and writes the parameters back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import torch
from torch import nn

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from . import _device, _probe, _rows, _shard
from ._guard import Guard
from ._on_shares import Inside, OnShares
from ._shard import PARAMETERS
from ._tree import Tree, built, tree_of, units_of
from ._unit import Parameter, ShardedUnit
from .optim import _check, _root


class OnPieces(OnShares):
    """See above. ``partial``: it has not all trained parameters of the model."""

    def adopt(self, inner: type[torch.optim.Optimizer], params: Iterable[Any],
              make: Callable[[Any, list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        """In the place of __init__, for an object of @inner that is being built: @make(outer,
        shards) gives the inner optimizer, which has the attributes of @outer (collective)."""
        before = set(self.__dict__)
        torch.optim.Optimizer.__init__(self, params, {})  # see _adopt.py
        _probe.refuse_known(inner, False)
        groups = [{k: v for k, v in g.items() if k != "param_names"} for g in self.param_groups]
        self._model = _model_of(groups)
        self._places = {id(p.guard): (unit, p) for unit in self._model.units for p in unit.params}
        self._of: dict[int, nn.Parameter] = {}
        self.guards = [list(g["params"]) for g in groups]
        self.inner = make(self, [self._shards(g) for g in groups])
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults
        self.state = Inside(self)
        self._own = frozenset(set(self.__dict__) - before)
        self._unprobed = lambda: self._probe(inner, make)

    def _shards(self, group: dict[str, Any]) -> dict[str, Any]:
        return dict(group, params=[self._stand_in(p) for p in group["params"]])

    def _stand_in(self, guard: Guard) -> nn.Parameter:
        """The inner optimizer's parameter, of the shape of this rank's rows; it has their memory
        during a step."""
        unit, p = self._places[id(guard)]
        zero = torch.zeros((), dtype=unit.stored, device=_device.here)
        self._of[id(guard)] = nn.Parameter(zero.expand(self._shape(p)))
        return self._of[id(guard)]

    def _shape(self, p: Parameter) -> tuple[int, ...]:
        mesh = _rows.mesh_of(self._model)
        rows = _shard.extent(self._model.client, mesh, p.shape)[1]
        return (rows, *p.shape[1:]) if p.shape else ()

    @property
    def partial(self) -> bool:
        """See above."""
        return any(id(p.guard) not in self._of for u in self._model.units for p in u.trained)

    def extents(self, unit: ShardedUnit, p: Parameter) -> list[tuple[int, int]]:
        """See OnShares. Replicas have the same."""
        mesh, row = _rows.mesh_of(self._model), p.shape[1:].numel()
        return [(first * row, n * row) for rank in mesh.ranks
                for first, n in [_shard.rows_of(rank, mesh, p.shape)]]

    def own(self, unit: ShardedUnit, p: Parameter) -> tuple[int, int]:
        """See OnShares."""
        member = self._model.client.member
        assert member is not None
        return self.extents(unit, p)[_rows.mesh_of(self._model).ranks.index(member.rank)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's: parameters of the same model, with which the next step begins."""
        if not hasattr(self, "inner"):
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        _check([{"params": given}])
        for p in given:
            if id(p) not in self._places:
                raise InvalidArgument("a parameter of the group belongs to another model: build "
                                      "one optimizer for each model", "params")
            if id(p) in self._of:
                raise ValueError("some parameters appear in more than one parameter group")
        with self._at_work():
            self.inner.add_param_group(self._shards(dict(param_group, params=given)))
            self.guards.append(given)

    # ------------------------------------------------------------------------ a step

    def _with_gradient(self) -> list[tuple[Parameter, torch.Tensor]]:
        found = []
        for guard in (g for guards in self.guards for g in guards):
            _, p = self._places[id(guard)]
            gradient = p.gradient.rows() if p.trained else None
            if gradient is not None:
                found.append((p, gradient))
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient (collective). The gradients stay until
        zero_grad(). Return: what @closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._probe_once()
        self._model.collect()
        self._model.take_dropped()
        if self._skip_if_found and self._found_inf:
            return loss
        used = self._with_gradient()
        if not used:
            return loss
        self._before_step()
        self._model.begin_write()
        try:
            for p, gradient in used:
                assert p.values.piece is not None
                stand_in = self._of[id(p.guard)]
                stand_in.data, stand_in.grad = p.values.piece.read(PARAMETERS), gradient
            with self._at_work():
                self.inner.step()
            for p, _ in used:
                assert p.values.piece is not None
                p.values.piece.write(PARAMETERS, self._of[id(p.guard)].data)
        finally:
            for p, _ in used:
                stand_in = self._of[id(p.guard)]
                zero = torch.zeros((), dtype=stand_in.dtype, device=_device.here)
                stand_in.grad, stand_in.data = None, zero.expand(stand_in.shape)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of its parameters (collective, if some were reduced)."""
        for guard in (g for guards in self.guards for g in guards):
            if self._places[id(guard)][1].trained:
                guard.grad = None
        self._model.collect()
        self._model.take_dropped()


def _roots(groups: list[dict[str, Any]]) -> list[ShardedUnit]:
    found = {id(_root(p._unit)): _root(p._unit) for g in groups for p in g["params"]}
    return list(found.values())


def _model_of(groups: list[dict[str, Any]]) -> Tree:
    """The one model of the parameters, registered if it was not (collective)."""
    _check(groups)
    roots = _roots(groups)
    if len(roots) != 1:
        raise InvalidArgument("the parameters belong to several models: build one optimizer for "
                              "each model", "params")
    [root] = roots
    if root.replicated:
        raise Unimplemented(
            "this optimizer has some parameters of a replicated model, or is not its first one: "
            "the shards of a replicated model are stepped together; give one optimizer all "
            "parameters before the first forward, or use fully_shard")
    tree = built(root)
    if tree is None:
        tree = tree_of(root)
    elif getattr(tree.optimizer, "in_backward", False):
        raise FailedPrecondition("the model has an optimizer that steps in backward and uses up "
                                 "all gradients: build that one without in_backward")
    tree.finish()
    tree.optimizer = None  # it may not step from here on
    tree.take_unfrozen()
    tree.several = True
    return tree


def fits(groups: list[dict[str, Any]]) -> bool:
    """Must an optimizer of these groups be one of pieces? If it has not all of the model's trained
    parameters, or if another one steps all of them."""
    roots = _roots(groups)
    if len(roots) != 1 or roots[0].replicated:
        return False
    tree, given = built(roots[0]), {id(p) for g in groups for p in g["params"]}
    if tree is not None and not (tree.by_trainer and not tree.several):
        return True
    return any(p.guard.requires_grad and id(p.guard) not in given
               for u in units_of(roots[0].module) for p in u.params)


__all__ = ["OnPieces", "fits"]
