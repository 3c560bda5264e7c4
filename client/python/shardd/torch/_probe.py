"""Does an optimizer compute the same on parts of a tensor as on all of it?

Known ones that do not are refused by name. Others make some steps with samples: on whole tensors,
on the same ones cut in two, and on each alone. What they come to is compared.
"""

from __future__ import annotations

import contextlib
import copy
import types
import warnings
from typing import Any, Callable

import torch
from torch import nn

from ..errors import Unimplemented

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# By the name of the class, or of one that it is derived from.
_ALL = frozenset({  # of all tensors at once, or of sparse gradients
    "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "FusedLAMB", "LBFGS",
    "Prodigy", "SparseAdam"})
_TENSORS = frozenset({  # of a tensor: its norm, its rows and columns, its matrix
    "Adafactor", "AdafactorBigVision", "CAME", "DistributedMuon", "DistributedShampoo", "Fromage",
    "FusedLARS", "FusedNovoGrad", "LAMB", "LARS", "Lamb", "Lars", "Muon", "MuonWithAuxAdam",
    "NovoGrad", "NvNovoGrad", "SM3", "SOAP", "Shampoo", "SingleDeviceMuon",
    "SingleDeviceMuonWithAuxAdam"})

_STEPS = 3
_ROWS, _COLUMNS = 8, 6
_SAME = 1e-3  # of the largest change of a tensor


def refuse_known(kind: type, whole: bool) -> None:
    """Unimplemented: @kind is known to need more than a share; with @whole: than a tensor."""
    names = {base.__name__ for base in kind.__mro__}
    if names & _ALL:
        raise Unimplemented(f"{kind.__name__} computes with all tensors of a model at once, or "
                            "with sparse gradients: Sharded steps unit after unit; use another "
                            "optimizer", "inner")
    if names & _TENSORS and not whole:
        raise Unimplemented(_needs_whole(kind, "needs whole tensors, and a rank has a share of "
                                               "each"), "inner")


def _needs_whole(kind: type, why: str) -> str:
    return (f"{kind.__name__} {why}; shardd.torch.Sharded({kind.__name__}, model.parameters(), "
            "whole=True, ...) steps each parameter as a whole, on one rank")


def _sample(number: int) -> list[torch.Tensor]:
    """Two matrices, the halves of which are not of one size. The same in every call."""
    size, made = _ROWS * _COLUMNS, []
    for index in range(2):
        x = torch.sin(torch.arange(1, size + 1, dtype=torch.float64) * (1.7 + number + 5 * index))
        x = x.view(_ROWS, _COLUMNS) * (1 + 3 * index)
        x[_ROWS // 2:] *= 8
        made.append(x)
    return made


def _run(make: Make, group: dict[str, Any],
         cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What the samples have changed by, after some steps on what @cut makes of each."""
    params = [[nn.Parameter(part.clone()) for part in cut(x)] for x in _sample(0)]
    optimizer = make([dict(group, params=[p for parts in params for p in parts])])
    for step in range(_STEPS):
        for parts, gradient in zip(params, _sample(step + 1)):
            for p, part in zip(parts, cut(gradient)):
                p.grad = part.clone()
        optimizer.step()
    return [torch.cat([p.detach().reshape(-1) for p in parts]) - x.reshape(-1)
            for parts, x in zip(params, _sample(0))]


def _whole(x: torch.Tensor) -> list[torch.Tensor]:
    return [x]


def _rows(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:_ROWS // 2], x[_ROWS // 2:]]


def _alone(make: Make, group: dict[str, Any]) -> list[torch.Tensor]:
    """Each sample stepped by an optimizer of its own."""
    found = []
    for index in range(2):
        p = nn.Parameter(_sample(0)[index].clone())
        optimizer = make([dict(group, params=[p])])
        for step in range(_STEPS):
            p.grad = _sample(step + 1)[index].clone()
            optimizer.step()
        found.append((p.detach() - _sample(0)[index]).reshape(-1))
    return found


def _differ(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return any(bool((a - b).abs().max() > _SAME * torch.maximum(a.abs(), b.abs()).max())
               for a, b in zip(some, others))


def _with_a_rate(group: dict[str, Any]) -> dict[str, Any]:
    """A rate of 0, of a schedule that begins there, would show nothing."""
    return dict(group, lr=0.01) if group.get("lr") == 0 else group


def _copied(value: Any) -> Any:
    """A copy of @value. TypeError: it may belong to somebody else."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    if type(value) is torch.Tensor:
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, type,
                                           types.FunctionType)):
        return value
    raise TypeError(type(value).__name__)


def copies(attributes: dict[str, Any]) -> dict[str, Any]:
    """Of @attributes those that can be copied, so that samples change nothing."""
    found = {}
    for name, value in attributes.items():
        with contextlib.suppress(TypeError):
            found[name] = _copied(value)
    return found


def check(kind: type, make: Make, groups: list[dict[str, Any]], whole: bool) -> None:
    """Unimplemented: a step of @kind on parts of a tensor is not that on the tensor; with @whole:
    one on several tensors is not that on each. @groups: settings, with or without params. A
    warning, if the samples cannot be stepped."""
    for given in groups:
        group = _with_a_rate({k: v for k, v in given.items() if k not in ("params", "param_names")})
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            _check_group(kind, make, copy.deepcopy(group), whole)


def _check_group(kind: type, make: Make, group: dict[str, Any], whole: bool) -> None:
    try:
        all_of_it = _run(make, group, _whole)
        alone = _alone(make, group)
    except Exception as error:
        warnings.warn(f"shardd.torch.Sharded cannot find out whether {kind.__name__} computes the "
                      f"same on shares of a tensor as on all of it ({type(error).__name__}: "
                      f"{error}); probe=False says that it does", stacklevel=4)
        return
    if _differ(all_of_it, alone):
        raise Unimplemented(f"{kind.__name__} computes with all tensors at once: a step of two "
                            "samples together is not that of each alone; Sharded steps unit after "
                            "unit. If that is meant (random noise, say), give Sharded probe=False",
                            "inner")
    if whole:
        return
    try:
        differ = _differ(all_of_it, _run(make, group, _rows))
    except Exception as error:
        raise Unimplemented(_needs_whole(kind, f"cannot step a part of a tensor ({error})"),
                            "inner") from None
    if differ:
        raise Unimplemented(_needs_whole(
            kind, "needs whole tensors: a step on a sample is not that on its two halves") +
            ". If the difference is meant, give Sharded probe=False", "inner")


__all__ = ["Make", "check", "copies", "refuse_known"]
