"""Weight gradients that are computed where they belong: in the daemon's gradient buffer.

Autograd makes a tensor of its own for every gradient, which is then copied. For ``nn.Linear`` and
``nn.Embedding``, whose weights are nearly all of a model, backward is written out here, with the
operations that PyTorch's own has, so that the bits are the same; but what is the weight's gradient
is written into the buffer. AccumulateGrad takes that tensor over as it is, since nobody else
holds it, and the unit sees by its address that there is nothing to copy. Where the buffer holds
something already (a second use, gradients added up under no_sync) the gradient is a tensor as
ever, and autograd adds in the order in which it always adds.
"""

from __future__ import annotations

import types
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from . import _device

# False: all gradients are copied (tests/bench/direct_gradients.py compares).
enabled = True

# Of PyTorch's own tensors in memory, in bytes. The last bit of a product of small matrices depends
# on where the result is.
ALIGNMENT = 64

_PLACE = "_shardd_place"  # of a full parameter: its unit, and its index among the trained


class Gradients(Protocol):
    """Where gradients go: a unit."""

    def direct_gradient(self, index: int, accumulator: Any) -> torch.Tensor | None:
        """The place in the daemon's buffer for the gradient of trained parameter @index; None:
        none now. @accumulator: autograd's node that gets it."""


def attach(module: nn.Module, attribute: str, full: torch.Tensor, unit: Gradients,
           index: int) -> None:
    """@full is the weight of @module alone: if it is of a kind that is known here its gradient
    shall go to @unit's buffer."""
    ours = _forward_of(module) if attribute == "weight" else None
    own = module.__dict__.get("forward")
    if ours is not None and (own is None or getattr(own, "__func__", None) is ours):
        setattr(full, _PLACE, (unit, index))
        module.forward = types.MethodType(ours, module)  # type: ignore[method-assign]


def _forward_of(module: nn.Module) -> Any:
    """What replaces its forward, which must be PyTorch's own. None: nothing does."""
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return _linear
    if isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        plain = module.padding_idx is None and module.max_norm is None
        return _embedding if plain and not (module.sparse or module.scale_grad_by_freq) else None
    return None


def _place(weight: torch.Tensor) -> Any:
    """Where its gradient is to go, if this use of it is one that we know. None: as ever."""
    place = getattr(weight, _PLACE, None)
    if (place is None or not enabled or not torch.is_grad_enabled()
            or torch.is_autocast_enabled(_device.here.type)
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0):
        return None
    return place


def arrives(accumulator: Any) -> bool:
    """Will @accumulator, a parameter's AccumulateGrad, be run by the backward that runs now?"""
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # torch.autograd.grad of the parameter: the caller gets it
        return False


# ------------------------------------------------------------------------ forward


def _linear(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return F.linear(input, self.weight, self.bias)
    weight, place = self.weight, _place(self.weight)
    if (place is None or type(input) not in (torch.Tensor, nn.Parameter) or input.dim() < 2
            or input.dtype != weight.dtype or input.shape[-1] != weight.shape[1]
            or not input.numel() or not (input.dim() == 2 or input.is_contiguous())):
        return F.linear(input, weight, self.bias)
    rows = input if input.dim() == 2 else input.reshape(-1, weight.shape[1])
    out: torch.Tensor = _Linear.apply(rows, weight, self.bias, place)
    return out if input.dim() == 2 else out.view(*input.shape[:-1], weight.shape[0])


def _embedding(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return F.embedding(input, self.weight)
    place = _place(self.weight)
    if (place is None or type(input) is not torch.Tensor or not input.numel()
            # Others are added up in fp32; a GPU adds in no order here.
            or self.weight.dtype != torch.float32 or self.weight.is_cuda):
        return F.embedding(input, self.weight)
    out: torch.Tensor = _Embedding.apply(input, self.weight, place)
    return out


# ----------------------------------------------------------------------- backward


def _buffer(ctx: Any, edge: int) -> torch.Tensor | None:
    """Where the weight's gradient can be written to, in backward. @edge: which input it is."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled(_device.here.type):
        return None  # backward will be differentiated, or computes in another type
    unit, index = ctx.place
    return unit.direct_gradient(index, ctx.next_functions[edge][0])  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """addmm, or mm without a bias, of rows; their derivatives as PyTorch has them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor,  # type: ignore[override]
                bias: torch.Tensor | None, place: Any) -> torch.Tensor:
        ctx.place = place
        ctx.save_for_backward(rows, weight)
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            # Of what is stored by columns the gradient is, too.
            by_columns = rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]
            of_rows = weight.t().mm(gradient.t()).t() if by_columns else gradient.mm(weight)
        if ctx.needs_input_grad[1]:
            place = _buffer(ctx, 1)
            of_weight = (gradient.t().mm(rows) if place is None
                         else torch.mm(gradient.t(), rows, out=place))
        # Autograd adds its rows up, as it does behind addmm.
        return of_rows, of_weight, gradient if ctx.needs_input_grad[2] else None, None


class _Embedding(torch.autograd.Function):
    """A lookup; backward adds row after row, as PyTorch's does."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor,  # type: ignore[override]
                weight: torch.Tensor, place: Any) -> torch.Tensor:
        ctx.place, ctx.rows = place, weight.shape[0]
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (indices,) = ctx.saved_tensors
        place = _buffer(ctx, 1)
        if place is None:
            of_weight = torch.ops.aten.embedding_dense_backward(gradient, indices, ctx.rows, -1,
                                                                False)
        else:
            of_weight = place.zero_().index_add_(0, indices.reshape(-1),
                                                 gradient.reshape(-1, gradient.shape[-1]))
        return None, of_weight, None
