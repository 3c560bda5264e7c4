"""The client that wrapped modules use; it connects at the first use."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any, Callable

import torch

from .._launch import Launch, launched_or_alone
from .._reconnect import ConnectionEvent
from ..client import Client
from ..errors import FailedPrecondition, InUse, InvalidArgument
from . import _device
from ._again import guard as _guard
from ._device import tensor_at as tensor_at

_current: Client | None = None


def _job_name(found: Launch, world_size: int) -> str:
    """$SHARDD_JOB, else one that all ranks of a launcher come to, else this process's own."""
    name = os.environ.get("SHARDD_JOB") or found.job
    if name:
        return name
    if world_size > 1:
        raise FailedPrecondition("there are several ranks and no name for their job: set "
                                 "SHARDD_JOB to the same name for all of them")
    return f"torch-{os.getpid()}"


def init(socket: str | None = None, job: str | None = None, rank: int | None = None,
         world_size: int | None = None, guard: bool = False, device: Any = None,
         on_existing: str | None = None, resume: bool = False, fresh: bool = False,
         reconnect: float | None = None,
         on_connection: Callable[[ConnectionEvent], Any] | None = None,
         **options: Any) -> Client:
    """Connect and join explicitly, with values that the environment does not give.

    Without this call the first module that is used connects, with $SHARDD_SOCKET, $SHARDD_JOB (or
    the launcher's id of the run), and the rank and world size of torchrun, shardctl run, mpirun
    or srun; one rank without any of them. @guard: call :func:`guard` first; by default not.
    @device: where this rank computes: "cpu", "cuda:1" (as PyTorch numbers it), a GPU's UUID;
    None: $SHARDD_DEVICE, or the current GPU if PyTorch has begun to use one, or the daemon's
    choice.
    @on_existing: if the job has state of another run: "error" (the default) is FailedPrecondition,
    "resume" continues from it and does not use the values that the program gives its model,
    "fresh" deletes it. @resume, @fresh: the same as words. $SHARDD_ON_EXISTING: for a program that
    says none of them. A rank that a guard or a launcher has started again continues by itself, and
    says so on standard error.
    @reconnect, @on_connection: when the daemon dies: as of :class:`shardd.Client`.
    @options: of :meth:`shardd.Client.join`.
    FailedPrecondition: there is already a session, or its memory is on a GPU that PyTorch does not
    have. Unimplemented: the launcher has started ranks on other machines. Return: the client.
    """
    return _connect(socket, job, rank, world_size, guard,
                    _device.wanted(()) if device is None else _device.named(device),
                    {**options, "on_existing": _wish(on_existing, resume, fresh)},
                    reconnect, on_connection)


def _wish(on_existing: str | None, resume: bool, fresh: bool) -> str:
    said = [w for w, given in (("resume", resume), ("fresh", fresh), (on_existing, on_existing))
            if given]
    if len(said) > 1:
        raise InvalidArgument(f"on_existing={on_existing!r}, resume={resume!r} and fresh={fresh!r} "
                              "are given together: give one of them", "on_existing")
    return (said[0] if said else os.environ.get("SHARDD_ON_EXISTING")) or "error"


_WAYS = ("this program brings a model of its own, whose values would not be used: continue from "
         "that state with shardd.torch.init(resume=True) or SHARDD_ON_EXISTING=resume, delete it "
         "with init(fresh=True) or SHARDD_ON_EXISTING=fresh, or name another job (SHARDD_JOB)")


_RESTARTED = ("the daemon has the parameters and the optimizer's state of the last step that was "
              "applied: shardd.torch.resilient continues by itself, and a program that is started "
              "again continues with SHARDD_ON_EXISTING=resume")


def _say_resumed(client: Client, name: str) -> None:
    """Nobody has asked for it, and who starts again at step 0 must see it."""
    member = client.member
    assert member is not None
    where = f"from step {member.step}" if member.has_commit else "which has committed no step"
    print(f"shardd: rank {member.rank} was started again in its run and continues job {name!r}, "
          f"{where}: the values that the program gives its model are not used",
          file=sys.stderr, flush=True)


def _connect(socket: str | None, job: str | None, rank: int | None, world_size: int | None,
             guard: bool, device: str | None, options: dict[str, Any],
             reconnect: float | None = None,
             on_connection: Callable[[ConnectionEvent], Any] | None = None) -> Client:
    global _current
    if _current is not None and not _current.forked:
        raise FailedPrecondition("this process already has a session: call "
                                 "shardd.torch.shutdown() first")
    if guard:
        _guard()
    found = launched_or_alone()
    if world_size is None and rank is None:
        options.setdefault("local", found.local)
    world_size = found.world_size if world_size is None else world_size
    rank = found.rank if rank is None else rank
    name = job or _job_name(found, world_size)
    options.setdefault("on_existing", _wish(None, False, False))
    client = Client(socket, name=f"rank {rank} of {name}"[:64], device=device,
                    reconnect=reconnect, on_connection=on_connection)
    client.restart_advice = _RESTARTED
    try:
        client.join(name, world_size, rank, **options)
    except InvalidArgument as error:
        raise (_device.not_there(error) if error.field == "device" else error) from None
    except FailedPrecondition as error:
        if error.field == "on_existing" and options["on_existing"] == "error":
            raise error.advised(_WAYS) from None
        raise error.advised("end that process, or name another job (SHARDD_JOB)") \
            if "is taken by" in error.text else error from None
    try:
        _device.take(client)
    except FailedPrecondition:
        _leave(client)
        raise
    _current = client
    if client.member is not None and client.member.resumed and options["on_existing"] != "resume":
        _say_resumed(client, name)
    return client


def session_for(devices: Iterable[torch.device]) -> Client:
    """The same, for a model whose parameters are on @devices: that is what the daemon is asked for
    if there is no session yet. FailedPrecondition: the rank's memory is elsewhere."""
    devices = list(devices)
    began = _current is None
    client = _connect(None, None, None, None, False, _device.wanted(devices), {}) \
        if began else session()
    try:
        _device.check(client, devices)
    except FailedPrecondition:
        if began:
            shutdown()
        raise
    return client


def session() -> Client:
    """The process's client; connects and joins at the first call.

    FailedPrecondition: this is a fork of the process that connected.
    """
    if _current is None:
        return init()
    if _current.forked:
        raise FailedPrecondition(
            "this process is a fork of one that has a session: wrap modules after the fork, or "
            "start processes with multiprocessing's \"spawn\"")
    return _current


def rank() -> int:
    """This process's rank in its job."""
    member = session().member
    return member.rank if member else 0


def rank_if_any() -> int:
    """This process's rank, or 0 before there is a session."""
    member = _current.member if _current is not None else None
    return member.rank if member else 0


def world_size() -> int:
    """How many ranks the job has."""
    member = session().member
    return member.world_size if member else 1


def shutdown() -> None:
    """Leave the job cleanly and close. Wrapped modules cannot be used afterwards.

    This is also done when the interpreter ends, except by an exception: then the other ranks must
    learn that this rank died. Calling it twice is allowed.
    """
    global _current
    client, _current = _current, None
    if client is None or client.forked:
        return
    try:
        _leave(client)
    finally:
        _device.drop()


def _leave(client: Client) -> None:
    if client.member is not None:
        client.leave()
    # Tensors that look at memory of the session are unmapped with the process only.
    with contextlib.suppress(InUse):
        client.close()


def _at_exit() -> None:
    if getattr(sys, "last_type", None) is None:
        with contextlib.suppress(Exception):  # the daemon may be gone: it learns of our end
            shutdown()


atexit.register(_at_exit)
