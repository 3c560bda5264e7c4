"""A connection to the daemon: one session, and its ops."""

from __future__ import annotations

import ctypes as C
import math
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from . import _abi, _again, _library, _restart, specs
from ._connection import DEFAULT_SOCKET as DEFAULT_SOCKET
from ._connection import socket_path as socket_path
from ._device import HOST, Gpu
from ._launch import launched
from ._reconnect import ConnectionEvent
from ._session import Session
from .buffer import Buffer as Buffer
from .errors import FailedPrecondition, InUse, InvalidArgument
from .memory import Dtype, Memory
from .specs import Checkpoints, ClipProfile, Lifetime, ReduceOp, StepSettings, UnitSpec
from .unit import Unit

WORLD = 0
_FROM_ENV = 0xFFFFFFFF


@dataclass(frozen=True)
class Membership:
    """The result of a join. ``epoch`` grows whenever the membership changes. ``resumed``: the job
    has state from before. ``step``: the parameters are those of this step, if ``has_step``.
    ``committed_step``: of the last commit, if ``has_commit``. ``blob``: this rank's last one, of
    ``blob_step``, which is below ``step`` if steps after it had no blob. ``torn``: parameters were
    changed after the commit, and nobody knows to which step. ``created``: this join made the
    job."""

    epoch: int
    world_size: int
    rank: int
    resumed: bool
    has_commit: bool
    torn: bool
    step: int
    blob: bytes
    created: bool = False
    has_step: bool = False
    committed_step: int = 0
    blob_step: int = 0


@dataclass(frozen=True)
class Device:
    """Where this rank's memory is. ``id``: "host:0", "cuda:0"; ``backend``: "host", "cuda"."""

    id: str
    backend: str
    uuid: str
    streams: bool


class StepResult(NamedTuple):
    """The result of a step: was it skipped, was an infinity found, the norm of the plan's clip
    (or None)."""

    skipped: bool
    found_inf: bool
    total_norm: float | None


class Shard(NamedTuple):
    """A shard for the trainer's own optimizer, as flat fp32 copies; it changes the parameters."""

    unit: Unit
    params: Memory
    gradient: Memory


