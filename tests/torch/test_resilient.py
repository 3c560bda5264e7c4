#!/usr/bin/env python3
"""What resilient brings back beside parameters: buffers, schedulers, settings, the scaler."""

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
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
st.fully_shard(model)
optimizer = st.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler, scaler = StepLR(optimizer, 2, gamma=0.5), st.GradScaler(init_scale=64, growth_interval=3)
run = st.resilient(model, also=[scheduler, scaler])
killed = pathlib.Path(sys.argv[1])
while run.step < 8:
    with run:
        for group in optimizer.param_groups:  # a schedule that nobody else knows of
            group.update(weight_decay=group["weight_decay"] + 0.01, momentum=0.9 * group["momentum"])
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * run.step + st.rank()))
        scaler.scale(model(x).pow(2).mean()).backward()
        if run.step == 5 and st.rank() == 1 and sys.argv[2] == "kill" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
state = {k: v.tolist() for k, v in model.state_dict().items()}
state["lr"], state["scale"] = scheduler.get_last_lr(), scaler.get_scale()
state["momentum"] = optimizer.param_groups[0]["momentum"]
pathlib.Path(f"{killed}.{st.rank()}").write_text(json.dumps(state))
"""


class Resilient(unittest.TestCase):
    def run_program(self, socket, folder, how):
        program, flag = pathlib.Path(folder, "program.py"), pathlib.Path(folder, how)
        program.write_text(PROGRAM)
        env = dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"),
                   SHARDD_SOCKET=socket, SHARDD_JOB=how, OMP_NUM_THREADS="1")
        done = subprocess.run(
            [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "run", "-n", "2", "--",
             sys.executable, "-B", str(program), str(flag), how], env=env, text=True,
            capture_output=True, timeout=200)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(flag.exists(), how == "kill")
        return [json.loads(pathlib.Path(f"{flag}.{rank}").read_text()) for rank in range(2)]

    def test_all_that_a_step_leaves_comes_back(self):
        with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
            calm = self.run_program(socket, folder, "calm")
            self.assertEqual(self.run_program(socket, folder, "kill"), calm)
            self.assertEqual(calm[0]["1.num_batches_tracked"], 8)
            self.assertEqual(calm[0]["lr"], [0.1 * 0.5**4])
            self.assertEqual(calm[0]["scale"], 64 * 2.0**2)
            self.assertAlmostEqual(calm[0]["momentum"], 0.9**9)


if __name__ == "__main__":
    support.main()
