#!/usr/bin/env python3
"""The daemon is killed under shardd-holder while PyTorch trains: the same processes go on, and end
with the parameters of a run in which nobody dies."""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import held
import support

STEPS, WORLD = 12, 2
PATH = os.pathsep.join([str(support.ROOT / "client" / "python"),
                        str(support.ROOT / "tests" / "python")])

PROGRAM = """
import json, os, pathlib, random, sys, threading
import torch
from torch import nn
import shardd.torch as st
import held

out, wrap, kind, point, step = sys.argv[1:]

def kill(now):
    if now == point and run.step == int(step) and not flag.exists() and st.rank() == 1:
        flag.touch()
        held.kill_daemon(int(os.environ["HOLDER"]))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 16), nn.Linear(16, 6), nn.Dropout(0.3)

    def forward(self, x):
        kill("in forward")
        return x + self.down(self.drop(torch.tanh(self.up(x))))

torch.manual_seed(3)
model = nn.Sequential(Block(), nn.BatchNorm1d(6), Block(), nn.Linear(6, 1))
if wrap == "replicate":
    st.replicate(model, bucket_cap_mb=1e-4)
else:
    for layer in model:
        st.fully_shard(layer)
    st.fully_shard(model)
made = {"AdamW": lambda p: st.AdamW(p, lr=0.01), "SGD": lambda p: st.SGD(p, 0.05, momentum=0.9),
        "in backward": lambda p: st.AdamW(p, lr=0.01, in_backward=True),
        "NAdam": lambda p: st.Sharded(torch.optim.NAdam, p, resilient=True, lr=0.01)}
optimizer = made[kind](model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
run = st.resilient(model, {"seen": 0}, also=[scheduler], wait=60)
flag, before = pathlib.Path(out + ".killed"), [id(p) for p in model.parameters()]

draw = random.Random(int(step))
dying = {draw.randrange(2, 6), draw.randrange(6, 10)} if point == "random" else set()
kill("before the first step")
while run.step < 12:
    with run:
        if st.rank() == 1 and run.step in dying:
            dying.remove(run.step)
            threading.Timer(draw.uniform(0, 0.03), held.kill_daemon,
                            [int(os.environ["HOLDER"])]).start()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * run.step + st.rank()))
        loss = model(x).pow(2).mean()
        kill("before backward")
        loss.backward()
        kill("before the step")
        optimizer.step()
        kill("after the step")
        scheduler.step()
        optimizer.zero_grad()
        run.state["seen"] += 5
        kill("before the commit")

state = {k: v.tolist() for k, v in model.state_dict().items()}
state["lr"], state["seen"], state["step"] = scheduler.get_last_lr(), run.state["seen"], run.step
said = {"state": state, "rejoins": run.rejoins, "pid": os.getpid(),
        "same": before == [id(p) for p in model.parameters()]}
pathlib.Path(f"{out}.{st.rank()}").write_text(json.dumps(said))
"""


PLAIN = """
import os, sys
import torch
import held
import shardd.torch as st

torch.manual_seed(3)
model = st.fully_shard(torch.nn.Linear(6, 3))
optimizer = st.SGD(model.parameters(), 0.1)
first = st.session().member.step
for step in range(first, first + 3):
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    st.commit(step + 1)
print("at", first, flush=True)
if not first:
    held.kill_daemon(int(os.environ["HOLDER"]))
model(torch.ones(2, 6)).sum().backward()
"""


