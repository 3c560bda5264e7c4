#!/usr/bin/env python3
"""train_gpt.py by real launchers: the losses of `shardctl run`, without any code for them."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import launchers
import support
from test_train_gpt import EXAMPLE, SMALL, losses

PROGRAM = launchers.python(EXAMPLE, *SMALL)


def two_agents(port, *command):
    """torchrun on two nodes, both of which are this machine. The first one has rank 0."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node",
                "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [[*torchrun, "--node-rank", str(node), *command] for node in range(2)]


class Launchers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()
        cls.expected = cls.losses(cls.run_by(launchers.shardctl(2)))

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    @classmethod
    def run_by(cls, launcher, **more):
        return launchers.run([*launcher, *PROGRAM], launchers.environment(cls.socket, **more), 120)

    @staticmethod
    def losses(text):
        """Of what rank 0 prints; `shardctl run` has its number in front."""
        lines = (re.sub(r"^\[0\] ", "", line) for line in text.splitlines())
        return losses([json.loads(line) for line in lines if line.startswith("{")])

    def check(self, text):
        self.assertEqual(len(self.expected), 8)
        self.assertEqual(self.losses(text), self.expected)

    def test_mpirun(self):
        launchers.need(self, launchers.OPENMPI)
        self.check(self.run_by(launchers.openmpi(2)))

    def test_mpiexec(self):
        launchers.need(self, launchers.HYDRA)
        self.check(self.run_by(launchers.hydra(2)))

    def test_srun(self):
        launchers.need(self, launchers.CLUSTER)
        with launchers.slurm() as conf:
            self.check(self.run_by(launchers.srun(2, "-Q"), SLURM_CONF=conf))

    def test_torchrun(self):
        self.check(self.run_by([sys.executable, "-m", "torch.distributed.run", "--standalone",
                                "--nproc-per-node", "2", "--no-python"]))

    def agents(self, sockets):
        """Exit codes of torchrun on two nodes, and what its ranks and it have written."""
        [port] = support.free_ports(1)
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "out")
            with open(out, "w") as file:
                started = [subprocess.Popen(command, env=launchers.environment(at), stdout=file,
                                            stderr=file, stdin=subprocess.DEVNULL)
                           for command, at in zip(two_agents(port, str(EXAMPLE), *SMALL), sockets)]
                codes = [agent.wait(120) for agent in started]
            return codes, out.read_text()

    def test_torchrun_on_two_nodes(self):
        support.need_etcd(self)
        with support.cluster("a", "b") as at:
            codes, said = self.agents([at["a"], at["b"]])
        self.assertEqual(codes, [0, 0], said)
        found = self.losses(said)
        self.assertEqual(found.keys(), self.expected.keys())
        for step, loss in found.items():
            self.assertAlmostEqual(loss, self.expected[step], delta=1e-6)

    def test_a_daemon_that_is_alone_refuses_two_nodes(self):
        codes, said = self.agents([self.socket] * 2)
        self.assertNotIn(0, codes)
        self.assertIn("the launcher has started 1 of the 2 ranks of job", said)
        self.assertIn("this daemon is in no cluster", said)


if __name__ == "__main__":
    support.main()
