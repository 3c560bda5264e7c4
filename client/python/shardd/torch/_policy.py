"""Which modules inside a model become units: what a wrapping policy says.

Policies are those of torch.distributed.fsdp.wrap, by what they can do and not by their class, and
plain predicates and classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from torch import nn

from ..errors import InvalidArgument

Options = dict[str, Any]


def _classes(policy: Any) -> tuple[type, ...]:
    """@policy, if it is a module class or some of them; else none."""
    given = policy if isinstance(policy, (set, frozenset, tuple, list)) else (policy,)
    return tuple(given) if all(isinstance(c, type) for c in given) else ()


def _is_recursive(policy: Any) -> bool:
    """Does it take (module, recurse, nonwrapped_numel), as PyTorch's functions do?"""
    try:
        names = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return False
    return {"recurse", "nonwrapped_numel"} <= set(names)


def _recursive(module: nn.Module, policy: Callable[..., bool], ignored: set[int],
               found: dict[nn.Module, Options], root: bool) -> int:
    """Elements of @module's parameters that units have, those of @found and it."""
    every = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
    if not policy(module=module, recurse=True, nonwrapped_numel=every):
        return 0
    wrapped = sum(_recursive(child, policy, ignored, found, False)
                  for child in module.children())
    if root or not policy(module=module, recurse=False, nonwrapped_numel=every - wrapped):
        return wrapped
    found[module] = {}
    return every


def _asked(module: nn.Module, predicate: Callable[[nn.Module], Any]) -> Options | None:
    """The options of a unit, or None if @module does not become one."""
    said = predicate(module)
    if not isinstance(said, (bool, dict)):
        raise InvalidArgument(f"policy returned {said!r} for a {type(module).__name__}: must be "
                              "True, False or a dictionary of arguments of fully_shard", "policy")
    if not said:
        return None
    return dict(said) if isinstance(said, dict) else {}


def _run(root: nn.Module, policy: Any, ignored: set[int]) -> dict[nn.Module, Options]:
    classes = _classes(policy)
    if classes:
        return {m: {} for m in root.modules() if isinstance(m, classes)}
    if hasattr(policy, "_run_policy"):  # ModuleWrapPolicy, CustomPolicy
        return dict(policy._run_policy(root, set(), {}))
    if not callable(policy):
        raise InvalidArgument(
            f"policy is {policy!r}, must be module classes, a function of a module, or a policy of "
            "torch.distributed.fsdp.wrap", "policy")
    found: dict[nn.Module, Options] = {}
    if _is_recursive(policy):
        _recursive(root, policy, ignored, found, True)
        return found
    for module in root.modules():
        options = _asked(module, policy)
        if options is not None:
            found[module] = options
    return found


def targets(root: nn.Module, policy: Any,
            ignored: Iterable[nn.Parameter]) -> list[tuple[nn.Module, Mapping[str, Any]]]:
    """The modules inside @root that become units, inner ones before outer ones, and which of
    fully_shard's arguments differ for each. @root itself is not one of them."""
    found = _run(root, policy, {id(p) for p in ignored})
    # modules() has outer ones first, each once. A container without a forward has nothing that
    # could gather it: its parameters go to the unit around it.
    order = [m for m in root.modules()
             if m in found and m is not root and not isinstance(m, (nn.ModuleList, nn.ModuleDict))]
    return [(m, found[m]) for m in reversed(order)]


__all__ = ["targets"]
