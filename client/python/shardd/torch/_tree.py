"""All units of one model: registration, the end of a backward pass, steps.

Units are reduced in one order on all ranks, the reverse of the model's, whatever the order in
which their gradients arrive. A rank that takes another branch than its peers contributes nothing
for the units that it has not used, so no rank waits forever.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Iterator
from typing import Any, Callable, cast

import torch
from torch import nn

from ..client import WORLD
from ..errors import Aborted, FailedPrecondition, InvalidArgument, SharddError, Unimplemented
from ..specs import OptimizerSpec, OptimizerWhen, ReduceOp
from ..ticket import Ticket
from ..unit import Unit
from . import _device, _faults, _mesh, _models
from ._meta import from_meta
from ._progress import Bar
from ._session import session_for
from ._unit import NO_TASK, Call, OwnHook, Parameter, ShardedUnit
from ._used import Used

Settings = Callable[[ShardedUnit], "tuple[OptimizerSpec, dict[int, dict[str, Any]]]"]


def unit_of(module: nn.Module) -> ShardedUnit | None:
    """The unit of a wrapped module; of a replicated one the first."""
    units: list[ShardedUnit] = getattr(module, "_shardd_units", [])
    return units[0] if units else None


def units_of(module: nn.Module) -> list[ShardedUnit]:
    """Those of @module and inside it, in the order of its modules."""
    # not by getattr, which wrappers (checkpoints, torch.compile) pass on to what is in them
    return [u for m in module.modules() for u in m.__dict__.get("_shardd_units", [])]


class Tree:
    """See above."""

    def __init__(self, root: ShardedUnit, settings: Settings | None) -> None:
        """Register the units and initialise their parameters (collective)."""
        self.root = root
        self.client = session_for(p.initial.device for u in units_of(root.module)
                                  for p in u.params if p.initial is not None)
        self._as = self._numbers()
        if _device.here.type != "cpu" and any(u.offload for u in units_of(root.module)):
            raise Unimplemented(f"CPUOffloadPolicy: this rank's memory is on {_device.here}; leave "
                                "it out, or use a daemon with host memory", "offload_policy")
        self.mesh = self._one_mesh(units_of(root.module))
        self.units = units_of(root.module)
        for unit in self.units:
            unit.check()
            unit.take_trained()
        self.by_trainer = settings is None  # a Sharded may be built yet
        self._take_order()
        self.optimizer: Any = None
        self.several = False  # optimizers that step their own parameters each
        self.uneven = False  # inside join()
        self._thread: int | None = None  # that is in the root's forward
        self._writing = False  # the program writes to shards
        self.backward = False
        self.reduced = False  # something since the last step
        self.used = Used()
        self._next = 0  # in order
        self._some = False  # gradients in this pass
        self.missing: list[str] = []  # of the last pass: another backward may bring them
        self._tickets: list[tuple[ShardedUnit, Ticket[bool]]] = []
        self.arrived: set[int] = set()  # numbers of units with a gradient since the last step
        self.loaded = False  # parameters, over what was found; the optimizer's state is of before
        self._name_units()
        self.group = self._own_group()
        self._register(settings)
        _models.add(self.client, self._ranks, self, self._number, self.group,
                    [u.unit.id for u in self.units if u.unit is not None])
        buffers = getattr(root.module, "_shardd_buffers", None)
        if buffers is not None:
            buffers.begin(self)
        self._modules = _with_parameters(root.module)
        self._count = self._parameters()

    def _take_order(self) -> None:
        """In which units are reduced, and what is trained in each."""
        self.order = [u for u in reversed(self.units) if u.trained]
        for unit in self.units:
            unit.below = [u for u in units_of(unit.module) if u is not unit and u.trained]

    def _name_units(self) -> None:
        names = {id(m): n for n, m in self.root.module.named_modules()}
        self._number = _models.number(self.client, self._ranks)
        prefix = f"{self._number}:" if self._number > 1 else ""
        if self.mesh is not None and len(self.mesh.ranks) < self._world:  # others have others
            prefix = f"{self.mesh.label}:{prefix}"
        for unit in self.units:
            if unit.tree is not None:
                raise FailedPrecondition(
                    f"unit '{unit.name}' was used before the module around it was wrapped: call "
                    "fully_shard or replicate on all modules before the first forward")
            unit.tree, unit.name = self, prefix + (names[id(unit.module)] or "root") + unit.bucket

    def _one_mesh(self, units: list[ShardedUnit]) -> _mesh.Mesh | None:
        """All units', checked against the job; None: all ranks of it share."""
        member = self.client.member
        assert member is not None
        meshes = {u.mesh and (u.mesh.ranks, u.mesh.shard): u.mesh for u in units}
        if len(meshes) != 1:
            raise Unimplemented("units of one model have different meshes: all units step on the "
                                "same ranks; give every fully_shard the same mesh", "mesh")
        [mesh] = meshes.values()
        if mesh is None:
            return None
        if mesh.given is not None and mesh.given.device_type != _device.here.type:
            raise InvalidArgument(f"mesh is of {mesh.given.device_type}, but this rank's memory is "
                                  f"on {_device.here}: give "
                                  f"init_device_mesh(\"{_device.here.type}\", ...)", "mesh")
        if member.rank not in mesh.ranks:
            raise InvalidArgument(f"mesh has the ranks {list(mesh.ranks)}, but this is rank "
                                  f"{member.rank} of the job: wrap only on the ranks of the mesh",
                                  "mesh")
        if max(mesh.ranks) >= member.world_size:
            raise InvalidArgument(f"mesh has rank {max(mesh.ranks)}, but the job has "
                                  f"{member.world_size} ranks", "mesh")
        return mesh

    def _own_group(self) -> int:
        """A step is of a group: every further model has one of its own, as has a mesh that is not
        all ranks in their order."""
        every = tuple(range(self._world))
        if self.mesh is not None and self.mesh.ranks != every:
            return self.client.group(f"model {self._number} of {self.mesh.label}",
                                     self.mesh.ranks)
        if self._number == 1:
            return WORLD
        return self.client.group(f"model {self._number}", every)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks if self.mesh is not None else tuple(range(self._world))

    @property
    def _world(self) -> int:
        member = self.client.member
        assert member is not None
        return member.world_size

    @property
    def first_rank(self) -> int:
        """Whose parameters are everybody's."""
        return self.mesh.ranks[0] if self.mesh is not None else 0

    @property
    def alone(self) -> bool:
        """Is it the only model of this process?"""
        return _models.is_alone(self.client)

    def _register(self, settings: Settings | None) -> None:
        some = [u for u in self.units if u.params]
        specs = [u.spec(self.group, *(settings or _by_trainer)(u)) for u in some]
        if not some:
            raise InvalidArgument("the model has no parameters to shard")
        self._specs = specs
        try:
            registration = self._registration()
            self.client.do("verify_model", self.group)
        except SharddError as error:
            raise error.advised(_SAME_MODEL) if _is_of_models(error) else error from None
        rank = self.client.member.rank if self.client.member else 0
        with _device.same_random(), \
                Bar("initialising", sum(4 * u.elements for u in some), rank) as bar:
            for unit, registered in zip(some, registration):
                unit.registered(registered)
                from_meta(unit, self.root.module)
                unit.initialise(self.client)
                unit.place_shards(self.client)
                bar.add(4 * unit.elements, unit.name)
            for unit in self.units:
                if not unit.params:
                    from_meta(unit, self.root.module)  # its buffers

    def _registration(self) -> list[Unit]:
        member = self.client.member
        try:
            return self.client.register(self._specs)
        except SharddError as error:
            if member is None or not member.resumed or "is registered with" not in error.text:
                raise
            raise FailedPrecondition(
                f"{error.text}; if these units belong to another model that trained under the "
                "job's name before, name another job (SHARDD_JOB), or delete that one "
                "(shardctl job delete)") from error

    def _parameters(self) -> int:
        return sum(len(m._parameters) for m in self._modules)

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """The root's forward begins, outside of backward; :meth:`end_forward` follows."""
        if self.elsewhere:
            raise FailedPrecondition(
                "two threads are in the forward of one model: one thread must gather and reduce "
                "its units in one order; give each thread its own rank or model, or let them take "
                "turns")
        modules = _with_parameters(self.root.module)
        if len(modules) != len(self._modules) or self._parameters() != self._count or \
                any(a is not b for a, b in zip(modules, self._modules)):
            raise FailedPrecondition(
                "a parameter, or a module with parameters, was added, removed or replaced after "
                "the model was wrapped: the daemon has the original ones; build the model first, "
                "then call fully_shard or replicate")
        self.check_missing()
        self.take_unfrozen()
        self.take_dropped()
        self.settle()
        _faults.check()
        _faults.expect(True)
        self._thread = threading.get_ident()

    def take_unfrozen(self, optimizer: Any = None) -> None:
        """What was frozen when the daemon got the model, and is trained now, gets room for its
        gradient and the optimizer's state (collective, if there is something). @optimizer: one that
        is being built; None: the present one goes on."""
        found = [(unit, fresh) for unit in self.units for fresh in [unit.check()] if fresh]
        if not found:
            return
        self._check_unfrozen(found, optimizer)
        self.take_dropped()
        self.release_all()
        for unit, fresh in found:
            like = None if unit.trained else self._like(unit, fresh[0])
            unit.unfreeze(self.client, fresh, like)
        self._take_order()
        self._specs = [u.unit.spec for u in self.units if u.unit is not None]
        if self.optimizer is not None:
            self.optimizer.took_unfrozen()

    def _check_unfrozen(self, found: list[tuple[ShardedUnit, list[Parameter]]],
                        optimizer: Any) -> None:
        unit, fresh = found[0]
        if unit.replicated:
            for p in fresh:
                p.guard.requires_grad = False
            raise FailedPrecondition(
                f"requires_grad of '{unit.name}.{fresh[0].name}' is True, and was False when "
                "replicate got the model: as with DistributedDataParallel, what is trained is "
                "decided then; set it before, and freeze it afterwards")
        if self.optimizer is not None and optimizer is None:
            for _, fresh in found:
                self.optimizer.check_unfrozen(fresh)

    def _like(self, unit: ShardedUnit, p: Parameter) -> ShardedUnit:
        """A unit with the optimizer that @unit, which has none, needs for @p."""
        for other in self.order:
            if self.optimizer is None or self.optimizer.keeps_the_same(other.trained[0], p):
                return other
        raise FailedPrecondition(
            f"requires_grad of '{unit.name}.{p.name}' is True, and no unit was trained before that "
            "has the optimizer that this unit needs: unfreeze one parameter before fully_shard "
            "that has the same settings, and freeze it again after the first forward")

    @property
    def elsewhere(self) -> bool:
        """Is another thread in the root's forward?"""
        return self._thread not in (None, threading.get_ident())

    def end_forward(self) -> None:
        """The root's forward is over, perhaps by an exception."""
        if not self.elsewhere:
            self._thread = None
            _faults.expect(self.backward)

    def finish(self) -> None:
        """Parameters are wanted: a step that waits for the commit is made now, and what the
        program has written to shards is there on all ranks (collective)."""
        if self.optimizer is not None:
            self.optimizer.finish()
        if self._writing:
            self._writing = False
            self.client.barrier(self.group)

    @property
    def uses_parameters(self) -> bool:
        """Is a forward or backward running?"""
        return self._thread is not None or self.backward

    def begin_read(self) -> None:
        """The program is about to read a shard (collective, if a step waits for the commit)."""
        if self.optimizer is not None:
            self.optimizer.finish()

    def begin_write(self) -> None:
        """The program is about to write to a shard. No rank has gathered the unit then, or will
        before all have written (collective, if it is the first write since a gather)."""
        if not self._writing:
            self.release_all()
            self.client.barrier(self.group)
            self._writing = True

    def settle(self) -> None:
        """Parameters are wanted, and no backward runs: if an exception ended the last one, what it
        had gathered and produced goes."""
        self.finish()
        self._end_failed()

    def _end_failed(self) -> None:
        if not self.backward or torch._C._current_graph_task_id() != -1:
            return
        self.backward = False
        if not (self._adds_up or self._steps_here):  # else what was reduced is still to be taken
            self._tickets.clear()
        for unit in self.units:
            unit.end_backward()
            unit.forget_gradients()
            unit.release()

    def _numbers(self) -> tuple[int, int]:
        """Which rank of how many."""
        member = self.client.member
        assert member is not None
        return member.rank, member.world_size

    def _check_numbers(self) -> None:
        """What the program holds of shards, DTensors among it, is of a rank of so many."""
        (rank, world), (was, of) = self._numbers(), self._as
        if (rank, world) != (was, of):
            raise FailedPrecondition(
                f"the job goes on with {world} ranks: this process was rank {was} of {of} and is "
                f"rank {rank} of {world} now, and a model cannot change that while its process "
                "lives. Its state is in the daemon: started again, the process goes on from there "
                f"(shardctl run --max-restarts). With torch.distributed start all again, {world} "
                "ranks (torchrun --nproc-per-node, shardctl run --min without --join-grace)")

    def rejoin(self, wait: float) -> None:
        """After Aborted: forget what was held, which the daemon has dropped, and join the job's new
        epoch; @wait: seconds, at most, until all ranks are there."""
        self.backward, self.reduced, self._writing = False, False, False
        self._tickets.clear()
        self.arrived.clear()
        self.uneven = False
        for unit in self.units:
            unit.forget()
        if self.optimizer is not None:
            self.optimizer.forget()
        member = self.client.member
        assert member is not None
        self.client.rejoin()
        self._check_numbers()
        self.client.set_timeout(wait)
        try:
            if self.group != WORLD:
                self.group = self._own_group()
            self.client.register(self._specs)
            self.client.do("verify_model", self.group)
        finally:
            self.client.set_timeout(0)

    def loads(self, unit: ShardedUnit) -> None:
        """The parameters of @unit, which was summoned, are loaded. An optimizer's state that was
        found in the job is then not theirs."""
        if unit.found and unit.unit is not None and any(unit.unit.steps().values()):
            self.loaded = True

    def knows_optimizer(self) -> None:
        """The optimizer's state is now what the program wants."""
        self.loaded = False
        for unit in self.units:
            unit.found = False

    def check_optimizer(self) -> None:
        """FailedPrecondition: its state belongs to parameters that were loaded over."""
        if self.loaded:
            raise FailedPrecondition(
                "the model's parameters were loaded, but the optimizer still has the state that "
                "was found in the job: load the optimizer's too (optimizer.load_state_dict), or "
                "begin without one (optimizer.reset_state())")

    def release_all(self) -> None:
        """Nobody may have a unit gathered that is stepped, summoned or saved."""
        self.settle()
        _faults.check()
        for unit in self.units:
            unit.release()

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Inside is nothing collective; behind it all ranks go on, or none: if one has raised, it
        raises that, and the others InvalidArgument (collective)."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        with self.client.alloc((1,)) as said:
            said.memory.write(array("f", [failed is not None]))
            self.client.all_reduce(said, ReduceOp.MAX, self.group)
            some = array("f", said.memory.tobytes())[0] > 0
        if failed is not None:
            raise failed
        if some:
            raise InvalidArgument(f"another rank cannot {what}: see its error; nothing was "
                                  "changed")

    # ----------------------------------------------------------------- backward

    @property
    def sync(self) -> bool:
        """Does backward reduce anything?"""
        return any(unit.sync for unit in self.units)

    def set_sync(self, sync: bool) -> None:
        """Of all units."""
        for unit in self.units:
            unit.sync = sync

    def begin_backward(self) -> None:
        """Something of a backward pass has come."""
        if self.backward:
            return
        self.take_dropped()
        self._check_hooks()
        self.used.backward()
        self.backward, self._some = True, False
        _faults.expect(True)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not self.missing:  # else it goes on where the one before has ended
            self._next = 0
        for unit in self.units:
            if not self.missing:
                unit.arrived.clear()
            unit.promised.clear()
            unit.inside.clear()
            unit.task = NO_TASK

    def _check_hooks(self) -> None:
        """FailedPrecondition: there are hooks of gradients that nobody will see."""
        named = [f"{u.name}.{p.name}" for u in self.units for p in u.trained
                 if p.guard._accumulated]
        if named and (self.uses_up_gradients or self.units[0].replicated):
            raise FailedPrecondition(
                f"'{named[0]}' has a hook of register_post_accumulate_grad_hook, but "
                f"{self.units[0].why_no_gradient(torch.Size((1,)))}: remove the hook")

    @property
    def uses_up_gradients(self) -> bool:
        """Does an optimizer step in backward?"""
        return self._steps_in_backward

    @property
    def _adds_up(self) -> bool:
        return getattr(self.optimizer, "adds_up", self.by_trainer)

    @property
    def _steps_here(self) -> bool:
        return getattr(self.optimizer, "steps_here", False)

    @property
    def _steps_in_backward(self) -> bool:
        return getattr(self.optimizer, "in_backward", False)

    def pre_backward(self, unit: ShardedUnit, call: Call | None = None) -> None:
        """@unit's parameters are about to be needed: also by its modules, where a part of its
        forward is computed again. @call: the forward, of a unit with frozen parameters."""
        self.begin_backward()
        unit.enter(call)
        if self._steps_here and any(u is unit for u, _ in self._tickets):
            self._take_done(unit)
        unit.in_backward, unit.task = True, torch._C._current_graph_task_id()
        if unit.unshard_in_backward:
            unit.gather()
            unit.install()

    def gradient(self, unit: ShardedUnit, index: int, gradient: torch.Tensor) -> None:
        """A gradient has arrived."""
        self.begin_backward()
        self._some = True
        self._take_hooked(unit)
        if not unit.add_gradient(index, gradient):
            return
        if unit.task not in (NO_TASK, torch._C._current_graph_task_id()):
            return  # of a part that is computed again, by a backward in the unit's: more may come
        unit.arrived.add(index)
        if unit.complete:
            self._came(unit)

    def input_gradient(self, unit: ShardedUnit, call: Call) -> None:
        """The gradient of an input of @call, a forward of @unit, is there."""
        if self.backward:
            unit.leave(call)
            self._came(unit)

    def _came(self, unit: ShardedUnit) -> None:
        """@unit has all gradients, or autograd has left a forward of it."""
        around: ShardedUnit | None = unit
        while around is not None:
            if around.in_backward and around.left:
                around.in_backward = False
                self._let_go(around)
            around = around.parent
        while self._next < len(self.order):
            unit = self.order[self._next]
            if not unit.sync:
                self._next += 1
                continue
            # who steps in backward waits until nobody has it
            if not unit.complete or (self._steps_in_backward and not unit.left):
                break
            self._reduce(unit)
            self._next += 1

    def _reduce(self, unit: ShardedUnit) -> None:
        if self._steps_here:
            self._let_go(unit)  # who steps waits until nobody has it
            self._take_done()
        elif self._steps_in_backward and not self.reduced:
            self.check_optimizer()
            rate, settings = self.optimizer.rates()
            self.client.plan_backward(rate, group=self.group, settings=settings,
                                      **self.optimizer.planned())
        unit.push_gradients()
        self.reduced = True
        if unit.own_hook is not None:
            self._call_hook(unit, unit.own_hook)
        else:
            self._submit(unit)

    def _submit(self, unit: ShardedUnit) -> None:
        self._tickets.append((unit, unit.reduce_submit(self._adds_up)))

    def _call_hook(self, unit: ShardedUnit, hook: OwnHook) -> None:
        """The function of the program reduces while backward goes on; :meth:`_take_hooked` hands
        the result to the daemon."""
        self._take_hooked(unit)
        hook.number(self.order.index(unit), unit is self.order[-1])
        hook.begin(unit)
        unit.hooked = True
        if self._steps_here or self._steps_in_backward:
            self._take_hooked(unit)

    def _take_hooked(self, last: ShardedUnit | None = None) -> None:
        """What hooks have reduced, in the order of the reductions; up to @last, if it is one."""
        if last is not None and not last.hooked:
            return
        for unit in self.order:
            if unit.hooked and unit.own_hook is not None:
                unit.hooked = False
                unit.own_hook.finish(unit)
                self._submit(unit)
            if unit is last:
                break

    def _end_backward(self) -> None:
        """Runs when autograd has done all of the pass."""
        self.backward = False
        for unit in self.units:
            unit.end_backward()
            self._let_go(unit)
        _faults.expect(self._thread is not None)
        _faults.check()
        if not self._some:  # torch.autograd.grad of inputs, say
            return
        self.missing = self._missing()
        if self.sync and not self.missing:
            for unit in self.order[self._next:]:
                if unit.sync:
                    self._reduce(unit)
            self._take_hooked()
            for unit in self.order:
                if unit.sync and unit.written:  # a second gradient after its reduction
                    self._reduce(unit)
            self._take_hooked()
        self._wait()
        for unit in self.units:
            unit.guard_gradients(True)
            unit.pull_gradients()
        for unit in self.order:
            unit.call_hooks()

    def check_missing(self) -> None:
        """FailedPrecondition: parameters that must have a gradient have none after the last
        backward, so that not all was reduced."""
        if not self.missing:
            return
        self._reduce_missing()
        missing, self.missing = self.missing, []
        raise FailedPrecondition(
            f"{len(missing)} parameters have no gradient after backward: "
            f"{', '.join(missing[:5])}{'...' if len(missing) > 5 else ''}; give replicate "
            "find_unused_parameters=True, or use all parameters in every forward")

    def _reduce_missing(self) -> None:
        """The other ranks wait for what this one has not reduced."""
        if not self.missing:
            return
        rest, self._next = self.order[self._next:], len(self.order)
        for unit in rest:
            if unit.sync:
                self._reduce(unit)
        self._take_hooked()
        self._wait()

    def _let_go(self, unit: ShardedUnit) -> None:
        """Backward does not need it any more; replicas keep its memory until the step."""
        if unit.replicated:
            if not self.backward:
                unit.uninstall()
            return
        if unit.reshard_after_backward or self._steps_here or self._steps_in_backward:
            unit.release()
        else:
            unit.uninstall()

    def _missing(self) -> list[str]:
        """Parameters that are to have a gradient after this pass, and have none."""
        return [p.name for unit in self.units if unit.all_used and unit.sync
                for i, p in enumerate(unit.trained)
                if p.guard.requires_grad and i not in unit.arrived and i not in unit.written]

    def _arrive(self, unit: ShardedUnit, ticket: Ticket[bool]) -> None:
        if ticket.wait() and unit.unit is not None:
            self.arrived.add(unit.unit.id)
            if self._steps_here:
                self.optimizer.came(unit)

    def _take_done(self, last: ShardedUnit | None = None) -> None:
        """What has been reduced by now, in order; with @last: wait until that has."""
        while self._tickets and (last is not None or self._tickets[0][1].done()):
            unit, ticket = self._tickets.pop(0)
            self._arrive(unit, ticket)
            last = None if unit is last else last

    def _wait(self) -> None:
        tickets, self._tickets = self._tickets, []
        failed: Exception | None = None
        for unit, ticket in tickets:
            try:
                self._arrive(unit, ticket)
            except Aborted:
                raise
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    # --------------------------------------------------------------------- steps

    def collect(self) -> None:
        """Nothing is gathered, and nothing is being reduced: also if an exception ended the last
        backward."""
        self.release_all()
        self._wait()

    def keeps_gradients(self, what: str) -> None:
        """FailedPrecondition: the optimizer in backward has used them up."""
        if self._steps_in_backward:
            raise FailedPrecondition(f"{what}: the optimizer steps in backward, so the gradients "
                                     "are gone; call optimizer.plan_backward() before backward, "
                                     "or build it without in_backward")

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ (collective). Return: the norm before."""
        self.keeps_gradients("clip_grad_norm_")
        with self.using_gradients():
            norm = self.client.clip_grad_norm(
                max_norm, norm_type, self.group, error_if_nonfinite=error_if_nonfinite)
        return torch.tensor(norm, device=_device.here)

    def unscale(self, inv_scale: float) -> bool:
        """Multiply the gradients (collective). Return: had any rank an infinity or NaN?"""
        self.keeps_gradients("unscale_")
        with self.using_gradients():
            return self.client.unscale(inv_scale, self.group)

    def hand_over_gradients(self) -> None:
        """The daemon gets what the program has made of the gradients (collective, if some were
        dropped)."""
        self.check_missing()
        self.take_dropped()
        for unit in self.units:
            unit.push_gradients()

    @contextlib.contextmanager
    def using_gradients(self) -> Iterator[None]:
        """Inside, the daemon uses or changes the gradients: before, it gets what the program has
        made of them, afterwards the program sees what it has made of them."""
        self.hand_over_gradients()
        yield
        for unit in self.units:
            unit.pull_gradients()

    def used_up(self) -> None:
        """An optimizer has stepped."""
        if not self.reduced:
            self.used.step()
        self.used.there = (self.used.there or self.reduced) and not self._steps_in_backward
        self.stepped()

    def stepped(self) -> None:
        """The gradients are gone."""
        self.reduced = False
        self._tickets.clear()
        self.arrived.clear()
        for unit in self.units:
            unit.guard_gradients(False)

    def by_number(self, number: int) -> ShardedUnit:
        """The unit that the daemon calls @number."""
        return next(u for u in self.units if u.unit is not None and u.unit.id == number)

    def take_dropped(self) -> None:
        """What the program has dropped by p.grad = None, or a zero_grad() that does so, is dropped
        (collective, if it was reduced). FailedPrecondition: some of what was not reduced yet."""
        there = [(u, p) for u in self.units for p in u.trained if p.told]
        gone = [(u, p) for u, p in there if p.gradient.dropped]
        if gone and len(gone) == len(there):
            self.zero_grad()
            return
        for unit, p in gone:
            if not p.reduced or unit.trained.index(p) in unit.written:
                raise FailedPrecondition(
                    f"the gradient of '{unit.name}.{p.name}' was set to None, but it is of a "
                    "backward whose gradients were not reduced: such gradients are dropped all "
                    "together, by zero_grad() of the optimizer or of the model")
        for unit in self.units:
            unit.drop_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients there are (collective, if something was reduced). With @set_to_none
        False parameters that had one count as used, with zeros, in later backwards."""
        self._end_failed()
        self._reduce_missing()
        self.used.there = False
        for p in (p for unit in self.units for p in unit.trained):
            p.zeroed = p.had and not set_to_none
            p.had = p.zeroed
        for unit in self.units:
            unit.forget_gradients()
        if self.reduced:
            held = [(u, u.installed) for u in self.units if u.held]
            self.release_all()
            self.client.step(group=self.group, discard=True)
            for unit, installed in held:  # between forward and backward
                unit.gather()
                if installed:
                    unit.install()
        self.stepped()


