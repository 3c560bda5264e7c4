#!/usr/bin/env python3
"""The programs of docs/recipes.md, as they stand there."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import launchers
import support

TRAINER, ACCELERATE, LIGHTNING, LOOP = range(4)
SHARDCTL = [*launchers.shardctl(2)[:2], "--standalone", *launchers.shardctl(2)[2:]]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def blocks():
    text = (support.ROOT / "docs" / "recipes.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


class Recipes(unittest.TestCase):
    def setUp(self):
        self.context = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.context.name)
        self.parts = blocks()
        self.assertEqual(len(self.parts), 4)

    def tearDown(self):
        self.context.cleanup()

    def run_one(self, code, *arguments, socket=None):
        """What it prints, of which rank 0's lines have a 0 in front unless @socket is given; then
        torchrun starts it."""
        program = self.folder / "program.py"
        program.write_text(code)
        started = [*SHARDCTL, sys.executable] if socket is None else [sys.executable, *TORCHRUN]
        env = launchers.environment(socket or "", HF_HUB_OFFLINE="1")
        if socket is None:
            del env["SHARDD_SOCKET"]
        done = subprocess.run([*started, program, *arguments], text=True, timeout=200, env=env,
                              cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_trainer(self):
        said = self.run_one(self.parts[TRAINER])
        self.assertIn("[0] saved 22688 parameters", said)
        self.assertTrue((self.folder / "trained" / "checkpoint-3" / "optimizer.pt").exists())

    def test_accelerate(self):
        self.assertIn("[0] saved 4 tensors", self.run_one(self.parts[ACCELERATE]))

    def test_accelerate_by_torchrun(self):
        with support.daemon() as socket:
            self.assertIn("saved 4 tensors", self.run_one(self.parts[ACCELERATE], socket=socket))

    def test_lightning(self):
        said = self.run_one(self.parts[LIGHTNING])
        self.assertIn("[0] saved after 8 steps", said)
        self.assertTrue((self.folder / "autoencoder.ckpt").is_file())

    def steps(self, code, steps, name, *more):
        """Loss and norm of each step, by its number."""
        said = self.run_one(code, str(steps), name, *more)
        lines = re.findall(r"^\[0\] step (\d+) loss (\S+) norm (\S+) words/s \d+$", said, re.M)
        return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}

    def test_the_loop_is_that_of_fsdp2(self):
        """From the same checkpoint, and each from the checkpoint of the other."""
        ours = self.parts[LOOP]
        theirs, n = re.subn(r"(?m)^# (from .* import fully_shard)\n.*# shardd$", r"\1", ours)
        self.assertEqual(n, 1)
        self.assertEqual(self.steps(ours, 0, "a"), {})
        shutil.copytree(self.folder / "a", self.folder / "b")
        a, b = self.steps(ours, 4, "a"), self.steps(theirs, 4, "b")
        self.assertEqual(a, b)
        self.assertEqual(list(a), [1, 2, 3, 4])
        a, b = self.steps(theirs, 6, "a"), self.steps(ours, 6, "b")
        self.assertEqual(a, b)
        self.assertEqual(list(a), [5, 6])

    def test_the_loop_compiled(self):
        plain = self.steps(self.parts[LOOP], 2, "a")
        self.assertEqual(self.steps(self.parts[LOOP], 2, "b", "compile"), plain)
        self.assertEqual(list(plain), [1, 2])


if __name__ == "__main__":
    support.main()
