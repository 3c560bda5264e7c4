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

    def agents(self, **more):
        """Exit codes of torchrun on two nodes, and what its ranks and it have written."""
        env = launchers.environment(self.socket, **more)
        [port] = launchers.free_ports(1)
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "out")
            with open(out, "w") as file:
                started = [subprocess.Popen(command, env=env, stdout=file, stderr=file,
                                            stdin=subprocess.DEVNULL)
                           for command in two_agents(port, str(EXAMPLE), *SMALL)]
                codes = [agent.wait(120) for agent in started]
            return codes, out.read_text()

    def test_torchrun_on_two_nodes(self):
        codes, said = self.agents()
        self.assertNotIn(0, codes)
        self.assertIn("torchrun has started 2 ranks, 1 of them on this machine: all ranks of a job "
                      "must be on the machine of their daemon", said)
        codes, said = self.agents(SHARDD_NODES="1")  # they are
        self.assertEqual(codes, [0, 0], said)
        self.check(said)


if __name__ == "__main__":
    support.main()
