"""What optimizers have in common whose inner one, of torch.optim, runs in this process on a part of
each parameter: what PyTorch's functions for state dicts see of them.

torch.distributed.checkpoint's get_optimizer_state_dict and set_optimizer_state_dict ask for
``state`` and ``param_groups``, and know parameters by the objects that the model has. So does the
program: the groups are the inner optimizer's own, but have the model's parameters in them, unless
the inner one is at work.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Callable

import torch
from torch import nn

from ..errors import Unimplemented
from . import _device, _inner_state, _probe, _rows
from ._tree import Tree
from ._unit import Parameter, ShardedUnit
from .optim import State, _Sharded, check_groups


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

    _complete = False  # no constructor of its class is at work any more

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's, with the parameters of the model. A constructor of an adopted
        class, which makes its state, finds what the inner optimizer has in their place."""
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if "inner" not in self.__dict__:
            return groups
        if not self._complete and not _constructs(self):
            self._complete = True
            self._put(self.guards)
        if self._complete and _rows.for_pytorch():
            return [dict(g, params=list(p)) for g, p in zip(groups, self.guards)]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _put(self, params: list[list[Any]]) -> None:
        for group, given in zip(self.__dict__["param_groups"], params):
            group["params"] = list(given)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """The inner optimizer's groups have its own parameters."""
        if self._complete:
            check_groups(self, [p for guards in self.guards for p in guards])
        self._put([[self._of[id(p)] for p in guards] for guards in self.guards])
        try:
            yield
        finally:
            self._complete = True
            self._put(self.guards)

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
            with self._at_work():
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


def _constructs(optimizer: Any) -> bool:
    """Is this called by a constructor of @optimizer?"""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Inside(State, MutableMapping[Any, Any]):
    """``optimizer.state``, which the inner optimizer has, by the parameters of the model. Not empty
    to PyTorch's functions, which would step an optimizer that has none."""

    def __init__(self, optimizer: OnShares) -> None:
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

    def _inner(self) -> tuple[Any, dict[int, nn.Parameter]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.inner.state, optimizer._of

    def __getitem__(self, guard: Any) -> Any:
        state, of = self._inner()
        return state[of.get(id(guard), guard)]

    def __setitem__(self, guard: Any, value: Any) -> None:
        state, of = self._inner()
        state[of.get(id(guard), guard)] = value

    def __delitem__(self, guard: Any) -> None:
        state, of = self._inner()
        del state[of.get(id(guard), guard)]

    def __contains__(self, guard: Any) -> bool:
        state, of = self._inner()
        return of.get(id(guard), guard) in state

    def __iter__(self) -> Iterator[Any]:
        optimizer, (state, of) = self._optimizer(), self._inner()
        assert optimizer is not None
        by = {id(of[id(g)]): g for guards in optimizer.guards for g in guards}
        return iter([by.get(id(key), key) for key in state])

    def __len__(self) -> int:
        return len(self._inner()[0])

    def clear(self) -> None:
        """The next step begins without a state."""
        self._inner()[0].clear()

    def replace(self, other: Mapping[Any, Any]) -> None:
        """See State."""
        given = dict(other.items())
        self.clear()
        self.update(given)


class _Attributes:
    """What an adopted object has beside what an optimizer has."""


__all__ = ["Inside", "OnShares"]
