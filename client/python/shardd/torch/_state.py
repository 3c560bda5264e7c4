"""Whole parameters: state_dict, load_state_dict, summon_full_params."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import FailedPrecondition
from ._tree import units_of
from ._unit import Parameter, ShardedUnit


def _names(unit: ShardedUnit, p: Parameter, prefix: str) -> Iterator[str]:
    """All names of a parameter in a state dict of the unit's module."""
    paths = {id(m): path for path, m in unit.module.named_modules()}
    for module, attribute in p.owners:
        path = paths[id(module)]
        yield prefix + (f"{path}." if path else "") + attribute


@contextlib.contextmanager
def _summoned(unit: ShardedUnit, write: bool) -> Iterator[None]:
    """The module has fp32 parameters that may be written to (collective once registered)."""
    if unit.unit is None:
        for p in unit.params:
            assert p.initial is not None
            p.install(p.initial)
        try:
            yield
        finally:
            for p in unit.params:
                p.install(p.guard)
        return
    if unit.tree is not None:
        unit.tree.settle()
    if unit.tree is not None and unit.tree.backward:
        raise FailedPrecondition(f"unit '{unit.name}' is in backward: whole parameters are to be "
                                 "had between steps")
    unit.summon()
    try:
        yield
    finally:
        unit.give_back(write)


@contextlib.contextmanager
def summon_full_params(module: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Inside, the parameters of all units in @module are whole, in float32, and may be changed
    (collective).

    @writeback: each rank's own shard of what it wrote becomes the parameters. Whoever keeps a
    parameter from inside must not touch it afterwards. Costs the memory of all of them.
    """
    with contextlib.ExitStack() as stack:
        for unit in units_of(module):
            if unit.params:
                stack.enter_context(_summoned(unit, writeback))
        yield


def _save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """After the module's state dict was made: copies in the place of guards (collective)."""
    for unit in own_units(module):
        if unit.params:
            _save_unit(unit, state, prefix)


def _save_unit(unit: ShardedUnit, state: dict[str, Any], prefix: str) -> None:
    with _summoned(unit, False):
        for p in unit.params:
            owner, attribute = p.owners[0]
            value = owner._parameters[attribute]
            assert value is not None
            copy = value.detach().clone()
            for name in _names(unit, p, prefix):
                if name in state:
                    state[name] = copy


def _before_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise FailedPrecondition("load_state_dict(assign=True) replaces parameters: leave it out")
    loading = contextlib.ExitStack()
    for unit in own_units(module):
        if unit.params:
            loading.enter_context(_summoned(unit, True))
    object.__setattr__(module, "_shardd_loading", loading)


def _after_load(module: nn.Module, _: Any) -> None:
    loading: contextlib.ExitStack | None = module.__dict__.pop("_shardd_loading", None)
    if loading is not None:
        loading.close()


def own_units(module: nn.Module) -> list[ShardedUnit]:
    """Those of the module itself."""
    units: list[ShardedUnit] = getattr(module, "_shardd_units", [])
    return units


def add_hooks(module: nn.Module) -> None:
    """For a module that was wrapped."""
    module._register_state_dict_hook(_save)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)


__all__ = ["add_hooks", "own_units", "summon_full_params"]
