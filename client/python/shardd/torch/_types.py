"""The types of a unit's parameters: the one in which they are built, and the one in which the
daemon stores them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import InvalidArgument, Unimplemented
from ..memory import Dtype

DTYPES = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}
# with what only published tensors have: torch.from_dlpack(memory).view(TORCH_DTYPES[memory.dtype])
TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in DTYPES.items()} | {
    Dtype.E4M3: torch.float8_e4m3fn}
_Parameters = list[tuple[nn.Module, str, str]]


def dtype_of(dtype: torch.dtype, what: str) -> Dtype:
    """The daemon's name of a type. InvalidArgument: it does not know it."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"{what} is {dtype}, must be float32, bfloat16 or float16", what)
    return DTYPES[dtype]


def name_of(dtype: torch.dtype) -> str:
    """Without the module's."""
    return str(dtype).rpartition(".")[2]


def master_of(given: Any) -> torch.dtype | None:
    """The type that @given means as the argument ``master``. InvalidArgument: it means none."""
    if given in (None, torch.float32):
        return given  # type: ignore[no-any-return]
    if given in ("fp32", "float32"):
        return torch.float32
    raise InvalidArgument(f"master is {given!r}, must be 'fp32' or None", "master")


def is_kept(value: torch.Tensor) -> bool:
    """Is it frozen and of a type that the daemon does not know (integers, fp8)? Then the module
    keeps it, whole on each rank."""
    return not value.requires_grad and value.dtype not in DTYPES


def _by_dtype(parameters: _Parameters, trained: bool) -> dict[torch.dtype, _Parameters]:
    found: dict[torch.dtype, _Parameters] = {}
    for one in parameters:
        value = one[0]._parameters[one[1]]
        assert value is not None
        if value.dtype not in DTYPES:
            raise InvalidArgument(f"parameter '{one[2]}' is {value.dtype}, must be float32, "
                                  "bfloat16 or float16", one[2])
        if value.requires_grad or not trained:
            found.setdefault(value.dtype, []).append(one)
    return found


def split(module: nn.Module, parameters: _Parameters) -> list[_Parameters]:
    """By type, and first the type of what is trained, which is one as in FSDP2. InvalidArgument:
    several, or one that the daemon does not know."""
    every, trained = _by_dtype(parameters, False), _by_dtype(parameters, True)
    if len(trained) > 1:
        said = " and ".join(f"{dtype} ('{found[0][2]}')" for dtype, found in trained.items())
        raise InvalidArgument(
            f"the trained parameters of one unit have several types, {said}: call fully_shard on "
            f"the modules inside this {type(module).__name__} that have them, or convert them to "
            "one type")
    first = next(iter(trained or every), None)
    return [found for _, found in sorted(every.items(), key=lambda e: e[0] != first)] or [[]]


def of_parameters(parameters: _Parameters) -> torch.dtype:
    """Their type, which is one (float32 if there are none)."""
    [dtype] = _by_dtype(parameters, False) or [torch.float32]
    return dtype


def check_daemon_steps(unit: Any, name: str) -> None:
    """Unimplemented: the optimizer @name, which the daemon runs, cannot step @unit."""
    if unit.stored != torch.float32 and unit.trained:
        kind = name_of(unit.stored)
        raise Unimplemented(
            f"parameter '{unit.trained[0].name}' is stored in {kind}, and shardd.torch.{name} runs "
            f"in the daemon, which steps float32: call fully_shard(..., master='fp32') to keep "
            f"float32 parameters behind a {kind} model (better: small steps are not rounded away), "
            f"or use torch.optim.{name}, which steps them in {kind} as with FSDP2")


__all__ = ["DTYPES", "TORCH_DTYPES", "check_daemon_steps", "dtype_of", "is_kept", "master_of",
           "name_of", "of_parameters", "split"]
