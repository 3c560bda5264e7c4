"""The state of the daemon's optimizers as state dicts: torch.optim's, and those by names.

Every array of a unit's state is summoned, read or written, and given back; so no more than one of
one unit is in memory beside the state dict itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from ..errors import InvalidArgument, Unimplemented
from . import _rows
from ._device import nothing, tensor_at
from ._progress import Bar
from ._tree import Tree
from ._unit import Parameter, ShardedUnit, _swap, of_all_ranks

_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
# What says how PyTorch computes, and not what.
_ELSEWHERE = ("foreach", "fused", "capturable", "differentiable")

State = dict[str, Any]


class InDaemon(Protocol):
    """What this file needs of an optimizer that the daemon runs: those of shardd.torch.optim.
    ``_by_id``: the group of a parameter. ``_like``: torch.optim's own."""

    param_groups: list[dict[str, Any]]
    _by_id: dict[int, dict[str, Any]]
    _like: Any
    _model: Tree

    def keeps_momentum(self, group: dict[str, Any]) -> bool:
        """Has the daemon memory for it?"""

    def check_kept(self, group: dict[str, Any], other: Mapping[str, Any], where: str) -> None:
        """Unimplemented: @other's settings would need memory that @group's parameters have not."""


def _arrays(optimizer: InDaemon, unit: ShardedUnit) -> tuple[str, ...]:
    """The names of the arrays that the unit's state consists of, in the daemon's order."""
    group = optimizer._by_id[id(unit.trained[0].guard)]
    if "momentum" in group:
        return ("momentum_buffer",) if optimizer.keeps_momentum(group) else ()
    return _ADAM if group["amsgrad"] else _ADAM[:2]


def names(optimizer: InDaemon, guard: Any) -> tuple[str, ...]:
    """What the state of a parameter consists of."""
    unit: ShardedUnit = guard._unit
    if not any(p.guard is guard for p in unit.trained):
        return ()
    arrays = _arrays(optimizer, unit)
    return ("step", *arrays) if arrays and arrays[0] in _ADAM else arrays


class _Array:
    """One array, summoned. ``steps``: that each tensor has had, by name. ``write``: it is written
    at the end, and with it ``steps``."""

    def __init__(self, unit: ShardedUnit, flat: torch.Tensor, steps: dict[str, int]) -> None:
        self._unit, self._flat, self.steps, self.write = unit, flat, steps, False

    def of(self, p: Parameter) -> torch.Tensor:
        """What is @p's; not to be kept."""
        assert self._unit.unit is not None
        place = self._unit.unit.places[p.name]
        return self._flat[place.offset:place.offset + place.elements].view(p.shape)


@contextlib.contextmanager
def _summoned(unit: ShardedUnit, number: int) -> Iterator[_Array]:
    """Array @number of the unit's state (collective)."""
    assert unit.unit is not None
    client = unit.unit.client
    address = of_all_ranks(client.submit("summon", unit.unit.id, number,
                                         finish=lambda r: r.data))
    array = _Array(unit, tensor_at(address, unit.unit.elements, torch.float32), unit.unit.steps())
    try:
        yield array
    finally:
        _swap(array._flat.untyped_storage(), nothing())
        options = unit.unit.return_options(
            array.write, *((max(array.steps.values()), array.steps) if array.write else ()))
        client.do("return", unit.unit.id, **options)


def _bar(optimizer: InDaemon, what: str) -> Bar:
    member = optimizer._model.client.member
    total = sum(4 * u.elements * len(_arrays(optimizer, u))
                for u in optimizer._model.units if u.trained)
    return Bar(what, total, member.rank if member else 0)


# ------------------------------------------------------------------------ out of it


def _read_unit(optimizer: InDaemon, unit: ShardedUnit, full: bool, wanted: bool,
               bar: Bar) -> list[State]:
    """By trained parameter: its state, with its steps; nothing unless @wanted here."""
    found: list[State] = [{} for _ in unit.trained]
    for number, name in enumerate(_arrays(optimizer, unit), 1):
        with _summoned(unit, number) as array:
            for p, state in zip(unit.trained, found) if wanted else ():
                if name in _ADAM:
                    state["step"] = torch.tensor(float(array.steps[p.name]))
                state[name] = (array.of(p).clone() if full
                               else _rows.take(unit, p, array.of(p)))
                if not array.steps[p.name]:
                    state["new"] = True
        bar.add(4 * unit.elements, unit.name)
    return found


def read(optimizer: InDaemon, full: bool, with_new: bool, wanted: bool = True,
         zeros: bool = False) -> dict[int, State]:
    """By the id of a parameter its state (collective). @with_new: also if it was never stepped:
    then all is 0. @wanted: else this rank takes part, and gets nothing. @zeros: of whole momentum,
    too, where they say that it is there."""
    tree = optimizer._model
    tree.release_all()
    found = {}
    with _bar(optimizer, "saving the optimizer's state") as bar:
        for unit in tree.units:
            for p, state in zip(unit.trained, _read_unit(optimizer, unit, full, wanted, bar)
                                if unit.trained else ()):
                # zeros say of momentum that it is there
                new = state.pop("new", False)
                if state and (not new or zeros or
                              (with_new and not (full and "step" not in state))):
                    found[id(p.guard)] = state
    return found


