"""A base: frozen parameters in the daemon's memory, which the models of many jobs share."""

from __future__ import annotations

import ctypes as C
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..base import BaseReader, BaseTensor, Mapped, load_tensors
from ..errors import FailedPrecondition, InvalidArgument, NotFound
from ._names import untied
from ._types import TORCH_DTYPES, dtype_of

_Owners = dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str, str]]]]
_PAUSE = 0.1  # seconds between two checks for a base that does not exist yet
_bound: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}


def is_bound(value: torch.Tensor) -> bool:
    """Is @value bound to a base? Then it is in no unit. After a move or a conversion it is not."""
    seen, address = _bound.get(id(value), (None, 0))
    return seen is not None and seen() is value and value.data_ptr() == address


def _note(view: nn.Parameter) -> None:
    key = id(view)
    _bound[key] = weakref.ref(view, lambda _: _bound.pop(key, None)), view.data_ptr()


class Base:
    """The result of :func:`attach_base`. ``name``: of the base. ``nbytes``: the size of the tensors
    that the module is bound to. ``tensors``: their names. This object keeps the base mapped until
    :meth:`close`, or until the process ends."""

    def __init__(self, name: str, reader: BaseReader) -> None:
        self.name, self._reader = name, reader
        self.nbytes, self.tensors = 0, []  # type: int, list[str]

    def close(self) -> None:
        """Unmap the base. InUse: parameters of a module are still bound to it."""
        self._reader.close()

    def __repr__(self) -> str:
        return (f"<shardd.torch.Base {self.name!r}, {len(self.tensors)} tensors, {self.nbytes} "
                "bytes>")


_kept: list[Base] = []  # parameters may be bound to them until the process ends


# ------------------------------------------------------------------------- names


