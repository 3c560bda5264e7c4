"""``python -m shardd [SOCKET]``: print what this Python sees of the daemon."""

from __future__ import annotations

import os
import sys
from typing import Any

import shardd

from . import _library
from ._launch import launched_or_alone


def _bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _device(device: dict[str, Any]) -> None:
    print(f"device {device['id']}: {_bytes(device['used_bytes'])} of "
          f"{_bytes(device['capacity_bytes'])} used, kernels {device['kernels']}")
    if device.get("uuid"):
        order = device.get("order")
        print(f"  {device['uuid']}, {device['detail']}, streams "
              f"{'ordered by ' + order if order else 'not ordered'}")
    if device.get("lost"):
        print(f"  lost: {device['lost']}")


def _ranks(job: dict[str, Any]) -> None:
    """Where the memory of those is that are on a GPU."""
    places = [f"rank {rank['rank']} on {rank['device']}" for rank in job["ranks"]
              if rank.get("device", "host:0") not in ("", "host:0")]
    if places:
        print(f"  {', '.join(places)}")


def _cluster(cluster: dict[str, Any]) -> str:
    why = f": {cluster['why']}" if cluster["why"] else ""
    return f"cluster {cluster['name']}, node {cluster['node']}: {cluster['state']}{why}"


def _report(client: shardd.Client, said: dict[str, Any]) -> None:
    print(f"daemon {client.daemon_version}, pid {said['pid']}, at {client.socket}, "
          f"up {said['uptime_s']} s")
    if said["cluster"]:
        print(_cluster(said["cluster"]))
    for device in said["devices"]:
        _device(device)
    for job in said["jobs"]:
        joined = sum(rank["state"] == "JOINED" for rank in job["ranks"])
        print(f"job {job['name']}: {job['state']}, {joined} of {job['world_size']} ranks, "
              f"step {job['step']}, {job['unit_count']} units, {_bytes(job['used_bytes'])}")
        _ranks(job)
    if not said["jobs"]:
        print("no jobs")


def _report_launch(in_cluster: bool) -> None:
    """Print what a join without arguments would be; nothing without a launcher.

    FailedPrecondition: the daemon would refuse it.
    """
    found = launched_or_alone()
    if not found.launcher:
        return
    job = os.environ.get("SHARDD_JOB") or found.job
    print(f"this process: rank {found.rank} of {found.world_size} of "
          f"{f'job {job}' if job else 'a job without a name: set SHARDD_JOB'}, by "
          f"{found.launcher}")
    here = found.local[1] or found.world_size
    if here == found.world_size:
        return
    print(f"  {here} of the {found.world_size} ranks are on this machine")
    if not in_cluster:
        raise shardd.FailedPrecondition(
            f"{found.launcher} has started {here} of {found.world_size} ranks on this machine, and "
            "the daemon is in no cluster (coord is none): set coord on the daemons of all machines",
            "local_world_size")


def main(arguments: list[str]) -> int:
    """Return: 0, 1 (no daemon, or it refused), 2 (usage)."""
    if len(arguments) > 1 or any(a.startswith("-") for a in arguments):
        print("usage: python -m shardd [SOCKET]", file=sys.stderr)
        return 2
    try:
        library = _library.library()
        print(f"package {shardd.__version__}, library {library.shardd_version().decode()} "
              f"({library._name})")
        with shardd.connect(arguments[0] if arguments else None, name="python -m shardd",
                            connect_timeout=0.5) as client:
            said = client.status()
            _report(client, said)
        _report_launch(bool(said["cluster"]))
    except (shardd.SharddError, ImportError) as error:
        print(f"shardd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
