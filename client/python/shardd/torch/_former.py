"""Parameters of before replicate(). DistributedDataParallel keeps the objects that the model has;
here others take their place. A program that has kept them (in a list that it clips, freezes or
averages) would go on with values that nobody trains, so using them is an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import FailedPrecondition

_ABOUT = ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_meta", "is_sparse",
          "is_quantized", "requires_grad", "nbytes", "itemsize")
_ALLOWED = {getattr(torch.Tensor, name).__get__ for name in _ABOUT} | {
    torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.stride,
    torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.__len__}


class Former(nn.Parameter):
    """What a parameter becomes when the daemon has its values."""

    _shardd_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [a for one in args for a in (one if isinstance(one, (list, tuple)) else [one])
                 if isinstance(a, Former)]
        name = f" '{found[0]._shardd_name}'" if found else ""
        raise FailedPrecondition(
            f"parameter{name} is of before replicate(), which has put another one in its place: "
            "this one is no longer trained; take it from the model again "
            "(model.parameters()), after wrapping")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"parameter '{self._shardd_name}' of before replicate()"


def retire(value: nn.Parameter, name: str) -> None:
    """The daemon has what @value had."""
    if type(value) is nn.Parameter:
        value.__class__ = Former
        value._shardd_name = name  # type: ignore[attr-defined]


__all__ = ["Former", "retire"]
