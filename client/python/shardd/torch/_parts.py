"""One optimizer of torch.optim for parameters of several models, or of a model and of none.

A layer that is wrapped without the model around it is a model of its own; what is not wrapped
belongs to none. Each gets an optimizer of the same class, which this one steps with its settings.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..errors import Unimplemented
from ._guard import Guard
from .optim import _root

Groups = list[dict[str, Any]]


def _parameters(group: dict[str, Any]) -> list[Any]:
    given = group["params"]
    return [given] if isinstance(given, torch.Tensor) else list(given)


def _model(p: Any) -> int:
    """Of which model @p is; 0: of none."""
    value = p[1] if isinstance(p, tuple) else p
    return id(_root(value._unit)) if isinstance(value, Guard) else 0


def models(groups: Groups) -> list[int]:
    """Those of the parameters, in their order."""
    return list(dict.fromkeys(_model(p) for group in groups for p in _parameters(group)))


class _None:
    """The state, which is in the parts."""

    def _refused(self, *_: Any) -> Any:
        raise Unimplemented("the state of an optimizer over several models, or over parameters "
                            "that are not sharded beside some that are, cannot be saved or "
                            "loaded: wrap the model around all of them, or build one optimizer "
                            "for each")

    __len__ = __bool__ = __iter__ = __getitem__ = __contains__ = _refused


class OfParts(torch.optim.Optimizer):
    """See above. ``parts``: optimizers, and for each of their groups the number of that here."""

    def adopt(self, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer]) -> None:
        """@make builds a part (collective, if the daemon gets a model)."""
        self.parts = []
        for model in models(groups):
            own = [(n, [p for p in _parameters(g) if _model(p) == model])
                   for n, g in enumerate(groups)]
            made = make([dict(groups[n], params=params) for n, params in own if params])
            self.parts.append((made, [n for n, params in own if params]))
        self.state = _None()  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parts with the settings of this one's groups (collective)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, numbers in self.parts:
            for group, number in zip(part.param_groups, numbers):
                group.update({k: v for k, v in self.param_groups[number].items()
                              if k not in ("params", "param_names")})
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parts (collective, if some were reduced)."""
        for part, _ in self.parts:
            part.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Unimplemented, once it is built."""
        if hasattr(self, "parts"):
            raise Unimplemented("add_param_group of an optimizer over several models: build a new "
                                "one")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Unimplemented."""
        return _None()._refused()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Any) -> None:
        """Unimplemented."""
        _None()._refused()


__all__ = ["OfParts", "models"]
