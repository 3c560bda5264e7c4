#!/usr/bin/python3
"""One rank of a job, which does what its arguments say, one after the other.

usage: rank.py WORLD RANK STEP...

  init          initialise the unit
  train=N       until step N is committed
  wait=FILE     until there is this file
  note=FILE     rank 0: the parameters, as hexadecimal digits
  loaded=FILE   make it when all have registered; join again when a checkpoint is loaded
  load=FOLDER   rank 0 loads the newest checkpoint there; all join again
"""
import array
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "client/python"))
import shardd

SIZES = (37, 1001)


class Rank:
    def __init__(self, world, rank):
        self.client, self.rank, self.world = shardd.connect(), rank, world
        self.joined(self.client.join(None, world, rank))

    def joined(self, found):
        self.step = found.step if found.has_commit else 0
        adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.01)
        tensors = [shardd.TensorSpec(f"t{i}", (n, 7), shardd.Init.UNIFORM, -1.0, 1.0)
                   for i, n in enumerate(SIZES)]
        [self.unit] = self.client.register([shardd.UnitSpec("block", tensors, optimizer=adamw)])

    def init(self):
        self.unit.init_seed(5)

    def train(self, until):
        for step in range(self.step + 1, int(until) + 1):
            gradient = self.unit.gradient()
            # of each rank another one, with a mean that does not depend on how many there are
            own = 2 * self.rank - (self.world - 1)
            gradient.view()[:] = array.array(
                "f", [((i * 31 + step * 17) % 101 + own * (i % 5)) / 64 - 0.75
                      for i in range(gradient.elements)])
            self.unit.reduce()
            self.client.step()
            self.client.commit(step, b"rank %d at %d" % (self.rank, step))
            self.step = step
            if self.rank == 0:
                print(step, flush=True)

    def wait(self, path):
        while not pathlib.Path(path).exists():
            time.sleep(0.05)

    def note(self, path):
        values = bytes(self.unit.gather().view())[:4 * 7 * sum(SIZES)]
        self.unit.release()
        if self.rank == 0:
            pathlib.Path(path).write_text(values.hex())

    def loaded(self, path):
        self.client.barrier()
        if self.rank == 0:
            pathlib.Path(path).touch()
        try:
            while True:
                self.client.barrier()
                time.sleep(0.05)
        except shardd.Aborted:
            self.joined(self.client.rejoin())

    def load(self, path):
        self.client.barrier()  # all have registered
        try:
            if self.rank == 0:
                self.client.load_checkpoint(path)
            self.client.barrier()
        except shardd.Aborted:
            self.joined(self.client.rejoin())
        else:
            sys.exit("the epoch has not ended")


def main():
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]))
    for step in sys.argv[3:]:
        what, _, argument = step.partition("=")
        getattr(rank, what)(*([argument] if argument else []))
    rank.client.leave()


if __name__ == "__main__":
    main()
