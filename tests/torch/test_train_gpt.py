#!/usr/bin/env python3
"""The example train_gpt.py: with every engine the same losses, and a rank killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
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


def by_torchrun(ranks, *command):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(ranks), *command]


def torchrun(socket, *arguments, ranks=2):
    """What rank 0 prints."""
    done = subprocess.run(
        by_torchrun(ranks, str(EXAMPLE), *SMALL, *arguments), env=environment(socket), text=True,
        capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def losses(lines):
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


STEPS = 150  # more than there are before the kill has been noticed


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

    def test_losses_with_fused_adamw_are_those_of_fsdp2(self):
        self.compare("--fused")  # whose square root is

    def pid_of_rank_1(self, job):
        with shardd.connect(self.socket) as client:
            [status] = client.status(job)["jobs"]
        [pid] = [r["pid"] for r in status["ranks"] if r["rank"] == 1]
        return pid

    def by_shardctl(self, restarts, *command):
        return [os.path.join(support.BIN_DIR, "shardctl"), "--socket", self.socket, "run", "-n",
                "2", "--max-restarts", str(restarts), "--", sys.executable, *command]

    def run_and_kill(self, job, at=None, whom=lambda pid: pid, restarts=0, guard="3"):
        """Losses by step, with what @whom makes of rank 1's process killed when step @at was
        printed. @restarts: by shardctl; None: torchrun instead. Return: them, and how often the
        ranks have rejoined."""
        program = [str(EXAMPLE), *SMALL, "--resilient", "--steps", str(STEPS)]
        process = subprocess.Popen(
            by_torchrun(2, *program) if restarts is None else self.by_shardctl(restarts, *program),
            env=dict(environment(self.socket), SHARDD_GUARD=guard, SHARDD_JOB=job), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        got, said, rejoined, killed = {}, [], 0, None
        for line in process.stdout:
            said.append(line)
            text = line[max(0, line.find("{")):]  # shardctl says before it which rank's it is
            if not text.startswith("{"):
                continue
            found = json.loads(text)
            rejoined += "rejoined" in found
            got.update(losses([found]))
            if killed and rejoined and "loss" in found:
                print(f"# {job}: {time.monotonic() - killed:.2f} s from the kill to the next step")
                killed = None
            if at is not None and found.get("step") == at:
                killed, at = time.monotonic(), None
                os.kill(whom(self.pid_of_rank_1(job)), signal.SIGKILL)
        self.assertEqual(process.wait(60), 0, "".join(said))
        return got, rejoined

    def test_a_rank_that_is_killed_comes_back(self):
        undisturbed, rejoined = self.run_and_kill("calm")
        self.assertEqual(rejoined, 0)
        self.assertEqual(sorted(undisturbed), list(range(STEPS)))
        for job, how in (
                ("forked again by its guard", dict()),
                ("the same under torchrun", dict(restarts=None)),
                ("started again by shardctl", dict(restarts=1, guard="0")),
                ("its guard killed", dict(restarts=1, whom=parent_of))):
            with self.subTest(job):
                disturbed, rejoined = self.run_and_kill(job.replace(" ", "-"), 3, **how)
                self.assertEqual(rejoined, 1)
                self.assertEqual(disturbed, undisturbed)


if __name__ == "__main__":
    support.main()
