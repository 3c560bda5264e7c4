"""join: ranks with different numbers of inputs.

The daemon takes part for a rank that has no more inputs (JoinUneven). This module decides whose
buffers are the newest.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..errors import FailedPrecondition, Unimplemented
from ..specs import ReduceOp
from ._buffers import Buffers
from ._tree import Tree, tree_of, unit_of


def _newest(tree: Tree, was_last: bool) -> int:
    """The highest rank of those that had most inputs (collective)."""
    member = tree.client.member
    assert member is not None
    with tree.client.alloc((1,)) as best:
        best.memory.write(array("f", [member.rank if was_last else -1]))
        tree.client.all_reduce(best, ReduceOp.MAX, tree.group)
        return int(array("f", best.memory.tobytes())[0])


@contextlib.contextmanager
def _told(tree: Tree) -> Iterator[None]:
    """A rank that is told by its collective answers it, so that the group can go on."""
    try:
        yield
    except FailedPrecondition as error:
        if "error_if_uneven" in error.text:
            with contextlib.suppress(FailedPrecondition):
                tree.client.join_even(tree.group)
        raise


@contextlib.contextmanager
def uneven(module: nn.Module, buffers: Buffers | None, by_all: bool, enable: bool,
           throw: bool) -> Iterator[None]:
    """See ReplicatedModule.join."""
    unit = unit_of(module)
    assert unit is not None
    if not enable:
        yield
        return
    tree: Any = tree_of(unit)
    if getattr(tree.optimizer, "inner", None) is not None:
        raise Unimplemented("join() does not support shardd.torch.Sharded: a rank without inputs "
                            "must step its shares, too; use AdamW, Adam or SGD of shardd.torch")
    if unit.own_hook is not None:
        raise Unimplemented("join() does not support a communication hook of your own: a rank "
                            "without inputs must take part in its collectives, too; use one of "
                            "PyTorch's default_hooks")
    tree.uneven = True
    try:
        with _told(tree) if throw else contextlib.nullcontext():
            yield
        tree.release_all()
        if throw:
            tree.client.join_even(tree.group)
            return
        _, surrogates = tree.client.join_uneven(not by_all, tree.group)
    finally:
        tree.uneven = False
    if buffers is not None and buffers.in_forward:
        buffers.broadcast(tree, _newest(tree, not surrogates))
