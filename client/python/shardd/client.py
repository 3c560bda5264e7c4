"""A connection to the daemon: one session, and its ops."""

from __future__ import annotations

import contextlib
import ctypes as C
import json
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, TypeVar

from . import _abi, _again, _library, _restart, specs
from ._device import HOST, Gpu, Where
from ._launch import launched
from .errors import FailedPrecondition, InUse, Unavailable, VersionMismatch
from .memory import Dtype, Memory, _Mapped
from .specs import ClipProfile, Lifetime, ReduceOp, StepSettings, UnitSpec
from .ticket import Ticket
from .unit import Unit

T = TypeVar("T")
WORLD = 0
_FROM_ENV = 0xFFFFFFFF
DEFAULT_SOCKET = "/run/shardd/shardd.sock"


@dataclass(frozen=True)
class Membership:
    """The result of a join. ``epoch`` grows whenever the membership changes. ``resumed``: the job
    has state from before. ``step`` and ``blob`` are those of the last commit if
    ``has_commit``. ``torn``: a step was applied after it. ``created``: this join made the job."""

    epoch: int
    world_size: int
    rank: int
    resumed: bool
    has_commit: bool
    torn: bool
    step: int
    blob: bytes
    created: bool = False


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


class Buffer:
    """A buffer of this session, for init, all_reduce and broadcast. ``memory``: its bytes as
    elements of the requested type. A context manager: freed at the end."""

    def __init__(self, client: Client, number: int, memory: Memory) -> None:
        self._client, self.id, self.memory = client, number, memory

    def free(self) -> None:
        """Free it. InUse: something still uses it. Calling this twice is allowed."""
        if not self.memory.released:
            self.memory._mapped.end()
            self._client.do("free", self.id)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


def socket_path(socket: str | None = None) -> str:
    """@socket, else $SHARDD_SOCKET, else the default path."""
    return socket or os.environ.get("SHARDD_SOCKET") or DEFAULT_SOCKET


def _not_there(error: Unavailable, socket: str) -> Unavailable:
    return Unavailable(
        f"{error.text}. Is a daemon running? Start one with `shardd --socket {socket}`, or run "
        "the trainers under `shardctl run --standalone -n N -- COMMAND`, or set SHARDD_SOCKET "
        "to the socket of a running daemon", error.field, error.domain, error.native, error.call)


