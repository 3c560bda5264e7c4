#!/usr/bin/env python3
"""The daemon is killed while a model trains, and the next one continues: programs with resilient go
on in the same processes and end with the same bits; others are told what happened and what is
safe."""

import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import fsdp  # noqa: F401  finds the package
import support

STEPS, DEATHS = 48, 6

PROGRAM = """
import hashlib, os, pathlib, struct, sys
import torch
from torch import nn
import shardd.torch as st

out, wrap, kind, steps = sys.argv[1:]
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Dropout(0.5), nn.Linear(128, 1))
if wrap == "replicate":
    st.replicate(model, bucket_cap_mb=1e-2)
else:
    st.fully_shard(model[0])
    st.fully_shard(model)
if kind == "AdamW":
    optimizer = st.AdamW(model.parameters(), lr=0.01)
else:
    optimizer = st.Sharded(getattr(torch.optim, kind), model.parameters(), resilient=True, lr=0.01)
run = st.resilient(model, {"pid": os.getpid()})
progress = os.open(f"{out}.{st.rank()}.progress", os.O_CREAT | os.O_RDWR)
while run.step < int(steps):
    with run:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * run.step + st.rank()))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    os.pwrite(progress, struct.pack("q", run.step), 0)
assert run.state["pid"] == os.getpid(), "another process has finished"
words = hashlib.sha256()
for name, value in sorted(model.state_dict().items()):
    words.update(name.encode() + value.numpy().tobytes())
pathlib.Path(f"{out}.{st.rank()}").write_text(f"{words.hexdigest()} {run.rejoins > 0}")
"""

# Without resilient: one sentence, and no more steps.
PLAIN = """
import sys
import torch
from torch import nn
import shardd
import shardd.torch as st

model = nn.Linear(64, 1)
st.fully_shard(model)
optimizer = st.AdamW(model.parameters(), lr=0.01)
while True:
    model(torch.ones(8, 64)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", flush=True)
"""


class Ended(AssertionError):
    """A training that did not get to its last step, with what it has written."""


class Died(unittest.TestCase):
    def command(self, socket, folder, name, text, *arguments, world=2):
        program = pathlib.Path(folder, "program.py")
        program.write_text(text)
        env = dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"),
                   SHARDD_SOCKET=socket, SHARDD_JOB=name, OMP_NUM_THREADS="1")
        return subprocess.Popen(
            [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "run", "-n", str(world),
             "--", sys.executable, "-B", str(program), *arguments], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def progress(self, out):
        try:
            return struct.unpack("q", pathlib.Path(f"{out}.0.progress").read_bytes())[0]
        except (FileNotFoundError, struct.error):
            return 0

    def kill_at(self, process, out, daemon, step, points):
        while self.progress(out) < step:
            if process.poll() is not None:
                raise Ended(process.communicate()[0])
            time.sleep(0.001)
        time.sleep(points.random() * 0.02)  # anywhere in the steps after it
        daemon.kill()

    def train(self, held, folder, name, wrap, kind, deaths):
        out = os.path.join(folder, name)
        process = self.command(held.socket, folder, name, PROGRAM, out, wrap, kind, str(STEPS))
        points = random.Random(name)
        try:
            for death in range(deaths):
                self.kill_at(process, out, held, death * STEPS // deaths + 2, points)
            text = process.communicate(timeout=120)[0]
        finally:
            process.kill()
        if process.returncode:
            raise Ended(text)
        results = [pathlib.Path(f"{out}.{rank}").read_text().split() for rank in range(2)]
        self.assertEqual(results[0][1], str(deaths > 0), "rejoined")
        return [words for words, _ in results], text  # the ranks' buffers differ

    def compare(self, wrap, kind):
        with support.held_daemon() as held, tempfile.TemporaryDirectory() as folder:
            calm, text = self.train(held, folder, "calm", wrap, kind, 0)
            self.assertNotIn("daemon", text)
            died, text = self.train(held, folder, "dies", wrap, kind, DEATHS)
            self.assertEqual(died, calm)
            self.assertIn("shardd: the connection to the daemon has broken; connecting", text)
            self.assertIn("shardd: the daemon is back, with its state", text)

    def test_sharded_model(self):
        self.compare("fully_shard", "AdamW")

    def test_replicated_model(self):
        self.compare("replicate", "AdamW")

    def test_optimizer_in_the_process_ends_alike_or_says_why_not(self):
        """A daemon that dies between the shares of a step and its commit cannot complete it."""
        try:
            self.compare("fully_shard", "NAdam")
        except Ended as error:
            self.assertRegex(str(error), "while the ranks' optimizers were writing parameters|"
                                         "applied after the last commit")
            self.assertRegex(str(error), "start all ranks again")

    def test_without_resilient_one_sentence_says_what_is_safe(self):
        with support.held_daemon() as held, tempfile.TemporaryDirectory() as folder:
            process = self.command(held.socket, folder, "plain", PLAIN, world=1)
            try:
                self.assertIn("step", process.stdout.readline())
                held.kill()
                text = process.communicate(timeout=60)[0]
            finally:
                process.kill()
            self.assertNotEqual(process.returncode, 0)
            self.assertIn("was restarted; this process is connected to it again", text)
            self.assertIn("continue from the last committed step", text)


if __name__ == "__main__":
    support.main()
