"""The stand-in for a parameter while its values are in the daemon.

It is a tensor with shape and dtype but without memory. It can be a module's parameter and be passed
to an optimizer. Computing with it raises an error instead of using stale or freed memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import FailedPrecondition, Unimplemented
from . import _device

_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_CONVERTS = ("aten._to_copy.default", "aten.to.dtype")


def explain(name: str, kind: str, function: str) -> str:
    """Why @function cannot be called on this @kind ("parameter", "gradient")."""
    if kind == "gradient":
        return (f"the gradient of '{name}' is in the daemon, sharded ({function}): clip with "
                "shardd.torch.clip_grad_norm_, step with an optimizer of shardd.torch (any of "
                "torch.optim: shardd.torch.Sharded), scale with shardd.torch.GradScaler")
    if function in _CONVERTS:
        return (f"parameter '{name}' is sharded: its type and device cannot be changed after "
                "fully_shard; call .to() before it, and use mp_policy for the type in "
                "which forward computes")
    return (f"parameter '{name}' is sharded: its values are in the daemon, and here only during "
            f"forward and backward ({function}); elsewhere use "
            "shardd.torch.summon_full_params(model), or model.state_dict(). If another module uses "
            "it too, wrap a module that contains both")


class Guard(torch.Tensor):
    """See above. ``_is_param``: counts as torch.nn.Parameter."""

    _name: str
    _kind: str
    _unit: Any
    _is_param: bool
    _where: torch.device | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def make(name: str, kind: str, shape: Sequence[int], dtype: torch.dtype,
             requires_grad: bool = False, unit: Any = None,
             where: torch.device | None = None) -> Guard:
        """@unit: the ShardedUnit of a parameter, by which optimizers find it. @where: its device;
        None: that of the session."""
        guard: Guard = torch.Tensor._make_wrapper_subclass(
            Guard, tuple(shape), dtype=dtype, device=torch.device("cpu"),
            requires_grad=requires_grad)
        guard._name, guard._kind, guard._unit, guard._where = name, kind, unit, where
        guard._is_param = kind == "parameter"
        return guard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        every = [*args, *(kwargs or {}).values()]
        every += [x for a in every if isinstance(a, (list, tuple)) for x in a]
        first = max((a for a in every if isinstance(a, Guard)), key=lambda a: a._kind == "gradient")
        if func in _HARMLESS:
            return Guard.make(first._name, first._kind, first.shape, first.dtype,
                              where=first._where)
        raise FailedPrecondition(explain(first._name, first._kind, str(func)))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the values are when they are gathered: inputs belong there."""
        return self._where if self._where is not None else _device.here

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Of CUDA's?"""
        return self.device.type == "cuda"

    @property
    def data(self) -> Any:  # type: ignore[override]
        """As stiff as the guard itself."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        if isinstance(value, Guard):  # a .to() that changes nothing
            return
        raise FailedPrecondition(explain(self._name, self._kind, "data = ..."))

    def register_hook(self, hook: Any) -> Any:
        """Unimplemented: a gradient goes to the daemon as it arrives."""
        raise Unimplemented(
            f"register_hook of the sharded parameter '{self._name}': its gradient goes to the "
            "daemon; for a hook of all gradients see register_comm_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Unimplemented: nothing accumulates here."""
        raise Unimplemented(
            f"register_post_accumulate_grad_hook of the sharded parameter '{self._name}': its "
            "gradient goes to the daemon; an optimizer steps in backward with in_backward=True")

    def __deepcopy__(self, memo: Any) -> Any:
        raise FailedPrecondition(explain(self._name, self._kind, "copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FailedPrecondition(explain(self._name, self._kind, "pickle"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<sharded {self._kind} '{self._name}' {list(self.shape)} {self.dtype}>"
