"""Values for parameters and buffers that were made on the meta device.

They come from a state dict that is loaded, or from the model's own initialisation:
``_init_weights`` of the model around a module, as transformers has it, then
``reset_parameters()``. What neither of them gives a value is named in an error. One unit is in
this process's memory at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Callable

import torch
from torch import nn

from ..errors import InvalidArgument
from . import _device
from ._unit import Parameter, ShardedUnit

Initialise = Callable[[nn.Module], None]
_Key = tuple[int, str]  # a module, and the name of its parameter or buffer


def _own(unit: ShardedUnit) -> Iterator[tuple[str, nn.Module]]:
    """The modules of @unit that are in no unit inside it, and their paths; children first, as
    Module.apply."""
    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module._modules.items():
            if child is not None and not getattr(child, "_shardd_units", None):
                yield from walk(f"{path}{name}.", child)
        yield path, module
    return walk("", unit.module)


def _initialisers(root: nn.Module) -> dict[int, Initialise]:
    """By module: _init_weights of the innermost model around it."""
    found: dict[int, Initialise] = {}

    def walk(module: nn.Module, of: Initialise | None) -> None:
        of = getattr(module, "_init_weights", of)
        if of is not None:
            found[id(module)] = of
        for child in module.children():
            walk(child, of)
    walk(root, None)
    return found


def _sentinel(value: torch.Tensor) -> torch.Tensor:
    """Fill @value, so that :func:`_is_set` can tell."""
    if value.is_floating_point() or value.is_complex():
        return value.detach().fill_(float("nan"))
    return value.fill_(False if value.dtype == torch.bool else torch.iinfo(value.dtype).min)


def _is_set(value: torch.Tensor, version: int) -> bool:
    if value.is_floating_point() or value.is_complex():
        return not bool(value.detach().isnan().any())
    return value._version != version or (
        value.dtype != torch.bool and bool((value != torch.iinfo(value.dtype).min).all()))


class _Missing:
    """What of a unit has no value yet."""

    def __init__(self, unit: ShardedUnit, given: Container[str]) -> None:
        """Memory for what is on the meta device. @given: names, from the unit's module on, that a
        state dict gives values afterwards."""
        self.versions: dict[_Key, int] = {}
        with torch.no_grad():
            for p in unit.params:
                if p.initial is not None and p.initial.is_meta:
                    self._parameter(unit, p, given)
            for path, module in _own(unit):
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_meta:
                        made = _sentinel(torch.empty_like(buffer, device=_device.here))
                        module._buffers[name] = made
                        if path + name not in given:
                            self.versions[id(module), name] = made._version

    def _parameter(self, unit: ShardedUnit, p: Parameter, given: Container[str]) -> None:
        p.initial = nn.Parameter(
            torch.empty(p.shape, dtype=p.guard.dtype, device=_device.here),
            requires_grad=p.trained)
        _sentinel(p.initial)
        p.install(p.initial)
        paths = {id(m): path for path, m in _own(unit)}
        if not any(paths.get(id(m), "") + name in given for m, name in p.owners):
            self.versions.update(((id(m), name), p.initial._version) for m, name in p.owners)

    def of(self, module: nn.Module) -> list[str]:
        """Those of @module itself that have none; what has one is forgotten."""
        for key in [k for k in self.versions if k[0] == id(module)]:
            value = getattr(module, key[1])
            if value is not None and _is_set(value, self.versions[key]):
                del self.versions[key]
        return [name for of, name in self.versions if of == id(module)]

    def below(self, module: nn.Module) -> bool:
        """Is anything missing in @module?"""
        return any(self.of(m) for m in module.modules())


def from_meta(unit: ShardedUnit, root: nn.Module, given: Container[str] = ()) -> None:
    """Give values to what @unit has on the meta device. @root: the model, or the part of it that is
    loaded. @given: names, from the unit's module on, that get values afterwards.

    Changes PyTorch's generator. InvalidArgument names what gets no value.
    """
    missing = _Missing(unit, given)
    if missing.versions:
        initialisers = _initialisers(root)
        with torch.no_grad():
            for _, module in _own(unit):
                _initialise(module, missing, initialisers.get(id(module)))
        for path, module in _own(unit):
            _refuse(unit, path, module, missing.of(module))
    for p in unit.params:
        p.install(p.guard)


def _initialise(module: nn.Module, missing: _Missing, init: Initialise | None) -> None:
    if init is not None and missing.below(module):
        init(module)
    reset = getattr(module, "reset_parameters", None)
    if reset is not None and missing.of(module):
        reset()


def _refuse(unit: ShardedUnit, path: str, module: nn.Module, names: list[str]) -> None:
    if not names:
        return
    what = "buffer" if names[0] in module._buffers else "parameter"
    where = f" ('{path[:-1]}' of unit '{unit.name}')" if path and unit.name else ""
    raise InvalidArgument(
        f"{what} '{names[0]}' of {type(module).__name__}{where} is on the meta device, and neither "
        "a reset_parameters() of its module nor an _init_weights of the model gives it a value: "
        "define one, load a state dict that has it, or build the model with values")
