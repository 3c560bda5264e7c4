"""torch.optim's own classes on a wrapped model: ``torch.optim.AdamW(model.parameters())``.

An optimizer that is built with sharded parameters gets another class while it is built: that of
shardd.torch which the daemon runs, if there is one with its settings, else :class:`Sharded`; if it
has some of the model's parameters only, or is not the model's first one, that of _pieces.py; if its
parameters are of several models, that of _parts.py. It is
still an instance of its own class, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..errors import Unimplemented
from . import _base
from ._guard import Guard
from ._parts import OfParts, models
from ._pieces import OnPieces, fits
from ._sharded import Sharded
from .optim import SGD, Adam, AdamW, _root, _Sharded

_TWINS: dict[type, Any] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD}

# What a twin has no settings for: only as they are here it computes the same.
_NEITHER = ("capturable", "differentiable")
_FORM = ("foreach", "fused")  # of all groups


def _groups(given: list[Any]) -> list[dict[str, Any]]:
    """As Optimizer makes them of @given. Iterators in it become lists, as there."""
    if not given or not all(isinstance(group, dict) for group in given):
        return [{"params": given}]
    for group in given:
        if isinstance(group.get("params"), Iterator):
            group["params"] = list(group["params"])
    return [dict(g) for g in given]


def _guards(groups: list[dict[str, Any]]) -> list[Guard]:
    found = []
    for group in groups:
        given = group.get("params", ())
        for p in [given] if isinstance(given, torch.Tensor) else given:
            value = p[1] if isinstance(p, tuple) else p  # of named_parameters()
            if isinstance(value, Guard) and value._kind == "parameter":
                found.append(value)
    return found


def _flat(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": _guards([group])} for group in groups]


def _settings(kind: type, groups: list[dict[str, Any]],
              defaults: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of the twin of @kind; None: it has none that computes the same."""
    if kind not in _TWINS or any(name in g for g in groups for name in (*_NEITHER, *_FORM)):
        return None
    decoupled = defaults.get("decoupled_weight_decay", False)
    if any(defaults.get(name) for name in _NEITHER) or decoupled != (kind is torch.optim.AdamW):
        return None
    return {name: value for name, value in defaults.items()
            if name not in (*_NEITHER, "decoupled_weight_decay")}


def _class(kind: type, ours: type) -> type:
    """One that is both, and says that it is @kind."""
    return type(kind.__name__, (ours, kind), {"__module__": ours.__module__})


def _adopt(optimizer: Any, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    kind = type(optimizer)
    if len(models(groups)) > 1 and kind.__module__.startswith("torch.optim."):
        optimizer.__class__ = _class(kind, OfParts)
        _original(optimizer, groups, defaults)
        OfParts.adopt(optimizer, groups, functools.partial(_part, kind, defaults))
        return
    settings = _settings(kind, groups, defaults)
    if fits(_flat(groups)):
        optimizer.__class__ = _class(kind, OnPieces)
        OnPieces.adopt(optimizer, kind, groups, functools.partial(_inner, kind, defaults))
        return
    late = any(_root(p._unit).tree is not None for p in _guards(groups))
    if settings is not None and not late:
        optimizer.__class__ = _class(kind, _TWINS[kind])
        try:
            _TWINS[kind].__init__(optimizer, groups, **settings)
            return
        except Unimplemented:  # nothing has been registered yet
            optimizer.__class__ = kind
            vars(optimizer).pop("_state", None)
    optimizer.__class__ = _class(kind, Sharded)
    Sharded.adopt(optimizer, kind, groups, functools.partial(_inner, kind, defaults))


def _part(kind: Any, defaults: dict[str, Any], groups: list[dict[str, Any]]) -> Any:
    """An optimizer of @kind of @groups, which are of one model, or of none."""
    made = kind.__new__(kind)
    _init(made, groups, dict(defaults))
    return made


def _inner(kind: type, defaults: dict[str, Any], outer: Any,
           shards: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of @kind of @shards. The attributes that @kind's __init__ gives @outer stay
    there; it reads and changes them."""
    seen = weakref.ref(outer)

    def attribute(_: Any, name: str) -> Any:
        found = seen()
        if found is None or name not in found.__dict__:
            raise AttributeError(name)
        return found.__dict__[name]

    def set_attribute(self: Any, name: str, value: Any) -> None:
        found = seen()
        if name not in self.__dict__ and found is not None and name in found.__dict__:
            found.__dict__[name] = value
        else:
            object.__setattr__(self, name, value)

    made: Any = type(kind.__name__, (kind,), {"__getattr__": attribute,
                                              "__setattr__": set_attribute})
    inner = made.__new__(made)
    for name in vars(torch.optim.Optimizer([torch.zeros(1)], {})):
        object.__setattr__(inner, name, None)  # its own, not @outer's
    _original(inner, shards, defaults)
    return inner  # type: ignore[no-any-return]


_original = torch.optim.Optimizer.__init__


def _held_by_optimizers(params: Iterable[Any]) -> list[Any]:
    """@params, with a model's sharded parameters in the place of those that it computes with while
    they are gathered, and without those that look at a base, which nothing steps."""
    def held(p: Any) -> Any:
        if isinstance(p, tuple):  # of named_parameters()
            return (p[0], held(p[1]))
        return getattr(p, "_shardd_guard", p)

    def bound(p: Any) -> bool:
        value = p[1] if isinstance(p, tuple) else p
        return isinstance(value, torch.Tensor) and _base.is_bound(value)

    found = []
    for one in params:
        if bound(one):
            continue
        if isinstance(one, dict) and "params" in one:
            if isinstance(one["params"], Iterator):
                one["params"] = list(one["params"])
            given = [one["params"]] if isinstance(one["params"], torch.Tensor) else one["params"]
            now = [held(p) for p in given if not bound(p)]
            if len(now) < len(given) or any(a is not b for a, b in zip(now, given)):
                one = dict(one, params=now)
        found.append(held(one))
    return found


@functools.wraps(_original)
def _init(self: torch.optim.Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
    if isinstance(params, torch.Tensor):
        _original(self, params, defaults)
        return
    if isinstance(self, _Sharded):
        _original(self, _held_by_optimizers(params), defaults)
        return
    params = _held_by_optimizers(params)
    groups = _groups(params)
    if _guards(groups):
        _adopt(self, groups, defaults)
    else:
        _original(self, params, defaults)


torch.optim.Optimizer.__init__ = _init  # type: ignore[method-assign]
