#!/usr/bin/env python3
"""A PyTorch model whose launcher comes back with another number of ranks: parameters and optimizer
state are those of before, and training goes on as if there had always been one rank."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import support

# argv: the folder for what it says, and how many steps. All ranks have the same batch: the mean of
# its gradient has the same bits for 1, 2 and 4 ranks.
PROGRAM = """
import json, os, pathlib, sys
import torch
from torch import nn
import shardd
import shardd.torch as st

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
st.init(resume=True, lifetime=shardd.Lifetime.KEEP, elastic=(1, 4), op_timeout=60)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
for module in model[0], model[2], model:
    st.fully_shard(module)
optimizer = st.AdamW(model.parameters(), lr=0.1)
first = st.session().member.step + 1 if st.session().member.has_step else 1
said = []
for step in range(first, first + steps):
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    st.commit(step)
    said.append((step, loss.item()))
if st.rank() == 0:
    with open(folder / "said", "a") as file:
        file.write(json.dumps({"world": st.world_size(), "losses": said}) + "\\n")
"""
STEPS = 3


class Elastic(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.program = self.folder / "program.py"
        self.program.write_text(PROGRAM)
        self.socket = self.enterContext(support.daemon())

    def run_ranks(self, job, ranks):
        folder = self.folder / job
        folder.mkdir(exist_ok=True)
        environment = dict(os.environ, SHARDD_SOCKET=self.socket, SHARDD_JOB=job,
                           OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                        "--nproc-per-node", str(ranks), self.program, folder, str(STEPS)],
                       env=environment, check=True, timeout=180)

    def said(self, job):
        lines = (self.folder / job / "said").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def test_trains_on_with_other_numbers_of_ranks(self):
        walk = [4, 2, 1, 4]
        for ranks in walk:
            self.run_ranks("walks", ranks)
            self.run_ranks("still", 1)
        self.assertEqual([s["world"] for s in self.said("walks")], walk)
        self.assertEqual([s["losses"] for s in self.said("walks")],
                         [s["losses"] for s in self.said("still")])
        steps = [step for s in self.said("walks") for step, _ in s["losses"]]
        self.assertEqual(steps, list(range(1, STEPS * len(walk) + 1)))


if __name__ == "__main__":
    support.main()