class Client(Session):
    """One connection and one session; may be used by several threads at once.

    It cannot be used in a child after fork, which cannot connect, either: start processes that
    connect with multiprocessing's spawn, or before this. Environment: SHARDD_SOCKET,
    SHARDD_DEVICE; and for :meth:`join` SHARDD_JOB and the variables of launchers.

    A context manager: at the end it leaves its job, if it has joined one, and closes. After an
    exception it closes without leaving, so the other ranks learn of the failure.
    """

    def __init__(self, socket: str | None = None, name: str | None = None,
                 device: str | None = None, connect_timeout: float = 5.0,
                 reconnect: float | None = None,
                 on_connection: Callable[[ConnectionEvent], None] | None = None,
                 on_stall: Callable[[str], None] | None = None) -> None:
        """Connect. @name: shown in status. @device: "host:0" or a GPU's UUID; None: chosen.
        @connect_timeout: seconds to retry while no daemon listens. @reconnect: seconds to connect
        again when the daemon ends and its jobs outlive it, 0: not at all, None:
        $SHARDD_RECONNECT_MS or 60 s. @on_connection: called with each :class:`ConnectionEvent`, in
        a thread of its own, instead of a line on standard error; it may not use this client.
        @on_stall: called by a thread that has waited for a ticket for 10 s, then 20 s and so on,
        with a sentence that says who holds it up, instead of a line on standard error. If it
        raises, the wait does.

        Unavailable: no daemon listens. PermissionDenied: the socket's mode. VersionMismatch.
        """
        self.member: Membership | None = None
        self._name: bytes | None = None  # of the job
        self._units: dict[int, Unit] = {}
        super().__init__(socket, name, device, connect_timeout, reconnect, on_connection,
                         on_stall)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self.member is not None:
            self.leave()
        try:
            self.close()
        except InUse:
            if kind is None:
                raise

    # ------------------------------------------------------------------ jobs

    def join(self, job: str | None = None, world_size: int | None = None,
             rank: int | None = None, lifetime: Lifetime | None = None, quota_bytes: int = 0,
             ttl: int = 0, op_timeout: float = 0, allow_torn: bool = False,
             private: bool = False, on_existing: str = "resume",
             resume_from: str | None = None,
             elastic: tuple[int, int] | tuple[int, int, float] | None = None,
             checkpoints: Checkpoints | None = None,
             local: tuple[int, int] | None = None, priority: int = 0,
             wait_for_memory: float = 0) -> Membership:
        """Join a job as a rank; the job is created if it does not exist. Join again after Aborted.

        None: the launcher's value (docs/python.md); for the job, $SHARDD_JOB comes first. @ttl,
        @op_timeout: seconds, 0: the daemon's default. Blocks until the daemon has answered, not
        until all ranks have joined. @private: closed to other users, including root.
        @on_existing: if the job has parameters or a commit of another run: "resume" continues from
        them, "error" is FailedPrecondition, "fresh" deletes the job, unless it has trainers, and
        creates it. A rank that a guard or a launcher has started again continues in any case.
        @resume_from: what the job goes on from after a rank was lost: "applied", the last applied
        step; units with an optimizer in backward, or of the trainers' own, are copied before each
        step (as much memory again for them), so that one that is half made is rolled back.
        "no-copy": the same without the copy: such a step leaves the job torn. "committed": the last
        commit, of which it keeps a copy (as much memory again). None: as the job has it, a new one
        "applied".
        @elastic: the least and the largest number of ranks: ranks that join with another world_size
        between them give the job that size, if none of the former size is in it; None: as the job
        has it, a new one keeps its size. With a third number, seconds, the job does this by itself:
        when ranks do not come back for so long, those that have joined again go on, and a process
        with a rank that the job does not have waits here and is taken in at a commit. All ranks
        give the same, and pass the same rank and world_size each time: the result says which rank
        of how many this process is.
        @checkpoints: when the daemon makes checkpoints by itself; the same on all ranks. None: as
        the job has it, a new one has none. FailedPrecondition: another one than the job was created
        with.
        @local: the number of this process among the ranks on this machine, and how many these are;
        None: as the launcher says, where it gives rank and world size.
        @priority: in the line for memory the job is before those with a lower one: -100 to 100, up
        to the limit that the administrator has set (0 by default). @wait_for_memory: seconds that a
        registration of units may wait in that line for memory that is not there. 0: as the job has
        it, a new one has priority 0 and does not wait: ResourceExhausted at once.
        Where the daemon is in a cluster, this waits until all ranks have joined, on all nodes.
        FailedPrecondition: the launcher has started ranks on other machines, and the daemon is in
        no cluster. InvalidArgument: the ranks of a node do not follow each other. DataLoss: the
        job's state was in an earlier run of the daemon; nothing starts again at step 0.
        """
        asked, here = _as_launched(job, world_size, rank)
        if self.member is None:
            _again.check(self, asked[0].decode() if asked[0] else None)
        wish, run = _wish(on_existing, asked[0])
        spec = _abi.Job(C.sizeof(_abi.Job), *asked, lifetime or 0, quota_bytes, ttl,
                        int(op_timeout * 1000), allow_torn, private, wish, run,
                        _resume_from(resume_from), *_elastic(elastic),
                        None if checkpoints is None else C.pointer(checkpoints.as_struct()),
                        *(here if local is None else local), _priority(priority),
                        _wait_for_memory(wait_for_memory))
        found = _abi.Membership()
        _library.call("join", self.handle, C.byref(spec), C.byref(found))
        blob = C.string_at(found.blob, found.blob_bytes) if found.blob else b""
        self._find_memory()
        self._join = (job, world_size, rank, lifetime, quota_bytes, ttl, op_timeout, allow_torn,
                      private, on_existing, resume_from, elastic, checkpoints, local, priority,
                      wait_for_memory)
        self._name = asked[0]
        _restart.joined(self.instance)
        self.member = Membership(found.epoch, found.world_size, found.rank, found.resumed,
                                 found.has_commit, found.torn, found.step, blob,
                                 found.created, found.has_step, found.committed_step,
                                 found.blob_step)
        return self.member

    def _find_memory(self) -> None:
        device = self.device
        if device.backend == "host" or self.where is not HOST:  # it stays where it was
            return
        own = weakref.ref(self)

        def handle() -> C.c_void_p:
            client = own()
            if client is None:
                raise FailedPrecondition("the client of this memory is closed: connect again")
            return client.handle

        try:
            self.where = Gpu(handle, device.id, device.uuid)
        except BaseException:
            _library.call("leave", self.handle)
            raise

    def who(self) -> str:
        """For messages: " (rank 1 of job 'x')"; "" before a join."""
        if self.member is None:
            return ""
        job = f" of job '{self._name.decode()}'" if self._name else ""
        return f" (rank {self.member.rank}{job})"

    def rejoin(self) -> Membership:
        """Join again with the same arguments, after Aborted; units keep their numbers."""
        if self.member is None:
            raise FailedPrecondition("this client has not joined a job: call join() first")
        return self.join(*self._join)

    def load_checkpoint(self, path: str, step: int | None = None) -> int:
        """Load a checkpoint that the daemon has saved into the job of this client, whose units
        are registered and which has no step of its own. One rank calls it. In a job with ranks on
        several nodes all of them have registered before: call :meth:`barrier` first.

        @path: the folder of checkpoints, below the daemon's checkpoint_roots. @step: which one;
        None: the newest. Returns its step. The epoch has ended then: all ranks, this one too,
        join again (:meth:`rejoin`) and find the commit of the checkpoint. World size, layout and
        strategy may differ from the job that was saved; a rank that it did not have gets the
        buffers of its first one. A checkpoint without buffers leaves those of the job as they are,
        with a warning. FailedPrecondition: the job has state of its own, or the checkpoint has
        other units. DataLoss: it is damaged; the units have to be initialised.
        """
        if self.member is None or self._name is None:
            raise FailedPrecondition("this client has not joined a job: call join() first")
        which, found = C.c_uint64(step or 0), _abi.Loaded(size=C.sizeof(_abi.Loaded))
        folder = os.fsencode(os.path.abspath(path))
        _library.call("load_checkpoint", self.handle, self._name, folder,
                      None if step is None else C.byref(which), C.byref(found))
        if found.buffers_missing:
            warnings.warn(f"the checkpoint of step {found.step} in {path} has no buffers: "
                          f"{found.buffers_missing} buffers of the job are as they were before",
                          stacklevel=2)
        return int(found.step)

    def leave(self) -> None:
        """Leave cleanly; ops of this session must be done."""
        _library.call("leave", self.handle)
        self.member = None
        _left[self._name] = _left.get(self._name, 0) + 1

    @property
    def device(self) -> Device:
        """Where this rank's memory is. FailedPrecondition: not joined yet."""
        d = self._info().device
        if not d.id:
            raise FailedPrecondition("this client has not joined a job yet: call join first")
        return Device(d.id.decode(), d.backend.decode(), d.uuid.decode(), d.streams)

    def group(self, name: str, ranks: Sequence[int]) -> int:
        """Create or find the group @name of exactly these ranks in this order. Return: its number,
        for ops and UnitSpec.group."""
        number = C.c_uint32()
        _library.call("group_create", self.handle, name.encode(),
                      (C.c_uint32 * max(1, len(ranks)))(*ranks), len(ranks), C.byref(number))
        return number.value

    def register(self, units: Sequence[UnitSpec]) -> list[Unit]:
        """Register a whole model: all units or none. Every rank registers the same."""
        made = (_abi.UnitSpec * max(1, len(units)))()
        infos = (_abi.UnitInfo * max(1, len(units)))()
        for spec, u in zip(units, made):
            specs.fill(spec, u)
        _library.call("register", self.handle, made, len(units), infos)
        registered = [Unit(self, spec, info) for spec, info in zip(units, infos)]
        self._units.update((unit.id, unit) for unit in registered)
        return registered

    def unfreeze(self, unit: Unit, tensors: Sequence[int], like: Unit | None = None) -> Unit:
        """Train frozen tensors of @unit from here on (collective), which nobody has gathered.
        @tensors: their indices. @like: a unit whose optimizer @unit gets, which has none. Return:
        the unit as it is now, in place of @unit."""
        numbers = sorted(tensors)
        self.do("convert", (C.c_uint32 * 1)(unit.id), 1, unit.spec.layout,
                unit.spec.shard_multiple, unfreeze=(C.c_uint32 * len(numbers))(*numbers),
                n_unfreeze=len(numbers), optimizer_like=like.id if like is not None else 0)
        made = [replace(t, frozen=False) if i in numbers else t
                for i, t in enumerate(unit.spec.tensors)]
        optimizer = like.spec.optimizer if like is not None else unit.spec.optimizer
        return self.register([replace(unit.spec, tensors=made, optimizer=optimizer)])[0]

    def drop_units(self, units: Sequence[int]) -> None:
        """Free units, by their numbers in ascending order (collective): nobody has anything of
        them. The parameters' memory is unmapped; buffers that were asked for, and memory of GPUs,
        stay on the job's account until the process ends."""
        self.do("free", 0, (C.c_uint32 * len(units))(*units), len(units))
        for number in units:
            self._units.pop(number, None)

    # ------------------------------------------------------------------- ops

    def alloc(self, shape: Sequence[int], dtype: Dtype = Dtype.FP32) -> Buffer:
        """Allocate a writable buffer of this session; its contents are undefined."""
        elements = 1
        for extent in shape:
            elements *= extent

        def finish(r: _abi.Result) -> Buffer:
            mapped = self.mapped(r, f"buffer {r.buffer}")
            return Buffer(self, r.buffer, self.lent(Memory(mapped, 0, shape, dtype, True)))

        return self.submit("alloc", elements * dtype.itemsize, finish=finish).wait()

    def all_reduce(self, buffer: Buffer, op: ReduceOp = ReduceOp.SUM, group: int = WORLD,
                   first: int = 0, count: int | None = None) -> None:
        """Reduce @count elements of each member's @buffer, from index @first on; all get the result
        (collective). FP32, BF16 or FP16."""
        memory = buffer.memory
        self.do("all_reduce", group, buffer.id, first * memory.dtype.itemsize,
                memory.elements - first if count is None else count, memory.dtype, op)

    def broadcast(self, buffer: Buffer, root: int, group: int = WORLD) -> None:
        """Copy @root's @buffer to all members' (collective). @root: a rank of the job."""
        self.do("broadcast", group, buffer.id, 0, buffer.memory.nbytes, root)

    def barrier(self, group: int = WORLD) -> None:
        """Wait for all ranks of the group (collective)."""
        self.do("barrier", group)

    def join_uneven(self, divide_by_active: bool = False, group: int = WORLD) -> tuple[int, int]:
        """Say that this rank has no more inputs: the daemon takes part for it, with zeros, until
        all ranks of the group have called this (DDP's join). @divide_by_active: divide gradients by
        the number of ranks that have inputs. Return: the rank that joined last, and the number of
        collectives in which the daemon replaced this rank."""
        return self.submit("join_uneven", group, divide_by_active,
                           finish=lambda r: (int(r.last), int(r.surrogates))).wait()

    def join_even(self, group: int = WORLD) -> None:
        """As join_uneven, but if a rank that has not called this asks for a collective, all ranks
        of the group get FailedPrecondition."""
        self.do("join_uneven", group, require_even=True)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, group: int = WORLD,
                       profile: ClipProfile = ClipProfile.TORCH, error_if_nonfinite: bool = False,
                       units: Sequence[Unit] | None = None, whole_job: bool = False) -> float:
        """Scale the gradient shards so that their norm is at most @max_norm (collective).
        @units: only these. Return: the norm before that."""
        if units is not None and not units:
            raise InvalidArgument("units is empty: name at least one, or None for all units")
        ids = (C.c_uint32 * len(units))(*(u.id for u in units)) if units else None
        return self.submit("clip", group, max_norm, norm_type, profile, error_if_nonfinite, ids,
                           len(units or ()), whole_job,
                           finish=lambda r: float(r.total_norm)).wait()

    def clip_grad_value(self, value: float, group: int = WORLD) -> None:
        """Clamp the gradient shards of the group's units to [-value, value] (collective)."""
        self.do("clip", group, by_value=True, value=value)

    def unscale(self, inv_scale: float, group: int = WORLD) -> bool:
        """Multiply the gradient shards (collective, once per step). Return: True if any rank had an
        infinity or NaN."""
        return self.submit("unscale", group, inv_scale, finish=lambda r: bool(r.found_inf)).wait()

    def step(self, lr: float | None = None, group: int = WORLD, skip_if_found: bool = False,
             discard: bool = False, settings: Sequence[StepSettings] = (),
             number: int | None = None, blob: bytes | None = None) -> StepResult:
        """Step every unit of the group that has a gradient, and clear the gradients (collective).

        @lr: instead of the units' own. @skip_if_found: do not step if unscale found an infinity.
        @discard: only clear the gradients. @settings: for this step; @lr then applies to the
        tensors that they do not name. No rank may have these units gathered. @number: of this
        step, above the one before it, the same on all ranks; @blob: with it, this rank's own state,
        as in commit. Both take effect when the step is applied, without a commit.
        """
        rate = C.c_double(lr) if lr is not None else None
        return self.submit("step", group, C.pointer(rate) if rate is not None else None,
                           skip_if_found, discard, specs.step_settings(settings), len(settings),
                           C.pointer(C.c_uint64(number)) if number is not None else None,
                           blob, len(blob) if blob is not None else 0,
                           finish=lambda r: StepResult(
                               r.skipped, r.found_inf,
                               r.total_norm if r.has_total_norm else None)).wait()

    def plan_backward(self, lr: float | None = None, inv_scale: float = 0,
                      max_norm: float | None = None, norm_type: float = 2.0,
                      profile: ClipProfile = ClipProfile.TORCH, group: int = WORLD,
                      settings: Sequence[StepSettings] = (),
                      error_if_nonfinite: bool = False) -> None:
        """Say before a backward pass what is done with its gradients until the step (collective).
        @settings: as in step, which then takes none. @error_if_nonfinite: of the norm: the step is
        FailedPrecondition."""
        rate = C.c_double(lr) if lr is not None else None
        clip = _abi.options("clip", max_norm=max_norm or 0, norm_type=norm_type, profile=profile,
                            error_if_nonfinite=error_if_nonfinite)
        self.do("plan_backward", group,
                C.cast(C.pointer(clip), C.c_void_p) if max_norm is not None else None, inv_scale,
                C.pointer(rate) if rate is not None else None, specs.step_settings(settings),
                len(settings))

    def next_shard(self, group: int = WORLD) -> Shard:
        """BY_TRAINER: wait for the next unit whose last reduce has ended; return this rank's
        shard."""
        def finish(r: _abi.Result) -> Shard:
            unit = self._units[r.unit]
            mapped = self.mapped(r, f"shard of unit '{unit.spec.name}'" if r.elements
                                 else "an empty shard")
            params = self.lent(Memory(mapped, 0, (r.elements,), unit.spec.storage_dtype, True))
            unit._lent["shard"] = params
            return Shard(unit, params, Memory(mapped, r.gradient_offset, (r.elements,),
                                              Dtype.FP32, True))

        return self.submit("next_shard", group, finish=finish).wait()

    def commit(self, step: int, blob: bytes = b"") -> None:
        """Make @step the step from which a restarted trainer continues, on all ranks or none
        (collective over the job). @blob: up to 64 KiB of this rank's own state."""
        self.do("commit", step, blob, len(blob))
        _restart.committed()

    def __repr__(self) -> str:
        if not self._open:
            return f"<shardd.Client of {self.socket}, closed>"
        where = f"rank {self.member.rank} of {self.member.world_size}" if self.member else "no job"
        return f"<shardd.Client session {self.session} at {self.socket}, {where}>"


