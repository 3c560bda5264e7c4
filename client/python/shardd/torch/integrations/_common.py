"""What the frameworks have in common: wrapping a model, moving an optimizer to its sharded
parameters, gradients' norm, and state dicts for one file that rank 0 writes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Union

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import InvalidArgument
from .._session import rank_if_any
from .._state import state_dict
from .._tree import unit_of, units_of
from .._wrap import fully_shard
from ..optim import optimizer_state_dict

Options = Union[Mapping[str, Any], Callable[[nn.Module], Any], None]


def is_sharded(model: nn.Module) -> bool:
    """Has fully_shard or replicate been called on @model, or on a module inside it?"""
    return unit_of(model) is not None or bool(units_of(model))


def _blocks(model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """The layers that a model of transformers names as not to be split. None: it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return (lambda module: type(module).__name__ in names) if names else None


def shard(model: nn.Module, options: Options, **defaults: Any) -> WeakIdKeyDictionary:
    """Call fully_shard on @model. @options: its arguments, which replace @defaults; or a function
    that gets the model and wraps it itself. Without a policy in @options the layers of a model of
    transformers are units.

    Return: the sharded parameter of each parameter that the model had.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    if callable(options):
        options(model)
        if unit_of(model) is None:
            raise InvalidArgument("the function given as fully_shard has not wrapped the model: "
                                  "call shardd.torch.fully_shard(model) in it, last",
                                  "fully_shard")
    else:
        fully_shard(model, **{"policy": _blocks(model), **defaults, **(options or {})})
    after = dict(model.named_parameters(remove_duplicate=False))
    replaced = WeakIdKeyDictionary()
    for name, parameter in before.items():
        if after.get(name, parameter) is not parameter:
            replaced[parameter] = after[name]
    return replaced


# -------------------------------------------------------------------- an optimizer


def rebind(optimizer: torch.optim.Optimizer, replaced: Mapping[Any, Any]) -> None:
    """Make @optimizer, which was built before its model was wrapped, one of the sharded parameters.
    It stays the same object, with its settings, its hooks and its schedulers, and keeps its state,
    of which each rank takes its own rows (collective).
    """
    if not any(p in replaced for group in optimizer.param_groups for p in group["params"]):
        return
    state = optimizer.state_dict() if optimizer.state else None
    groups = [_group(group, optimizer.defaults, replaced) for group in optimizer.param_groups]
    hooks = {name: hook for name, hook in optimizer.__dict__.items()
             if name.startswith("_optimizer_")}
    followed = hasattr(optimizer.__dict__.pop("step", None), "_wrapped_by_lr_sched")
    torch.optim.Optimizer.__init__(optimizer, groups, optimizer.defaults)  # see _adopt.py
    if state is not None:
        optimizer.load_state_dict(state)
    optimizer.__dict__.update(hooks)
    if followed:
        _follow(optimizer)


def _group(group: Mapping[str, Any], defaults: Mapping[str, Any],
           replaced: Mapping[Any, Any]) -> dict[str, Any]:
    """@group as it was given: with what differs from @defaults."""
    params = [replaced.get(p, p) for p in group["params"]]
    if "param_names" in group:
        params = list(zip(group["param_names"], params))
    own = {name: value for name, value in group.items()
           if name not in ("params", "param_names")
           and not (name in defaults and _same(value, defaults[name]))}
    return {**own, "params": params}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    return bool(a == b)


def _follow(optimizer: Any) -> None:
    """As a scheduler does when it is built: it is told of every step, to warn of a wrong order."""
    seen, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        optimizer = seen()
        assert optimizer is not None
        optimizer._opt_called = True
        return step(optimizer, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper


# ----------------------------------------------------------------------- gradients


def whole(norm: Any) -> Any:
    """A norm of gradients of several ranks, as a plain tensor (collective, if it is not one)."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


# --------------------------------------------------------------------- state dicts


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a plain model on rank 0, nothing on the others (collective)."""
    return state_dict(model, full=True, rank0_only=True)


def optimizer_state(optimizer: Any) -> dict[str, Any]:
    """The state dict of torch.optim's for a plain model on rank 0, nothing on the others
    (collective)."""
    named = optimizer_state_dict(optimizer, full=True, rank0_only=True)
    if rank_if_any():
        return {}
    numbers: dict[str, int] = {}
    for group in named["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    return {"state": {numbers[name]: state for name, state in named["state"].items()},
            "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]}
                             for group in named["param_groups"]]}


def sharded_roots(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost wrapped modules."""
    if unit_of(module) is not None:
        yield module
        return
    for child in module.children():
        yield from sharded_roots(child)


__all__ = ["Options", "is_sharded", "model_state", "optimizer_state", "rebind", "shard",
           "sharded_roots", "whole"]