def groups(optimizer: InDaemon, name: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The parameter groups with what torch.optim's have beside; @name: of a parameter, by id."""
    also = optimizer._like([torch.zeros(1)]).defaults
    return [{**also, **{k: v for k, v in group.items() if k != "params"},
             "params": [name[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups]


def numbered(optimizer: InDaemon) -> dict[int, int]:
    """The parameters' numbers in torch.optim's state dicts, by id."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return {id(p): number for number, p in enumerate(every)}


def named(optimizer: Any) -> dict[int, str]:
    """Their names in the model, of tied ones the first."""
    return {id(p): _rows.plain(name)
            for name, p in optimizer._model.root.module.named_parameters()}


# ------------------------------------------------------------------------- into it


def matching(optimizer: Any, own: list[list[Any]],
             saved: list[Any]) -> list[tuple[Any, list[Any]]]:
    """For each of the optimizer's @own groups of parameters: (the saved one, its keys in the order
    of the own one's parameters). InvalidArgument: they are of others."""
    if len(own) != len(saved):
        raise InvalidArgument(f"the state has {len(saved)} parameter groups, this optimizer "
                              f"has {len(own)}", "param_groups")
    names = named(optimizer)
    found = []
    for number, parameters in enumerate(own):
        keys = [names[id(p)] for p in parameters]
        like = next((s for s in saved if set(s["params"]) == set(keys)), None)
        if like is None:  # by number
            like = saved[number]
            if any(isinstance(k, str) for k in like["params"]) or \
                    len(like["params"]) != len(keys):
                raise InvalidArgument(
                    f"group {number} of this optimizer has {len(keys)} parameters, as "
                    f"{', '.join(map(repr, keys[:3]))}, and none of the state's has the same",
                    "param_groups")
            keys = list(like["params"])
        found.append((like, keys))
    return found


def _new_settings(optimizer: InDaemon, group: dict[str, Any], saved: Any) -> dict[str, Any]:
    """What of @saved becomes @group's. Unimplemented: it needs memory that the daemon has not."""
    changed = {}
    optimizer.check_kept(group, saved, "in the state")
    for key, value in saved.items():
        if key in ("params", "param_names", *_ELSEWHERE):
            continue
        if key == "decoupled_weight_decay":
            if bool(value) != optimizer._like([torch.zeros(1)]).defaults[key]:
                raise Unimplemented("the state comes from the other one of Adam and AdamW: build "
                                    "that optimizer", key)
        else:
            changed[key] = copy.deepcopy(value)
    return changed


def _steps(unit: ShardedUnit, states: list[Any], arrays: tuple[str, ...]) -> dict[str, int]:
    """How many each trained tensor has had by @states; of momentum: whether it is there."""
    def count(state: Any) -> int:
        if "momentum_buffer" in arrays:
            return int(state.get("momentum_buffer") is not None)
        return int(state["step"]) if state else 0

    return {p.name: count(state) for p, state in zip(unit.trained, states)}


def _check(unit: ShardedUnit, states: list[Any], arrays: tuple[str, ...]) -> None:
    for p, state in zip(unit.trained, states):
        for name in arrays:
            if state and state.get(name) is not None:
                _rows.check(p, state[name], f"{name} of {p.name}")
                _rows.check_own(unit, p, state[name])
            elif state and name in _ADAM:
                raise InvalidArgument(f"the state of '{p.name}' has no {name}: it comes from an "
                                      "optimizer with other settings", name)
        if state and arrays[:1] == _ADAM[:1] and "step" not in state:
            raise InvalidArgument(f"the state of '{p.name}' has no step: it comes from another "
                                  "kind of optimizer", "step")


def _write_unit(unit: ShardedUnit, states: list[Any], arrays: tuple[str, ...],
                steps: dict[str, int], bar: Bar) -> None:
    for number, name in enumerate(arrays, 1):
        with _summoned(unit, number) as array:
            for p, state in zip(unit.trained, states):
                value = state.get(name)
                if value is None:
                    array.of(p).zero_()
                else:
                    _rows.put(unit, p, value, array.of(p))
            array.write, array.steps = True, steps
        bar.add(4 * unit.elements, unit.name)


_Plan = list[tuple[ShardedUnit, list[Any], tuple[str, ...], dict[str, int]]]


def _plan(optimizer: InDaemon, state: Mapping[str, Any]) -> tuple[list[Any], _Plan]:
    """Return (group, its new settings) for each, and what to write. Raises an error if @state does
    not fit."""
    by_id: dict[int, Any] = {}
    settings, plan = [], []
    own = [g["params"] for g in optimizer.param_groups]
    for group, (saved, keys) in zip(optimizer.param_groups,
                                    matching(optimizer, own, state["param_groups"])):
        settings.append((group, _new_settings(optimizer, group, saved)))
        by_id.update((id(p), state["state"].get(key) or {})
                     for p, key in zip(group["params"], keys))
    for unit in optimizer._model.units:
        if unit.trained:
            arrays, states = _arrays(optimizer, unit), [by_id[id(p.guard)] for p in unit.trained]
            _check(unit, states, arrays)
            if arrays:
                plan.append((unit, states, arrays, _steps(unit, states, arrays)))
    return settings, plan


def load(optimizer: InDaemon, state: Mapping[str, Any]) -> None:
    """Everything of @state: by number or by name (collective). All is checked, by all ranks, before
    anything changes."""
    tree = optimizer._model
    tree.release_all()
    with tree.all_or_none("load the optimizer's state"):
        settings, plan = _plan(optimizer, state)
    with _bar(optimizer, "loading the optimizer's state") as bar:
        for unit, states, arrays, steps in plan:
            _write_unit(unit, states, arrays, steps, bar)
    for group, changed in settings:
        group.update(changed)
    tree.knows_optimizer()


__all__ = ["groups", "load", "matching", "named", "names", "numbered", "read"]
