"""Loss scaling: torch.amp.GradScaler's rule over the daemon's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import FailedPrecondition, Unimplemented
from .optim import _Sharded


class GradScaler:
    """As torch.amp.GradScaler, for the optimizers of shardd.torch, also for several models at once.

    Every rank has its own scale; they stay equal, since all ranks learn of an infinity.
    """

    def __init__(self, device: str = "cpu", init_scale: float = 65536.0, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000,
                 enabled: bool = True) -> None:
        """@device: ignored. @growth_interval: steps without an infinity until it grows."""
        self._scale, self._enabled = float(init_scale), enabled
        self._growth, self._backoff = growth_factor, backoff_factor
        self._interval, self._steps = growth_interval, 0
        self._found: dict[int, bool] = {}  # by optimizer, since the last update
        self._stepped: set[int] = set()

    def scale(self, outputs: Any) -> Any:
        """@outputs, a tensor or tensors in a container, times the scale."""
        if not self._enabled:
            return outputs
        return pytree.tree_map_only(torch.Tensor, lambda x: x * self._scale, outputs)

    def unscale_(self, optimizer: _Sharded) -> None:
        """Divide the gradients by the scale (collective, once per step)."""
        if not self._enabled:
            return
        if id(optimizer) in self._found:
            raise FailedPrecondition("unscale_() was already called since the last update()")
        if getattr(optimizer, "scaler", None) is self:
            raise FailedPrecondition("unscale_(): optimizer.plan_backward(scaler=...) has said "
                                     "that the daemon unscales in backward: leave out unscale_()")
        if getattr(optimizer, "partial", False):
            raise Unimplemented("unscale_() divides the gradients of the whole model, and this "
                                "optimizer has some of its parameters only: use GradScaler with "
                                "one optimizer of all parameters", "optimizer")
        optimizer._found_inf = optimizer._model.unscale(1.0 / self._scale)
        self._found[id(optimizer)] = optimizer._found_inf

    def step(self, optimizer: _Sharded, *args: Any, **kwargs: Any) -> Any:
        """Unscale, if not done yet, and step unless there was an infinity (collective)."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        planned = getattr(optimizer, "scaler", None) is self
        if id(optimizer) not in self._found and not planned:
            self.unscale_(optimizer)
        if id(optimizer) in self._stepped:
            raise FailedPrecondition("step() was already called with this optimizer since the last "
                                     "update()")
        self._stepped.add(id(optimizer))
        if planned:  # the daemon has unscaled as the gradients came
            found = optimizer.step(*args, **kwargs)
            self._found[id(optimizer)] = optimizer._found_inf
            return found
        optimizer._skip_if_found = True
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            optimizer._skip_if_found = False

    def update(self, new_scale: float | None = None) -> None:
        """After the step: shrink or grow the scale."""
        if not self._enabled:
            return
        if not self._found:
            raise FailedPrecondition("update() was called before a step: call step() first")
        if new_scale is not None:
            self._scale = float(new_scale)
        elif any(self._found.values()):
            self._scale, self._steps = self._scale * self._backoff, 0
        else:
            self._steps += 1
            if self._steps == self._interval:
                self._scale, self._steps = self._scale * self._growth, 0
        self._found.clear()
        self._stepped.clear()

    def get_scale(self) -> float:
        """The scale; 1 if it is not enabled."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self._growth

    def set_growth_factor(self, new_factor: float) -> None:
        """Another one."""
        self._growth = new_factor

    def get_backoff_factor(self) -> float:
        """The factor by which the scale shrinks."""
        return self._backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        """Another one."""
        self._backoff = new_factor

    def get_growth_interval(self) -> int:
        """Steps without an infinity until the scale grows."""
        return self._interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Another number."""
        self._interval = new_interval

    def is_enabled(self) -> bool:
        """Is scaling enabled?"""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        if not self._enabled:
            return {}
        return {"scale": self._scale, "growth_factor": self._growth,
                "backoff_factor": self._backoff, "growth_interval": self._interval,
                "_growth_tracker": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As torch's; a step that was begun counts no more."""
        if self._enabled:
            self._found.clear()
            self._stepped.clear()
            self._scale, self._growth = state["scale"], state["growth_factor"]
            self._backoff, self._interval = state["backoff_factor"], state["growth_interval"]
            self._steps = state["_growth_tracker"]
