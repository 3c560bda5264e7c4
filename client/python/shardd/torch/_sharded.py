"""Any optimizer of torch.optim, on this rank's shard of the parameters.

Gradients stay in the daemon until the step, where they can be added up, unscaled and clipped like
those of its own optimizers: every reduction says that more follow. The step then takes unit after
unit: it ends the unit's reductions and gets a copy of this rank's share to work on. With
in_backward a unit's reduction is the last one, and its share comes at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable

import torch
from torch import nn

from ..errors import FailedPrecondition, Unimplemented
from ..specs import OptimizerSpec, OptimizerWhen
from . import _device, _kept, _probe, _share
from ._device import tensor_at
from ._guard import Guard
from ._on_shares import Inside, OnShares
from ._tree import built
from ._unit import Parameter, ShardedUnit
from ._whole import Owners
from .optim import _tree


class Sharded(OnShares):
    """Any optimizer of torch.optim, on this rank's shard: ``Sharded(torch.optim.Adagrad,
    model.parameters(), lr=0.1)``.

    Its state is in this process and ends with it, unless it is built with resilient. The shard of
    every parameter is some of its rows or a part of its elements. Optimizers that need whole
    tensors are built with whole: each parameter is then stepped by one rank. The parameter groups
    are those of the inner optimizer, so schedulers work on them.
    """

    def __init__(self, inner: type[torch.optim.Optimizer], params: Iterable[Any],
                 in_backward: bool = False, resilient: bool = False, whole: bool = False,
                 probe: bool = True, **options: Any) -> None:
        """@inner: a class of torch.optim's kind. @options: for it. @in_backward: as of AdamW.
        @resilient: with room in the daemon for its state, twice, which shardd.torch.resilient
        needs. @whole: the inner optimizer steps whole tensors; the state of each parameter is in
        the process of one rank. Not with in_backward or resilient. @probe: False: do not compare
        steps of samples. Unimplemented: @inner is known, or seen, not to compute the same on what
        it would get."""
        groups = self._groups_of(inner, params, whole)
        if whole and (in_backward or resilient):
            raise Unimplemented("whole=True is supported at the step only, with the state in the "
                                "ranks' processes: leave out in_backward and resilient", "whole")
        inner([dict(g, params=[_sample(p, whole) for p in g["params"]]) for g in groups],
              **options)  # valid?
        if probe:
            _probe.check(inner, lambda given: inner(given, **options), [
                {**({"lr": options["lr"]} if "lr" in options else {}), **g} for g in groups], whole)
        kept = _kept.Kept({
            id(p): arrays for group in groups for arrays in [_kept.arrays(inner, group, options)]
            for p in group["params"]}) if resilient else None
        self._begin(groups, in_backward, kept, lambda shards: inner(shards, **options), whole)

    def adopt(self, inner: type[torch.optim.Optimizer], params: Iterable[Any],
              make: Callable[[Any, list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        """In the place of __init__, for an object of @inner that is being built: @make(outer,
        shards) gives the inner optimizer, which has the attributes of @outer."""
        before = set(self.__dict__)
        self._begin(self._groups_of(inner, params, False), False, None,
                    lambda shards: make(self, shards))
        self._own = frozenset(set(self.__dict__) - before)
        self._unprobed = lambda: self._probe(inner, make)

    def _groups_of(self, inner: type[torch.optim.Optimizer], params: Iterable[Any],
                   whole: bool) -> list[dict[str, Any]]:
        torch.optim.Optimizer.__init__(self, params, {})  # see _adopt.py
        _probe.refuse_known(inner, whole)
        return [{k: v for k, v in g.items() if k != "param_names"} for g in self.param_groups]

    def _begin(self, groups: list[dict[str, Any]], in_backward: bool, kept: _kept.Kept | None,
               make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
               whole: bool = False) -> None:
        self.state = Inside(self)
        self._own = None
        self._before: list[_Plain] | None = None  # this step; see _as_before
        self.kept, self.may_be_late = kept, not in_backward and kept is None
        self._owners_wanted = whole
        self._model = _tree(self.param_groups, self, self._settings)
        self.in_backward = self.steps_here = in_backward
        self.adds_up = not in_backward
        self._coming = 0  # shares of units that were reduced for the last time, and not stepped
        self.puts_off = False  # giving them back, until parameters are wanted or committed
        self._stepped: list[int] = []  # units of which they were not given back
        self._of: dict[int, nn.Parameter] = {}
        self._unprobed = None
        self._owners = Owners(self._model) if whole else None
        shards = [dict(group, params=[self._stand_in(p) for p in group["params"]])
                  for group in groups]
        self.guards = [list(g["params"]) for g in groups]
        self.inner = make(shards)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults

    def _settings(self, unit: ShardedUnit) -> tuple[OptimizerSpec, dict[int, dict[str, Any]]]:
        if self._owners_wanted and unit.stored != torch.float32 and unit.trained:
            raise Unimplemented(
                f"parameter '{unit.trained[0].name}' is stored in {unit.stored}: whole=True is for "
                "float32; call fully_shard(..., master='fp32')", "whole")
        tree = built(unit)
        if self.kept is not None and tree is not None:
            self.kept.reserve(tree)
        return OptimizerSpec(when=OptimizerWhen.BY_TRAINER) if unit.trained else OptimizerSpec(), {}

    def _stand_in(self, guard: Guard) -> nn.Parameter:
        """The inner optimizer's parameter; it gets the share's memory in every step, and has its
        shape before, for optimizers that make their state at once."""
        unit: ShardedUnit = guard._unit
        [p] = [p for p in unit.params if p.guard is guard]
        shape = _shape(p, *self.own(unit, p))
        if self._owners is not None and self._owners.has(p):
            shape = tuple(p.shape)
        zero = torch.zeros((), dtype=unit.stored, device=_device.here)
        self._of[id(guard)] = nn.Parameter(zero.expand(shape))
        return self._of[id(guard)]

    @property
    def whole(self) -> bool:
        """Does the inner optimizer step whole tensors?"""
        return self._owners is not None

    def extents(self, unit: ShardedUnit, p: Parameter) -> list[tuple[int, int]]:
        """See OnShares."""
        return _share.extents(unit, p) if self._owners is None else self._owners.extents(p)

    def own(self, unit: ShardedUnit, p: Parameter) -> tuple[int, int]:
        """See OnShares."""
        return self.extents(unit, p)[_share.position(unit)]

    # ------------------------------------------------------------------ one unit

    def _check_share(self, unit: ShardedUnit) -> None:
        for index, first, n, _ in unit.pieces():
            p = unit.params[index]
            if (first, n) != _share.own(unit, p):
                raise Unimplemented(
                    f"this rank has elements {first} to {first + n} of '{unit.name}.{p.name}', "
                    "because the ranks are on several devices, and the optimizer's state for them "
                    "is with another rank; use AdamW, Adam or SGD of shardd.torch")

    def _lend(self, unit: ShardedUnit, params: torch.Tensor, gradient: torch.Tensor) -> None:
        self._check_share(unit)
        for index, first, n, at in unit.pieces():
            p = unit.params[index]
            stand_in, shape = self._of[id(p.guard)], _shape(p, first, n)
            stand_in.data = params[at:at + n].view(shape)
            stand_in.grad = (gradient[at:at + n].view(shape).to(unit.stored) if p.reduced
                             else None)

    def _take_back(self, unit: ShardedUnit) -> None:
        for p in unit.trained:
            stand_in = self._of[id(p.guard)]
            stand_in.grad = None
            zero = torch.zeros((), dtype=unit.stored, device=_device.here)
            stand_in.data = zero.expand(stand_in.shape)

    def _next(self, step: bool = True) -> None:
        """Step the unit that was reduced next. @step: False: give it back as it is."""
        client = self._model.client
        number, address, elements, offset = client.submit(
            "next_shard", self._model.group, finish=lambda r: (
                r.unit, r.data, r.elements, r.gradient_offset)).wait()
        unit = self._model.by_number(number)
        if step and (elements or self.whole):
            try:
                share = (tensor_at(address, elements, unit.stored), tensor_at(
                    address + offset, elements, torch.float32)) if elements else None
                if self._owners is not None:
                    self._check_share(unit)
                    values, gradients = share or (None, None)
                    self._owners.step(unit, values, gradients, self._of, self._step_inner)
                elif share is not None:
                    self._lend(unit, *share)
                    self._step_inner()
            except BaseException:
                client.do("shard_done", number)
                raise
            finally:
                self._take_back(unit)
        if self.puts_off and not self.in_backward:
            self._stepped.append(number)
        else:
            client.do("shard_done", number)

    def _step_inner(self) -> None:
        self._as_before()
        with self._at_work():
            self.inner.step()

    def _as_before(self) -> None:
        """The inner optimizer steps unit by unit. What it counts elsewhere than in its state
        (attributes, settings of a group) shall count steps, and not units: each unit finds it as
        it was before the first one."""
        seen = [vars(self.inner), *self.inner.param_groups]
        if self._own is not None:
            seen.append(vars(self))
        if self._before is None:
            self._before = [_Plain(s, self._other(s)) for s in seen]
        else:
            for plain in self._before:
                plain.restore()

    def came(self, unit: ShardedUnit) -> None:
        """In backward: @unit was reduced. A replica is held until the step."""
        if unit.replicated:
            self._coming += 1
        else:
            self._next()

    # ------------------------------------------------------------------- all units

    def _step_all(self) -> None:
        coming, self._coming = self._coming, 0
        for _ in range(coming):
            self._next()
        for unit in self._model.order if self.adds_up else ():
            if unit.unit is not None and unit.unit.id in self._model.arrived:
                unit.end_reductions()
                self._next()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all units that have a gradient, one after the other (collective). Return: what
        @closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._model.optimizer is not self:
            raise FailedPrecondition(
                f"this {type(self).__name__} was replaced: another optimizer was built for the "
                "model's parameters later, and a model has one at a time; to have both, "
                "give one optimizer a group for each, or build both before the first backward with "
                "some of the trained parameters each")
        self._probe_once()
        self._before_step()
        self._model.collect()
        self._model.hand_over_gradients()
        try:
            if not (self._skip_if_found and self._found_inf):
                self._step_all()
        finally:
            self._before = None
        if not self._stepped:
            self._model.client.step(group=self._model.group, skip_if_found=self._skip_if_found)
        self._model.used_up()
        return loss

    def finish(self) -> None:
        """Give back what was stepped (collective, if there is something). A rank that died before
        has changed nothing, since none begins before all are here."""
        stepped, self._stepped = self._stepped, []
        if not stepped:
            return
        client, group = self._model.client, self._model.group
        client.barrier(group)
        for number in stepped:
            client.do("shard_done", number)
        client.step(group=group)

    def forget(self) -> None:
        """The daemon has dropped what this session held."""
        self._coming = 0
        self._stepped.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients there are (collective, if there are any that were reduced)."""
        if self.in_backward:
            self._model.collect()
            coming, self._coming = self._coming, 0
            for _ in range(coming):
                self._next(step=False)
        super().zero_grad(set_to_none)


