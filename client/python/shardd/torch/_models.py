"""The models of this process that the daemon knows, and the end of those that the program has
dropped.

Python collects a model at another moment on every rank, and freeing its units is collective. So it
is done when the next model of the same ranks is built: the ranks agree on what is gone on all.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from array import array
from dataclasses import dataclass, field
from typing import Any

from ..client import Client
from ..errors import FailedPrecondition
from ..specs import ReduceOp

_Ranks = tuple[int, ...]


@dataclass
class _Model:
    tree: weakref.ref[Any]
    number: int
    group: int
    units: list[int]


@dataclass
class _Known:
    last: int = 0  # number given
    free: dict[_Ranks, list[int]] = field(default_factory=dict)  # numbers of what was dropped
    models: dict[_Ranks, list[_Model]] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[Client, _Known] = weakref.WeakKeyDictionary()


def number(client: Client, ranks: _Ranks) -> int:
    """Of the next model, whose ranks are @ranks. What they have all dropped is freed before
    (collective among them, if they have built a model before)."""
    known = _known.setdefault(client, _Known())
    if known.models.get(ranks):
        _drop_gone(client, known, ranks)
    free = known.free.get(ranks)
    if free:
        return free.pop(0)
    known.last += 1
    return known.last


def add(client: Client, ranks: _Ranks, tree: Any, given: int, group: int,
        units: list[int]) -> None:
    """@tree is the model with the number @given."""
    models = _known[client].models.setdefault(ranks, [])
    models.append(_Model(weakref.ref(tree), given, group, sorted(units)))


def is_alone(client: Client) -> bool:
    """Is there one model only, until now?"""
    return _known[client].last == 1


def _drop_gone(client: Client, known: _Known, ranks: _Ranks) -> None:
    models = known.models[ranks]
    gc.collect()  # modules, units and hooks refer to each other
    with client.alloc((len(models),)) as said:
        said.memory.write(array("f", [model.tree() is None for model in models]))
        client.all_reduce(said, ReduceOp.MIN, models[0].group)
        gone = [bool(flag) for flag in array("f", said.memory.tobytes())]
    for model in [m for m, flag in zip(models, gone) if flag]:
        for unit in model.units:  # a backward that never came
            with contextlib.suppress(FailedPrecondition):
                client.do("release", unit)
        try:
            client.drop_units(model.units)
        except FailedPrecondition:
            continue  # gradients that were added up and not reduced; it is tried again
        models.remove(model)
        known.free.setdefault(ranks, []).append(model.number)


__all__ = ["add", "is_alone", "number"]