class DaemonDies(unittest.TestCase):
    def train(self, one, name, folder, wrap, kind, point="-", step=0, world=WORLD):
        """Return: what every rank says, and the lines of all."""
        program, out = pathlib.Path(folder, "program.py"), pathlib.Path(folder, name)
        program.write_text(PROGRAM)
        env = dict(os.environ, PYTHONPATH=PATH, HOLDER=str(one.holder), OMP_NUM_THREADS="1")
        done = subprocess.run(
            [os.path.join(support.BIN_DIR, "shardctl"), "--socket", one.socket, "run", "--job",
             name, "-n", str(world), "--", sys.executable, "-B", str(program), str(out), wrap,
             kind, point, str(step)], env=env, text=True, capture_output=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        said = [json.loads(pathlib.Path(f"{out}.{rank}").read_text()) for rank in range(world)]
        for one_said in said:
            self.assertEqual(one_said["state"]["step"], STEPS)
            self.assertTrue(one_said["same"])
        return said, done.stderr

    def points(self, wrap, kind, points):
        with held.daemon() as one, tempfile.TemporaryDirectory() as folder:
            calm, _ = self.train(one, "calm", folder, wrap, kind)
            self.assertEqual([s["rejoins"] for s in calm], [0, 0])
            for n, (point, step) in enumerate(points):
                with self.subTest(point):
                    said, lines = self.train(one, f"dies{n}", folder, wrap, kind, point, step)
                    self.assertEqual([s["state"] for s in said], [s["state"] for s in calm])
                    self.assertGreaterEqual(min(s["rejoins"] for s in said), 1, lines)
                    for rank in range(WORLD):
                        self.assertRegex(lines, f"has broken; connecting again .rank {rank} of job")
                        self.assertRegex(lines, f"is back, with its state, after .*rank {rank}")

    def test_at_every_point_of_a_step(self):
        self.points("fully_shard", "AdamW", [
            ("before the first step", 0), ("in forward", 4), ("before backward", 5),
            ("before the step", 5), ("after the step", 6), ("before the commit", 7)])

    def test_a_replicated_model(self):
        self.points("replicate", "SGD", [
            ("before the first step", 0), ("in forward", 3), ("before the step", 5),
            ("before the commit", 7)])

    def test_an_optimizer_in_backward(self):
        """What was stepped since the commit is rolled back."""
        self.points("fully_shard", "in backward", [
            ("in forward", 4), ("before the step", 5), ("after the step", 6),
            ("before the commit", 7)])

    def test_state_in_the_process(self):
        self.points("fully_shard", "NAdam", [
            ("in forward", 2), ("before the step", 5), ("before the commit", 7)])

    def test_a_program_without_resilient(self):
        """It ends with a sentence, and continues when it is started again."""
        env = dict(os.environ, SHARDD_JOB="plain", SHARDD_ON_EXISTING="resume",
                   PYTHONPATH=PATH, RANK="0", WORLD_SIZE="1")
        with held.daemon() as one:
            env.update(HOLDER=str(one.holder), SHARDD_SOCKET=one.socket)
            for at in 0, 3:
                done = subprocess.run([sys.executable, "-B", "-c", PLAIN], env=env, text=True,
                                      capture_output=True, timeout=200)
                self.assertEqual(done.stdout, f"at {at}\n", done.stderr)
                self.assertEqual(done.returncode, 0 if at else 1, done.stderr)
                if not at:
                    self.assertRegex(done.stderr, "DaemonRestarted: .*was restarted.*"
                                                  "shardd.torch.resilient continues by itself.*"
                                                  "SHARDD_ON_EXISTING=resume")

    def test_at_random_instants(self):
        seed = int(os.environ.get("SHARDD_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
        print(f"# SHARDD_SEED={seed}", flush=True)
        for wrap, kind in ("fully_shard", "AdamW"), ("replicate", "SGD"):
            with self.subTest(wrap), held.daemon() as one, \
                    tempfile.TemporaryDirectory() as folder:
                calm, _ = self.train(one, "calm", folder, wrap, kind, world=3)
                for n in range(3):
                    said, lines = self.train(one, f"random{n}", folder, wrap, kind, "random",
                                             seed + n, world=3)
                    self.assertEqual([s["state"] for s in said], [s["state"] for s in calm])
                    self.assertGreaterEqual(min(s["rejoins"] for s in said), 1, lines)


if __name__ == "__main__":
    support.main()