class Client:
    """One connection and one session; may be used by several threads at once.

    It cannot be used in a child after fork: connect there. Environment: SHARDD_SOCKET,
    SHARDD_DEVICE; and for :meth:`join` SHARDD_JOB and the variables of launchers.

    A context manager: at the end it leaves its job, if it has joined one, and closes. After an
    exception it closes without leaving, so the other ranks learn of the failure.
    """

    def __init__(self, socket: str | None = None, name: str | None = None,
                 device: str | None = None, connect_timeout: float = 5.0) -> None:
        """Connect. @name: shown in status. @device: "host:0" or a GPU's UUID; None: chosen.
        @connect_timeout: seconds to retry while no daemon listens.

        Unavailable: no daemon listens. PermissionDenied: the socket's mode. VersionMismatch.
        """
        self.socket, self.member = socket_path(socket), None  # type: str, Membership | None
        self._open = False
        self._pid = os.getpid()
        self._lent: weakref.WeakSet[_Mapped] = weakref.WeakSet()
        self._waiting: set[int] = set()  # threads
        self.kept: list[_Mapped] = []  # given back, but still in use
        self._units: dict[int, Unit] = {}
        self.where: Where = HOST  # this rank's memory
        self._streams = threading.local()  # now: that of a thread
        self._follow: Callable[[], int | None] | None = None
        handle = C.c_void_p()
        options = _abi.Options(C.sizeof(_abi.Options), self.socket.encode(),
                               name.encode() if name else None,
                               max(1, int(connect_timeout * 1000)), 0,
                               device.encode() if device else None)
        try:
            _library.call("connect", C.byref(options), C.byref(handle))
        except Unavailable as error:
            raise _not_there(error, self.socket) from None
        self._handle, self._open = handle, True
        _restart.clients.add(self)
        self._check_version()

    def _check_version(self) -> None:
        daemon, library = self.daemon_version, _library.library().shardd_version().decode()
        if not _library.same_version(daemon, library):
            self.close()
            raise VersionMismatch(
                f"the daemon at {self.socket} is version {daemon}, this library is {library}: "
                "install both from the same release and restart the daemon (SIGTERM lets "
                "trainers commit and leave first)")

    # ---------------------------------------------------------------- calls

    @property
    def handle(self) -> C.c_void_p:
        """The shardd_client, for calls by ctypes. FailedPrecondition: closed."""
        if not self._open:
            raise FailedPrecondition("this client is closed: connect again")
        return self._handle

    def submit(self, op: str, *arguments: Any, finish: Callable[[_abi.Result], T],
               **options: Any) -> Ticket[T]:
        """Submit an op by ``shardd_submit_OP``; @finish makes the ticket's value of the result.
        @arguments, @options: fields of the op's options, in their order or by name."""
        number = C.c_uint64()
        stream = self._stream()
        made = _abi.options(op, *arguments, **options)
        _library.call("submit_" + op, self.handle, C.byref(made), C.byref(number))
        return Ticket(self, op, number.value, finish, stream)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this thread is in a call that may block, and the client cannot be closed."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            yield
        finally:
            self._waiting.discard(thread)

    def do(self, op: str, *arguments: Any, **options: Any) -> None:
        """Submit an op without a value and wait for its end."""
        self.submit(op, *arguments, finish=lambda r: None, **options).wait()

    def mapped(self, r: _abi.Result, what: str) -> _Mapped:
        """The memory of an op's result; @what names it in messages."""
        return _Mapped(r.data or 0, r.bytes, what, self.where, r.stream)

    def lent(self, memory: Memory) -> Memory:
        """Remember memory that ends with this client. Return: @memory."""
        self._lent.add(memory._mapped)
        return memory

    # --------------------------------------------------------------- session

    def _info(self) -> _abi.Info:
        info = _abi.Info(C.sizeof(_abi.Info))
        _library.call("get_info", self.handle, C.byref(info))
        return info

    @property
    def daemon_version(self) -> str:
        """The daemon's version."""
        text: bytes = self._info().daemon_version
        return text.decode()

    @property
    def session(self) -> int:
        """This session's number."""
        return int(self._info().session)

    @property
    def instance(self) -> str:
        """The id of this run of the daemon; a restarted daemon is another run, without state."""
        text: bytes = self._info().instance
        return text.decode()

    @property
    def daemon_started(self) -> int:
        """When the daemon started, seconds since 1970."""
        return int(self._info().daemon_started)

    @property
    def forked(self) -> bool:
        """Is this a fork of the process that connected? Then it cannot be used."""
        return self._pid != os.getpid()

    @property
    def connected(self) -> bool:
        """Can it be used, in this process?"""
        return self._open and not self.forked

    @property
    def draining(self) -> bool:
        """Has the job or the daemon been asked to drain? Then commit and leave."""
        return bool(self._info().draining)

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline of ops submitted from now on; 0: the job's."""
        _library.library().shardd_set_timeout(self.handle, int(seconds * 1000))

    def status(self, job: str | None = None) -> dict[str, Any]:
        """The status of the daemon, devices, jobs and sessions, as `shardctl --json status`."""
        text = C.c_void_p()
        _library.call("status", self.handle, job.encode() if job else None, C.byref(text))
        try:
            said: dict[str, Any] = json.loads(C.string_at(text.value or 0))
        finally:
            libc = C.CDLL(None)
            libc.free.argtypes, libc.free.restype = [C.c_void_p], None
            libc.free(text)
        return said

    def _let_go(self) -> None:
        if self._waiting:
            raise InUse("another thread waits for an op of this client: wait until the op ends, at "
                        "the latest at its deadline (Client.set_timeout), or wait with a timeout")
        for mapped in list(self._lent):
            mapped.end()

    def close(self) -> None:
        """End the session. What it holds is dropped; a rank that has not left counts as dead.

        InUse: something still uses memory of this client, or another thread waits for one of its
        ops. Calling this twice is allowed. In a child after fork it does nothing: the connection
        belongs to the parent.
        """
        if not self._open:
            return
        if self._pid != os.getpid():
            self._open = False
            return
        self._open = False  # from here on no thread begins to wait
        try:
            self._let_go()
        except InUse:
            self._open = True
            raise
        _library.library().shardd_close(self._handle)
        if isinstance(self.where, Gpu):
            self.where.close()

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

    def __del__(self) -> None:
        # Memory in use is not unmapped: the session then ends with the
        # process then.
        with contextlib.suppress(BaseException):
            self.close()

    # ------------------------------------------------------------------ jobs

    def join(self, job: str | None = None, world_size: int | None = None,
             rank: int | None = None, lifetime: Lifetime | None = None, quota_bytes: int = 0,
             ttl: int = 0, op_timeout: float = 0, allow_torn: bool = False,
             private: bool = False) -> Membership:
        """Join a job as a rank; the job is created if it does not exist. Join again after Aborted.

        None: the launcher's value (docs/python.md); for the job, $SHARDD_JOB comes first. @ttl,
        @op_timeout: seconds, 0: the daemon's default. Blocks until the daemon has answered, not
        until all ranks have joined. @private: closed to other users, including root.
        Unimplemented: the launcher has started ranks on other machines. DataLoss: the job's
        state was in an earlier run of the daemon; nothing starts again at step 0.
        """
        asked = _as_launched(job, world_size, rank)
        if self.member is None:
            _again.check(self, asked[0].decode() if asked[0] else None)
        spec = _abi.Job(C.sizeof(_abi.Job), *asked, lifetime or 0, quota_bytes, ttl,
                        int(op_timeout * 1000), allow_torn, private)
        found = _abi.Membership()
        _library.call("join", self.handle, C.byref(spec), C.byref(found))
        blob = C.string_at(found.blob, found.blob_bytes) if found.blob else b""
        self._find_memory()
        self._join = (job, world_size, rank, lifetime, quota_bytes, ttl, op_timeout, allow_torn,
                      private)
        _restart.joined(self.instance)
        self.member = Membership(found.epoch, found.world_size, found.rank, found.resumed,
                                 found.has_commit, found.torn, found.step, blob,
                                 found.created)
        return self.member

    def _find_memory(self) -> None:
        device = self.device
        if device.backend == "host" or self.where is not HOST:  # it stays where it was
            return
        try:
            self.where = Gpu(self, device.id, device.uuid)
        except BaseException:
            _library.call("leave", self.handle)
            raise

    def rejoin(self) -> Membership:
        """Join again with the same arguments, after Aborted; units keep their numbers."""
        if self.member is None:
            raise FailedPrecondition("this client has not joined a job: call join() first")
        return self.join(*self._join)

    def leave(self) -> None:
        """Leave cleanly; ops of this session must be done."""
        _library.call("leave", self.handle)
        self.member = None

    @property
    def device(self) -> Device:
        """Where this rank's memory is. FailedPrecondition: not joined yet."""
        d = _abi.Device()
        _library.call("get_device", self.handle, C.byref(d))
        return Device(d.id.decode(), d.backend.decode(), d.uuid.decode(), d.streams)

    def set_stream(self, stream: int | None) -> None:
        """GPUs: order the ops that this thread submits from now on with the CUDA stream @stream, a
        handle (``.cuda_stream`` of a PyTorch stream; 0: CUDA's default stream).

        An op begins after the work that is on the stream when it is submitted. Its ticket ends when
        the daemon has queued it; later work on the stream runs after the op, and the CPU does not
        wait for the device. None: tickets end when ops have been executed, and data that this
        process's kernels write must be complete before an op that reads it is submitted.

        FailedPrecondition: the memory is not on a GPU. InvalidArgument: a stream of another
        context.
        """
        if stream is None:
            _library.library().shardd_clear_stream(self.handle)
        else:
            # The default stream is that of the current context.
            with self.where.entered() if isinstance(self.where, Gpu) else contextlib.nullcontext():
                _library.call("set_stream", self.handle, stream)
        self._streams.now = stream

    def follow_stream(self, current: Callable[[], int | None] | None) -> None:
        """Call @current for the stream before every op, in the submitting thread, instead of
        :meth:`set_stream`. None: stop this; threads keep their current stream."""
        self._follow = current

    def _stream(self) -> int | None:
        """This thread's."""
        now: int | None = getattr(self._streams, "now", None)
        if self._follow is not None:
            wanted = self._follow()
            if wanted != now:
                self.set_stream(wanted)
                now = wanted
        return now

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
                           finish=lambda r: (int(r.last), int(r.shadowed))).wait()

    def join_even(self, group: int = WORLD) -> None:
        """As join_uneven, but if a rank that has not called this asks for a collective, all ranks
        of the group get FailedPrecondition."""
        self.do("join_uneven", group, require_even=True)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, group: int = WORLD,
                       profile: ClipProfile = ClipProfile.TORCH, error_if_nonfinite: bool = False,
                       units: Sequence[Unit] | None = None, whole_job: bool = False) -> float:
        """Scale the gradient shards so that their norm is at most @max_norm (collective).
        @units: only these. Return: the norm before that."""
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
             discard: bool = False, settings: Sequence[StepSettings] = ()) -> StepResult:
        """Step every unit of the group that has a gradient, and clear the gradients (collective).

        @lr: instead of the units' own. @skip_if_found: do not step if unscale found an infinity.
        @discard: only clear the gradients. @settings: for this step; @lr then applies to the
        tensors that they do not name. No rank may have these units gathered.
        """
        rate = C.c_double(lr) if lr is not None else None
        return self.submit("step", group, C.pointer(rate) if rate is not None else None,
                           skip_if_found, discard, specs.step_settings(settings), len(settings),
                           finish=lambda r: StepResult(
                               r.skipped, r.found_inf,
                               r.total_norm if r.has_total_norm else None)).wait()

    def plan_backward(self, lr: float | None = None, inv_scale: float = 0,
                      max_norm: float | None = None, norm_type: float = 2.0,
                      profile: ClipProfile = ClipProfile.TORCH, group: int = WORLD,
                      settings: Sequence[StepSettings] = ()) -> None:
        """Say before a backward pass what is done with its gradients until the step (collective).
        @settings: as in step, which then takes none."""
        rate = C.c_double(lr) if lr is not None else None
        clip = _abi.options("clip", max_norm=max_norm or 0, norm_type=norm_type, profile=profile)
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
            params = self.lent(Memory(mapped, 0, (r.elements,), Dtype.FP32, True))
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
                 rank: int | None) -> tuple[bytes | None, int, int]:
    """The arguments of a join. What neither the caller nor a launcher has given is left to the
    library, whose error names the variable to set."""
    job = job if job is not None else os.environ.get("SHARDD_JOB") or None
    found = launched() if None in (job, world_size, rank) else None
    if found is not None:
        if world_size is None:
            found.check_one_machine()
            world_size = found.world_size
        rank = found.rank if rank is None else rank
        job = found.job if job is None else job
    return (job.encode() if job is not None else None, world_size or 0,
            _FROM_ENV if rank is None else rank)


def connect(socket: str | None = None, **options: Any) -> Client:
    """A :class:`Client`."""
    return Client(socket, **options)
