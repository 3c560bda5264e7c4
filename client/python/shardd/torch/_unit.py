"""One unit: the parameters of one fully_shard call, gathered and reduced together.

Its parameters exist three times as Python objects: ``guard`` (what the module has while the
unit is sharded, and what optimizers hold), ``full`` (what forward computes with, made once),
and ``initial`` (the values until the daemon has them). All ``full`` are views of one storage, into
which the gathered memory is swapped, and out of which it goes with the release: so what autograd
saved in forward sees the parameters again in backward, wherever they were gathered to.
"""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import _abi, _library
from ..client import Client
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..memory import Dtype
from ..specs import Layout, OptimizerSpec, Profile, Strategy, TensorSpec, UnitSpec
from ..ticket import Ticket
from ..unit import Unit
from ._guard import Guard
from ._mesh import Mesh
from ._session import tensor_at

if TYPE_CHECKING:
    from ._tree import Tree

DTYPES = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}
TORCH_DTYPES = {dtype: torch_dtype for torch_dtype, dtype in DTYPES.items()}


def dtype_of(dtype: torch.dtype, what: str) -> Dtype:
    """The daemon's name of a type. InvalidArgument: it does not know it."""
    if dtype not in DTYPES:
        raise InvalidArgument(f"{what} is {dtype}: float32, bfloat16 and float16 are allowed", what)
    return DTYPES[dtype]


def _swap(storage: Any, other: Any) -> None:
    """Each has the other's memory: no tensor of them notices but by what it reads."""
    storage._swap_data_ptr_(other)


def _nothing() -> Any:
    return torch.empty(0).untyped_storage()


