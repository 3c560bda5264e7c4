#!/usr/bin/env python3
"""Daemons of two nodes, both on this machine, train one job together."""

import math
import subprocess
import unittest

import launchers
import support

import shardd

WORLD, STEPS = 4, 8
NODE = "aabb"  # of each rank


def example(rank, i):
    return math.sin(1.7 * i + rank), math.cos(0.6 * i - rank)


def forward(w, rank):
    """Loss and gradient of a line through this rank's examples, each element a slope."""
    loss, gradient = 0.0, []
    for i, value in enumerate(w):
        x, y = example(rank, i)
        loss += (value * x - y) ** 2
        gradient.append(2 * (value * x - y) * x)
    return loss, gradient


def train(rank, world, sockets, job):
    """The losses, and where the ranks were in the middle."""
    adam = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.05)
    layers = [shardd.UnitSpec(f"layer{n}", [shardd.TensorSpec("w", (size,), shardd.Init.NORMAL,
                                                              0.0, 0.5)], optimizer=adam)
              for n, size in enumerate((10, 7))]
    losses = []
    with shardd.connect(sockets[rank]) as client:
        client.join(job, world, rank)
        units = client.register(layers)
        for number, unit in enumerate(units):
            unit.init_seed(3 + number)
        for step in range(STEPS):
            total = 0.0
            for unit in units:
                w = unit.tensor(unit.gather(), "w").view().tolist()
                unit.release()
                loss, values = forward(w, rank)
                total += loss
                gradient = unit.gradient().view()
                for i, value in enumerate(values):
                    gradient[i] = value
                gradient.release()
                unit.reduce()
            client.clip_grad_norm(1.0)
            client.step()
            client.commit(step + 1)
            losses.append(total)
        [seen] = client.status(job)["jobs"]
    return losses, seen


def join(rank, world, socket, job, local, elastic=None):
    """What the daemon says to a rank that it refuses."""
    with shardd.connect(socket) as client:
        try:
            client.join(job, world, rank, local=local, elastic=elastic)
        except shardd.SharddError as error:
            return error.name, error.field, error.text
    return None


class TwoNodes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = cls.at = None

    def setUp(self):
        support.need_etcd(self)
        if self.context is None:
            type(self).context = support.cluster("a", "b")
            type(self).at = self.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        if cls.context is not None:
            cls.context.__exit__(None, None, None)

    def test_losses_are_those_of_one_daemon(self):
        with support.daemon() as alone:
            expected = support.ranks(train, WORLD, [alone] * WORLD, "one")
        found = support.ranks(train, WORLD, [self.at[node] for node in NODE], "two")
        for rank in range(WORLD):
            self.assertLess(expected[rank][0][-1], expected[rank][0][0] * 0.9)
            for one, other in zip(expected[rank][0], found[rank][0]):
                self.assertAlmostEqual(one, other, delta=1e-6)
        self.check_where([job for _, job in found])
        self.assertEqual(expected[0][1]["nodes"], [])

    def check_where(self, jobs):
        for rank, job in enumerate(jobs):
            here = [{"name": node, "first": first, "ranks": 2, "here": node == NODE[rank],
                     "error": ""} for node, first in (("a", 0), ("b", 2))]
            leads = [node.pop("leads") for node in job["nodes"]]
            self.assertEqual(job["nodes"], here)
            self.assertEqual(sorted(leads), [False, True])
            self.assertEqual([one["node"] for one in job["ranks"]], list(NODE))
            for one in job["ranks"]:
                self.assertEqual(one["state"] == "ELSEWHERE", one["node"] != NODE[rank])

    def test_ranks_of_a_node_follow_each_other(self):
        sockets = [self.at[node] for node in "abab"]
        for said in support.ranks(by_node, WORLD, sockets, "by-node"):
            self.assertEqual(said[0], "INVALID_ARGUMENT")
            self.assertIn("the ranks of a node must follow each other", said[2])

    def test_an_elastic_job_with_ranks_elsewhere_needs_replicas(self):
        """Its trainers have made it elastic, or shardctl has."""
        said = join(0, 4, self.at["a"], "elastic", (0, 2), (2, 4))
        self.assertEqual(said[:2], ("FAILED_PRECONDITION", "local_world_size"))
        self.assertIn("started 2 of the 4 ranks of job 'elastic' on this machine, and an elastic "
                      "job with ranks on several nodes needs replicas: 1", said[2])
        support.shardctl(self.at["a"], "job", "create", "elastic", "--world-size", "4",
                         "--min-ranks", "2", "--max-ranks", "4")
        said = join(0, 4, self.at["a"], "elastic", (0, 2))
        self.assertEqual(said[:2], ("FAILED_PRECONDITION", "local_world_size"))
        self.assertIn("needs replicas: 1 in the configuration of their daemons: set it, or start "
                      "all ranks here", said[2])
        self.assertIsNone(join(0, 4, self.at["a"], "elastic", (0, 4)))
        support.shardctl(self.at["a"], "job", "delete", "elastic")

    def test_what_is_there_can_be_seen(self):
        said = launchers.run(launchers.python("-m", "shardd"), launchers.environment(self.at["b"]))
        self.assertIn("\ncluster test, node b: IN\n", said)
        said = launchers.run(launchers.python("-m", "shardd"), launchers.environment(
            self.at["b"], RANK="2", WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"))
        self.assertIn("2 of the 4 ranks are on this machine\n", said)


def by_node(rank, world, sockets, job):
    return join(rank, world, sockets[rank], job, None)


class Alone(unittest.TestCase):
    """Ranks on several machines, and a daemon that is in no cluster."""

    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_it_refuses_ranks_that_have_others_elsewhere(self):
        said = join(0, 4, self.socket, "here", (0, 2))
        self.assertEqual(said[:2], ("FAILED_PRECONDITION", "local_world_size"))
        self.assertIn("the launcher has started 2 of the 4 ranks of job 'here' on this machine, "
                      "and this daemon is in no cluster (coord is none)", said[2])
        self.assertEqual(support.shardctl(self.socket, "status")["jobs"], [])

    def test_numbers_that_cannot_be(self):
        for local in ((2, 2), (0, 5), (1, 0)):
            self.assertEqual(join(0, 4, self.socket, "here", local)[:2],
                             ("INVALID_ARGUMENT", "local_rank"), local)

    def test_ranks_that_are_all_here(self):
        self.assertIsNone(join(0, 1, self.socket, "all", (0, 1)))

    def test_it_is_said_without_a_join(self):
        done = subprocess.run(launchers.python("-m", "shardd"), text=True, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True,
                              env=launchers.environment(
                                  self.socket, RANK="2", WORLD_SIZE="4", LOCAL_RANK="0",
                                  LOCAL_WORLD_SIZE="2"))
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertNotIn("cluster ", done.stdout)
        self.assertIn("a launcher has started 2 of 4 ranks on this machine, and the daemon is in "
                      "no cluster", done.stderr)


if __name__ == "__main__":
    support.main()
