#!/usr/bin/python3
"""One rank of an elastic job. Rank 0 prints a line of JSON for each step: its number, how many
ranks there are, and a hash of the parameters.

usage: elastic_rank.py STEPS LEAST MOST GRACE_S [STEP_S]

STEP_S: what forward and backward would take (0.02).
"""
import array
import hashlib
import json
import sys
import time

import shardd

SIZES = (37, 1001)


class Rank:
    def __init__(self, steps, least, most, grace, pause=0.02):
        self.steps, self.pause = steps, pause
        self.client = shardd.connect()
        found = self.client.join(elastic=(least, most, grace))
        adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.01)
        tensors = [shardd.TensorSpec(f"t{i}", (n, 7), shardd.Init.UNIFORM, -1.0, 1.0)
                   for i, n in enumerate(SIZES)]
        [self.unit] = self.client.register([shardd.UnitSpec("block", tensors, optimizer=adamw)])
        if not found.has_commit:
            self.unit.init_seed(5)
        self.take(found)

    def take(self, found):
        self.step = found.step if found.has_commit else 0
        self.rank, self.world = found.rank, found.world_size

    def make(self, step):
        gradient = self.unit.gradient()
        # of each rank another one, with a mean that does not depend on how many there are
        own = 2 * self.rank - (self.world - 1)
        gradient.write(array.array(
            "f", [((i * 31 + step * 17) % 101 + own * (i % 5)) / 64 - 0.75
                  for i in range(gradient.elements)]))
        self.unit.reduce()
        self.client.step()
        self.client.commit(step, b"at %d" % step)
        values = self.unit.gather().tobytes()[:4 * 7 * sum(SIZES)]
        self.unit.release()
        if self.rank == 0:
            print(json.dumps({"step": step, "world": self.world,
                              "loss": hashlib.sha256(values).hexdigest()}), flush=True)

    def train(self):
        while self.step < self.steps:
            try:
                self.make(self.step + 1)
                self.step += 1
                time.sleep(self.pause)
            except shardd.Aborted as e:
                print(e, file=sys.stderr, flush=True)
                found = self.client.rejoin()
                # others went on without this process, and have no blob of it
                away = found.step > self.step + 1
                if found.blob != (b"" if away else b"at %d" % found.step):
                    sys.exit(f"step {found.step} has blob {found.blob}")
                self.take(found)
        self.client.leave()


if __name__ == "__main__":
    Rank(*map(int, sys.argv[1:4]), *map(float, sys.argv[4:])).train()
