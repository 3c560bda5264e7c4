"""What a launcher has told this process: its rank, how many ranks there are, which of them are on
this machine, and which run it is.

Launchers may be nested (torchrun in a step of srun, mpirun in an allocation). The innermost one
counts, so they are asked in this order. Variables that a launcher leaves in the environment of
processes that it did not start itself do not count: SLURM_NTASKS is also set in a batch script and
in the shell of salloc, where there is one process.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Callable

from .errors import InvalidArgument

_Env = Mapping[str, str]
_NAME_MAX = 60  # of the 64 bytes that the daemon allows


def _first(env: _Env, *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


def _number(env: _Env, name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


# ----------------------------------------------------------------------- names of runs


def _stat(pid: int) -> tuple[str, int, str] | None:
    """A process's name, its parent, and when it began; None: not readable."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return head.partition("(")[2], int(fields[1]), fields[19]


def _arguments(pid: int) -> list[str]:
    """A process's command line; []: not readable."""
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read().split("\0")[:-1]
    except OSError:
        return []


def _hydra(env: _Env) -> str | None:
    """Hydra gives its runs no number. On one machine all ranks have one proxy above them; each
    machine has one, and all proxies have the address of one mpiexec."""
    here, world = _number(env, "MPI_LOCALNRANKS"), _number(env, "PMI_SIZE")
    pid = os.getppid()
    while pid > 1:
        seen = _stat(pid)
        if seen is None:
            return None
        name, parent, began = seen
        if name == "hydra_pmi_proxy":
            if here in (None, world):
                return f"{pid}-{began}"
            said = _arguments(pid)
            return dict(zip(said, said[1:])).get("--control-port")
        pid = parent
    return None


def _of_torch(env: _Env) -> str | None:
    run = env.get("TORCHELASTIC_RUN_ID")
    return run if run and run != "none" else None  # torchrun without --rdzv-id says "none"


def _of_openmpi(env: _Env) -> str | None:
    return _first(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _of_pmi(env: _Env) -> str | None:
    return _first(env, "PMI_JOBID") or _hydra(env)


def _of_slurm(env: _Env) -> str | None:
    job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step else None


# --------------------------------------------------------------------------- launchers


@dataclass(frozen=True)
class _Kind:
    """``rank``, ``world``: the variables that say them; ``local``: pairs of those that say the same
    of the ranks on this machine; ``prefix``: of the job's name, which ``run`` goes on with."""

    launcher: str
    rank: str
    world: str
    local: tuple[tuple[str, str], ...]
    prefix: str
    run: Callable[[_Env], str | None]


_KINDS = (
    _Kind("a launcher", "RANK", "WORLD_SIZE", (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),), "torch",
          _of_torch),
    _Kind("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
          (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),), "mpi", _of_openmpi),
    _Kind("mpiexec", "PMI_RANK", "PMI_SIZE",
          (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")), "mpi",
          _of_pmi),
    _Kind("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", (), "slurm", _of_slurm),
)


@dataclass(frozen=True)
class Launch:
    """``launcher`` started ``world_size`` ranks, this one as ``rank``. ``job``: a name that all
    of them derive and no other run does, or None. ``local``: the number of this one among those on
    this machine, and how many there are; (0, 0): unknown."""

    launcher: str
    rank: int
    world_size: int
    job: str | None
    local: tuple[int, int] = (0, 0)


def _numbers(env: _Env, kind: _Kind) -> tuple[int, int]:
    rank, world = _number(env, kind.rank), _number(env, kind.world)
    if rank is None or world is None or rank >= world:
        raise InvalidArgument(
            f"{kind.rank}={env.get(kind.rank, '')!r} and {kind.world}={env.get(kind.world, '')!r}: "
            "set both to whole numbers, the first from 0 and smaller than the second",
            kind.rank)
    return rank, world


def _there(env: _Env) -> Iterator[_Kind]:
    return (kind for kind in _KINDS if kind.rank in env and kind.world in env)