_SAME_MODEL = ("all ranks must build the same model, wrap it in the same order and give its "
               "optimizer the same settings; a rank that has left has printed why")


def _is_of_models(error: SharddError) -> bool:
    """Is it, as far as can be known, that ranks have different models?"""
    return "name another job" not in error.text and any(
        said in error.text for said in ("is registered with", "models differ", "ops differ",
                                        "has left job"))


def _by_trainer(unit: ShardedUnit) -> tuple[OptimizerSpec, dict[int, dict[str, Any]]]:
    """The settings of a unit of which no optimizer is known yet."""
    return OptimizerSpec(when=OptimizerWhen.BY_TRAINER) if unit.trained else OptimizerSpec(), {}


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if m._parameters]


def _root(unit: ShardedUnit) -> ShardedUnit:
    while unit.parent is not None:
        unit = unit.parent
    return unit


def tree_of(unit: ShardedUnit, settings: Settings | None = None) -> Tree:
    """The tree of @unit, made now if it was not yet."""
    root = _root(unit)
    return built(root) or Tree(root, settings)


def empty(unit: ShardedUnit) -> bool:
    """Has the model of @unit no parameters to shard?"""
    return not any(u.params for u in units_of(_root(unit).module))


def built(unit: ShardedUnit) -> Tree | None:
    """The tree of @unit; None: it is not made yet."""
    return cast("Tree | None", unit.tree)


def its_tree(unit: ShardedUnit) -> Tree:
    """The tree of @unit, which is made already."""
    assert unit.tree is not None
    return cast("Tree", unit.tree)
