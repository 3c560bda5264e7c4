"""The state of an optimizer in this process, kept in the daemon for when the process dies.

There is room for it twice, among the units' buffers, which are each rank's own: a commit
writes the half that the last commit did not, and says in what it commits which one that was.
So the half that the last commit names is as it was, whenever a rank dies.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

from ..errors import InvalidArgument, Unimplemented
from . import _inner_state, _share
from ._device import tensor_at
from ._inner_state import OnShares
from ._tree import Tree
from ._unit import ShardedUnit

_SAMPLE = 4  # elements
_ALIGN = 64
_DESCRIPTION = 512  # bytes for each parameter: its numbers, and where its arrays are


def arrays(inner: type[torch.optim.Optimizer], group: dict[str, Any],
           options: dict[str, Any]) -> list[int]:
    """The bytes of an element of each array of the state, as a step with a sample shows."""
    sample = nn.Parameter(torch.zeros(_SAMPLE))
    optimizer = inner([dict(group, params=[sample])], **options)
    sample.grad = torch.ones(_SAMPLE)
    optimizer.step()
    return [value.itemsize for value in optimizer.state[sample].values()
            if isinstance(value, torch.Tensor) and value.shape == sample.shape]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Kept:
    """See above. ``half``: 0 or 1, of the last commit."""

    def __init__(self, by_parameter: dict[int, list[int]]) -> None:
        """@by_parameter: :func:`arrays`, by the id of a parameter."""
        self._arrays = by_parameter
        self._places: dict[ShardedUnit, tuple[ShardedUnit, int]] = {}  # among whose buffers, where
        self.half = 1

    def reserve(self, tree: Tree) -> None:
        """Take room among the buffers of units that are not registered yet. Twice is once."""
        free = [u for u in tree.units if u.trained and not u.buffer_bytes]
        if not free:
            raise Unimplemented(
                "all parameters are in one unit with the model's buffers, which are copied from "
                "rank 0: give replicate broadcast_buffers=False or a smaller bucket_cap_mb, or "
                "build the optimizer without resilient", "resilient")
        for unit in tree.units if not self._places else ():
            host = free[-1] if unit.buffer_bytes else unit
            self._places[unit] = host, host.state_bytes
            host.state_bytes += 2 * self._bytes(unit)

    def _described(self, unit: ShardedUnit) -> int:
        return _aligned(_DESCRIPTION * (len(unit.trained) + 1))

    def _bytes(self, unit: ShardedUnit) -> int:
        """Of a half; the same on all ranks."""
        if not unit.trained:
            return 0
        return self._described(unit) + sum(
            _aligned(max(n for _, n in _share.extents(unit, p)) * each)
            for p in unit.trained for each in self._arrays[id(p.guard)])

    def _memory(self, unit: ShardedUnit, half: int) -> torch.Tensor:
        host, at = self._places[unit]
        assert host.unit is not None
        address = host.unit.client.submit("unit_buffers", host.unit.id,
                                          finish=lambda r: r.data).wait()
        nbytes = self._bytes(unit)
        return tensor_at((address or 0) + at + half * nbytes, nbytes, torch.uint8)

    # ------------------------------------------------------------------- into it

    def write(self, optimizer: OnShares) -> int:
        """All of the state. Return: into which half; it is the commit's if that is made."""
        half = 1 - self.half
        for unit in optimizer._model.units:
            if unit.trained:
                self._write(unit, [optimizer._of[id(p.guard)] for p in unit.trained], optimizer,
                            self._memory(unit, half))
        return half

    def _write(self, unit: ShardedUnit, stand_ins: list[nn.Parameter], optimizer: OnShares,
               memory: torch.Tensor) -> None:
        described: list[dict[str, Any]] = []
        at = self._described(unit)
        for stand_in in stand_ins:
            described.append({})
            for key, value in optimizer.inner.state.get(stand_in, {}).items():
                if _inner_state.is_cut(value, stand_in):
                    end = at + value.nbytes
                    self._check(end <= len(memory), unit, "more arrays than expected from a sample")
                    memory[at:end].view(value.dtype).copy_(value.reshape(-1))
                    described[-1][key] = "array", value.dtype, at
                    at = _aligned(end)
                elif isinstance(value, torch.Tensor):
                    described[-1][key] = "tensor", value.dtype, value.tolist()
                else:
                    described[-1][key] = "value", value
        packed = pickle.dumps(described)
        self._check(len(packed) + 8 <= self._described(unit), unit, "too much data beside its "
                                                                    "arrays")
        head = len(packed).to_bytes(8, "little") + packed
        memory[:len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))

    def _check(self, fits: bool, unit: ShardedUnit, why: str) -> None:
        if not fits:
            raise InvalidArgument(
                f"the optimizer's state of unit '{unit.name}' has {why}: it cannot be kept in the "
                "daemon; build the optimizer without resilient", "resilient")

    # ------------------------------------------------------------------- out of it

    def read(self, optimizer: OnShares, half: int) -> None:
        """What :meth:`write` has put into @half becomes the optimizer's state."""
        for unit in optimizer._model.units:
            if not unit.trained:
                continue
            memory = self._memory(unit, half)
            n = int.from_bytes(bytes(memory[:8].tolist()), "little")
            described = pickle.loads(bytes(memory[8:8 + n].tolist()))
            for p, entries in zip(unit.trained, described):
                stand_in = optimizer._of[id(p.guard)]
                optimizer.inner.state[stand_in] = {
                    key: self._value(stand_in, memory, *entry) for key, entry in entries.items()}
        self.half = half

    def _value(self, stand_in: torch.Tensor, memory: torch.Tensor, kind: str, *said: Any) -> Any:
        if kind == "value":
            return said[0]
        if kind == "tensor":
            return torch.tensor(said[1], dtype=said[0])
        dtype, at = said
        nbytes = stand_in.numel() * dtype.itemsize
        return memory[at:at + nbytes].clone().view(dtype).view(stand_in.shape)


__all__ = ["Kept", "arrays"]