def _called(env: _Env, kind: _Kind) -> str:
    """RANK and WORLD_SIZE are set by shardctl run, too, and by hand."""
    return "torchrun" if kind is _KINDS[0] and "TORCHELASTIC_RUN_ID" in env else kind.launcher


def _job_name(prefix: str, run: str) -> str:
    """A name that the daemon allows and that differs between runs."""
    name = prefix + "-" + "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in run)
    if name == f"{prefix}-{run}" and len(name) <= _NAME_MAX:
        return name
    return f"{name[:_NAME_MAX - 9]}-{zlib.crc32(run.encode(errors='replace')):08x}"


def _job(env: _Env, kind: _Kind) -> str | None:
    """A script may have set RANK and WORLD_SIZE from another launcher's variables: then that
    launcher gives the name. A port is the last resort: two runs may have the same one."""
    others = [k for k in _there(env) if k is not kind]
    world = env[kind.world]
    same = [k for k in others if env[k.world] == world]
    for k in (kind, *same):
        run = k.run(env)
        if run:
            return _job_name(k.prefix, run)
    if kind is not _KINDS[0]:
        return None
    port = env.get("MASTER_PORT")
    if port:
        return _job_name("torch", port)
    runs = ((k, k.run(env)) for k in others)
    return next((_job_name(k.prefix, run) for k, run in runs if run), None)


def run_name(run: str) -> str:
    """@run as the daemon allows it; short enough to count sessions behind it."""
    return run if len(run.encode(errors="replace")) <= _NAME_MAX - 4 else _job_name("run", run)


def run_of(env: _Env = os.environ) -> str | None:
    """An identifier of this run of the innermost launcher that gives one, the same for all its
    ranks and not that of another run. None: unknown. What torchrun gives is the user's own
    (--rdzv-id), and perhaps not different between runs."""
    there = list(_there(env))
    for kind in there:
        run = kind.run(env) if env[kind.world] == env[there[0].world] else None
        if run:
            return run_name(f"{kind.prefix}-{run}")
    return None


def _slurm_tasks(text: str) -> list[int]:
    """How many tasks each node has, of "4(x2),3"; []: it is something else."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part, re.ASCII)
        if found is None:
            return []
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _slurm_local(env: _Env) -> tuple[int | None, int | None]:
    """srun says how many tasks this node has only in a list of all nodes."""
    node = _number(env, "SLURM_NODEID")
    tasks = _slurm_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    here = tasks[node] if node is not None and node < len(tasks) else None
    return _number(env, "SLURM_LOCALID"), here


def _local(env: _Env, kind: _Kind, world: int) -> tuple[int, int]:
    """Numbers that do not fit are another launcher's."""
    said = [(_number(env, rank), _number(env, size)) for rank, size in kind.local]
    if _number(env, "SLURM_STEP_NUM_TASKS") == world:  # also of srun --mpi=pmi2, and of a script
        said.append(_slurm_local(env))
    for rank, size in said:
        if rank is not None and size is not None and rank < size <= world:
            return rank, size
    return 0, 0


def launched(env: _Env = os.environ) -> Launch | None:
    """What the innermost launcher says; None: no launcher gives rank and world size.

    InvalidArgument: they are not numbers.
    """
    for kind in _there(env):
        rank, world = _numbers(env, kind)
        return Launch(_called(env, kind), rank, world, _job(env, kind), _local(env, kind, world))
    return None


def launched_or_alone(env: _Env = os.environ) -> Launch:
    """The same, or one rank of one.

    InvalidArgument: as there, or only one of RANK and WORLD_SIZE is set.
    """
    found = launched(env)
    if found is None and ("RANK" in env or "WORLD_SIZE" in env):
        _numbers(env, _KINDS[0])
    return found or Launch("", 0, 1, None)


def environment(env: _Env = os.environ) -> tuple[int, int]:
    """(rank, world size) as torchrun, shardctl run, mpirun and srun say them; (0, 1) by itself.

    InvalidArgument: only one of the two is set, or one is not a number.
    """
    found = launched_or_alone(env)
    return found.rank, found.world_size


__all__ = ["Launch", "environment", "launched", "launched_or_alone", "run_name",
           "run_of"]
