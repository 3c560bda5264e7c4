"""Parameters as tensors: state_dict, load_state_dict, summon_full_params."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import FailedPrecondition, InvalidArgument
from . import _device, _rows
from ._meta import from_meta
from ._progress import Bar
from ._session import rank_if_any, session
from ._tree import built, units_of
from ._unit import Parameter, ShardedUnit

_sharded: contextvars.ContextVar[bool] = contextvars.ContextVar("sharded", default=False)
_unwanted: contextvars.ContextVar[bool] = contextvars.ContextVar("unwanted", default=False)
_running: tuple[nn.Module, Bar] | None = None  # the outermost module that is saved or loaded


def _names(unit: ShardedUnit, p: Parameter, prefix: str) -> Iterator[str]:
    """All names that a parameter may have in a state dict of the unit's module."""
    paths = {id(m): path for path, m in unit.module.named_modules()}
    for module, attribute in p.owners:
        path = paths[id(module)]
        name = prefix + (f"{path}." if path else "") + attribute
        yield name
        if _rows.plain(name) != name:
            yield _rows.plain(name)


@contextlib.contextmanager
def _summoned(unit: ShardedUnit, write: bool, given: Container[str] = ()) -> Iterator[None]:
    """The module has fp32 parameters that may be written to (collective once registered). @given:
    names, from the module on, of what will be written."""
    if unit.unit is None:
        if write and any(p.initial is not None and p.initial.is_meta for p in unit.params):
            session()  # whose device they come to be on
            with _device.same_random():
                from_meta(unit, _running[0] if _running else unit.module, given)  # else nowhere
        unit.end_early()
        for p in unit.params:
            assert p.initial is not None
            p.install(p.initial)
        try:
            yield
        finally:
            for p in unit.params:
                p.install(p.guard)
        return
    tree = built(unit)
    if tree is not None:
        tree.settle()
    if tree is not None and tree.backward:
        raise FailedPrecondition(f"unit '{unit.name}' is in backward: whole parameters are "
                                 "available between steps")
    unit.summon()
    try:
        yield
    finally:
        unit.give_back(write)


@contextlib.contextmanager
def summon_full_params(module: nn.Module, writeback: bool = True) -> Iterator[None]:
    """Inside, the parameters of all units in @module are whole, in the type in which they are
    stored, and may be changed
    (collective).

    @writeback: each rank's own shard of what it wrote becomes the parameters. A parameter
    that is kept from inside must not be used afterwards. Needs memory for all of them.
    """
    with contextlib.ExitStack() as stack:
        for unit in units_of(module):
            if unit.params:
                stack.enter_context(_summoned(unit, writeback))
        yield


def _begin(module: nn.Module, what: str) -> bool:
    """A bar, unless one runs for a module around this one. Return: there is none around it."""
    global _running
    if _running is not None:
        if any(m is module for m in _running[0].modules()) and _running[0] is not module:
            return False
        _running[1].close()  # of one that an exception ended
    total = sum(u.stored.itemsize * u.elements for u in units_of(module))
    _running = module, Bar(what, total, rank_if_any())
    return True


def _advance(unit: ShardedUnit) -> None:
    if _running is not None:
        _running[1].add(unit.stored.itemsize * unit.elements, unit.name)


def _end(module: nn.Module) -> None:
    global _running
    if _running is not None and _running[0] is module:
        _running[1].close()
        _running = None


def _before_save(module: nn.Module, *_: Any) -> None:
    _begin(module, "saving")


def _save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """After the module's state dict was made: copies in the place of guards (collective)."""
    for unit in own_units(module):
        if unit.params:
            _save_unit(unit, state, prefix)
            _advance(unit)
    _end(module)


def _installed(p: Parameter) -> torch.Tensor:
    owner, attribute = p.owners[0]
    value = owner._parameters[attribute]
    assert value is not None
    return value


def _save_unit(unit: ShardedUnit, state: dict[str, Any], prefix: str) -> None:
    if _sharded.get() and unit.unit is None:
        raise FailedPrecondition("the model is not sharded yet: build the optimizer first, or "
                                 "give full=True")
    rows = _sharded.get() or (unit.unit is not None and _rows.rows_for_pytorch())
    with _summoned(unit, False):
        for p in unit.params:
            value = _installed(p)
            if _unwanted.get():
                continue
            copy = _rows.take(unit, p, value) if rows else value.detach().clone()
            for name in _names(unit, p, prefix):
                if name in state:
                    state[name] = copy


