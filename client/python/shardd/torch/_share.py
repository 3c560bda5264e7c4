"""Which elements of a parameter each rank's own optimizer has.

The daemon says it of what it lends; this is its rule (docs/protocol.md, BY_TRAINER) where all
ranks are on one device, for what must be known before, and of other ranks.
"""

from __future__ import annotations

from . import _rows
from ._tree import its_tree
from ._unit import Parameter, ShardedUnit


def by_rows(unit: ShardedUnit) -> bool:
    """Has every rank whole rows of each parameter, as sharded state dicts have them?"""
    return not unit.replicated and _rows.mesh_of(its_tree(unit)).replicas == 1


def cut(size: int, per: int, position: int) -> tuple[int, int]:
    """Where a piece of @per of @size begins, and what of it there is."""
    first = min(position * per, size)
    return first, min(per, size - first)


def extents(unit: ShardedUnit, p: Parameter) -> list[tuple[int, int]]:
    """Of each rank of the mesh, in its order: the first element, and how many."""
    ranks = len(_rows.mesh_of(its_tree(unit)).ranks)
    n = p.shape.numel()
    if by_rows(unit):
        rows = p.shape[0] if p.shape else 1
        per = -(-rows // ranks) * (n // rows if rows else 0)
        return [cut(n, per, position) for position in range(ranks)]
    if not p.trained:
        return [(0, 0)] * ranks
    # One after the other, cut into equal pieces.
    at = sum(q.shape.numel() for q in unit.trained[:unit.trained.index(p)])
    per = -(-sum(q.shape.numel() for q in unit.trained) // ranks)
    pieces = []
    for position in range(ranks):
        first, end = (min(max(edge * per - at, 0), n) for edge in (position, position + 1))
        pieces.append((first, end - first) if end > first else (0, 0))
    return pieces


def position(unit: ShardedUnit) -> int:
    """This rank's in the mesh."""
    tree = its_tree(unit)
    assert tree.client.member is not None
    return _rows.mesh_of(tree).ranks.index(tree.client.member.rank)


def own(unit: ShardedUnit, p: Parameter) -> tuple[int, int]:
    """This rank's: the first element, and how many."""
    return extents(unit, p)[position(unit)]


__all__ = ["by_rows", "cut", "extents", "own", "position"]
