"""What a launcher has told this process: its rank, how many ranks there are, and which run it is.

Launchers may be nested (torchrun in a step of srun, mpirun in an allocation). The innermost one
counts, so they are asked in this order. Variables that a launcher leaves in the environment of
processes that it did not start itself do not count: SLURM_NTASKS is also set in a batch script and
in the shell of salloc, where there is one process.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Callable

from .errors import InvalidArgument, Unimplemented

_Env = Mapping[str, str]
_NAME_MAX = 60  # of the 64 bytes that the daemon allows


def _first(env: _Env, *names: str) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


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


def _hydra() -> str | None:
    """Hydra gives its runs no number; on one machine all ranks have one proxy above them."""
    pid = os.getppid()
    while pid > 1:
        seen = _stat(pid)
        if seen is None:
            return None
        name, parent, began = seen
        if name == "hydra_pmi_proxy":
            return f"{pid}-{began}"
        pid = parent
    return None


def _of_torch(env: _Env) -> str | None:
    run = env.get("TORCHELASTIC_RUN_ID")
    return run if run and run != "none" else None  # torchrun without --rdzv-id says "none"


def _of_openmpi(env: _Env) -> str | None:
    return _first(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


def _of_pmi(env: _Env) -> str | None:
    return _first(env, "PMI_JOBID") or _hydra()


def _of_slurm(env: _Env) -> str | None:
    job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step else None


# --------------------------------------------------------------------------- launchers


@dataclass(frozen=True)
class _Kind:
    """``rank``, ``world``: the variables that say them; ``here``: those that say how many of the
    ranks are on this machine; ``prefix``: of the job's name, which ``run`` goes on with."""

    launcher: str
    rank: str
    world: str
    here: tuple[str, ...]
    prefix: str
    run: Callable[[_Env], str | None]


_KINDS = (
    _Kind("a launcher", "RANK", "WORLD_SIZE", ("LOCAL_WORLD_SIZE",), "torch",
          _of_torch),
    _Kind("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
          ("OMPI_COMM_WORLD_LOCAL_SIZE",), "mpi", _of_openmpi),
    _Kind("mpiexec", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), "mpi",
          _of_pmi),
    _Kind("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", (), "slurm", _of_slurm),
)


@dataclass(frozen=True)
class Launch:
    """``launcher`` started ``world_size`` ranks, this one as ``rank``. ``job``: a name that all
    of them derive and no other run does, or None. ``elsewhere``: why not all of them can be on
    this machine, or ""."""

    launcher: str
    rank: int
    world_size: int
    job: str | None
    elsewhere: str = ""

    def check_one_machine(self) -> None:
        """Unimplemented: there are ranks on other machines, which another daemon would have."""
        if self.elsewhere:
            raise Unimplemented(
                f"{self.elsewhere}: all ranks of a job must be on the machine of their daemon. "
                "Start them all on one machine; if they already are (in containers that share the "
                "daemon's socket), set SHARDD_NODES=1", "world_size")


def _number(env: _Env, name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


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


def _elsewhere(env: _Env, kind: _Kind, world: int) -> str:
    nodes = env.get("SHARDD_NODES")
    if nodes is not None and nodes != "1":
        raise InvalidArgument(f"SHARDD_NODES={nodes!r}, must be 1 (all ranks are on this "
                              "machine) or not set", "SHARDD_NODES")
    if nodes == "1":
        return ""
    here = next((n for n in (_number(env, name) for name in kind.here) if n is not None), None)
    if here is not None and here < world:
        return f"{_called(env, kind)} has started {world} ranks, {here} of them on this machine"
    steps = _number(env, "SLURM_STEP_NUM_NODES")
    if kind.prefix != "torch" and here is None and steps is not None and steps > 1:
        return f"{kind.launcher} has started {world} ranks on {steps} nodes"
    return ""


def launched(env: _Env = os.environ) -> Launch | None:
    """What the innermost launcher says; None: no launcher gives rank and world size.

    InvalidArgument: they are not numbers.
    """
    for kind in _there(env):
        rank, world = _numbers(env, kind)
        return Launch(_called(env, kind), rank, world, _job(env, kind),
                      _elsewhere(env, kind, world))
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

    InvalidArgument: only one of the two is set, or one is not a number. Unimplemented: there are
    ranks on other machines.
    """
    found = launched_or_alone(env)
    found.check_one_machine()
    return found.rank, found.world_size


__all__ = ["Launch", "environment", "launched", "launched_or_alone", "run_name",
           "run_of"]
