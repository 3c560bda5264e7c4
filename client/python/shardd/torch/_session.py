"""The client that wrapped modules use, connected at the first need."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any

import torch

from .._launch import Launch, launched_or_alone
from ..client import Client
from ..errors import FailedPrecondition, InUse
from ._again import guard as _guard

_current: Client | None = None


def _job_name(found: Launch, world_size: int) -> str:
    """$SHARDD_JOB, else one that all ranks of a launcher come to, else this process's own."""
    name = os.environ.get("SHARDD_JOB") or found.job
    if name:
        return name
    if world_size > 1:
        raise FailedPrecondition("several ranks and no name for their job: set SHARDD_JOB to the "
                                 "same name for all of them")
    return f"torch-{os.getpid()}"


def init(socket: str | None = None, job: str | None = None, rank: int | None = None,
         world_size: int | None = None, guard: bool = False, **options: Any) -> Client:
    """Connect and join, where the environment does not say what is wanted.

    Without this the first module that is used does it: $SHARDD_SOCKET, $SHARDD_JOB (or the
    launcher's own number of the run), and rank and world size of torchrun, shardctl run, mpirun
    or srun; one rank without any of them. @guard: first of all :func:`guard`, by default not.
    @options: of :meth:`shardd.Client.join`.
    FailedPrecondition: there is one already. Unimplemented: the launcher has started ranks on
    other machines. Return: the client.
    """
    global _current
    if _current is not None and not _current.forked:
        raise FailedPrecondition("this process has a session already: call "
                                 "shardd.torch.shutdown() first")
    if guard:
        _guard()
    found = launched_or_alone()
    if world_size is None:
        found.check_one_machine()
        world_size = found.world_size
    rank = found.rank if rank is None else rank
    name = job or _job_name(found, world_size)
    client = Client(socket, name=f"rank {rank} of {name}"[:64])
    client.join(name, world_size, rank, **options)
    _current = client
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
    """The same, or 0 before there is a session."""
    member = _current.member if _current is not None else None
    return member.rank if member else 0


def world_size() -> int:
    """How many ranks the job has."""
    member = session().member
    return member.world_size if member else 1


def shutdown() -> None:
    """Leave the job cleanly and close; modules that were wrapped are of no use afterwards.

    Also done when the interpreter ends, unless by an exception: then the others are to learn
    that this rank died. Twice is allowed.
    """
    global _current
    client, _current = _current, None
    if client is None or client.forked:
        return
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


def tensor_at(address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over memory that the daemon lent; whoever makes it ends it in time."""
    nbytes = elements * dtype.itemsize
    storage: Any = torch._C._construct_storage_from_data_pointer(
        address, torch.device("cpu"), nbytes)
    empty: Any = torch.empty(0, dtype=dtype)
    seen: torch.Tensor = empty.set_(storage, 0, (elements,))
    return seen