def _plain(name: str) -> str:
    """The name of a parameter in the model before peft wrapped it."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _is_adapters(name: str) -> bool:
    """Is it a parameter of an adapter that peft has added?"""
    parts = name.split(".")
    return "modules_to_save" in parts or any(part.startswith("lora_") for part in parts)


def _find(names: list[str], there: Mapping[str, Mapped]) -> str | None:
    for name in names:
        for candidate in (name, _plain(name)):
            if candidate in there and not _is_adapters(name):
                return candidate
    return None


# ------------------------------------------------------------------------ binding


def _parameters(module: nn.Module) -> _Owners:
    """Each parameter with (module, attribute, name) for each module that has it."""
    found: _Owners = {}
    for prefix, owner in module.named_modules():
        for attribute, value in owner._parameters.items():
            if value is not None:
                name = f"{prefix}.{attribute}" if prefix else attribute
                found.setdefault(id(value), (value, []))[1].append((owner, attribute, name))
    return found


def _view(reader: BaseReader, t: Mapped) -> torch.Tensor:
    seen = torch.utils.dlpack.from_dlpack(reader[t.name])
    return seen.as_strided(t.shape, t.strides) if t.strides else seen


def _check(name: str, value: torch.Tensor, base: str, t: Mapped) -> None:
    if tuple(value.shape) != t.shape:
        raise InvalidArgument(f"'{name}' has shape {list(value.shape)} in the module but "
                              f"{list(t.shape)} in base '{base}': it is another model's", "module")
    if value.dtype != TORCH_DTYPES[t.dtype] or value.device.type not in ("cpu", "meta"):
        raise InvalidArgument(f"'{name}' is {value.dtype} on {value.device} in the module: base "
                              f"'{base}' has it in {TORCH_DTYPES[t.dtype]} in host memory; build "
                              "the module with both", "module")


def _refuse_load(base: str, prefix_of: dict[int, set[str]]) -> Callable[..., None]:
    """Refuse load_state_dict(), which would write into the base."""
    def hook(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for attribute in prefix_of[id(module)]:
            value = module._parameters.get(attribute)
            if value is not None and prefix + attribute in state and is_bound(value):
                raise InvalidArgument(
                    f"'{prefix + attribute}' is of base '{base}', which is read-only: give "
                    "load_state_dict() what is trained alone, with strict=False", "state_dict")

    return hook


class _Plan:
    """What happens to each parameter. Nothing changes before all of them are checked."""

    def __init__(self, module: nn.Module, base: str, there: Mapping[str, Mapped]) -> None:
        self.base, self.there = base, there
        self.binds: list[tuple[nn.Parameter, list[tuple[nn.Module, str, str]], str]] = []
        self.copies: list[tuple[nn.Parameter, list[tuple[nn.Module, str, str]], str]] = []
        found = _parameters(module)
        whole = all(p.requires_grad for p, _ in found.values())  # as it was built
        for parameter, owners in found.values():
            names = [name for _, _, name in owners]
            key = _find(names, there)
            if key is not None and (whole or not parameter.requires_grad):
                _check(names[0], parameter, base, there[key])
                self.binds.append((parameter, owners, key))
            elif parameter.device.type == "meta" and key is not None:
                _check(names[0], parameter, base, there[key])
                self.copies.append((parameter, owners, key))
            elif parameter.device.type == "meta" or not (
                    parameter.requires_grad or _is_adapters(names[0])):
                raise NotFound(f"base '{base}' has no tensor '{_plain(names[0])}', which the "
                               "module needs: it is another model's, or the tensor was left out"
                               f"{untied(parameter)}")
        if not self.binds:
            raise NotFound(f"base '{base}' has none of the module's parameters")
        for name, buffer in module.named_buffers():
            if buffer.device.type == "meta":
                raise InvalidArgument(
                    f"buffer '{name}' is on the meta device and has no values: build the module "
                    "with accelerate.init_empty_weights(), or on the CPU", "module")


def _bind(plan: _Plan, base: Base) -> None:
    reader, attributes = base._reader, {}  # type: BaseReader, dict[int, set[str]]
    modules: dict[int, nn.Module] = {}
    for _, owners, key in plan.binds:
        t = plan.there[key]
        view = nn.Parameter(_view(reader, t), requires_grad=False)
        _note(view)
        base.nbytes += view.nbytes
        base.tensors.append(key)
        for owner, attribute, _ in owners:
            owner._parameters[attribute] = view
            attributes.setdefault(id(owner), set()).add(attribute)
            modules[id(owner)] = owner
    for parameter, owners, key in plan.copies:
        copy = _view(reader, plan.there[key]).clone()
        trained = nn.Parameter(copy, requires_grad=parameter.requires_grad)
        for owner, attribute, _ in owners:
            owner._parameters[attribute] = trained
    refuse = _refuse_load(base.name, attributes)
    for owner in modules.values():
        owner.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


def _open(name: str, socket: str | None, timeout: float) -> BaseReader:
    """Wait until the base exists and is loaded."""
    until = time.monotonic() + timeout
    while True:
        try:
            return BaseReader(name, socket, name=f"reads base {name}"[:64])
        except (NotFound, FailedPrecondition):
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE)


def attach_base(module: nn.Module, name: str, socket: str | None = None,
                timeout: float = 0) -> Base:
    """Bind the frozen parameters of @module to the base @name: the daemon's memory, mapped
    read-only, which all processes of the machine share. Trainable parameters stay unchanged.

    ::

        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.tie_weights()                      # which init_empty_weights() undoes
        shardd.torch.attach_base(model, "llama")
        model = peft.get_peft_model(model, peft.LoraConfig(...))
        shardd.torch.fully_shard(model)          # only the adapter becomes a unit of the job

    Call this before fully_shard or replicate, which ignore these parameters. @module: on the CPU or
    on the meta device, in the base's types, before or after get_peft_model(). If all its parameters
    are trainable, those that the base has are bound and frozen. Otherwise the frozen ones are bound
    to the base, and trainable ones on the meta device become a copy of the base's. @timeout:
    seconds to wait for a base that is not loaded yet.

    A write to a base ends the process. NotFound: there is no such base, or it lacks a parameter.
    InvalidArgument: a parameter has another shape or type. After an error nothing has changed.
    """
    reader = _open(name, socket, timeout)
    try:
        base = Base(name, reader)
        plan = _Plan(module, name, reader.tensors)
    except BaseException:
        reader.close()
        raise
    _kept.append(base)
    _bind(plan, base)
    return base


# ------------------------------------------------------------------------ loading


def _copier(value: torch.Tensor) -> Callable[[int], None]:
    def read(address: int) -> None:
        whole = value.detach().to("cpu").contiguous()
        C.memmove(address, whole.data_ptr(), whole.nbytes)

    return read


def load_base(name: str, state: nn.Module | Mapping[str, torch.Tensor] | str | os.PathLike[str],
              socket: str | None = None, **options: Any) -> int:
    """As :func:`shardd.load_base`, for a module's parameters or a state dict, each tensor in its
    own type. A tensor with several names is loaded once. @options: of :func:`shardd.load_base`."""
    if isinstance(state, (str, os.PathLike)):
        from ..base import load_base as load_files

        return load_files(name, state, socket, **options)
    if isinstance(state, nn.Module):
        state = dict(state.named_parameters())
    skip, seen = options.pop("skip", ()), set()  # type: Any, set[Any]
    tensors = []
    for key, value in state.items():
        place = value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
        if key in skip or (place in seen and value.numel() and not value.is_meta):
            continue
        if value.is_meta:
            raise InvalidArgument(f"'{key}' is on the meta device and has no values", "state")
        seen.add(place)
        tensors.append(BaseTensor(key, dtype_of(value.dtype, key), tuple(value.shape),
                                  _copier(value)))
    return load_tensors(name, tensors, socket, **options)


__all__ = ["Base", "attach_base", "is_bound", "load_base"]
