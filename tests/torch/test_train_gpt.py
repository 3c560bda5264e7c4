#!/usr/bin/env python3
"""The example train_gpt.py: with every engine the same losses, and a rank killed on the way."""

import json
import os
import signal
import subprocess
import sys
import unittest

import fsdp  # noqa: F401  finds the package
import support

import shardd

EXAMPLE = support.ROOT / "client" / "python" / "examples" / "train_gpt.py"
SMALL = ["--data", str(support.ROOT / "README.md"), "--layers", "2", "--width", "32", "--heads",
         "2", "--length", "16", "--batch", "4", "--steps", "8", "--json"]


def environment(socket):
    path = str(support.ROOT / "client" / "python")
    return dict(os.environ, PYTHONPATH=path, SHARDD_SOCKET=socket, OMP_NUM_THREADS="1",
                PYTHONDONTWRITEBYTECODE="1")


def torchrun(socket, *arguments, ranks=2):
    """What rank 0 prints."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(ranks), str(EXAMPLE), *SMALL, *arguments], env=environment(socket), text=True,
        capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def losses(lines):
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


class TrainGpt(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def compare(self, *arguments, places=None):
        ours = losses(torchrun(self.socket, "--engine", "shardd", *arguments))
        theirs = losses(torchrun(self.socket, "--engine", "fsdp2", *arguments))
        self.assertEqual(len(ours), 8)
        for step, loss in ours.items():
            if places is None:
                self.assertEqual(loss, theirs[step], step)
            else:
                self.assertAlmostEqual(loss, theirs[step], places, step)
        return ours

    def test_losses_are_those_of_fsdp2(self):
        ours = self.compare("--optimizer", "sgd")
        # single: another order of additions, that of one large batch
        single = losses(torchrun(self.socket, "--engine", "single", "--optimizer", "sgd", ranks=1))
        ddp = losses(torchrun(self.socket, "--engine", "ddp", "--optimizer", "sgd"))
        for step, loss in ours.items():
            self.assertAlmostEqual(loss, single[step], 4)
            self.assertAlmostEqual(loss, ddp[step], 4)

    def test_losses_in_bf16_are_those_of_fsdp2(self):
        self.compare("--optimizer", "sgd", "--bf16")

    def test_losses_with_adamw_are_printed_alike(self):
        self.compare(places=4)  # PyTorch's square root is not correctly rounded

    def run_and_kill(self, job, at):
        """Losses by step, with rank 1 killed when step @at was printed (None: never)."""
        process = subprocess.Popen(
            [os.path.join(support.BIN_DIR, "shardctl"), "--socket", self.socket, "run", "-n", "2",
             "--job", job, "--max-restarts", "1", "--", sys.executable, str(EXAMPLE), *SMALL,
             "--resilient", "--steps", "150"], env=environment(self.socket), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        got, said, rejoined = {}, [], False
        for line in process.stdout:
            said.append(line)
            _, _, text = line.partition("] ")
            if not text.startswith("{"):
                continue
            found = json.loads(text)
            rejoined = rejoined or "rejoined" in found
            got.update(losses([found]))
            if at is not None and found.get("step") == at:
                with shardd.connect(self.socket) as client:
                    [status] = client.status(job)["jobs"]
                [pid] = [r["pid"] for r in status["ranks"] if r["rank"] == 1]
                os.kill(pid, signal.SIGKILL)
                at = None
        self.assertEqual(process.wait(60), 0, "".join(said))
        return got, rejoined

    def test_a_rank_that_is_killed_comes_back(self):
        undisturbed, rejoined = self.run_and_kill("calm", None)
        self.assertFalse(rejoined)
        disturbed, rejoined = self.run_and_kill("killed", 3)
        self.assertTrue(rejoined)
        self.assertEqual(sorted(disturbed), list(range(150)))
        self.assertEqual(disturbed, undisturbed)


if __name__ == "__main__":
    support.main()
