"""One unit: the parameters of one fully_shard call, gathered and reduced together.

Its parameters exist three times as Python objects: ``guard`` (what the module has while the
unit is sharded, and what optimizers hold), ``full`` (what forward computes with, made once),
and ``initial`` (the values until the daemon has them). All ``full`` are views of one storage, into
which the gathered memory is swapped, and out of which it goes with the release: so what autograd
saved in forward sees the parameters again in backward, wherever they were gathered to.
"""

from __future__ import annotations

import ctypes as C
import functools
import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _abi, _library
from ..client import Client
from ..errors import DeadlineExceeded, FailedPrecondition, Unimplemented
from ..memory import Dtype
from ..specs import (
    BufferSpec,
    Layout,
    OptimizerSpec,
    Profile,
    Strategy,
    TensorSpec,
    UnitSpec,
)
from ..ticket import Ticket
from ..unit import Unit, reduce_options
from . import _device, _direct, _faults, _shard, _types
from ._device import nothing, tensor_at
from ._former import retire
from ._gradient import Gradient
from ._guard import Guard
from ._mesh import Mesh, world
from ._types import DTYPES, dtype_of
from ._used import Used
from ._values import Values

NO_TASK = -1  # autograd's number of none


def _swap(storage: Any, other: Any) -> None:
    """Each has the other's memory: no tensor of them notices but by what it reads."""
    storage._swap_data_ptr_(other)


_originals: dict[int, weakref.ref[nn.Parameter]] = {}


def _take_original(value: nn.Parameter) -> None:
    key = id(value)
    _originals[key] = weakref.ref(value, lambda _: _originals.pop(key, None))


def is_original(value: Any) -> bool:
    """Is it a parameter that a unit has taken? The unit made another one of it."""
    known = _originals.get(id(value))
    return known is not None and known() is value


def _not_of_before(optimizer: Any, args: Any, kwargs: Any) -> None:
    if any(is_original(p) for group in optimizer.param_groups for p in group["params"]):
        raise FailedPrecondition(
            f"this {type(optimizer).__name__} was built before fully_shard or replicate: it has "
            "the old parameters, which are no longer trained; build it afterwards, as one of "
            "shardd.torch (any of torch.optim: shardd.torch.Sharded)")


register_optimizer_step_pre_hook(_not_of_before)


def of_all_ranks(ticket: Ticket[int]) -> int:
    """What @ticket, of whole parameters or of an optimizer's state, gives."""
    try:
        return ticket.wait()
    except (DeadlineExceeded, FailedPrecondition) as error:
        if isinstance(error, FailedPrecondition) and "ops differ" not in error.text:
            raise
        raise error.advised(
            "whole tensors come from all ranks: call state_dict() and the like on every rank, "
            "also if one alone writes the file") from None


class Model(Protocol):
    """What a unit tells and asks its model: a Tree, of which this file knows nothing else."""

    @property
    def first_rank(self) -> int:
        """Whose parameters are everybody's."""

    @property
    def uses_up_gradients(self) -> bool:
        """Does an optimizer step in backward?"""

    @property
    def uses_parameters(self) -> bool:
        """Is a forward or backward running?"""

    @property
    def used(self) -> Used:
        """What the last step has used up."""

    def begin_read(self) -> None:
        """The program is about to read a shard."""

    def begin_write(self) -> None:
        """The program is about to write to a shard (collective, if it is the first)."""

    def begin_backward(self) -> None:
        """Something of a backward pass has come."""

    def gradient(self, unit: ShardedUnit, index: int, gradient: torch.Tensor) -> None:
        """A gradient has arrived."""

    def finish(self) -> None:
        """Parameters are wanted: a step that waits for the commit is made now (collective)."""


class OwnHook(Protocol):
    """A communication hook that runs in this process."""

    def number(self, index: int, last: bool) -> None:
        """Which bucket the next one is, and whether it is the last of the pass."""

    def begin(self, unit: ShardedUnit) -> None:
        """Call it with the gradients of a pass."""

    def finish(self, unit: ShardedUnit) -> None:
        """Wait for it, and put this rank's contribution into the gradient buffer."""


