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

# argv: the folder for what it says, how many steps, and whether rank 1 dies once. All ranks have
# the same batch: the mean of its gradient has the same bits for 1, 2 and 4 ranks.
PROGRAM = """
import json, os, pathlib, signal, sys
import torch
from torch import nn
import shardd
import shardd.torch as st

folder, steps, dies = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["dies"]
st.init(resume=True, lifetime=shardd.Lifetime.KEEP, elastic=(1, 4, 30), op_timeout=60)
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
    if dies and step == 2 and st.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    st.commit(step)
    said.append((step, loss.item()))
if st.rank() == 0:
    with open(folder / "said", "a") as file:
        file.write(json.dumps({"world": st.world_size(), "losses": said}) + "\\n")
"""
STEPS = 3

# argv: a file that says that rank 1 has died, and one for the parameters at the end.
RESILIENT = """
import json, os, pathlib, signal, sys
flag, end = map(pathlib.Path, sys.argv[1:])
if os.environ["RANK"] == "1" and flag.exists():
    sys.exit(1)
import torch
from torch import nn
import shardd
import shardd.torch as st

st.init(resume=True, lifetime=shardd.Lifetime.KEEP, op_timeout=60)
torch.manual_seed(0)
model = nn.Linear(7, 5)
st.fully_shard(model)
optimizer = st.AdamW(model.parameters(), lr=0.1)
run = st.resilient(model)
while run.step < 5:
    with run:
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(run.step))
        model(x).pow(2).mean().backward()
        if run.step == 2 and os.environ["RANK"] == "1":
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
print("ended as rank", st.rank(), "of", st.world_size())
values = {k: v.tolist() for k, v in model.state_dict().items()}
if st.rank() == 0:
    end.write_text(json.dumps(values))
"""


class Elastic(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.program = self.folder / "program.py"
        self.program.write_text(PROGRAM)
        self.socket = self.enterContext(support.daemon())

    def run_ranks(self, job, ranks, *options, dies=False):
        folder = self.folder / job
        folder.mkdir(exist_ok=True)
        environment = dict(os.environ, SHARDD_SOCKET=self.socket, SHARDD_JOB=job,
                           OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path))
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                        "--nproc-per-node", str(ranks), *options, self.program, folder, str(STEPS),
                        *(["dies"] if dies else [])],
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

    def test_torchrun_starts_all_again_with_the_same_number(self):
        """Although the job could go on with fewer: they are back in time."""
        self.run_ranks("dies", 2, "--max-restarts", "1", dies=True)
        for _ in range(2):
            self.run_ranks("still", 1)
        [last] = self.said("dies")
        self.assertEqual(last["world"], 2)
        still = {step: loss for s in self.said("still") for step, loss in s["losses"]}
        self.assertEqual({step: still[step] for step, _ in last["losses"]}, dict(last["losses"]))
        self.assertEqual([step for step, _ in last["losses"]], [2, 3, 4])

    def run_resilient(self, job, *options):
        program, end = self.folder / "resilient.py", self.folder / f"{job}.json"
        program.write_text(RESILIENT)
        environment = dict(os.environ, SHARDD_SOCKET=self.socket, OMP_NUM_THREADS="1",
                           PYTHONPATH=os.pathsep.join(sys.path))
        ran = subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "run", *options,
                              "--job", job, "--", sys.executable, program,
                              self.folder / f"{job}.dead", end],
                             env=environment, capture_output=True, text=True, timeout=180)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return ran.stdout + ran.stderr, json.loads(end.read_text())

    def test_a_model_says_that_it_cannot_change_and_its_process_goes_on_when_started_again(self):
        said, values = self.run_resilient("shrinks", "-n", "2", "--min", "1", "--join-grace", "1",
                                          "--max-restarts", "1")
        self.assertIn("the others go on, 1 ranks", said)
        self.assertIn("this process was rank 0 of 2 and is rank 0 of 1 now, and a model cannot "
                      "change that while its process lives", said)
        self.assertIn("ended as rank 0 of 1", said)
        _, still = self.run_resilient("still", "-n", "1")
        self.assertEqual(values, still)


if __name__ == "__main__":
    support.main()
