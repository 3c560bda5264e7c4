"""Compute with the live parameters of a job in a process that is not a rank of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import InvalidArgument, NotFound
from ..reader import Reader, ReadTensor
from ._names import path_of
from ._types import TORCH_DTYPES

_Owners = dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str, str]]]]


def _parameters(module: nn.Module) -> _Owners:
    """Each parameter with (module, attribute, name) of all that have it."""
    found: _Owners = {}
    for prefix, owner in module.named_modules():
        for attribute, value in owner._parameters.items():
            if value is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(value), (value, []))[1].append((owner, attribute, name))
    return found


def _check(name: str, parameter: nn.Parameter, t: ReadTensor) -> None:
    if tuple(parameter.shape) != t.shape:
        raise InvalidArgument(f"'{name}' has shape {list(parameter.shape)} in the module but "
                              f"{list(t.shape)} in the job: build the model as its trainers do",
                              "module")
    if parameter.dtype != TORCH_DTYPES[t.dtype] or parameter.device.type not in ("cpu", "meta"):
        raise InvalidArgument(f"'{name}' is {parameter.dtype} on {parameter.device} in the module: "
                              f"live parameters are {TORCH_DTYPES[t.dtype]} in host memory; "
                              "call .to() with both", "module")


def _view(reader: Reader, t: ReadTensor) -> nn.Parameter:
    seen = torch.utils.dlpack.from_dlpack(reader[t.name])
    if t.strides:
        seen = seen.as_strided(t.shape, t.strides)
    return nn.Parameter(seen, requires_grad=False)


@contextlib.contextmanager
def _installed(module: nn.Module, reader: Reader, model: int) -> Iterator[None]:
    prefix = f"{model}:"
    there = {path_of(t.unit, t.tensor): t for t in reader.tensors.values()
             if (t.unit.startswith(prefix) if model > 1 else ":" not in t.unit)}
    installed: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for parameter, owners in _parameters(module).values():
            name = next((name for _, _, name in owners if name in there), None)
            if name is None:
                raise NotFound(f"job '{reader.job}' has no parameter '{owners[0][2]}': build the "
                               "model as its trainers do")
            _check(name, parameter, there[name])
            view = _view(reader, there[name])
            for owner, attribute, _ in owners:
                installed.append((owner, attribute, parameter))
                owner._parameters[attribute] = view
        yield
    finally:
        for owner, attribute, parameter in installed:
            owner._parameters[attribute] = parameter


@contextlib.contextmanager
def live(module: nn.Module, job: str | Reader, socket: str | None = None,
         timeout: float | None = None, hold: float | None = None,
         model: int = 1) -> Iterator[int]:
    """Inside the block, the parameters of @module are the live ones of @job, mapped and not copied.
    The block's value is the committed step to which they belong.

    ::

        with shardd.torch.live(model, "charlm") as step, torch.no_grad():
            loss = model(batch).mean().item()

    @module: a plain model, built as the trainers build theirs before fully_shard or replicate.
    Its buffers (running statistics) stay its own. @job: a name, or a :class:`shardd.Reader`,
    which saves a connection each time. @timeout, @hold: as in :meth:`shardd.Reader.snapshot`.
    @model: which of the trainers' models, in the order of their wrapping.

    The parameters are read-only: writing to one ends the process. Overtaken at the end: the block
    took longer than the trainers had to wait: discard what it has computed. InUse: something
    still uses a parameter.
    """
    with contextlib.ExitStack() as stack:
        reader = job if isinstance(job, Reader) else stack.enter_context(Reader(job, socket))
        step = stack.enter_context(reader.snapshot(timeout, hold))
        with _installed(module, reader, model):
            yield step


__all__ = ["live"]
