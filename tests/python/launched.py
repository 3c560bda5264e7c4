"""A rank of a job: a few steps of training without PyTorch. What it knows of launchers is join().

    launched.py FOLDER [RUNS]

Writes what it was and the parameters it ended with to FOLDER. Waits first until the ranks of RUNS
jobs like its own are there at once.
"""

import json
import os
import pathlib
import sys
import time

import shardd


def mine(jobs):
    return next(job for job in jobs for rank in job["ranks"] if rank["pid"] == os.getpid())


def wait_for_all(folder, name, ranks):
    """Until so many ranks of all runs have joined. Then a rank may leave: the marks stay."""
    (folder / f"joined.{name}").touch()
    end = time.monotonic() + 30
    while len(list(folder.glob("joined.*"))) < ranks:
        if time.monotonic() > end:
            sys.exit(f"not {ranks} ranks: {sorted(folder.iterdir())}")
        time.sleep(0.01)


def train(client, rank):
    sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=0.1, momentum=0.9)
    w = shardd.TensorSpec("w", (7,), shardd.Init.NORMAL, 0.0, 0.5)
    [unit] = client.register([shardd.UnitSpec("block", [w], optimizer=sgd)])
    if not unit.initialised:
        unit.init_seed(3)
    for step in range(6):
        seen = unit.tensor(unit.gather(), "w").view().tolist()
        unit.release()
        gradient = unit.gradient().view()
        for i, value in enumerate(seen):
            gradient[i] = value * (rank + 1) - 0.1 * step * i
        gradient.release()
        unit.reduce()
        client.step()
        client.commit(step + 1)
    seen = unit.tensor(unit.gather(), "w").view().tolist()
    unit.release()
    return [value.hex() for value in seen]


def main(folder, runs="1"):
    folder = pathlib.Path(folder)
    with shardd.connect() as client:
        me = client.join()
        name = f"{mine(client.status()['jobs'])['name']}.{me.rank}"
        wait_for_all(folder, name, int(runs) * me.world_size)
        said = {"job": name.rpartition(".")[0], "rank": me.rank, "world": me.world_size,
                "weights": train(client, me.rank)}
    (folder / f"said.{name}").write_text(json.dumps(said))


main(*sys.argv[1:])