class Parameter:
    """A parameter of a unit. ``owners``: every (module, attribute) that has it: tied weights are
    one parameter. ``name``: the first of its names, from the unit's module on."""

    def __init__(self, unit: ShardedUnit, name: str, value: nn.Parameter) -> None:
        self.name, self.owners = name, []  # type: str, list[tuple[nn.Module, str]]
        self.shape, self.trained = value.shape, value.requires_grad
        self.initial: nn.Parameter | None = value
        self.original = id(value)
        _take_original(value)
        self.full: nn.Parameter | None = None
        self.guard = Guard.make(name, "parameter", value.shape, unit.stored, value.requires_grad,
                                unit, None if value.is_meta else value.device)
        self.gradient = Gradient(
            self.guard, functools.partial(unit.why_no_gradient, value.shape),
            functools.partial(unit.missed, self))
        self.guard._gradient = self.gradient
        self.values = Values(name, value.shape)
        self.values.begin(functools.partial(unit.early, self), unit.why_no_values)
        self.guard._source = self.values
        self.reduced = False  # since the last step, and some rank has used it
        self.came = False  # reduced in this pass
        self.told = False  # the program sees a gradient
        self.had = False  # one that zero_grad() has not dropped
        self.zeroed = False  # and set to zeros

    def install(self, value: torch.Tensor) -> None:
        """Make @value the parameter of the modules that have it."""
        for module, attribute in self.owners:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = value  # type: ignore[assignment]
            else:  # a module that keeps parameters elsewhere too, as nn.LSTM
                setattr(module, attribute, value)


class Call:
    """One forward of a unit with frozen parameters. Backward has left it when all inputs that
    want a gradient have one. ``inputs``: how many do; 0: nothing says when."""

    inputs = 0