class _Plain:
    """The numbers, texts and tensors of a dictionary, as they are now."""

    def __init__(self, of: dict[str, Any], wanted: Callable[[str], bool]) -> None:
        self._of, self._wanted = of, wanted
        self._values = self._now()
        self._copies = {name: value.clone() for name, value in self._values.items()
                        if isinstance(value, torch.Tensor)}

    def _now(self) -> dict[str, Any]:
        return {name: value for name, value in self._of.items() if self._wanted(name) and
                (value is None or isinstance(value, (bool, int, float, str, tuple, torch.Tensor)))}

    def restore(self) -> None:
        """As they were when this was made."""
        for name in self._now().keys() - self._values.keys():
            del self._of[name]
        for name, value in self._values.items():
            if name in self._copies and not torch.equal(value, self._copies[name]):
                value.copy_(self._copies[name])
            self._of[name] = value



def _sample(guard: Guard, whole: bool) -> nn.Parameter:
    """What has the rank of a parameter, for a constructor that checks it."""
    return nn.Parameter(torch.zeros(()).expand(guard.shape) if whole else torch.zeros(1))


def _shape(p: Parameter, first: int, n: int) -> tuple[int, ...]:
    """The shape of a piece: whole rows if it is some, else flat."""
    row = p.shape[1:].numel() if len(p.shape) else 1
    if len(p.shape) and row and first % row == 0 and n % row == 0:
        return (n // row, *p.shape[1:])
    return (n,)


__all__ = ["Sharded"]
