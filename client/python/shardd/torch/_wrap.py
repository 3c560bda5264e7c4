"""fully_shard: hooks on a module that gather, release and reduce its unit."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import FailedPrecondition, InvalidArgument, SharddError, Unimplemented
from . import _base, _entrance, _faults, _fsdp2, _hooks, _mesh, _policy, _state, _types
from ._guard import Guard
from ._tree import Tree, built, empty, tree_of, unit_of, units_of
from ._unit import Call, ShardedUnit, is_original

M = TypeVar("M", bound=nn.Module)


class ShardedModule(_fsdp2.Settings):
    """The methods that fully_shard adds to a module; names as in FSDP2's FSDPModule."""

    def _unit(self) -> ShardedUnit:
        unit = unit_of(self)  # type: ignore[arg-type]
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> list[ShardedUnit]:
        """This module's own, with @recurse also those inside."""
        return units_of(self) if recurse else _state.own_units(self)  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients (of the whole model: collective, if they were reduced). Of a part of
        it only together with the rest."""
        unit = self._unit()
        tree = built(unit)
        if tree is not None and unit is tree.root:
            tree.zero_grad(set_to_none)
        super().zero_grad()  # type: ignore[misc]

    _orig_cls_mro_index: int  # of the class without this one, for FSDPModule's __new__

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped class's: FSDP2's is for its own state. to_empty() gives memory to parameters
        that are on the meta device (:meth:`Guard.in_apply`)."""
        with Guard.in_apply():
            return type(self).__mro__[self._orig_cls_mro_index]._apply(  # type: ignore[attr-defined]
                self, *args, **kwargs)

    def _get_fsdp_state(self) -> Any:
        """What functions of torch.distributed.fsdp ask an FSDPModule for."""
        raise Unimplemented(
            f"this {type(self).__name__} is sharded by shardd: use the function of shardd.torch "
            "instead of torch.distributed.fsdp's")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: a gather is over when it returns."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unimplemented(f"a {type(self).__name__} cannot be pickled, since its parameters are "
                            "in the daemon: save its state_dict()")

    def unshard(self, async_op: bool = False) -> Unsharded | None:
        """Gather this module's own unit; :meth:`reshard` releases it. Return: with @async_op an
        object to wait for; the parameters are available when this returns."""
        unit = self._unit()
        tree_of(unit)
        unit.gather()
        unit.install()
        return Unsharded() if async_op else None

    def reshard(self) -> None:
        """Release this module's own unit."""
        self._unit().release()

    def set_requires_gradient_sync(self, sync: bool, *, recurse: bool = True) -> None:
        """False: backward adds up the gradients of this module's unit on this rank, without
        reduction. @recurse: also those of the units inside. All ranks must set the same."""
        for unit in self._units(recurse):
            unit.sync = bool(sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: each backward waits for its reductions at its end."""

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Does nothing: gathered parameters exist once in the machine's memory for all ranks. A
        gather only casts or collects them, and from the second step on the daemon starts the next
        unit's gather by itself, in the order that it has seen."""

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Does nothing, as in forward."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this module's own unit, whose parameters it does not
        need (an embedding's). If it reads them nevertheless, it ends with FailedPrecondition."""
        for unit in self._units(False):
            unit.unshard_in_backward = bool(unshard_in_backward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *,
                                   recurse: bool = True) -> None:
        """False: this module's unit stays gathered after backward, for the next forward. Whatever
        changes or reads the parameters (the step, state_dict()) releases it before. With an
        optimizer in backward it is released in any case. @recurse: also the units inside."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward adds gradients up within each replica; the next backward with True adds
        the replicas' sums. Without replicas of shards it changes nothing. @recurse: also the units
        inside."""
        for unit in self._units(recurse):
            unit.all_reduce = bool(requires_all_reduce)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """set_requires_gradient_sync(False) inside."""
        tree = tree_of(self._unit())
        before = [(unit, unit.sync) for unit in tree.units]
        tree.set_sync(False)
        try:
            yield
        finally:
            for unit, sync in before:
                unit.sync = sync

    def set_reshard_after_forward(self, reshard: bool, recurse: bool = True) -> None:
        """Is a unit released after its forward, to be gathered again for backward?"""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0,
                        error_if_nonfinite: bool = False) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ of the whole model's gradients (collective).
        Return: their norm before."""
        return tree_of(self._unit()).clip(max_norm, norm_type, error_if_nonfinite)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Reduce this module's units, and those inside it, by a hook, as FSDP1. Before the
        optimizer is built.

        The daemon does what torch.distributed.algorithms._comm_hooks.default_hooks has:
        reduce_scatter_hook, fp16_compress_hook, bf16_compress_hook; then @state is None, or what
        has a process group of all ranks. Any other function (state, gradient, output) runs in this
        process, with the unit's flat gradient, padded, and room for this rank's part."""
        _hooks.register(units_of(self), state, hook)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """What the module says of itself, and its unit."""
        own = super().extra_repr()  # type: ignore[misc]
        units = map(repr, _state.own_units(self))  # type: ignore[arg-type]
        return "\n".join([own, *units] if own else units)


class Unsharded:
    """What unshard(async_op=True) gives."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


# ---------------------------------------------------------------------- wrapping


def own_parameters(module: nn.Module, ignored: set[int]) -> list[tuple[nn.Module, str, str]]:
    """(module, attribute, name) of all parameters below that no unit has yet."""
    _check_extensions(module, ignored)
    inner = {p.original: (u, p) for u in units_of(module) for p in u.params}
    replicated, found = _by_pytorch(module), []
    for prefix, owner in module.named_modules():
        if id(owner) in replicated:
            continue
        for attribute, value in owner._parameters.items():
            if value is None or isinstance(value, Guard) or id(value) in ignored or \
                    _types.is_kept(value) or _base.is_bound(value):
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if id(value) in inner:
                unit, other = inner[id(value)]
                raise InvalidArgument(
                    f"'{name}' is tied to '{other.name}' of {type(unit.module).__name__}, which is "
                    "already a unit: tied parameters must be in one unit, so wrap the module "
                    "that contains both and not the inner one", name)
            if is_original(value):
                raise InvalidArgument(
                    f"'{name}' is tied to a parameter of another module, which is already a unit: "
                    "tied parameters must be in one unit, so wrap a module that contains both and "
                    "neither of them by itself, also not in a list", name)
            found.append((owner, attribute, name))
    return found


def _by_pytorch(module: nn.Module) -> set[int]:
    """The modules inside that PyTorch's own replicate() has, which FSDP2 leaves alone, too."""
    key = "torch.distributed._composable.contract"
    if key not in sys.modules:
        return set()
    registry = sys.modules[key]._get_registry
    return {id(inner) for m in module.modules() if "replicate" in (registry(m) or ())
            for inner in m.modules()}


def _check_extensions(module: nn.Module, ignored: set[int]) -> None:
    """Unimplemented: a parameter has code of its own for FSDP2's gathers."""
    for name, value in module.named_parameters():
        if hasattr(value, "fsdp_pre_all_gather") and id(value) not in ignored:
            raise Unimplemented(
                f"parameter '{name}' has fsdp_pre_all_gather: the daemon gathers the numbers of "
                "parameters and runs none of your code; give a plain tensor, or add it to "
                "ignored_params", name)


def _check_placement(parameters: list[tuple[nn.Module, str, str]], placement: Any) -> None:
    """@placement: of torch's shard_placement_fn; it may say what is done anyway."""
    if not callable(placement):
        raise InvalidArgument(f"shard_placement_fn is {placement!r}, must be a function of a "
                              "parameter", "shard_placement_fn")
    for module, attribute, name in parameters:
        value = module._parameters[attribute]
        assert value is not None
        said = placement(value)
        dim = getattr(said, "dim", None)
        if said is None or dim == 0 or (dim == -1 and value.dim() == 1):
            continue
        raise Unimplemented(
            f"shard_placement_fn returned {said} for '{name}': parameters are cut along their "
            "first dimension; return Shard(0) or None, the losses are the same",
            "shard_placement_fn")


def _check_offload(policy: Any) -> None:
    """OffloadPolicy means nothing, CPUOffloadPolicy that shards are host memory, as they are where
    the daemon has no GPU."""
    if policy is not None and type(policy).__name__ not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise Unimplemented(f"offload_policy is {policy!r}, must be None, OffloadPolicy or "
                            "CPUOffloadPolicy", "offload_policy")


def fully_shard(module: M, *, mesh: Any = None, reshard_after_forward: bool | int | None = None,
                shard_placement_fn: Any = None, mp_policy: Any = None, offload_policy: Any = None,
                ignored_params: Iterable[nn.Parameter] | None = None, policy: Any = None,
                master: Any = None) -> M:
    """Shard the parameters of @module that no inner fully_shard has taken, as one unit.

    Call it on inner modules first and on the model last, as in PyTorch's FSDP2. The parameters go
    to the daemon when the optimizer is built, or at the first forward. They can be computed with
    only while they are gathered for a forward or backward.

    @module: or a list of modules, each of which becomes a unit; those that share parameters with
    each other become a part of the unit around them. @reshard_after_forward: False: kept
    from forward to the end of backward. None: False for the model, True for what is inside. A
    number of ranks: True, but for 1. @mp_policy: torch.distributed.fsdp's
    MixedPrecisionPolicy. @ignored_params: not sharded; every rank has its own.
    @mesh: a DeviceMesh of the model's device, or ranks in plain numbers: (0, 1, 2, 3) share the
    parameters, ((0, 1), (2, 3)) are replicas of two ranks each, whose gradients are averaged too
    (HSDP). The same for all units of a model; None: all ranks of the job. @shard_placement_fn: may
    say Shard(0), anything else raises Unimplemented. @offload_policy: CPUOffloadPolicy works with
    host memory only, where it changes nothing.
    @policy: which modules inside become units, too, with the same arguments: module classes, a
    function of a module that says True, False or a dictionary of other arguments, or a policy of
    torch.distributed.fsdp.wrap (ModuleWrapPolicy, CustomPolicy, size_based_auto_wrap_policy...).
    @master: "fp32": the daemon keeps the parameters in float32, whatever type they have; forward
    computes in the type they have, or in mp_policy's. None: it keeps them in their own type, and
    one that is not float32 is stepped by optimizers of torch.optim alone.

    Return: @module, whose class now has the methods of :class:`ShardedModule` too, and FSDP2's
    prefix "FSDP" before its name.
    """
    _check_offload(offload_policy)
    if isinstance(module, (list, tuple)):
        arguments = dict(mesh=mesh, reshard_after_forward=reshard_after_forward,
                         shard_placement_fn=shard_placement_fn, mp_policy=mp_policy,
                         offload_policy=offload_policy, ignored_params=list(ignored_params or ()),
                         policy=policy, master=master)
        _each(module, arguments)
        return module
    if not isinstance(module, nn.Module):
        raise InvalidArgument(f"fully_shard of a {type(module).__name__}: give a module, or a list "
                              "of modules", "module")
    if mp_policy is not None and not hasattr(mp_policy, "param_dtype"):
        raise InvalidArgument(f"mp_policy is {mp_policy!r}, must be a MixedPrecisionPolicy of "
                              "torch.distributed.fsdp", "mp_policy")
    ignored = list(ignored_params or ())
    reshard_after_forward = _reshard(reshard_after_forward)
    if unit_of(module) is not None:
        raise FailedPrecondition(
            f"fully_shard or replicate was already called on this {type(module).__name__}")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise InvalidArgument(f"{type(module).__name__} has no forward: wrap the modules in it")
    given = _mesh.parse(mesh)
    if policy is not None:
        arguments = dict(mesh=given, reshard_after_forward=reshard_after_forward,
                         shard_placement_fn=shard_placement_fn, mp_policy=mp_policy,
                         offload_policy=offload_policy, ignored_params=ignored, master=master)
        for inner, other in _policy.targets(module, policy, ignored):
            if unit_of(inner) is None:
                fully_shard(inner, **{**arguments, **other})
    parameters = own_parameters(module, {id(p) for p in ignored})
    _take_left(module)
    if shard_placement_fn is not None:
        _check_placement(parameters, shard_placement_fn)
    stored = _types.master_of(master)
    units = [ShardedUnit(module, part, reshard_after_forward, mp_policy, stored)
             for part in _types.split(module, parameters)]
    for below in units_of(module):
        if below.parent is None:
            below.parent = units[0]
    for unit in units:
        unit.mesh = given
        unit.offload = type(offload_policy).__name__ == "CPUOffloadPolicy"
    for unit in units[1:]:
        unit.parent, unit.bucket = units[0], f"#{_types.name_of(unit.dtype)}"
    units[0].companions = units[1:]
    object.__setattr__(module, "_shardd_units", units)
    module.__class__ = with_methods(type(module), ShardedModule, "FSDP")
    _add_hooks(module)
    return module


_classes: dict[tuple[type, type], type] = {}


def _pytorchs(methods: type) -> tuple[type, ...]:
    """What an instance of @methods is to other libraries: FSDP2's class, which makes of a slice of
    a wrapped container one that is not wrapped."""
    if methods is not ShardedModule or not torch.distributed.is_available():
        return ()
    from torch.distributed.fsdp import FSDPModule

    return (FSDPModule,)


def with_methods(kind: type, methods: type, prefix: str) -> type:
    """@kind with @methods before its own; the same for the same two. What is made of classes' names
    (the architecture that transformers saves) must be that of @kind: transformers takes away the
    prefix that FSDP2 uses, no other one."""
    if (kind, methods) not in _classes:
        made = type(prefix + kind.__name__, (methods, *_pytorchs(methods), kind), {
            "__module__": kind.__module__, "__doc__": kind.__doc__})
        made._orig_cls_mro_index = made.__mro__.index(kind)  # type: ignore[attr-defined]
        _classes[kind, methods] = made
    return _classes[kind, methods]


def _each(modules: Iterable[Any], arguments: dict[str, Any]) -> None:
    """Wrap each of @modules, those inside others of them first."""
    modules = list(modules)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"fully_shard of a list with a {type(module).__name__}: give "
                                  "modules", "module")
    within = {id(m): sum(any(m is inner for inner in other.modules()) for other in modules)
              for m in modules}
    tied = _tied(modules, {id(p) for p in arguments["ignored_params"]})
    for module in sorted(modules, key=lambda m: -within[id(m)]):
        if id(module) in tied:
            _leave_to_outer(module, tied[id(module)])
        else:
            fully_shard(module, **arguments)