class _Given(set[str]):
    """Names of a state dict, by which a parameter's own name finds them."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(_rows.plain(str(name)))


def _before_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        _check_types(module, state, prefix)
    if _begin(module, "loading"):
        _check(module, state, prefix)
    given = _Given(name[len(prefix):] for name in state if name.startswith(prefix))
    with contextlib.ExitStack() as loading:
        for unit in own_units(module):
            if unit.params:
                loading.enter_context(_summoned(unit, True, given))
                _whole(unit, state, prefix)
                loading.callback(_take_assigned, unit, [_installed(p) for p in unit.params])
        object.__setattr__(module, "_shardd_loading", loading.pop_all())


def _check_types(module: nn.Module, state: Any, prefix: str) -> None:
    """InvalidArgument: with assign=True a parameter would get another type."""
    for unit in own_units(module):
        for p in unit.params:
            for name in _names(unit, p, prefix):
                if name in state and state[name].dtype != unit.stored:
                    raise InvalidArgument(
                        f"load_state_dict(assign=True): '{name}' is {state[name].dtype}, and the "
                        f"parameter is stored in {unit.stored}: convert it, or leave out assign",
                        "assign")


def _take_assigned(unit: ShardedUnit, before: list[torch.Tensor]) -> None:
    """What assign=True has put in the place of parameters is copied into them. @before: those of
    the unit."""
    with torch.no_grad():
        for p, own in zip(unit.params, before):
            for owner, attribute in p.owners:
                value = owner._parameters[attribute]
                if value is not None and value is not own:
                    own.copy_(value)


def _check(module: nn.Module, state: Any, prefix: str) -> None:
    """What is sharded in @state, of all units in @module, before any of it is loaded (collective
    once registered)."""
    paths = {id(m): path + "." if path else "" for path, m in module.named_modules()}
    units = units_of(module)
    tree = next((built(u) for u in units if u.tree is not None), None)
    with tree.all_or_none("load the parameters") if tree else contextlib.nullcontext():
        for unit in units:
            for p in unit.params:
                for name in _names(unit, p, prefix + paths[id(unit.module)]):
                    if name in state and _rows.is_sharded(state[name]):
                        _rows.check(p, state[name], name)
                        _rows.check_own(unit, p, state[name])


def _whole(unit: ShardedUnit, state: Any, prefix: str) -> None:
    """What is sharded in @state becomes tensors that PyTorch's own loading can copy: those of the
    unit, in which this rank's rows are what @state has."""
    for p in unit.params:
        for name in _names(unit, p, prefix):
            if name in state and _rows.is_sharded(state[name]):
                whole = _installed(p).detach()
                _rows.put(unit, p, state[name], whole)
                state[name] = whole


def _after_load(module: nn.Module, _: Any) -> None:
    loading: contextlib.ExitStack | None = module.__dict__.pop("_shardd_loading", None)
    if loading is not None:
        loading.close()
    for unit in own_units(module):
        tree = built(unit)
        if tree is not None and unit.params:
            tree.loads(unit)
        if unit.params:
            _advance(unit)
    _end(module)


def own_units(module: nn.Module) -> list[ShardedUnit]:
    """Those of the module itself."""
    units: list[ShardedUnit] = getattr(module, "_shardd_units", [])
    return units


def add_hooks(module: nn.Module) -> None:
    """For a module that was wrapped."""
    module.register_state_dict_pre_hook(_before_save)
    module._register_state_dict_hook(_save)
    hooks: Any = module._state_dict_hooks  # before a checkpoint wrapper's own, which renames
    hooks.move_to_end(next(reversed(hooks)), last=False)
    module.register_load_state_dict_pre_hook(_before_load)
    module.register_load_state_dict_post_hook(_after_load)


def state_dict(module: nn.Module, *, full: bool = True,
               rank0_only: bool = False) -> dict[str, Any]:
    """``module.state_dict()`` (collective). @full: whole tensors, as of a plain model. Else each
    rank's rows of the parameters: as FSDP2's state dict DTensors, for
    torch.distributed.checkpoint, or :class:`Rows` if torch.distributed is not initialised;
    of a replicated model whole tensors. Either costs the memory of one unit beside the result.
    @rank0_only: with @full: nothing on the other ranks, which only take part."""
    tokens = _sharded.set(not full), _unwanted.set(full and rank0_only and rank_if_any() != 0)
    try:
        state = module.state_dict()
        return {} if _unwanted.get() else state
    finally:
        _sharded.reset(tokens[0])
        _unwanted.reset(tokens[1])


def load_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict(state, strict)`` (collective): values of a plain model, of any state
    dict of FSDP2, or of :func:`state_dict`. Whole tensors: each rank's rows of its own count, so
    give the same on all ranks."""
    return module.load_state_dict(state, strict)


__all__ = ["add_hooks", "load_state_dict", "own_units", "state_dict", "summon_full_params"]
