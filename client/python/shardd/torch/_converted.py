"""What both directions of converting checkpoints have in common (shardd.torch.checkpoint)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Union

from ..errors import InvalidArgument

Path = Union[str, "os.PathLike[str]"]

BLOB = ("shardd", "blob")  # where a distributed checkpoint has blobs, with the rank behind it
OWN = "shardd:"  # buffers of the client library


@dataclass(frozen=True)
class Converted:
    """What was converted. ``path``: of the new checkpoint; ``parameters``: how many tensors;
    ``left_out``: keys of the source that the new one does not have, and why; ``lacks``: what a
    checkpoint of that kind can have, and the source has not."""

    path: str
    step: int
    parameters: int
    left_out: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def listed(all_of_them: Iterable[str], most: int = 8) -> str:
    """For messages: the names, of many the first ones."""
    found = sorted(all_of_them)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(f"'{name}'" for name in found[:most]) + more


def check_aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """Other names of tied parameters, each of a name that is none itself."""
    for new, old in aliases.items():
        if new == old or old in aliases:
            raise InvalidArgument(f"'{new}' is given as another name of '{old}', which is itself "
                                  "such a name, or the same", "aliases")
    return dict(aliases)


__all__ = ["BLOB", "OWN", "Converted", "Path", "check_aliases", "listed"]