def _tied(modules: list[nn.Module], ignored: set[int]) -> dict[int, str]:
    """Those of @modules that share parameters with another one, and none of them has them all: by
    id, with the name of such a parameter."""
    having: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, value in module.named_parameters():
            if id(value) not in ignored and not isinstance(value, Guard):
                having.setdefault(id(value), []).append((module, name))
    found = {}
    for users in having.values():
        if not any(all(any(m is inner for inner in outer.modules()) for m, _ in users)
                   for outer, _ in users):
            found.update({id(m): f"{name}' of {type(m).__name__}" for m, name in users})
    return found


def _leave_to_outer(module: nn.Module, name: str) -> None:
    """Tied parameters are in one unit: that of the next module around that is wrapped. Until there
    is one, @module cannot be used, since nobody would reduce its gradients."""

    def refuse(*_: Any) -> None:
        raise FailedPrecondition(
            f"'{name} is tied to a parameter of another module of the list given to fully_shard: "
            "tied parameters must be in one unit, so call fully_shard on a module that contains "
            "both as well")

    object.__setattr__(module, "_shardd_left", module.register_forward_pre_hook(refuse))


def _take_left(module: nn.Module) -> None:
    """What was left to @module is in its unit."""
    for inner in module.modules():
        left = inner.__dict__.pop("_shardd_left", None)
        if left is not None:
            left.remove()


