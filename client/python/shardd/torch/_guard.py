"""The stand-in for a parameter while its values are in the daemon.

It is a tensor with shape and dtype but without memory. It can be a module's parameter and be passed
to an optimizer. Computing with it raises an error instead of using stale or freed memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import FailedPrecondition, Unimplemented
from . import _device

_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_CONVERTS = ("aten._to_copy.default", "aten.to.dtype")


def explain(name: str, kind: str, function: str, why: str = "") -> str:
    """Why @function cannot be called on this @kind ("parameter", "gradient"). @why: of a gradient,
    why it cannot be read."""
    if kind == "gradient":
        return (f"the gradient of '{name}' cannot be used here ({function}): "
                f"{why or 'it is in the daemon'}. To clip use shardd.torch.clip_grad_norm_, to "
                "scale shardd.torch.GradScaler")
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
    _why: str  # of a gradient: why it cannot be read
    _local: torch.Tensor | None  # of a gradient: this rank's rows, if only those can be had
    _gradient: Any  # of a parameter: what gives and takes p.grad
    _accumulated: dict[int, Any]  # of a parameter: hooks of its reduced gradient

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
        guard._why, guard._local, guard._gradient = "", None, None
        guard._accumulated = OrderedDict()
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
        raise FailedPrecondition(explain(first._name, first._kind, str(func), first._why))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the values are when they are gathered: inputs belong there."""
        return self._where if self._where is not None else _device.here

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Of CUDA's?"""
        return self.device.type == "cuda"

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """Of a parameter: this rank's rows of the reduced gradient; None: there is none."""
        return self._gradient.get() if self._gradient is not None else None

    @grad.setter
    def grad(self, value: Any) -> None:
        if self._gradient is not None:
            self._gradient.set(value)
        elif value is not None:
            raise FailedPrecondition(
                f"the gradient of '{self._name}' is set before the first backward: the daemon has "
                "a gradient from backward to the step")

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def to_local(self) -> torch.Tensor:
        """Of a gradient that can be no DTensor: this rank's rows. What is written to them is what
        the optimizer uses."""
        if self._local is None:
            raise FailedPrecondition(explain(self._name, self._kind, "to_local", self._why))
        return self._local

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
        """Unimplemented: autograd computes the gradient of the gathered parameter, and FSDP2 never
        calls such a hook."""
        raise Unimplemented(
            f"register_hook of the sharded parameter '{self._name}': autograd never computes the "
            "gradient of a shard, so the hook would not be called; use "
            "register_post_accumulate_grad_hook, which gets the parameter with its reduced "
            "gradient")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """@hook(parameter) is called at the end of every backward that has reduced the parameter's
        gradient, which is then its p.grad. Return: a handle that removes it."""
        handle = RemovableHandle(self._accumulated)
        self._accumulated[handle.id] = hook
        return handle

    def accumulated(self) -> None:
        """The gradient was reduced: call the hooks."""
        for hook in list(self._accumulated.values()):
            hook(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise FailedPrecondition(explain(self._name, self._kind, "copy.deepcopy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FailedPrecondition(explain(self._name, self._kind, "pickle"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<sharded {self._kind} '{self._name}' {list(self.shape)} {self.dtype}>"
