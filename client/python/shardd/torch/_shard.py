"""This rank's piece of a parameter, or of its gradient, in the daemon: how it is cut, read, written
and shown as a DTensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._launch import launched_or_alone
from ..client import Client
from ..errors import FailedPrecondition
from . import _device
from ._device import tensor_at
from ._mesh import Mesh, world
from ._types import DTYPES

PARAMETERS, GRADIENT = 1, 2  # enum shardd_array

_early: dict[Mesh, Any] = {}  # before there is a session
_meshes: weakref.WeakKeyDictionary[Client, dict[Mesh, Any]] = weakref.WeakKeyDictionary()


def distributed() -> bool:
    """Is torch.distributed initialised?"""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized()


def device_mesh(client: Client, mesh: Mesh) -> Any:
    """torch's mesh of the ranks of @mesh; None: torch.distributed is not initialised."""
    if not distributed():
        return None
    if mesh.given is not None:
        return mesh.given
    dist, member = torch.distributed, client.member
    made = _meshes.setdefault(client, {})
    if mesh not in made:
        assert member is not None
        if (dist.get_rank(), dist.get_world_size()) != (member.rank, member.world_size):
            raise FailedPrecondition(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in "
                f"torch.distributed, but {member.rank} of {member.world_size} in the job: "
                "start both with the same numbers, or give full=True")
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.tensor(mesh.ranks)
        if mesh.replicas > 1:
            ranks = ranks.view(mesh.replicas, mesh.shard)
        made[mesh] = DeviceMesh(_device.here.type, ranks)
    return made[mesh]


def placements(mesh: Any) -> tuple[Any, ...]:
    """Those of a parameter over torch's @mesh."""
    from torch.distributed.tensor import Replicate, Shard

    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


def as_dtensor(mesh: Any, local: torch.Tensor, shape: torch.Size) -> Any:
    """This rank's rows @local of something of @shape over torch's @mesh. It has @local's memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements(mesh), run_check=False, shape=shape,
                              stride=torch.empty(shape, device="meta").stride())


def extent(client: Client, mesh: Mesh, shape: torch.Size) -> tuple[int, int]:
    """This rank's rows of what has @shape: the first, and how many."""
    assert client.member is not None
    return rows_of(client.member.rank, mesh, shape)


def rows_of(rank: int, mesh: Mesh, shape: torch.Size) -> tuple[int, int]:
    """The same of any rank."""
    rows = shape[0] if shape else 1
    if not shape:
        return 0, rows
    position = mesh.ranks.index(rank) % mesh.shard
    each = -(-rows // mesh.shard)
    first = min(position * each, rows)
    return first, min(each, rows - first)


def early(mesh: Mesh | None, whole: torch.Tensor, name: str) -> tuple[Any, torch.Tensor]:
    """This rank's rows of @whole, parameter @name, before there is a session: as a DTensor, and
    as they are. @mesh: None: all ranks."""
    dist = torch.distributed
    if not distributed():
        if launched_or_alone().world_size == 1:
            return whole, whole
        raise FailedPrecondition(
            f"parameter '{name}' is sharded over several ranks and torch.distributed is not "
            "initialised, so its rows cannot be a DTensor: call "
            "torch.distributed.init_process_group(), or change it before fully_shard")
    if mesh is None:
        mesh = world(dist.get_world_size())
    if mesh.given is None and mesh not in _early:
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.tensor(mesh.ranks)
        if mesh.replicas > 1:
            ranks = ranks.view(mesh.replicas, mesh.shard)
        _early[mesh] = DeviceMesh(whole.device.type, ranks)
    first, n = rows_of(dist.get_rank(), mesh, whole.shape)
    rows = whole[first:first + n] if whole.shape else whole
    return as_dtensor(mesh.given or _early[mesh], rows, whole.shape), rows


class Piece:
    """This rank's rows of one parameter of a unit, by rows."""

    def __init__(self, client: Client, unit: int, number: int, shape: torch.Size,
                 rows: int, dtype: torch.dtype) -> None:
        """@unit, @number: the daemon's, of the unit and of the tensor in it. @dtype: in which the
        parameters are stored, and their gradients are seen."""
        self.client, self._unit, self._number = client, unit, number
        self._dtype = dtype
        self.shape = torch.Size((rows, *shape[1:])) if shape else shape

    def _copy(self, array: int, write: bool, local: torch.Tensor) -> None:
        n = local.numel()
        if not n:
            return
        dtype = torch.float32 if array == GRADIENT else self._dtype
        with self.client.alloc((n,), DTYPES[dtype]) as buffer:
            flat = tensor_at(buffer.memory.address, n, dtype).view(local.shape)
            if write:
                flat.copy_(local)
            self.client.do("copy_shard", self._unit, self._number, array, write, buffer.id, 0, n)
            if not write:
                local.copy_(flat)
            del flat

    def read(self, array: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy, or @into. FailedPrecondition: there is no such gradient now."""
        local = into
        if local is None:
            local = torch.empty(self.shape, dtype=self._dtype, device=_device.here)
        with torch.no_grad():
            self._copy(array, False, local.detach())
        return local

    def write(self, array: int, local: torch.Tensor) -> None:
        """What read gave, changed. FailedPrecondition: there is no such gradient now, or a rank has
        the parameters gathered."""
        with torch.no_grad():
            self._copy(array, True, local.detach())


__all__ = ["GRADIENT", "PARAMETERS", "Piece", "as_dtensor", "device_mesh", "distributed", "early",
           "extent", "placements", "rows_of"]
