"""reads.py DECLARES: lease generation after generation of the job's publication, and print for each
its number, its step, a hash of its bytes, and the hash of a copy, if a delta has changed it to this
generation. Ends by a signal."""

import hashlib
import json
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python"))

import shardd

JOB, NAME = os.environ["SHARDD_JOB"], "weights"
DECLARATION = {"name": NAME, "type": "bf16", "every_steps": 1, "buffers": 12, "delta_percent": 100}


def declare():
    """The job may have no units yet, and the daemon may die meanwhile."""
    while True:
        try:
            with shardd.Client() as client:
                shardd.declare_publication(DECLARATION, JOB, client)
                return
        except (shardd.SharddError, OSError):
            time.sleep(0.01)


def digest(tensors):
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(name.encode() + b"\0" + bytes(tensors[name]))
    return found.hexdigest()


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
        own = digest({name: memory.tobytes() for name, memory in weights.items()})
        by_delta = copy.follow(weights)
        said = {"number": weights.number, "step": weights.step, "digest": own}
        said["delta"] = digest(copy.tensors) if by_delta else None
        print(json.dumps(said), flush=True)


def main(declares):
    print("{}", flush=True)  # it runs
    if declares == "1":
        declare()
    while True:
        try:
            with shardd.Live(JOB, NAME) as live:
                read(live, Copy())
        except (
            shardd.SharddError,
            shardd.InUse,
            OSError,
        ):  # it is not there yet, or the daemon died
            time.sleep(0.005)


main(*sys.argv[1:])
