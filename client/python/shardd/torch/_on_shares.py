"""What optimizers have in common whose inner one, of torch.optim, runs in this process on a part of
each parameter: what PyTorch's functions for state dicts see of them.

torch.distributed.checkpoint's get_optimizer_state_dict and set_optimizer_state_dict ask for
``state`` and ``param_groups``, and know parameters by the objects that the model has.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch import nn

from ..errors import Unimplemented
from . import _device, _inner_state, _probe, _rows
from ._tree import Tree
from ._unit import Parameter, ShardedUnit
from .optim import _Sharded


class OnShares(_Sharded):
    """See above. ``guards``: the model's parameters, by group; ``_of``: by the id of one what the
    inner optimizer has in its place."""

    guards: list[list[Any]]
    inner: torch.optim.Optimizer
    _of: dict[int, nn.Parameter]
    _model: Tree
    _primed = False  # the inner state is one of zeros, and has had no step
    _own: frozenset[str] | None = None  # attributes that are not the adopted class's
    _unprobed: Callable[[], None] | None = None  # of an adopted object, until its first step

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's. To PyTorch's functions for state dicts, with the parameters of the
        model."""
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if "guards" in self.__dict__ and _rows.for_pytorch():
            return [dict(g, params=list(p)) for g, p in zip(groups, self.guards)]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def whole(self) -> bool:
        """Does the inner optimizer step whole tensors?"""
        return False

    def _probe_once(self) -> None:
        """Unimplemented: an adopted class does not compute the same of a part of a tensor."""
        if self._unprobed is not None:
            self._unprobed()
            self._unprobed = None

    def _probe(self, inner: type[torch.optim.Optimizer],
               make: Callable[[Any, list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        """Of an adopted object, which is complete only at its first step."""
        attributes = {name: value for name, value in vars(self).items()
                      if self._other(vars(self))(name)}

        def samples(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            outer = _Attributes()
            vars(outer).update(_probe.copies(attributes))
            made = make(outer, groups)
            made._outer = outer  # type: ignore[attr-defined] # which it refers to weakly
            return made

        _probe.check(inner, samples, self.param_groups, False)

    def _other(self, seen: dict[str, Any]) -> Callable[[str], bool]:
        if seen is not vars(self):
            return lambda name: name not in ("params", "state", "param_groups", "defaults")
        own = self._own or frozenset()
        return lambda name: name not in own and name != "_own" and not hasattr(OnShares, name)

    def extents(self, unit: ShardedUnit, p: Parameter) -> list[tuple[int, int]]:
        """Of each rank of the mesh, in its order: the first element of @p of which it has the
        state, and how many."""
        raise NotImplementedError

    def own(self, unit: ShardedUnit, p: Parameter) -> tuple[int, int]:
        """This rank's of :meth:`extents`."""
        raise NotImplementedError

    def _prime(self) -> None:
        """Make the inner optimizer's state, of zeros, as its first step would."""
        stand_ins = [self._of[id(p)] for guards in self.guards for p in guards if p.requires_grad]
        groups = self.inner.param_groups
        rates = [g.get("lr") for g in groups]
        for stand_in in stand_ins:
            stand_in.grad = torch.zeros(stand_in.shape, dtype=stand_in.dtype, device=_device.here)
            stand_in.data = torch.zeros_like(stand_in.grad)
        try:
            for group in groups:
                if "lr" in group:
                    group["lr"] = 0.0
            self.inner.step()
        finally:
            for group, rate in zip(groups, rates):
                if "lr" in group:
                    group["lr"] = rate
            for stand_in in stand_ins:
                zero = torch.zeros((), dtype=stand_in.dtype, device=_device.here)
                stand_in.grad, stand_in.data = None, zero.expand(stand_in.shape)
        for state in self.inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()
            elif "step" in state:
                state["step"] = 0
        self._primed = True

    def _before_step(self) -> None:
        """The first step makes the state itself."""
        if self._primed:
            self._primed = False
            self.inner.state.clear()

    # ----------------------------------------------------------------- state dicts

    def _numbered(self) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        numbers = {id(p): i for i, p in enumerate(p for g in self.guards for p in g)}
        state = {numbers[p]: s for p, s in _inner_state.read(
            self, not _rows.rows_for_pytorch()).items()}
        return state, _inner_state.groups(self, numbers)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._primed = False
        _inner_state.load(self, state)

    def _named(self, names: Mapping[int, str], full: bool,
               wanted: bool) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        return _inner_state.read(self, full), _inner_state.groups(self, names)


class Inside(dict[Any, Any]):
    """``optimizer.state``, which the inner optimizer has, by the parameters of the model. Not empty
    to PyTorch's functions, which would step an optimizer that has none."""

    def __init__(self, optimizer: OnShares) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def __bool__(self) -> bool:
        optimizer = self._optimizer()
        if optimizer is None:
            return False
        if optimizer.whole:
            raise Unimplemented(
                "the state of an optimizer of whole tensors is with one rank, which PyTorch's "
                "functions do not support: use shardd.torch.optimizer_state_dict(optimizer), or "
                "its state_dict()")
        if not optimizer.inner.state and _rows.for_pytorch():
            optimizer._prime()
        return bool(optimizer.inner.state)

    def __missing__(self, guard: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.inner.state[optimizer._of.get(id(guard), guard)]


class _Attributes:
    """What an adopted object has beside what an optimizer has."""


__all__ = ["Inside", "OnShares"]
