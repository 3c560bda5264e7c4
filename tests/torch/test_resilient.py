#!/usr/bin/env python3
"""What resilient brings back beside parameters: buffers, schedulers, settings, the scaler, and the
state of an optimizer that runs in the process."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import support

PROGRAM = """
import json, os, pathlib, signal, sys
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
import shardd.torch as st

st.guard()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
flag, how, wrap, kind = sys.argv[1:]
if wrap == "replicate":
    st.replicate(model, bucket_cap_mb=1e-4)
else:
    st.fully_shard(model[0])
    st.fully_shard(model)
if kind == "SGD":
    optimizer = st.SGD(model.parameters(), lr=0.1, momentum=0.9)
else:
    optimizer = st.Sharded(getattr(torch.optim, kind), model.parameters(), resilient=True, lr=0.1)
scheduler, scaler = StepLR(optimizer, 2, gamma=0.5), st.GradScaler(init_scale=64, growth_interval=3)
run = st.resilient(model, also=[scheduler, scaler])
killed = pathlib.Path(flag)

def die(when):
    if run.step == 5 and st.rank() == 1 and how == when and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

while run.step < 8:
    with run:
        for group in optimizer.param_groups:  # a schedule that nobody else knows of
            group["weight_decay"] += 0.01
            if kind == "SGD":
                group["momentum"] *= 0.9
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * run.step + st.rank()))
        scaler.scale(model(x).pow(2).mean()).backward()
        die("before the step")
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        die("before the commit")
state = {k: v.tolist() for k, v in model.state_dict().items()}
state["lr"], state["scale"] = scheduler.get_last_lr(), scaler.get_scale()
group = optimizer.param_groups[0]
state["decay"], state["momentum"] = group["weight_decay"], group.get("momentum")
pathlib.Path(f"{killed}.{st.rank()}").write_text(json.dumps(state))
"""


class Resilient(unittest.TestCase):
    def run_program(self, socket, folder, how, wrap, kind):
        name = "-".join([*how.split(), wrap, kind])
        program, flag = pathlib.Path(folder, "program.py"), pathlib.Path(folder, name)
        program.write_text(PROGRAM)
        env = dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"),
                   SHARDD_SOCKET=socket, SHARDD_JOB=name, OMP_NUM_THREADS="1")
        done = subprocess.run(
            [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "run", "-n", "2", "--",
             sys.executable, "-B", str(program), str(flag), how, wrap, kind], env=env, text=True,
            capture_output=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(flag.exists(), how != "calm")
        return [json.loads(pathlib.Path(f"{flag}.{rank}").read_text()) for rank in range(2)]

    def compare(self, wrap, kind):
        with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
            calm = self.run_program(socket, folder, "calm", wrap, kind)
            for how in ("before the step", "before the commit"):
                self.assertEqual(self.run_program(socket, folder, how, wrap, kind), calm)
            self.assertEqual(calm[0]["1.num_batches_tracked"], 8)
            self.assertEqual(calm[0]["lr"], [0.1 * 0.5**4])
            self.assertEqual(calm[0]["scale"], 64 * 2.0**2)
            self.assertAlmostEqual(calm[0]["decay"], 8 * 0.01)
            if kind == "SGD":
                self.assertAlmostEqual(calm[0]["momentum"], 0.9**9)

    def test_all_that_a_step_leaves_comes_back(self):
        self.compare("fully_shard", "SGD")

    def test_state_in_the_process(self):
        self.compare("fully_shard", "NAdam")

    def test_state_in_the_process_of_a_replicated_model(self):
        self.compare("replicate", "Adagrad")


if __name__ == "__main__":
    support.main()