def _reshard(given: Any) -> bool | None:
    """FSDP2 keeps the parameters of a unit on a smaller mesh of @given ranks, if it is a number.
    Here all ranks share what one gathers, so there is nothing smaller: 1 is False, more is True."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int) or given < 1:
        raise InvalidArgument(f"reshard_after_forward is {given!r}, must be True, False, None or a "
                              "number of ranks above 0", "reshard_after_forward")
    return given > 1


def _add_hooks(module: nn.Module) -> None:
    module.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_post_forward, always_call=True)
    _state.add_hooks(module)


# ------------------------------------------------------------------------- hooks


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors in @value as @dtype."""
    def one(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if torch.is_floating_point(x) else x

    return pytree.tree_map_only(torch.Tensor, one, value)


def _running(unit: ShardedUnit) -> Tree | None:
    """None: the model has no parameters."""
    tree = built(unit)
    return tree if tree is not None or empty(unit) else tree_of(unit)


def _not_compiled(function: Any) -> Any:
    """Hooks are no part of what torch.compile makes of a module. What says so imports the compiler,
    which takes seconds: it is not asked for before somebody compiles. From then on the module has
    hooks of which the compiler knows, and does not look into this wrapper for each of them."""
    known: list[Any] = []

    @functools.wraps(function)
    def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(module, *args, **kwargs)
        if not known:
            known.append(torch.compiler.disable(function))
        return _told(module, wrapper, known[0])(module, *args, **kwargs)

    return wrapper


def _told(module: nn.Module, wrapper: Any, known: Any) -> Any:
    """@module has @known as a hook in the place of @wrapper. Return: @known."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number, hook in hooks.items():
            if hook is wrapper:
                hooks[number] = known
    return known


def _begin(tree: Tree, unit: ShardedUnit) -> None:
    if unit is tree.root and not (tree.backward and torch._C._current_graph_task_id() != -1):
        tree.begin_forward()
        _hooks.check_states(tree.units)
    unit.gather()
    unit.install()


@_not_compiled
def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None
    with torch._C._DisableFuncTorch():  # of jvp and the like: what is made here has no tangents
        tree = _running(unit)
        if tree is not None:
            _begin(tree, unit)
    if tree is not None and unit.partly_frozen:
        unit.calls.append(_watched(tree, unit, (args, kwargs)))
    policy, changed = unit.mp_policy, None
    if getattr(policy, "param_dtype", None) and getattr(policy, "cast_forward_inputs", True):
        changed = _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)
    behind = _entrance.through(*(changed or (args, kwargs))) if unit.params else None
    return changed if behind is None else behind


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors in @value: in containers, and in attributes of objects of the user's."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and id(leaf) not in seen and \
                not isinstance(leaf, (nn.Module, type)):
            seen.add(id(leaf))
            yield from _tensors(list(vars(leaf).values()), seen)


@_not_compiled
def _post_forward(module: nn.Module, args: Any, output: Any) -> Any:
    """Also after an exception: then there is no output."""
    unit = unit_of(module)
    assert unit is not None
    tree = built(unit)
    if tree is None or tree.elsewhere:  # it was refused; nothing is this thread's to end
        return None
    if unit is tree.root and not unit.within:
        tree.end_forward()
    watched, call = False, unit.calls.pop() if unit.calls else None
    if torch.is_grad_enabled():
        for tensor in _tensors(output, set()):
            if tensor.requires_grad:
                tensor.register_hook(_before_backward(tree, unit, call))
                watched = True
    dtype = getattr(unit.mp_policy, "output_dtype", None)
    changed = _cast(output, dtype) if dtype is not None and output is not None else None
    if unit.within:  # the method that has called forward goes on with the parameters
        return changed
    reshard = unit.reshard_after_forward
    if reshard is None:
        reshard = unit is not tree.root
    unit.uninstall()
    failed = output is None and sys.exc_info()[0] is not None
    # What nothing announces in backward must stay until it is over.
    hidden = torch.is_grad_enabled() and not watched and (
        bool(unit.trained) or any(t.requires_grad for t in _tensors(args, set())))
    unit.unannounced = unit.unannounced or hidden
    if not unit.in_backward and failed:
        with contextlib.suppress(SharddError):  # perhaps what ended forward is why
            unit.release()
    elif not unit.in_backward and reshard and not hidden:
        unit.release()
    if not failed:
        _faults.check()
    return changed


def _before_backward(tree: Tree, unit: ShardedUnit, call: Call | None = None) -> Any:
    def hook(gradient: torch.Tensor) -> None:
        tree.pre_backward(unit, call)

    return hook


def _watched(tree: Tree, unit: ShardedUnit, given: Any) -> Call:
    """A forward of @unit, which says when backward has left it by the inputs in @given."""
    call = Call()
    if not torch.is_grad_enabled():
        return call

    def hook(gradient: torch.Tensor) -> None:
        tree.input_gradient(unit, call)

    for tensor in {id(t): t for t in _tensors(given, set()) if t.requires_grad}.values():
        tensor.register_hook(hook)
        call.inputs += 1
    return call
