"""replicate: DistributedDataParallel over the daemon.

The parameters exist once per machine, mapped by all ranks. Gradients are averaged as in DDP, in
units that are its buckets. Units are reduced in the same order on all ranks (shardd.torch._tree),
so the ranks need not exchange which parameters are unused while backward runs.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..specs import Profile
from . import _device, _hooks, _state
from ._buffers import Buffers
from ._join import uneven
from ._session import world_size
from ._tree import built, tree_of, unit_of, units_of
from ._types import dtype_of, master_of
from ._unit import ShardedUnit
from ._wrap import (
    ShardedModule,
    _before_backward,
    _cast,
    _not_compiled,
    _tensors,
    own_parameters,
    with_methods,
)

M = TypeVar("M", bound=nn.Module)


class ReplicatedModule(ShardedModule):
    """The methods that replicate adds to a module."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Reduce by a hook, as DistributedDataParallel. Before the optimizer is built.

        The daemon does what torch.distributed.algorithms.ddp_comm_hooks.default_hooks has:
        allreduce_hook, fp16_compress_hook, bf16_compress_hook, or one of the two compressing
        wrappers around the first; then @state is None, or a process group of all ranks. Any other
        function (state, bucket) -> Future runs in this process."""
        _hooks.register(_state.own_units(self), state, hook)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True,
             throw_on_early_termination: bool = False) -> Iterator[None]:
        """Support ranks with different numbers of inputs, as DistributedDataParallel.join: put it
        around the loop over the inputs. A rank that leaves it waits for the others and takes part
        in their reductions, steps and clipping with zeros; other collectives are refused
        meanwhile. Buffers are copied from the last rank that has inputs, at the end from the last
        one that had.

        @divide_by_initial_world_size: False: divide gradients by the number of ranks with inputs.
        @enable: False: do nothing. @throw_on_early_termination: no rank waits; all ranks get
        FailedPrecondition when the first one has no more inputs.
        """
        with uneven(self, self._shardd_buffers, divide_by_initial_world_size,  # type: ignore
                    enable, throw_on_early_termination):
            yield


def _limits(cap_mb: float | None, caps_mb: Sequence[float] | None, unused: bool) -> list[int]:
    """Bytes of the first buckets; the last one holds for all that follow."""
    if cap_mb is not None and not cap_mb > 0:
        raise InvalidArgument(f"bucket_cap_mb is {cap_mb}, must be above 0", "bucket_cap_mb")
    if caps_mb is not None and not (caps_mb and all(cap > 0 for cap in caps_mb)):
        raise InvalidArgument(f"bucket_cap_mb_list is {caps_mb}, must have numbers above 0",
                              "bucket_cap_mb_list")
    return [0] if unused else [int(cap * 2**20) for cap in caps_mb or [cap_mb or 25]]


def _buckets(parameters: list[tuple[nn.Module, str, str]], limits: list[int]) -> list[
        list[tuple[nn.Module, str, str]]]:
    """The parameters in units of one type and at least @limits bytes, names of one parameter
    together."""
    buckets: list[list[tuple[nn.Module, str, str]]] = []
    where: dict[int, int] = {}
    filled: dict[torch.dtype, tuple[int, int]] = {}  # the open one, and its bytes
    for one in parameters:
        value = one[0]._parameters[one[1]]
        assert value is not None
        if id(value) in where:
            buckets[where[id(value)]].append(one)
            continue
        number, nbytes = filled.get(value.dtype, (-1, 0))
        if number < 0 or nbytes >= limits[min(number, len(limits) - 1)]:
            number, nbytes = len(buckets), 0
            buckets.append([])
        where[id(value)] = number
        buckets[number].append(one)
        filled[value.dtype] = number, nbytes + value.nbytes
    return buckets or [[]]


def replicate(module: M, *, broadcast_buffers: bool = True,
              forward_sync_buffers: bool | None = None, bucket_cap_mb: float | None = None,
              bucket_cap_mb_list: Sequence[float] | None = None,
              find_unused_parameters: bool = False, gradient_as_bucket_view: bool = False,
              static_graph: bool = False, skip_all_reduce_unused_params: bool = False,
              process_group: Any = None, device_mesh: Any = None,
              mixed_precision: Any = None, device_ids: Any = None, output_device: Any = None,
              master: Any = None, **options: Any) -> M:
    """Train @module with the same parameters on every rank, as DistributedDataParallel does.

    @broadcast_buffers, or its newer name @forward_sync_buffers: rank 0's buffers become everybody's
    before a forward, if the one before it was with gradients that were to be reduced, and before
    the first. Also when the parameters go to the daemon, except with broadcast_buffers=False.
    @bucket_cap_mb: MiB of gradients that are reduced together, 25; @bucket_cap_mb_list: of one
    bucket after the other, the last number of all that follow. @find_unused_parameters,
    @static_graph: parameters may have no gradient; the optimizer skips what no rank has used (every
    parameter is then a unit). Otherwise that is FailedPrecondition at the next step or forward.
    @skip_all_reduce_unused_params: no difference, since what no rank has used is never reduced.
    @gradient_as_bucket_view: no difference, since this process keeps no gradients. @process_group,
    @device_mesh: of all ranks. @device_ids, @output_device: the device of @module, or None.
    @mixed_precision: with param_dtype, reduce_dtype and buffer_dtype, as DDP's own. @master: as of
    fully_shard.
    Other arguments of DistributedDataParallel are Unimplemented.

    Return: @module, whose class now has the methods of :class:`ReplicatedModule` too. Build an
    optimizer of shardd.torch afterwards; parameters have values from forward to the step.
    """
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"replicate() got an unexpected keyword argument '{name}'")
        if value != known[name].default:
            raise Unimplemented(f"{name} is {value!r}: only {known[name].default!r} is supported",
                                name)
    for name, value in (("device_ids", device_ids), ("output_device", output_device)):
        _device.check_one((p.device for p in module.parameters()), value, name)
    _hooks.check_all_ranks(process_group, "process_group")
    _hooks.check_all_ranks(device_mesh, "device_mesh")
    if process_group is not None and device_mesh is not None:
        raise InvalidArgument("process_group and device_mesh are both given: give one of them",
                              "device_mesh")
    if getattr(device_mesh, "ndim", 1) != 1:
        raise InvalidArgument(f"device_mesh has {device_mesh.ndim} dimensions, must have one: use "
                              "fully_shard for replicas of shards", "device_mesh")
    if mixed_precision is not None:
        _check_policy(mixed_precision)
    if units_of(module):
        raise FailedPrecondition("fully_shard or replicate was already called on this "
                                 f"{type(module).__name__} or on a module in it")
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    unused = find_unused_parameters or static_graph
    limits = _limits(bucket_cap_mb, bucket_cap_mb_list, unused)
    begin = broadcast_buffers or forward_sync_buffers is not None
    if forward_sync_buffers is not None:
        broadcast_buffers = forward_sync_buffers
    units = [ShardedUnit(module, part, False, mixed_precision, master_of(master))
             for part in _buckets(own_parameters(module, {
                 id(p) for name, p in module.named_parameters() if name in ignored}), limits)]
    for number, unit in enumerate(units):
        unit.bucket = f"#{number}"
        unit.replicated, unit.all_used = True, not unused
        unit.parent = units[0] if number else None
        if mixed_precision is not None:  # the sum is divided, in its own type
            unit.hook, unit.pre_divide = (Profile.FSDP1_HOOK, None), 1.0
    _cast_buffers(module, getattr(mixed_precision, "buffer_dtype", None))
    object.__setattr__(module, "_shardd_units", units)
    object.__setattr__(module, "_shardd_buffers", Buffers(
        module, units[0], broadcast_buffers, ignored) if begin else None)
    module.__class__ = with_methods(type(module), ReplicatedModule, "")
    module.register_forward_pre_hook(_pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_post_forward, always_call=True)
    _state.add_hooks(module)
    return module


def _check_policy(policy: Any) -> None:
    """Is @policy like DDP's _MixedPrecision, with types that the daemon has?"""
    if not hasattr(policy, "param_dtype") or not hasattr(policy, "reduce_dtype"):
        raise InvalidArgument(f"mixed_precision is {policy!r}, must be "
                              "torch.nn.parallel.distributed._MixedPrecision", "mixed_precision")
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(policy, name) is not None:
            dtype_of(getattr(policy, name), f"mixed_precision.{name}")


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for buffer in module.buffers() if dtype is not None else ():
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype)