def _as_launched(job: str | None, world_size: int | None,
                 rank: int | None) -> tuple[tuple[bytes | None, int, int], tuple[int, int]]:
    """The arguments of a join: job, world size and rank, and the local numbers. What neither the
    caller nor a launcher has given is left to the library, whose error names the variable to
    set."""
    job = job if job is not None else os.environ.get("SHARDD_JOB") or None
    found = launched() if None in (job, world_size, rank) else None
    local = (0, 0)
    if found is not None:
        local = found.local if world_size is None and rank is None else local
        world_size = found.world_size if world_size is None else world_size
        rank = found.rank if rank is None else rank
        job = found.job if job is None else job
    return ((job.encode() if job is not None else None, world_size or 0,
             _FROM_ENV if rank is None else rank), local)


# By a job's name, how often this process has left it: who joins once more begins something new.
_left: dict[bytes | None, int] = {}
_WISHES = {"resume": 1, "error": 2, "fresh": 3}


def _wish(on_existing: str, job: bytes | None) -> tuple[int, bytes | None]:
    """What a join asks for, and the run that it is of. A later life of a guarded process is of the
    same run, where nothing else says which that is."""
    if on_existing not in _WISHES:
        raise InvalidArgument(f"on_existing is {on_existing!r}, must be 'resume', 'error' or "
                              "'fresh'", "on_existing")
    run, left = _again.run(), _left.get(job, 0)
    if run is None:
        return _WISHES["resume" if _restart.lived() and not left else on_existing], None
    return _WISHES[on_existing], (f"{run}.{left}" if left else run).encode()