class Parameter:
    """A parameter of a unit. ``owners``: every (module, attribute) that has it: tied weights are
    one parameter. ``name``: the first of its names, from the unit's module on."""

    def __init__(self, unit: ShardedUnit, name: str, value: nn.Parameter) -> None:
        self.name, self.owners = name, []  # type: str, list[tuple[nn.Module, str]]
        self.shape, self.trained = value.shape, value.requires_grad
        self.initial: nn.Parameter | None = value
        self.original = id(value)
        self.full: nn.Parameter | None = None
        self.guard = Guard.make(name, "parameter", value.shape, value.dtype, value.requires_grad,
                                unit)
        self.gradient_guard: Guard | None = None

    def install(self, value: torch.Tensor) -> None:
        """Make @value the parameter of the modules that have it."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = value  # type: ignore[assignment]
            else:  # a module that keeps parameters elsewhere too, as nn.LSTM
                setattr(module, attribute, value)


class ShardedUnit:
    """See above. Not for several threads at once."""

    def __init__(self, module: nn.Module, parameters: list[tuple[nn.Module, str, str]],
                 reshard: bool | None, mp_policy: Any) -> None:
        """@parameters: (module, attribute, name) of all that are this unit's."""
        self.module, self.name = module, ""
        self.parent: ShardedUnit | None = None
        self.tree: Tree | None = None
        self.reshard_after_forward = reshard
        self.mp_policy = mp_policy
        self.bucket = ""  # behind the module's name
        self.replicated = False
        self.mesh: Mesh | None = None  # None: all ranks of the job
        self.all_used = False  # a parameter without a gradient is an error
        self.params: list[Parameter] = []
        self._take(parameters)
        self.unit: Unit | None = None
        self.held = False  # gathered
        self.installed = False  # the modules have the full parameters
        self.in_backward = False
        self.written: set[int] = set()  # indices into trained: there is something in the buffer
        self.arrived: set[int] = set()  # in this backward pass
        self._views: dict[int, list[torch.Tensor]] = {}  # by the buffer's address
        self._gradients: list[torch.Tensor] | None = None

    def _take(self, parameters: list[tuple[nn.Module, str, str]]) -> None:
        found: dict[int, Parameter] = {}
        for module, attribute, name in parameters:
            value = module._parameters[attribute]
            assert value is not None
            if id(value) not in found:
                self._check(name, value)
                found[id(value)] = Parameter(self, name, value)
                self.params.append(found[id(value)])
            found[id(value)].owners.append((module, attribute))
        self.trained = [p for p in self.params if p.trained]
        for p in self.params:
            p.install(p.guard)

    def _check(self, name: str, value: torch.Tensor) -> None:
        if value.device.type not in ("cpu", "meta"):
            raise Unimplemented(f"parameter '{name}' is on {value.device}: only host memory is "
                                "sharded from Python yet; call .to('cpu') before fully_shard")
        if value.dtype != torch.float32:
            raise InvalidArgument(
                f"parameter '{name}' is {value.dtype}: parameters are kept in float32; call "
                ".float() before fully_shard, and say in mp_policy in which type forward is "
                "to compute", name)

    # ------------------------------------------------------------- registration

    @property
    def compute(self) -> torch.dtype:
        """The type in which forward computes."""
        return getattr(self.mp_policy, "param_dtype", None) or torch.float32

    @property
    def reduce(self) -> torch.dtype:
        """The type of gradients, and of their sum."""
        return getattr(self.mp_policy, "reduce_dtype", None) or self.compute

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(p.shape.numel() for p in self.params)

    def spec(self, group: int, optimizer: OptimizerSpec,
             settings: dict[int, dict[str, Any]]) -> UnitSpec:
        """@settings: by the id of a parameter's guard, what differs from @optimizer."""
        tensors = [TensorSpec(p.name, list(p.shape), frozen=not p.trained,
                              **settings.get(id(p.guard), {})) for p in self.params]
        return UnitSpec(
            self.name, tensors, group=group, optimizer=optimizer,
            layout=Layout.FLAT if self.replicated else Layout.DIM0,
            strategy=(Strategy.REPLICATE if self.replicated else Strategy.HYBRID
                      if self.mesh and self.mesh.replicas > 1 else Strategy.SHARD),
            shard_ranks=self.mesh.shard if self.mesh and self.mesh.replicas > 1 else 0,
            compute_dtype=dtype_of(self.compute, "mp_policy.param_dtype"),
            gradient_dtype=dtype_of(self.reduce, "mp_policy.reduce_dtype"),
            reduce_profile=Profile.DDP if self.replicated else Profile.FSDP2)

    def registered(self, unit: Unit) -> None:
        """The daemon has it: make the full parameters, views of a storage without memory."""
        self.unit = unit
        base = torch.empty(max(1, unit.elements), dtype=self.compute)
        self._storage = base.untyped_storage()
        for p in self.params:
            place = unit.places[p.name]
            with torch.no_grad():
                view = base[place.offset:place.offset + place.elements].view(p.shape)
            p.full = nn.Parameter(view, requires_grad=p.trained)
        for i, p in enumerate(self.trained):
            assert p.full is not None
            p.full.register_post_accumulate_grad_hook(self._taker(i))
        self._storage.resize_(0)

    def initialise(self, client: Client) -> None:
        """The daemon's parameters become rank 0's (collective)."""
        assert self.unit is not None
        root = self.tree.first_rank if self.tree is not None else 0
        if not self.unit.initialised:
            if client.member is not None and client.member.rank == root:
                with client.alloc((self.unit.packed_elements,)) as buffer:
                    self._pack(buffer.memory.address, self.unit.packed_elements)
                    self.unit.init_broadcast(root, buffer)
            else:
                self.unit.init_broadcast(root, None)
        for p in self.params:
            p.initial = None

    def _pack(self, address: int, elements: int) -> None:
        at, flat = 0, tensor_at(address, elements, torch.float32)
        for p in self.params:
            n = p.shape.numel()
            assert p.initial is not None
            flat[at:at + n].view(p.shape).copy_(p.initial.detach())
            at += n

    def _must(self) -> Unit:
        if self.unit is None:
            raise FailedPrecondition(f"unit '{self.name}' is not registered yet")
        return self.unit

    # ------------------------------------------------------------ gather, release

    def gather(self) -> None:
        """The storage gets the gathered memory. Twice is once."""
        if self.held or not self.params:
            return
        unit = self._must()
        ticket: Ticket[tuple[int, int]] = unit.client.submit(
            "gather", unit.id, finish=lambda r: (r.data, unit.elements))
        address, elements = ticket.wait()
        _swap(self._storage, torch._C._construct_storage_from_data_pointer(
            address, torch.device("cpu"), elements * self.compute.itemsize))
        self.held = True

    def release(self) -> None:
        """The memory goes out of the storage and back. Twice is once."""
        self.uninstall()
        if not self.held:
            return
        _swap(self._storage, _nothing())
        self.held = False
        unit = self._must()
        unit.client.do("release", unit.id)

    def install(self) -> None:
        """The modules have the full parameters."""
        if not self.installed:
            for p in self.params:
                assert p.full is not None
                p.install(p.full)
            self.installed = True

    def uninstall(self) -> None:
        """The modules have the guards."""
        if self.installed:
            for p in self.params:
                p.install(p.guard)
            self.installed = False

    def check(self) -> None:
        """Is it still what was wrapped? FailedPrecondition: a parameter was replaced, or begins
        or ceases to be trained."""
        for p in self.params:
            now = p.full if self.installed else p.guard
            for module, attribute in p.owners:
                if module._parameters.get(attribute) is not now:
                    raise FailedPrecondition(
                        f"parameter '{self.name}.{p.name}' was replaced after fully_shard: the "
                        "daemon has the old one; replace it before, or change its values in "
                        "shardd.torch.summon_full_params(model)")
            if p.guard.requires_grad != p.trained:
                raise FailedPrecondition(
                    f"requires_grad of '{self.name}.{p.name}' was changed after fully_shard: what "
                    "is trained is laid out apart from what is not; set it before")

    # ----------------------------------------------------------------- gradients

    def _taker(self, index: int) -> Any:
        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert self.tree is not None and gradient is not None
            self.tree.gradient(self, index, gradient)

        return take

    def _gradient_views(self) -> list[torch.Tensor]:
        if self._gradients is None:
            unit = self._must()
            ticket: Ticket[int] = unit.client.submit("gradient", unit.id, finish=lambda r: r.data)
            address = ticket.wait()
            if address not in self._views:
                flat = tensor_at(address, unit.gradient_elements, self.reduce)
                places = [unit.places[p.name] for p in self.trained]
                self._views[address] = [
                    flat[a.offset:a.offset + a.elements].view(p.shape)
                    for a, p in zip(places, self.trained)]
            self._gradients = self._views[address]
        return self._gradients

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient into the daemon's buffer, or add it to what is there."""
        if gradient.layout != torch.strided:
            raise Unimplemented(
                f"the gradient of '{self.name}.{self.trained[index].name}' is {gradient.layout}: "
                "only dense gradients are reduced by fully_shard (sparse=False in nn.Embedding)")
        view = self._gradient_views()[index]
        if index in self.written:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.written.add(index)

    def reduce_submit(self) -> Ticket[bool]:
        """Hand the gradients in; what has none contributes 0 (collective). The ticket's value:
        did any rank use the unit?"""
        unused = not self.written
        views = self._gradient_views()
        for index, view in enumerate(views):
            if index not in self.written:
                view.zero_()
        self.written.clear()
        self._gradients = None
        unit = self._must()
        return unit.client.submit("reduce_unused" if unused else "reduce", unit.id,
                                  finish=lambda r: not r.skipped)

    def forget(self) -> None:
        """The daemon has dropped what this session held."""
        self.uninstall()
        if self.held:
            _swap(self._storage, _nothing())
        self.held = self.in_backward = False
        self._gradients = None
        self.forget_gradients()
        self.guard_gradients(False)

    def forget_gradients(self) -> None:
        """What is in the buffer counts no more."""
        self.written.clear()
        self.arrived.clear()

    def guard_gradients(self, there: bool) -> None:
        """Parameters have a gradient that cannot be touched, or none."""
        for p in self.trained:
            if there and p.gradient_guard is None:
                p.gradient_guard = Guard.make(p.name, "gradient", p.shape, torch.float32)
            p.guard.grad = p.gradient_guard if there else None

    # ----------------------------------------------------------- whole parameters

    def summon(self) -> None:
        """fp32 parameters in memory of this rank's own, installed (collective)."""
        unit = self._must()
        self.release()
        ticket: Ticket[int] = unit.client.submit("summon", unit.id, finish=lambda r: r.data)
        self._summoned = tensor_at(ticket.wait(), unit.elements, torch.float32)
        for p in self.params:
            place = unit.places[p.name]
            view = self._summoned[place.offset:place.offset + place.elements].view(p.shape)
            p.install(nn.Parameter(view, requires_grad=p.trained))

    def give_back(self, write: bool) -> None:
        """End of summon (collective)."""
        for p in self.params:
            p.install(p.guard)
        _swap(self._summoned.untyped_storage(), _nothing())
        unit = self._must()
        unit.client.do("return", unit.id, write)

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """This rank's shard for an optimizer of its own: (index in params, first, elements, at)."""
        unit, n = self._must(), C.c_size_t()
        handle = unit.client.handle
        _library.call("shard_pieces", handle, unit.id, None, 0, C.byref(n))
        pieces = (_abi.ShardPiece * max(1, n.value))()
        _library.call("shard_pieces", handle, unit.id, pieces, n.value, C.byref(n))
        return [(p.tensor, p.first, p.elements, p.at) for p in pieces[:n.value]]

    def __repr__(self) -> str:
        kept = "replicated" if self.replicated else "sharded"
        state = "gathered" if self.held else kept if self.unit else "not registered yet"
        if self.in_backward:
            state += ", in backward"
        if self.written:
            state += f", {len(self.written)} of {len(self.trained)} gradients"
        nbytes = self.elements * 4
        return (f"unit '{self.name}': {len(self.params)} parameters, {nbytes / 2**20:.2f} MiB, "
                f"{state}")