class ShardedUnit:
    """See above. Not for several threads at once."""

    def __init__(self, module: nn.Module, parameters: list[tuple[nn.Module, str, str]],
                 reshard: bool | None, mp_policy: Any, master: torch.dtype | None = None) -> None:
        """@parameters: (module, attribute, name) of all that are this unit's. @master: the type in
        which they are stored; None: their own."""
        self.module, self.name = module, ""
        self.dtype = _types.of_parameters(parameters)
        self.stored = master or self.dtype
        # of the same module, of frozen parameters of other types: gathered and released with this
        self.companions: list[ShardedUnit] = []
        self.parent: ShardedUnit | None = None
        self.below: list[ShardedUnit] = []  # units in it, with trained parameters; by the tree
        self.tree: Model | None = None  # _tree.built has all of it
        self.reshard_after_forward = reshard
        self.reshard_after_backward = self.unshard_in_backward = True
        self.sync = True  # backward reduces (else it only adds up)
        self.all_reduce = True  # over replicas, too
        self.deferred: set[int] = set()  # used in passes of which only replicas had the sums
        self.mp_policy = mp_policy
        self.bucket = ""  # behind the module's name
        self.replicated = False
        self.mesh: Mesh | None = None  # None: all ranks of the job
        self.offload = False  # shards go to host memory
        self.all_used = False  # a parameter without a gradient is an error
        self.zeros = False  # it is then one of zeros, once the unit was gathered
        self.was_gathered = False
        self.hook: tuple[Profile, torch.dtype | None] | None = None  # of register_comm_hook
        self.hook_state: Any = None  # the user's object
        self.sharers = 1, 0  # how many ranks share it, and which of them this one is
        self.own_hook: OwnHook | None = None  # a Python function that reduces
        self.hooked = False  # it has been called in this pass, and its result is not taken yet
        self.pre_divide = 0.0  # of the gradients; 0: as the profile has it
        self.within = 0  # calls of register_fsdp_forward_method's that are under way
        self.divide_factor, self.force_sum = 0.0, False  # FSDP2's; 0: by the number of ranks
        self.buffer_bytes = 0  # each rank's own, in the daemon
        self.state_bytes = 0  # the same, of an optimizer's state; never with those
        self.params: list[Parameter] = []
        self.expected = 0  # gradients of a pass: of trained parameters that are not frozen now
        self._take(parameters)
        self.unit: Unit | None = None
        self.found = False  # with parameters, when it was registered
        self.held = False  # gathered
        self.installed = False  # the modules have the full parameters
        self.in_backward = False
        self.calls: list[Call] = []  # forwards under way, for units with frozen parameters
        self.inside: dict[Call, int] = {}  # that backward is in: inputs without a gradient yet
        self.unannounced = False  # a forward of which backward has no beginning
        self.task = NO_TASK  # of autograd's, in which its backward began
        self.written: set[int] = set()  # indices into trained: there is something in the buffer
        self.arrived: set[int] = set()  # in this backward pass
        # in the buffer already, and on its way to add_gradient: by which of autograd's tasks
        self.promised: dict[int, int] = {}
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
        self.take_trained()
        for p in self.params:
            p.install(p.guard)

    def _check(self, name: str, value: torch.Tensor) -> None:
        if hasattr(value, "full_tensor"):
            raise Unimplemented(
                f"parameter '{name}' is a DTensor: tensor parallelism (parallelize_module, "
                "distribute_tensor) cannot be combined with fully_shard or replicate here; leave "
                "it out, or pass its full_tensor()")
        if value.device.type not in ("cpu", "cuda", "meta"):
            raise Unimplemented(f"parameter '{name}' is on {value.device}: only host and CUDA "
                                "memory is supported; call .to('cpu') or .to('cuda') before "
                                "fully_shard")
        if not value.is_contiguous():
            raise Unimplemented(
                f"parameter '{name}' has the strides {tuple(value.stride())}: the daemon's copy "
                "is row-major, so another memory format (channels_last) would be lost; call "
                ".to(memory_format=torch.contiguous_format), or make the parameter .contiguous(), "
                "before fully_shard or replicate. Inputs may be channels_last")
        if value._backward_hooks or value._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise FailedPrecondition(
                f"parameter '{name}' has hooks (register_hook or "
                "register_post_accumulate_grad_hook), which would be lost: fully_shard makes "
                "another parameter of it; register them on that one, after wrapping")

    # ------------------------------------------------------------- registration

    @property
    def compute(self) -> torch.dtype:
        """The type in which forward computes."""
        return getattr(self.mp_policy, "param_dtype", None) or self.dtype

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
        profile, reduce_dtype = self.hook or (
            Profile.DDP if self.replicated and self.own_hook is None else Profile.FSDP2, None)
        if self.own_hook is not None:  # its results are added to zeros
            self.divide_factor, self.force_sum = 1.0, True
        nbytes = self.buffer_bytes or self.state_bytes
        kind = "shardd:optimizer" if self.state_bytes else "shardd:buffers"  # in no state_dict
        buffers = [BufferSpec(kind, (nbytes,), Dtype.UINT8)]
        return UnitSpec(
            self.name, tensors, group=group, optimizer=optimizer,
            layout=Layout.FLAT if self.replicated else Layout.DIM0,
            strategy=(Strategy.REPLICATE if self.replicated else Strategy.HYBRID
                      if self.mesh and self.mesh.replicas > 1 else Strategy.SHARD),
            shard_ranks=self.mesh.shard if self.mesh and self.mesh.replicas > 1 else 0,
            storage_dtype=dtype_of(self.stored, "the parameters' type"),
            compute_dtype=dtype_of(self.compute, "mp_policy.param_dtype"),
            gradient_dtype=dtype_of(self.reduce, "mp_policy.reduce_dtype"),
            reduce_profile=profile, pre_divide=self.pre_divide,
            divide_factor=self.divide_factor, force_sum=self.force_sum,
            reduce_dtype=dtype_of(reduce_dtype, "hook") if reduce_dtype else None,
            buffers=buffers if nbytes else ())

    def registered(self, unit: Unit) -> None:
        """The daemon has it: make the full parameters, views of a storage without memory."""
        self.unit = unit
        base = _device.without_memory(max(1, unit.elements), self.compute)
        self._storage = base.untyped_storage()
        self._region = self._stand_in(unit) if self.elements and _device.on_host() else None
        for p in self.params:
            place = unit.places[p.name]
            with torch.no_grad():
                view = base[place.offset:place.offset + place.elements].view(p.shape)
            p.full = nn.Parameter(view, requires_grad=p.trained)
            p.full._shardd_region = self._region  # type: ignore[attr-defined] # as long as it lives
            p.full._shardd_guard = p.guard  # type: ignore[attr-defined] # what optimizers hold
        for i, p in enumerate(self.trained):
            assert p.full is not None
            p.full.register_post_accumulate_grad_hook(self._taker(i))
            if len(p.owners) == 1 and self.compute == self.reduce:
                _direct.attach(*p.owners[0], p.full, self, i)
        self._empty()

    def place_shards(self, client: Client) -> None:
        """The program may read and write this rank's rows, of the parameters and of the reduced
        gradients, from here on. Of a replicated unit it may not."""
        member, tree = client.member, self.tree
        assert member is not None and self.unit is not None and tree is not None
        mesh = self.mesh or world(member.world_size)
        self.sharers = len(mesh.ranks), mesh.ranks.index(member.rank)
        for i, p in enumerate(() if self.replicated else self.params):
            rows = _shard.extent(client, mesh, p.shape)[1]
            piece = _shard.Piece(client, self.unit.id, i, p.shape, rows, self.stored)
            p.values.place(piece, lambda: _shard.device_mesh(client, mesh), tree.begin_read,
                           tree.begin_write)
            if p.trained:
                p.gradient.place(piece, lambda: _shard.device_mesh(client, mesh))

    def end_early(self) -> None:
        """What each rank has written to its rows before the daemon has the parameters becomes
        that of all ranks (collective, if there is something)."""
        for p in self.params:
            if p.values.touched and p.initial is not None:
                shown, rows = p.values.take()
                if rows.shape != p.shape or hasattr(shown, "full_tensor"):
                    with torch.no_grad():
                        p.initial.copy_(shown.full_tensor())
                p.values.touched = False

    def materialise(self, guard: Guard, device: Any) -> None:
        """The parameter of @guard gets memory on @device, with any values, if it is on the meta
        device and the daemon does not have it yet."""
        [p] = [p for p in self.params if p.guard is guard]
        if p.initial is not None and p.initial.is_meta:
            p.initial = nn.Parameter(torch.empty(p.shape, dtype=guard.dtype, device=device),
                                     requires_grad=p.trained)
            guard._where = p.initial.device

    def early(self, p: Parameter) -> tuple[Any, torch.Tensor]:
        """This rank's rows of what the program has built, until the daemon has it: to compute
        with, and as they are. FailedPrecondition: there is nothing."""
        assert p.initial is not None
        whole = p.initial.detach()
        if whole.is_meta:
            raise FailedPrecondition(
                f"parameter '{p.name}' is on the meta device and has no values yet: they come from "
                "load_state_dict, or from the model's own initialisation when the optimizer is "
                "built")
        return _shard.early(self.mesh, whole, p.name)

    def why_no_values(self) -> str:
        """Why the program cannot have values of the parameters now; empty: it can."""
        if self.replicated:
            return ("those of a replicated model are mapped during forward and backward only; use "
                    "shardd.torch.summon_full_params(model), or model.state_dict()")
        if self.tree is not None and self.tree.uses_parameters:
            return ("forward or backward is running; use the parameters of the modules there, or "
                    "wait until it is over")
        return ""

    def why_no_gradient(self, shape: torch.Size) -> str:
        """Why the program cannot read the gradient of a parameter of @shape; empty: it can."""
        if self.replicated:
            return "that of a replicated model is in the daemon alone"
        if self.tree is not None and self.tree.uses_up_gradients:
            return "the optimizer steps in backward and has used it up"
        if not shape:
            return "the parameter has no dimension to shard"
        return ""

    def _stand_in(self, unit: Unit) -> _faults.Region:
        size = self.compute.itemsize
        places = [(p.name, unit.places[p.name]) for p in self.params]
        return _faults.Region(self.name, unit.elements * size, [
            (name, at.offset * size, at.elements * size) for name, at in places])

    def _empty(self) -> None:
        """The memory goes out of the storage."""
        if self._region is None:
            _swap(self._storage, nothing())
            return
        _swap(self._storage, self._region.storage())
        self._region.lent(None)

    def initialise(self, client: Client) -> None:
        """The daemon's parameters become rank 0's (collective)."""
        assert self.unit is not None
        self.found = self.unit.initialised
        root = self.tree.first_rank if self.tree is not None else 0
        self.end_early()
        if not self.unit.initialised:
            if client.member is not None and client.member.rank == root:
                with client.alloc((self.unit.packed_elements,), DTYPES[self.stored]) as buffer:
                    self._pack(buffer.memory.address, self.unit.packed_elements)
                    self.unit.init_broadcast(root, buffer)
            else:
                self.unit.init_broadcast(root, None)
        for p in self.params:
            if self.replicated and p.initial is not None:
                retire(p.initial, p.name)
            p.initial = None

    def _pack(self, address: int, elements: int) -> None:
        at, flat = 0, tensor_at(address, elements, self.stored)
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
        for companion in self.companions:
            companion.gather()
        if self.held or not self.params:
            return
        if self.tree is not None:
            self.tree.finish()
        unit = self._must()
        ticket: Ticket[tuple[int, int]] = unit.client.submit(
            "gather", unit.id, finish=lambda r: (r.data, unit.elements))
        address, elements = ticket.wait()
        _swap(self._storage, _device.storage_at(address, elements * self.compute.itemsize))
        if self._region is not None:
            self._region.lent(address)
        self.held = self.was_gathered = True

    def release(self) -> None:
        """The memory goes out of the storage and back. Twice is once."""
        for companion in self.companions:
            companion.release()
        self.uninstall()
        if not self.held:
            return
        self._empty()
        self.held = False
        unit = self._must()
        unit.client.do("release", unit.id)

    def install(self) -> None:
        """The modules have the full parameters."""
        for companion in self.companions:
            companion.install()
        if not self.installed:
            for p in self.params:
                assert p.full is not None
                p.install(p.full)
            self.installed = True

    def uninstall(self) -> None:
        """The modules have the guards."""
        for companion in self.companions:
            companion.uninstall()
        if self.installed:
            for p in self.params:
                p.install(p.guard)
            self.installed = False

    def check(self) -> list[Parameter]:
        """Is it still what was wrapped? FailedPrecondition: a parameter was replaced or has other
        memory. Return: those that are trained now and were frozen."""
        for p in self.params:
            if p.full is not None and p.full.untyped_storage()._cdata != self._storage._cdata:
                raise FailedPrecondition(
                    f"the type, device or data of parameter '{self.name}.{p.name}' was changed "
                    "while it was gathered: the daemon has the old one; call .to() before "
                    "wrapping, or change values in shardd.torch.summon_full_params(model)")
            now = p.full if self.installed else p.guard
            for module, attribute in p.owners:
                if module._parameters.get(attribute) is not now:
                    name = f"{self.name}.{p.name}" if self.name else p.name
                    raise FailedPrecondition(
                        f"parameter '{name}' was replaced after fully_shard: the "
                        "daemon has the old one; replace it before, or change its values in "
                        "shardd.torch.summon_full_params(model)")
            self._check_trained(p)
        self._expect()
        return [p for p in self.params if p.guard.requires_grad and not p.trained]

    def _expect(self) -> None:
        self.expected = sum(p.guard.requires_grad for p in self.trained)

    def _check_trained(self, p: Parameter) -> None:
        """A trained parameter may be frozen for some time: then it has no gradient."""
        if p.full is None:
            return
        if self.installed:
            p.guard.requires_grad = p.full.requires_grad
        if p.trained and p.full.requires_grad != p.guard.requires_grad:
            p.full.requires_grad_(p.guard.requires_grad)

    def unfreeze(self, client: Client, fresh: list[Parameter], like: ShardedUnit | None) -> None:
        """Train @fresh, which were frozen, from here on (collective). Nobody has the unit gathered.
        @like: a unit whose optimizer this one gets, which has none. FailedPrecondition: gradients
        of an earlier backward are still to be reduced."""
        name = f"{self.name}.{fresh[0].name}"
        if self.parent is not None and self in self.parent.companions:
            raise FailedPrecondition(
                f"requires_grad of '{name}', of {self.dtype}, is True now and was False when the "
                f"daemon got the model; other parameters of its unit are {self.parent.dtype}: call "
                "fully_shard on a module inside that has it, or unfreeze it before")
        if self.written:
            raise FailedPrecondition(
                f"requires_grad of '{name}' has become True while gradients of earlier backwards "
                "are added up and not reduced: change it after the step")
        numbers = [self.params.index(p) for p in fresh]
        unit = client.unfreeze(self._must(), numbers, like._must() if like is not None else None)
        for p in fresh:
            p.trained = True
        self.trained = [p for p in self.params if p.trained]
        self._views.clear()
        self._gradients = None
        self.registered(unit)
        self.place_shards(client)
        for p in self.trained:
            assert p.full is not None
            p.full.requires_grad_(p.guard.requires_grad)
        self._expect()

    def take_trained(self) -> None:
        """Which parameters are trained is decided when the daemon gets the unit."""
        for p in self.params:
            p.trained = p.guard.requires_grad
        self.trained = [p for p in self.params if p.trained]
        if self.trained and self.parent is not None and self in self.parent.companions:
            raise FailedPrecondition(
                f"parameter '{self.trained[0].name}', of {self.dtype}, was frozen when fully_shard "
                f"was called, and is trained now; other parameters of its unit are "
                f"{self.parent.dtype}: call fully_shard on a module inside that has it, or "
                "unfreeze it before")
        self.expected = len(self.trained)

    # ------------------------------------------------------------------- backward

    @property
    def partly_frozen(self) -> bool:
        """Trained gradients do not say when backward has used all of its parameters."""
        return self.expected < len(self.params) or bool(self.companions)

    def enter(self, call: Call | None) -> None:
        """Backward comes into what @call, a forward, has computed."""
        if call is not None and call not in self.inside:
            self.inside[call] = call.inputs

    def leave(self, call: Call) -> None:
        """An input of @call has its gradient."""
        left = self.inside.get(call, 0) - 1
        if left > 0:
            self.inside[call] = left
        elif left == 0:
            del self.inside[call]

    @property
    def complete(self) -> bool:
        """All gradients are there that can come in this pass."""
        return len(self.arrived) >= self.expected

    @property
    def left(self) -> bool:
        """Does backward need its parameters no more? Each node of its forward leads to a trained
        parameter of it, or of a unit in it, or to an input. A node that needs a trained parameter
        computes the gradient of that, too, so without frozen ones the gradients say it."""
        if not self.partly_frozen:
            return self.complete
        return (not self.inside and not self.unannounced and self.complete and
                all(u.complete for u in self.below))

    def end_backward(self) -> None:
        """The pass is over, whatever has come of it."""
        self.in_backward = self.unannounced = False
        self.inside.clear()

    # ----------------------------------------------------------------- gradients

    def _taker(self, index: int) -> Any:
        """Hooks of tensors are not seen by the garbage collector: it must not hold the unit."""
        weak = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            unit = weak()
            if unit is None:
                return  # a loss that has outlived its model
            assert unit.tree is not None and gradient is not None
            if gradient.requires_grad:
                raise Unimplemented(
                    f"backward(create_graph=True): the gradient of '{unit.name}."
                    f"{unit.trained[index].name}' goes to the daemon, which has no graph of it, so "
                    "what is computed with it later would be missing; use "
                    "torch.autograd.grad(..., create_graph=True) for gradients of inputs")
            unit.tree.gradient(unit, index, gradient)

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

    def flat_gradient(self) -> torch.Tensor:
        """The gradients of all trained parameters in one row; 0 where this rank has none. Of a
        replicated unit the daemon's buffer itself."""
        views = self._gradient_views()
        for index, view in enumerate(views):
            if index not in self.written:
                view.zero_()
        if self.replicated:  # its layout is one row
            n = sum(p.shape.numel() for p in self.trained)
            return torch.as_strided(views[0], (n,), (1,))
        return torch.cat([view.reshape(-1) for view in views])

    def set_flat_gradient(self, flat: torch.Tensor) -> None:
        """The same, written."""
        at = 0
        for p, view in zip(self.trained, self._gradient_views()):
            view.copy_(flat[at:at + p.shape.numel()].view(p.shape))
            at += p.shape.numel()

    def direct_gradient(self, index: int, accumulator: Any) -> torch.Tensor | None:
        """The parameter's part of the daemon's buffer, for the gradient that backward is about to
        compute and @accumulator, autograd's node, to hand on. None: something is there already, or
        the gradient goes elsewhere (torch.autograd.grad), or the place is not aligned."""
        assert self.tree is not None
        self.tree.begin_backward()
        if self.hooked or index in self.written or index in self.promised or \
                not _direct.arrives(accumulator):
            return None
        view = self._gradient_views()[index]
        if view.data_ptr() % _direct.ALIGNMENT:
            return None
        self.promised[index] = torch._C._current_graph_task_id()
        return view.detach()

    def add_gradient(self, index: int, gradient: torch.Tensor) -> bool:
        """Copy a gradient into the daemon's buffer, if it is not there, or add it to what is
        there. Return: False: it is not the last of this pass."""
        if gradient.layout == torch.sparse_coo:
            gradient = gradient.coalesce().to_dense()
        if gradient.layout != torch.strided:
            raise Unimplemented(
                f"the gradient of '{self.name}.{self.trained[index].name}' is {gradient.layout}: "
                "only dense gradients and those of nn.Embedding(sparse=True) are reduced")
        view, task = self._gradient_views()[index], torch._C._current_graph_task_id()
        if self.promised.get(index, task) != task:  # a backward within that one: reentrant
            view.add_(gradient)                     # checkpointing
            return False
        if index in self.written:
            view.add_(gradient)
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
        self.written.add(index)
        self.promised.pop(index, None)
        return True

    def reduce_submit(self, more: bool = False) -> Ticket[bool]:
        """Hand the gradients in; what has none contributes 0, if another rank has one
        (collective). @more: not the last time before the step. The ticket's value: did any rank
        use the unit?"""
        unit, views = self._must(), self._gradient_views()
        unused = [i for i in range(len(views)) if i not in self.written]
        for index in unused if self.own_hook is None else ():
            views[index].zero_()
        all_zeros = self.zeros and self.was_gathered  # they count as gradients
        unused = [i for i in unused if not self.trained[i].guard.requires_grad or
                  not (all_zeros or self.trained[i].zeroed)]
        if not self.all_reduce and self.mesh is not None and self.mesh.replicas > 1:
            self.deferred |= self.written
            self._gradients = None
            self.written.clear()
            return unit.client.submit("reduce", unit.id, deferred=True, finish=lambda _: False)
        unused = [i for i in unused if i not in self.deferred]
        self.deferred.clear()
        self.written.clear()
        self._gradients = None

        def finish(result: _abi.Result) -> bool:
            if not result.skipped:
                self._reduced(unused)
            return not result.skipped

        if len(unused) == len(views) and not more and self.own_hook is None:
            return unit.client.submit("reduce", unit.id, unit_unused=True, finish=finish)
        numbers = [self.params.index(self.trained[i]) for i in unused]
        return unit.client.submit("reduce", unit.id, finish=finish,
                                  **reduce_options(numbers, more))

    def end_reductions(self) -> None:
        """All before were with more: an optimizer in the process gets what they came to
        (collective)."""
        views = self._gradient_views()
        kept = {i: views[i].clone() for i in self.written}  # of a pass that is not to be reduced
        self._gradients = None
        self._must().client.do("reduce", self._must().id, unit_unused=True)
        for i, gradient in kept.items():
            self._gradient_views()[i].copy_(gradient)

    def _reduced(self, unused: list[int]) -> None:
        """@unused: of the trained, by this rank. Another may have used them."""
        unit = self._must()
        by_all = set(unit.unused()) if unused else ()
        for p in self.trained:
            p.came = p.came or p.name not in by_all
            p.reduced = p.reduced or p.came

    def set_factors(self, divide_factor: float, force_sum: bool) -> None:
        """By what reductions divide from here on (collective, if it is registered)."""
        if self.unit is not None:
            self.unit.set_factors(divide_factor=divide_factor, force_sum=force_sum)
        self.divide_factor, self.force_sum = divide_factor, force_sum

    def forget(self) -> None:
        """The daemon has dropped what this session held, and what was set in the epoch."""
        if self.unit is not None:
            self.divide_factor = self.unit.spec.divide_factor
            self.force_sum = self.unit.spec.force_sum
        self.uninstall()
        if self.held:
            self._empty()
        self.held = False
        self.end_backward()
        self._gradients = None
        self.forget_gradients()
        self.guard_gradients(False)

    def forget_gradients(self) -> None:
        """What is in the buffer counts no more."""
        self.hooked = False
        self.deferred.clear()
        self.written.clear()
        self.arrived.clear()
        self.promised.clear()

    def guard_gradients(self, there: bool) -> None:
        """The program sees the gradients that some rank has one of, or none."""
        for i, p in enumerate(self.trained):
            p.reduced = p.reduced and there
            p.told = there and (p.reduced or i in self.written)
            p.had = p.had or p.told
            p.gradient.show(p.told, p.reduced)

    def missed(self, p: Parameter, dropped: bool) -> None:
        """The program looks for the gradient of @p, and there is none; or it drops it."""
        if self.tree is None or not p.had:
            return
        if dropped:
            self.tree.used.there = False
        else:
            self.tree.used.read(p.name)

    def drop_gradients(self) -> None:
        """The daemon drops the reduced gradients that the program has set to None (collective, if
        there are any)."""
        gone = [p for p in self.trained if p.told and p.gradient.dropped]
        numbers = [self.params.index(p) for p in gone]
        if gone:
            self._must().client.do("drop_gradients", self._must().id,
                                   (C.c_uint32 * len(numbers))(*numbers), len(numbers))
        for p in gone:
            p.reduced = p.told = p.had = p.zeroed = p.gradient.dropped = False

    def push_gradients(self) -> None:
        """The daemon is about to use the gradients: it gets what the program has made of them."""
        for p in self.trained:
            p.gradient.push()

    def pull_gradients(self) -> None:
        """The daemon has changed the gradients: what the program has got of them follows."""
        for p in self.trained:
            p.gradient.pull()

    def call_hooks(self) -> None:
        """Those of parameters whose gradient was reduced in this pass."""
        for p in self.trained:
            if p.came:
                p.came = False
                p.guard.accumulated()

    # ----------------------------------------------------------- whole parameters

    def summon(self) -> None:
        """The parameters, as they are stored, in memory of this rank's own, installed
        (collective)."""
        unit = self._must()
        self.release()
        ticket: Ticket[int] = unit.client.submit("summon", unit.id, finish=lambda r: r.data)
        self._summoned = tensor_at(of_all_ranks(ticket), unit.elements, self.stored)
        for p in self.params:
            place = unit.places[p.name]
            view = self._summoned[place.offset:place.offset + place.elements].view(p.shape)
            p.install(nn.Parameter(view, requires_grad=p.trained))

    def give_back(self, write: bool) -> None:
        """End of summon (collective)."""
        for p in self.params:
            p.install(p.guard)
        _swap(self._summoned.untyped_storage(), nothing())
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
        nbytes = self.elements * self.stored.itemsize
        return (f"unit '{self.name}': {len(self.params)} parameters, {nbytes / 2**20:.2f} MiB, "
                f"{state}")
