"""Communication hooks of the program's own: Python functions that reduce gradients, between
backward and the daemon.

The function gets what a hook of DistributedDataParallel or FSDP1 gets: a bucket with this rank's
gradients, or the flat gradient and the memory for this rank's part of its sum. It reduces them over
a process group of torch.distributed. The daemon then adds up contributions of which all but one are
negative zeros at every place, which keeps the bits of that one: rank 0's of a bucket, and of a flat
gradient each rank's own part.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from ..errors import InvalidArgument
from ._unit import ShardedUnit


class Bucket:
    """What torch.distributed.GradBucket is to a hook: the gradients of one unit."""

    def __init__(self, unit: ShardedUnit, flat: torch.Tensor, index: int, last: bool) -> None:
        self._unit, self._flat, self._index, self._last = unit, flat, index, last

    def index(self) -> int:
        """Of the bucket, in the order in which they are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Is it the last one of this backward?"""
        return self._last

    def buffer(self) -> torch.Tensor:
        """The gradients of all its parameters, in one row: not divided by the number of ranks. What
        a parameter that this rank has not used contributes is 0."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Another tensor in the place of :meth:`buffer`."""
        self._flat = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of :meth:`buffer`, parameter by parameter: the model's last one first, as
        DistributedDataParallel has them."""
        found, at = [], 0
        for p in self._unit.trained:
            found.append(self._flat[at:at + p.shape.numel()].view(p.shape))
            at += p.shape.numel()
        return found[::-1]

    def parameters(self) -> list[torch.Tensor]:
        """Those of the bucket, in the order of the gradients."""
        return [p.guard for p in reversed(self._unit.trained)]


class CommHook:
    """A hook of one unit."""

    def __init__(self, hook: Callable[..., Any], state: Any) -> None:
        self._hook, self._state = hook, state
        self._named = getattr(hook, "__qualname__", repr(hook))
        self._result: Any = None
        self._index, self._last = 0, False

    def number(self, index: int, last: bool) -> None:
        """Which bucket the next one is, and whether it is the last of the pass."""
        self._index, self._last = index, last

    def begin(self, unit: ShardedUnit) -> None:
        """Call it with the gradients of a pass."""
        flat = unit.flat_gradient()
        if not unit.replicated:
            self._result = self._scatter(unit, flat)
            return
        self._result = self._hook(self._state, Bucket(unit, flat, self._index, self._last))
        if not callable(getattr(self._result, "wait", None)):
            raise InvalidArgument(
                f"the communication hook {self._named} returned {type(self._result).__name__}: it "
                "must return a torch.futures.Future of the reduced buffer", "hook")

    def _scatter(self, unit: ShardedUnit, flat: torch.Tensor) -> torch.Tensor:
        """FSDP1's: the sum of this rank's part, among negative zeros."""
        world, rank = unit.sharers
        each = -(-flat.numel() // world)
        padded = torch.nn.functional.pad(flat, (0, each * world - flat.numel()))
        output = torch.empty_like(padded[:each])
        self._hook(self._state, padded, output)
        made = torch.full_like(padded, -0.0)
        made[rank * each:(rank + 1) * each] = output
        return made[:flat.numel()]

    def finish(self, unit: ShardedUnit) -> None:
        """Wait for what it has begun, and put this rank's contribution into the gradient buffer."""
        result, self._result = self._result, None
        if unit.replicated:
            result = self._reduced(unit, result.wait())
            if unit.sharers[1]:
                result = torch.full_like(result, -0.0)
        unit.set_flat_gradient(result)

    def _reduced(self, unit: ShardedUnit, value: Any) -> torch.Tensor:
        """What the future of a hook holds: a tensor, or a list of one."""
        [value] = value if isinstance(value, (list, tuple)) and len(value) == 1 else [value]
        n = sum(p.shape.numel() for p in unit.trained)
        if not isinstance(value, torch.Tensor) or value.numel() != n:
            said = (f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor)
                    else type(value).__name__)
            raise InvalidArgument(
                f"the future of the communication hook {self._named} holds {said}: it must hold a "
                f"tensor of the bucket's {n} elements", "hook")
        return value.reshape(-1).to(unit.reduce)


__all__ = ["Bucket", "CommHook"]
