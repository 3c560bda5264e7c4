"""Communication hooks: PyTorch's own, which the daemon has as profiles of a reduction, and others,
which run here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..specs import Profile
from ._comm_hook import CommHook
from ._session import world_size
from ._unit import ShardedUnit

_Found = tuple[Profile, "torch.dtype | None"]

# Of a hook by its name in the module.
_DDP: dict[str, _Found] = {
    "allreduce_hook": (Profile.DDP_HOOK, None),
    "fp16_compress_hook": (Profile.DDP_HOOK, torch.float16),
    "bf16_compress_hook": (Profile.DDP_HOOK, torch.bfloat16),
}
_FSDP: dict[str, _Found] = {
    "reduce_scatter_hook": (Profile.FSDP1_HOOK, None),
    "fp16_compress_hook": (Profile.FSDP1_HOOK, torch.float16),
    "bf16_compress_hook": (Profile.FSDP1_HOOK, torch.bfloat16),
}


def _module(replicated: bool) -> Any:
    """Where PyTorch has its hooks. Imported when one is wanted: it takes a while."""
    if replicated:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as ddp

        return ddp
    from torch.distributed.algorithms._comm_hooks import default_hooks as fsdp

    return fsdp


def _unwrapped(hook: Any, module: Any) -> Any:
    """What a compressing wrapper of PyTorch's around its own allreduce_hook comes to."""
    name = getattr(hook, "__qualname__", "").split(".")[0]
    if getattr(hook, "__module__", "") != module.__name__ or not name.endswith("_wrapper"):
        return hook
    if inspect.getclosurevars(hook).nonlocals.get("hook") is not module.allreduce_hook:
        return hook
    return getattr(module, name.replace("_wrapper", "_hook"))


def check_all_ranks(group: Any, name: str) -> None:
    """@group: None, or a process group, or a mesh, of all ranks; argument @name."""
    if group is None:
        return
    size = getattr(group, "size", None)
    if not callable(size):
        raise InvalidArgument(f"{name} is {group!r}, must be None or a process group of all "
                              "ranks", name)
    if size() != world_size():
        raise Unimplemented(f"{name} has {size()} ranks: gradients are reduced over all "
                            f"{world_size()} ranks of the job", name)


def _check_state(state: Any, found: _Found) -> None:
    """Unimplemented: it asks for another reduction than the profile's."""
    kind = getattr(state, "parameter_type", torch.float32)
    if kind is not torch.float32 and found[1] is not None:
        raise Unimplemented(f"state.parameter_type is {kind}: reduced gradients are kept in "
                            "float32, as the parameters are", "state")
    rule = getattr(state, "_get_gradient_predivide_factor", None)
    if rule is None:
        return
    before = rule(state.world_size)
    for name, usual in (("gradient_predivide_factor", before),
                        ("gradient_postdivide_factor", state.world_size / before)):
        if getattr(state, name) != usual:
            raise Unimplemented(
                f"state.{name} is {getattr(state, name)}, for {state.world_size} ranks only "
                f"{usual} is supported: multiply the loss, or leave the hook out and call "
                "set_gradient_divide_factor", "state")


def check_states(units: Sequence[ShardedUnit]) -> None:
    """The same, of states that were changed since they were registered."""
    seen: set[int] = set()
    for unit in units:
        if unit.hook is not None and unit.hook_state is not None and \
                id(unit.hook_state) not in seen:
            seen.add(id(unit.hook_state))
            _check_state(unit.hook_state, unit.hook)


def _find(hook: Any, replicated: bool) -> _Found | None:
    """None: it is none of PyTorch's that the daemon has."""
    known, module = _DDP if replicated else _FSDP, _module(replicated)
    hook = _unwrapped(hook, module) if replicated else hook
    for name, found in known.items():
        if hook is getattr(module, name):
            return found
    return None


# The arguments of a hook that runs here.
_DDP_TAKES = "(state, bucket) -> Future, as DistributedDataParallel's"
_FSDP_TAKES = "(state, gradient, output) -> None, as FSDP1's"


def _check_own(hook: Any, units: Sequence[ShardedUnit]) -> None:
    takes, n = (_DDP_TAKES, 2) if units[0].replicated else (_FSDP_TAKES, 3)
    if not callable(hook):
        raise InvalidArgument(f"hook is {hook!r}: it must be a function {takes}", "hook")
    try:
        inspect.signature(hook).bind(*range(n))
    except TypeError:
        raise InvalidArgument(f"hook is {getattr(hook, '__qualname__', hook)!s}, which does not "
                              f"take {n} arguments: it must be a function {takes}",
                              "hook") from None
    except ValueError:  # a function of C: nothing is known of its arguments
        pass
    if any(u.mesh is not None and u.mesh.replicas > 1 for u in units):
        raise Unimplemented("a communication hook of your own gets gradients that are reduced in "
                            "one step: with replicas of shards (HSDP) use one of PyTorch's", "hook")


def register(units: Sequence[ShardedUnit], state: Any, hook: Any) -> None:
    """The units are reduced as @hook does it, from their registration on."""
    found = _find(hook, units[0].replicated)
    for unit in units:
        if unit.unit is not None:
            raise FailedPrecondition("register_comm_hook was called after the first forward or "
                                     "after the optimizer was built, when the daemon already knows "
                                     "how gradients are reduced: call it right after wrapping")
        if unit.pre_divide:
            raise Unimplemented("mixed_precision brings its own communication hook: give either "
                                "mixed_precision or a hook", "hook")
        if unit.hook is not None or unit.own_hook is not None:
            raise FailedPrecondition("register_comm_hook was already called: only one hook is "
                                     "allowed")
    if found is None:
        _check_own(hook, units)
        for unit in units:
            unit.own_hook = CommHook(hook, state)
        return
    check_all_ranks(getattr(state, "process_group", state), "state")
    _check_state(state, found)
    for unit in units:
        unit.hook, unit.hook_state = found, state


__all__ = ["check_all_ranks", "check_states", "register"]