def _elastic(given: tuple[int, int] | tuple[int, int, float] | None) -> tuple[int, int, int]:
    """The range, and milliseconds."""
    if given is None:
        return 0, 0, 0
    if len(given) not in (2, 3):
        raise InvalidArgument(f"elastic is {given!r}, must be (least, most) or (least, most, "
                              "seconds)", "elastic")
    seconds = float(given[2]) if len(given) == 3 else 0.0
    if not 0 <= seconds <= 0xFFFFFFFF // 1000:
        raise InvalidArgument(f"elastic is {given!r}: {seconds} seconds must be 0 to "
                              f"{0xFFFFFFFF // 1000}", "elastic")
    return given[0], given[1], math.ceil(seconds * 1000)


def _priority(priority: int) -> int:
    if not -100 <= priority <= 100:
        raise InvalidArgument(f"priority is {priority!r}, must be -100 to 100", "priority")
    return priority


def _wait_for_memory(seconds: float) -> int:
    """Milliseconds."""
    if not 0 <= seconds <= 0xFFFFFFFF // 1000:
        raise InvalidArgument(f"wait_for_memory is {seconds!r} seconds, must be 0 to "
                              f"{0xFFFFFFFF // 1000}", "wait_for_memory")
    return math.ceil(seconds * 1000)


_RESUMES = {None: 0, "applied": 1, "committed": 2, "no-copy": 3}


def _resume_from(resume_from: str | None) -> int:
    if resume_from not in _RESUMES:
        raise InvalidArgument(f"resume_from is {resume_from!r}, must be 'applied', 'committed', "
                              "'no-copy' or None", "resume_from")
    return _RESUMES[resume_from]


def connect(socket: str | None = None, **options: Any) -> Client:
    """A :class:`Client`."""
    return Client(socket, **options)
