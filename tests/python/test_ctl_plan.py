#!/usr/bin/env python3
"""shardctl plan against what jobs take that train, also with replicas and on two nodes."""

import contextlib
import json
import os
import subprocess
import unittest

import support

ELEMENTS, UNITS, WORLD = 1000070, 2, 4  # a slab of a pool is 1 MiB at least
PAGES = WORLD * UNITS * 4096  # what rounding to pages may add to the slabs of a class
AT_ONCE = ("parameters", "gradients", "optimizer state", "gathered copies", "gradient buffers")


def rank(number, world, sockets, job, replicas, tell, go):
    """Train, gather all, ask for all gradients, and stay."""
    import shardd

    strategy = {1: {}, world: {"strategy": shardd.Strategy.REPLICATE,
                               "reduce_profile": shardd.Profile.DDP}}.get(
        replicas, {"strategy": shardd.Strategy.HYBRID, "shard_ranks": world // replicas})
    adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.1)
    each = world // len(sockets)
    with shardd.connect(sockets[number // each]) as client:
        client.join(job, world, number,
                    local=(number % each, each) if len(sockets) > 1 else None)
        units = client.register([shardd.UnitSpec(
            f"u{i}", [shardd.TensorSpec("w", (ELEMENTS,), shardd.Init.CONSTANT, 1.0)],
            compute_dtype=shardd.Dtype.BF16, optimizer=adamw, **strategy) for i in range(UNITS)])
        for unit in units:
            unit.init_seed(1)
        for step in range(2):
            for unit in units:
                unit.gather()
                unit.release()
                unit.gradient()
                unit.reduce()
            client.step()
            client.commit(step + 1)
        for unit in units:
            unit.gather()
        held = [unit.gradient() for unit in units]
        client.barrier()
        tell.put(len(held))
        go.wait()


class Plan(unittest.TestCase):
    def compare(self, sockets, job, replicas):
        go, tell, results = support.spawn.Event(), support.spawn.Queue(), support.spawn.Queue()
        ranks = [support.spawn.Process(target=support._rank, daemon=True, args=(
            rank, r, WORLD, (sockets, job, replicas, tell, go), results)) for r in range(WORLD)]
        for one in ranks:
            one.start()
        try:
            for _ in ranks:
                tell.get(timeout=60)
            said = subprocess.run(
                [os.path.join(support.BIN_DIR, "shardctl"), "--socket", sockets[0], "--json",
                 "plan", "--backend", "host", "--params", str(ELEMENTS * UNITS),
                 "--units", str(UNITS), "--ranks", str(WORLD), "--nodes", str(len(sockets)),
                 "--replicas", str(replicas),
                 "--dtype", "bf16"], capture_output=True, text=True, check=True)
            plan = json.loads(said.stdout)
            for at in sockets:
                [seen] = [j for j in support.shardctl(at, "memory")["jobs"] if j["name"] == job]
                self.check(plan, {c["name"]: c for c in seen["memory"]}, (len(sockets), replicas))
        finally:
            go.set()
            for one in ranks:
                one.join(30)
                one.kill()

    def check(self, plan, classes, where):
        for name in ("shard", "full", "grad"):
            used = sum(item["most_bytes"] for item in plan["items"]
                       if item["class"] == name and item["name"] in AT_ONCE)
            self.assertEqual(used, classes[name]["used_bytes"], (name, where))
            self.assertLessEqual(classes[name]["peak_bytes"],
                                 plan["classes"][name]["most_bytes"] + PAGES, (name, where))

    def test_one_node(self):
        with support.daemon() as at:
            for replicas in (1, 2, 4):
                self.compare([at], f"j{replicas}", replicas)

    def test_two_nodes(self):
        support.need_etcd(self)
        with contextlib.ExitStack() as stack:
            at = stack.enter_context(support.cluster("a", "b"))
            for replicas in (1, 2, 4):
                self.compare(list(at.values()), f"j{replicas}", replicas)


if __name__ == "__main__":
    support.main()
