"""What a worker that torchrun has started again can know of the state of its job.

torchrun ends all workers when one fails and starts new ones, with another number in
TORCHELASTIC_RESTART_COUNT. It passes nothing on, but it stays: a daemon that is younger than
torchrun was started during the run, and has nothing of what was trained before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from ._connection import Connection
from ._launch import run_name, run_of
from .errors import DataLoss, NotFound

_MARK = b"TORCHELASTIC_RESTART_COUNT="


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started its workers again; 0 without torchrun."""
    text = env.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def run(env: Mapping[str, str] = os.environ) -> str | None:
    """An identifier of the run of the launcher that this process belongs to, also after it was
    started again: $SHARDD_RUN, the process of torchrun if it has all ranks, or what the launcher
    calls its run. None: not known."""
    given = env.get("SHARDD_RUN")
    if given:
        return run_name(given)
    if "TORCHELASTIC_RESTART_COUNT" in env and \
            env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        agent = _agent()
        began = _ticks(agent) if agent is not None else None
        if began is not None:
            return f"torchrun-{agent}-{began}"
    return run_of(env)


def _ticks(pid: int) -> int | None:
    """When a process began, in ticks of the clock since the machine did."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _agent() -> int | None:
    """The process that starts the workers: the first above us that is not a worker."""
    pid = os.getppid()
    try:
        while pid > 1:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if not any(entry.startswith(_MARK) for entry in file.read().split(b"\0")):
                    return pid
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _began(pid: int) -> float | None:
    """When a process began, seconds since 1970."""
    ticks = _ticks(pid)
    if ticks is None:
        return None
    up = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def check(client: Connection, job: str | None) -> None:
    """Before the first join: check that the state that a restarted worker expects exists.

    DataLoss: no such job, and the daemon was started after torchrun. If the daemon is
    older, nobody can know whether there ever was one (the first start may have failed before it
    joined): a line on standard error says so.
    """
    again = restarts()
    if not again or job is None or os.environ.get("SHARDD_INSTANCE"):
        return
    try:
        client.status(job)
        return
    except NotFound:
        pass
    agent = _agent()
    began = _began(agent) if agent is not None else None
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(client.daemon_started))
    if began is not None and client.daemon_started > began + 1:
        raise DataLoss(
            f"the daemon was restarted at {when}, after torchrun (process {agent}) began: the "
            f"state of job {job!r} is gone; restore a checkpoint, or start torchrun again from "
            "step 0 (SHARDD_INSTANCE=any lets this worker begin now, from copies if other nodes "
            "have some)")
    print(f"shardd: this is restart {again} of torchrun's workers, but the daemon, which has "
          f"run since {when}, has no job {job!r}: no rank joined it before, or it was freed. "
          "Training begins at step 0", file=sys.stderr, flush=True)


__all__ = ["check", "restarts", "run"]
