"""reads.py NAME [DECLARATION...]: declare publications of the job, lease generation after
generation of publication NAME, and print for each its number, its step, a digest of each of its
tensors, and those of a copy, if a delta has changed it to this generation. Ends by a signal."""

import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python"))

from published import digest

import shardd

JOB = os.environ["SHARDD_JOB"]


def declare(declaration):
    """The job may have no units yet, and the daemon may die meanwhile."""
    while True:
        try:
            with shardd.Client() as client:
                shardd.declare_publication(declaration, JOB, client)
                return
        except (shardd.SharddError, OSError):
            time.sleep(0.01)


def digests(weights, data_of):
    return {
        name: digest(memory.dtype.name, memory.shape, data_of(name))
        for name, memory in weights.items()
    }


class Copy:
    """Of a generation."""

    def __init__(self):
        self.number, self.tensors = 0, {}

    def follow(self, weights):
        """Return: by a delta."""
        try:
            weights.delta(self.number).apply(self.tensors)
            by_delta = True
        except shardd.NotFound:  # it is not of the generation that the copy is
            self.tensors = {name: bytearray(m.tobytes()) for name, m in weights.items()}
            by_delta = False
        self.number = weights.number
        return by_delta


def read(live, copy):
    while True:
        weights = live.acquire(wait=5)
        said = {"number": weights.number, "step": weights.step}
        said["tensors"] = digests(weights, lambda name, of=weights: of[name].tobytes())
        by_delta = copy.follow(weights)
        said["delta"] = digests(weights, copy.tensors.__getitem__) if by_delta else None
        print(json.dumps(said), flush=True)


def main(name, *declarations):
    print("{}", flush=True)  # it runs
    for declaration in declarations:
        declare(json.loads(declaration))
    while True:
        try:
            with shardd.Live(JOB, name) as live:
                read(live, Copy())
        except (
            shardd.SharddError,
            shardd.InUse,
            OSError,
        ):  # it is not there yet, or the daemon died
            time.sleep(0.005)


main(*sys.argv[1:])
