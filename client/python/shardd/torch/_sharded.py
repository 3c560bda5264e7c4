"""Any optimizer of torch.optim, on this rank's shard of the parameters.

Gradients stay in the daemon until the step, where they can be added up, unscaled and clipped like
those of its own optimizers: every reduction says that more follow. The step then takes unit after
unit: it ends the unit's reductions and gets a copy of this rank's share to work on. With
in_backward a unit's reduction is the last one, and its share comes at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Callable

import torch
from torch import nn

from ..errors import Unimplemented
from ..specs import OptimizerSpec, OptimizerWhen
from . import _device, _inner_state, _kept, _share
from ._device import tensor_at
from ._guard import Guard
from ._tree import built
from ._unit import Parameter, ShardedUnit
from .optim import _Sharded, _tree

# Of torch.optim; of other packages nobody knows.
_WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class Sharded(_Sharded):
    """Any optimizer of torch.optim, on this rank's shard: ``Sharded(torch.optim.Adagrad,
    model.parameters(), lr=0.1)``.

    Its state is in this process and ends with it, unless it is built with resilient. The shard of
    every parameter is some of its rows or a part of its elements: optimizers that need whole
    tensors are not supported. The parameter groups are those of the inner optimizer, so schedulers
    work on them.
    """

    def __init__(self, inner: type[torch.optim.Optimizer], params: Iterable[Any],
                 in_backward: bool = False, resilient: bool = False, **options: Any) -> None:
        """@inner: a class of torch.optim's kind. @options: for it. @in_backward: as of AdamW.
        @resilient: with room in the daemon for its state, twice, which shardd.torch.resilient
        needs."""
        super().__init__(params, {})
        if inner.__name__ in _WHOLE:
            raise Unimplemented(f"{inner.__name__} needs whole tensors, or all of them at once: "
                                "Sharded supports optimizers that work element by element", "inner")
        groups = [{k: v for k, v in g.items() if k != "param_names"} for g in self.param_groups]
        inner([dict(g, params=[nn.Parameter(torch.zeros(1))]) for g in groups], **options)  # valid?
        self.state = _Inside(self)  # type: ignore[assignment]
        self.kept = _kept.Kept({
            id(p): arrays for group in groups for arrays in [_kept.arrays(inner, group, options)]
            for p in group["params"]}) if resilient else None
        self._model = _tree(self.param_groups, self, self._settings)
        self.in_backward = self.steps_here = in_backward
        self.adds_up = not in_backward
        self._coming = 0  # shares of units that were reduced for the last time, and not stepped
        self.puts_off = False  # giving them back, until parameters are wanted or committed
        self._stepped: list[int] = []  # units of which they were not given back
        self._of: dict[int, nn.Parameter] = {}
        shards = [dict(group, params=[self._stand_in(p) for p in group["params"]])
                  for group in groups]
        self.guards = [list(g["params"]) for g in groups]
        self.inner = inner(shards, **options)
        self.param_groups, self.defaults = self.inner.param_groups, self.inner.defaults

    def _settings(self, unit: ShardedUnit) -> tuple[OptimizerSpec, dict[int, dict[str, Any]]]:
        tree = built(unit)
        if self.kept is not None and tree is not None:
            self.kept.reserve(tree)
        return OptimizerSpec(when=OptimizerWhen.BY_TRAINER) if unit.trained else OptimizerSpec(), {}

    def _stand_in(self, guard: Guard) -> nn.Parameter:
        """The inner optimizer's parameter; it gets the share's memory in every step, and has its
        shape before, for optimizers that make their state at once."""
        unit: ShardedUnit = guard._unit
        [p] = [p for p in unit.params if p.guard is guard]
        shape = _shape(p, *_share.own(unit, p))
        self._of[id(guard)] = nn.Parameter(torch.zeros((), device=_device.here).expand(shape))
        return self._of[id(guard)]

    # ------------------------------------------------------------------ one unit

    def _lend(self, unit: ShardedUnit, params: torch.Tensor, gradient: torch.Tensor) -> None:
        for index, first, n, at in unit.pieces():
            p = unit.params[index]
            if (first, n) != _share.own(unit, p):
                raise Unimplemented(
                    f"this rank has elements {first} to {first + n} of '{unit.name}.{p.name}', "
                    "because the ranks are on several devices, and the optimizer's state for them "
                    "is with another rank; use AdamW, Adam or SGD of shardd.torch")
            stand_in, shape = self._of[id(p.guard)], _shape(p, first, n)
            stand_in.data = params[at:at + n].view(shape)
            stand_in.grad = gradient[at:at + n].view(shape) if p.reduced else None

    def _take_back(self, unit: ShardedUnit) -> None:
        for p in unit.trained:
            stand_in = self._of[id(p.guard)]
            stand_in.grad = None
            stand_in.data = torch.zeros((), device=_device.here).expand(stand_in.shape)

    def _next(self, step: bool = True) -> None:
        """Step the unit that was reduced next. @step: False: give it back as it is."""
        client = self._model.client
        number, address, elements, offset = client.submit(
            "next_shard", self._model.group, finish=lambda r: (
                r.unit, r.data, r.elements, r.gradient_offset)).wait()
        unit = self._model.by_number(number)
        if elements and step:
            try:
                self._lend(unit, tensor_at(address, elements, torch.float32),
                           tensor_at(address + offset, elements, torch.float32))
                self.inner.step()
            except BaseException:
                client.do("shard_done", number)
                raise
            finally:
                self._take_back(unit)
        if self.puts_off and not self.in_backward:
            self._stepped.append(number)
        else:
            client.do("shard_done", number)

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
        self._model.take_dropped()
        self._model.collect()
        if not (self._skip_if_found and self._found_inf):
            self._step_all()
        if not self._stepped:
            self._model.client.step(group=self._model.group, skip_if_found=self._skip_if_found)
        self._model.stepped()
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

    # ----------------------------------------------------------------- state dicts

    def _numbered(self) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        numbers = {id(p): i for i, p in enumerate(p for g in self.guards for p in g)}
        state = {numbers[p]: s for p, s in _inner_state.read(self, True).items()}
        return state, _inner_state.groups(self, numbers)

    def _load(self, state: Mapping[str, Any]) -> None:
        _inner_state.load(self, state)

    def _named(self, names: Mapping[int, str], full: bool,
               wanted: bool) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        return _inner_state.read(self, full), _inner_state.groups(self, names)


class _Inside(dict[Any, Any]):
    """``optimizer.state``, which the inner optimizer has, of shares. torch.distributed's
    get_optimizer_state_dict asks whether it is empty, and would take shares for parameters."""

    def __init__(self, optimizer: Sharded) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        raise Unimplemented(
            "the state of shardd.torch.Sharded is kept by shares, which PyTorch's functions do "
            "not support: use shardd.torch.optimizer_state_dict(optimizer), or its state_dict()")

    def __missing__(self, guard: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.inner.state[optimizer._of[id(guard)]]


def _shape(p: Parameter, first: int, n: int) -> tuple[int, ...]:
    """The shape of a piece: whole rows if it is some, else flat."""
    row = p.shape[1:].numel() if len(p.shape) else 1
    if len(p.shape) and row and first % row == 0 and n % row == 0:
        return (n // row, *p.shape[1:])
    return (n,)


__all__ = ["Sharded"]