@_not_compiled
def _pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    first = unit_of(module)
    assert first is not None
    tree = built(first) or tree_of(first)
    if not (tree.backward and torch._C._current_graph_task_id() != -1):
        tree.begin_forward()
    for unit in tree.units:
        unit.gather()
        unit.install()
    buffers: Buffers | None = module._shardd_buffers  # type: ignore[assignment]
    if buffers is not None:
        # in join those of the last rank that has inputs, as there
        buffers.before(tree, world_size() - 1 if tree.uneven else 0)
    dtype = getattr(first.mp_policy, "param_dtype", None)
    return (_cast(args, dtype), _cast(kwargs, dtype)) if dtype is not None else None


@_not_compiled
def _post_forward(module: nn.Module, args: Any, output: Any) -> None:
    first = unit_of(module)
    assert first is not None
    tree = built(first)
    if tree is not None and not first.within:
        tree.end_forward()
    failed = output is None and sys.exc_info()[0] is not None
    if tree is not None and not failed and module._shardd_buffers is not None:
        module._shardd_buffers.after(tree)  # type: ignore[operator, union-attr]
    if tree is None or output is None or not torch.is_grad_enabled():
        return
    for tensor in _tensors(output, set()):
        if tensor.requires_grad:
            tensor.register_hook(_before_backward(tree, first))
