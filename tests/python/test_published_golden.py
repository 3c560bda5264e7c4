#!/usr/bin/env python3
"""Publications, against tests/golden/published.safetensors, which PyTorch has made."""

import contextlib
import json
import os
import unittest

import support

import shardd

GOLDEN = os.environ.get("SHARDD_GOLDEN") or support.ROOT / "tests" / "golden"
DTYPES = {"F32": shardd.Dtype.FP32, "BF16": shardd.Dtype.BF16, "F16": shardd.Dtype.FP16,
          "U8": shardd.Dtype.E4M3}


def read(name):
    """Tensors by name, as type, shape and bytes; and the metadata."""
    with open(os.path.join(GOLDEN, name), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    about = header.pop("__metadata__")
    return {n: (t["dtype"], tuple(t["shape"]), data[slice(*t["data_offsets"])])
            for n, t in header.items()}, about


def train(at, world, rank, done):
    """A rank whose shards have the masters, in two units: one of each kind of name."""
    tensors, _ = read("published.safetensors")
    masters = {name[3:]: t for name, t in tensors.items() if name.startswith("in/")}
    client = shardd.connect(at)
    client.join("golden", world, rank)
    sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0)
    units = {"root": {n: t for n, t in masters.items() if not n.startswith("layers.0.")},
             "layers.0": {n[9:]: t for n, t in masters.items() if n.startswith("layers.0.")}}
    made = client.register([
        shardd.UnitSpec(name, [shardd.TensorSpec(n, t[1]) for n, t in of.items()], optimizer=sgd)
        for name, of in units.items()])
    for unit, of in zip(made, units.values()):
        values = b"".join(t[2] for t in of.values())
        with client.alloc((len(values) // 4,)) as buffer:
            buffer.memory.view().cast("B")[:] = values
            unit.init_own(buffer)
    client.commit(1)
    done.wait(60)
    client.leave()
    client.close()


def declares(declaration, client):
    """False: the job, or its units, are not there yet."""
    try:
        shardd.declare_publication(declaration, "golden", client)
        return True
    except (shardd.NotFound, shardd.InvalidArgument):
        return False


class Golden(unittest.TestCase):
    def check(self, world, reads):
        """What @reads returns of a job of so many ranks has the golden names, types and bytes."""
        tensors, about = read("published.safetensors")
        done = support.spawn.Event()
        with support.daemon() as at, shardd.Client(at) as client:
            ranks = [support.spawn.Process(target=train, args=(at, world, rank, done))
                     for rank in range(world)]
            for rank in ranks:
                rank.start()
            try:
                support.wait_until(lambda: declares(json.loads(about["declaration"]), client))
                self.compare({n[4:]: t for n, t in tensors.items() if n.startswith("out/")},
                             reads(at, client))
            finally:
                done.set()
                for rank in ranks:
                    rank.join(20)
        self.assertEqual([rank.exitcode for rank in ranks], [0] * world)

    def compare(self, expected, found):
        self.assertEqual(sorted(found), sorted(expected))
        for name, (dtype, shape, data) in expected.items():
            with self.subTest(name):
                self.assertEqual((found[name].dtype, tuple(found[name].shape)),
                                 (DTYPES[dtype], shape))
                self.assertEqual(found[name].tobytes(), data)

    def test_what_is_mapped(self):
        for world in (1, 3):
            with self.subTest(world=world), contextlib.ExitStack() as stack:
                self.check(world, lambda at, _, stack=stack: stack.enter_context(
                    shardd.Live("golden", "golden", at)).acquire(wait=30))

    def test_what_is_fetched(self):
        self.check(2, lambda _, client: shardd.fetch_generation(
            "golden", "golden", client, wait=30))


if __name__ == "__main__":
    support.main()
