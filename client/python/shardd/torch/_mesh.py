"""Which ranks share a model, and how: a torch DeviceMesh, or the same in plain numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument, Unimplemented


@dataclass(frozen=True)
class Mesh:
    """``ranks``: of the job, replica after replica. ``shard``: how many of them have one replica
    between them. ``given``: the DeviceMesh it was made from."""

    ranks: tuple[int, ...]
    shard: int
    given: Any = None

    @property
    def replicas(self) -> int:
        """How many copies of the parameters there are."""
        return len(self.ranks) // self.shard

    @property
    def label(self) -> str:
        """Its ranks, for names of groups and units."""
        first, last = self.ranks[0], self.ranks[-1]
        if self.ranks == tuple(range(first, last + 1)):
            return f"{first}-{last}"
        return f"{first}-{last}-{zlib.crc32(repr(self.ranks).encode()):08x}"


def world(size: int) -> Mesh:
    """All ranks share one replica."""
    return Mesh(tuple(range(size)), size)


def _numbers(mesh: Any) -> list[list[int]]:
    """The rows of a mesh: replicas. InvalidArgument: it is none."""
    made: list[list[Any]] = []
    if isinstance(mesh, Sequence) and not isinstance(mesh, (str, bytes)):
        rows = mesh if any(isinstance(r, Sequence) for r in mesh) else [mesh]
        made = [list(row) if isinstance(row, Sequence) else [None] for row in rows]
    ranks = [r for row in made for r in row]
    if not ranks or not all(isinstance(r, int) and r >= 0 for r in ranks) or \
            len({len(row) for row in made}) != 1 or len(set(ranks)) != len(ranks):
        raise InvalidArgument(
            f"mesh is {mesh!r}: give ranks, as (0, 1, 2, 3), or replicas of the same size, as "
            "((0, 1), (2, 3)), each rank once; or a DeviceMesh", "mesh")
    return made


def _check_torch(mesh: Any) -> None:
    if mesh.ndim > 2:
        raise Unimplemented(f"mesh has {mesh.ndim} dimensions, must have one (shards) or two "
                            "(replicas, shards); take a sub-mesh of it, mesh[\"name\"]", "mesh")
    if mesh.device_type not in ("cpu", "cuda"):
        raise Unimplemented(f"mesh is of {mesh.device_type}: only host and CUDA memory is "
                            "supported; give init_device_mesh(\"cpu\" or \"cuda\", ...)", "mesh")


def parse(mesh: Any) -> Mesh | None:
    """@mesh: None, a torch DeviceMesh of one dimension (shards) or two (replicas, shards), or
    ranks as nested sequences of numbers. Return: None for None."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    given = mesh if hasattr(mesh, "device_type") and hasattr(mesh, "mesh") else None
    if given is not None:
        _check_torch(given)
    rows = _numbers(mesh if given is None else given.mesh.tolist())
    return Mesh(tuple(r for row in rows for r in row), len(rows[0]), given)


__all__ = ["Mesh", "parse", "world"]
