"""How fully_shard and replicate name units: as their modules, with a number before the second
model's, and a bucket's name behind a # where a module has several units."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def module_of(unit: str) -> str:
    """The path of the module that @unit is of; "root": the model itself."""
    number, colon, inner = unit.partition(":")
    return (inner if colon and number.isdigit() else unit).partition("#")[0]


def path_of(unit: str, tensor: str, root: str = "root") -> str:
    """The tensor's name in the model."""
    module = module_of(unit)
    return tensor if module == root else f"{module}.{tensor}"


def untied(parameter: torch.Tensor) -> str:
    """What to add to the error that there is no tensor for @parameter."""
    if not parameter.is_meta:
        return ""
    return ("; it is on the meta device: if the model ties it to another parameter, call "
            "tie_weights() of the model first (accelerate.init_empty_weights() unties)")


__all__ = ["module_of", "path_of", "untied"]
