"""FSDP2's functions of modules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import InvalidArgument
from . import _replicate, _wrap
from ._replicate import ReplicatedModule
from ._wrap import ShardedModule


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make @method_name of a wrapped module a second forward: inside it the parameters are
    available, and backward works. Does nothing for a module that is not wrapped. InvalidArgument:
    there is no such method."""
    if not isinstance(module, ShardedModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise InvalidArgument(f"{type(module).__name__} has no method '{method_name}'",
                              "method_name")
    unit = module._unit()
    hooks: Any = _replicate if isinstance(module, ReplicatedModule) else _wrap

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = changed = None
        unit.within += 1
        try:
            given = hooks._pre_forward(module, args, kwargs)
            args, kwargs = (args, kwargs) if given is None else given
            output = method(*args, **kwargs)
        finally:  # as the hook that is always called
            unit.within -= 1
            changed = hooks._post_forward(module, args, output)
        return output if changed is None else changed

    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Does nothing: there are no streams. InvalidArgument: a module is not wrapped."""
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise InvalidArgument(f"{type(module).__name__} is not wrapped: call fully_shard on it "
                                  "first", "modules")
