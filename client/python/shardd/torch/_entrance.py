"""Where autograd leaves a unit: one node for all inputs of its forward.

FSDP2 has such a node, from which it knows that it can reduce. It also decides in which order
gradients are added: those of one input that come from one unit first, then those of the units. So
that an input of several units (what an encoder has computed) gets the same bits, there is one here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


class _Entrance(torch.autograd.Function):
    """What it is given."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: torch.Tensor) -> Any:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> Any:
        return tangents


def _is_object(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, dict))


def _found(value: Any, found: list[torch.Tensor]) -> None:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                found.append(leaf)
        elif _is_object(leaf):
            for field in dataclasses.fields(leaf):
                _found(getattr(leaf, field.name), found)


def _replaced(value: Any, others: Iterator[torch.Tensor]) -> Any:
    """@value, with @others in the places that :func:`_found` finds, in its order."""
    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return next(others) if leaf.requires_grad else leaf
        if not _is_object(leaf):
            return leaf
        made = None
        for field in dataclasses.fields(leaf):
            before = getattr(leaf, field.name)
            after = _replaced(before, others)
            if after is not before:
                made = copy.copy(leaf) if made is None else made
                object.__setattr__(made, field.name, after)
        return leaf if made is None else made

    return pytree.tree_map(one, value)


def through(args: Any, kwargs: Any) -> Any:
    """The arguments of a forward, behind the node; None: none of them wants a gradient."""
    if not torch.is_grad_enabled():
        return None
    found: list[torch.Tensor] = []
    _found((args, kwargs), found)
    return _replaced((args, kwargs), iter(_Entrance.apply(*found))) if found else None


__all__ = ["through"]
