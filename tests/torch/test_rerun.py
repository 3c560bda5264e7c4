#!/usr/bin/env python3
"""A job with state, and a program that brings a model of its own: it must say which of them it
wants. Only a rank that was started again in the same run continues by itself."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import fsdp  # noqa: F401  finds the package
import launchers
import support

import shardd

# argv: the folder for what it says, the seed, how many steps, and how it ends.
PROGRAM = """
import json, os, pathlib, signal, sys
import torch
from torch import nn
import shardd.torch as st

folder, seed, steps, end = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
if os.environ.get("GUARDED"):
    st.guard()
st.init(op_timeout=60, **json.loads(os.environ.get("ASKED", "{}")))
torch.manual_seed(seed)
model = st.fully_shard(nn.Linear(6, 3))
optimizer = st.AdamW(model.parameters(), lr=0.1)
if os.environ.get("LOADED"):
    torch.manual_seed(9)
    model.load_state_dict({"weight": torch.randn(3, 6), "bias": torch.randn(3)})
if os.environ.get("LOADED") == "reset":
    optimizer.reset_state()
run = st.resilient(model) if os.environ.get("RESILIENT") else None
losses = []
for step in range(steps):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if os.environ.get("COMMITS"):
        st.commit(step + 1)
with open(folder / f"said.{os.environ.get('RANK', 0)}", "a") as file:
    file.write(json.dumps(losses) + "\\n")
once = folder / "died"
if end == "dies" or (end == "dies once" and st.rank() == 0 and not once.exists()):
    once.touch()
    st.session().barrier()
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Rerun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program = self.folder / "program.py"
        self.program.write_text(PROGRAM)
        self.job = self.id().split(".")[-1]

    def run_by(self, launcher, seed, steps, end="ends", **more):
        more.setdefault("SHARDD_JOB", self.job)
        env = launchers.environment(self.socket, **{k: v for k, v in more.items() if v})
        return subprocess.run(
            [*launcher, *launchers.python(self.program, self.folder, seed, steps, end)], env=env,
            text=True, capture_output=True, timeout=120, stdin=subprocess.DEVNULL)

    def said(self, rank=0):
        """The losses of the lives of a rank since the last call."""
        path = self.folder / f"said.{rank}"
        found = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return found

    def crash(self, *launcher, **more):
        """Return: the losses of a run that crashes after three steps."""
        done = self.run_by(launcher, 0, 3, "dies", **more)
        self.assertNotEqual(done.returncode, 0)
        return self.said()[0]

    def alone(self, seed, steps=1, **more):
        """Losses of a run that has nothing to continue from."""
        done = self.run_by((), seed, steps, SHARDD_JOB=self.job + "-other", **more)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.said()[0]

    def refused(self, done, *words):
        self.assertNotEqual(done.returncode, 0)
        for word in words:
            self.assertRegex(done.stderr, word)

    # ------------------------------------------------------------------ one rank

    def test_a_rerun_is_refused_and_says_the_ways_on(self):
        self.crash()
        for _ in range(2):  # the refusal is no run that has left state
            self.refused(self.run_by((), 7, 1),
                         r"has state of an earlier run: \d steps, none of them committed, by "
                         r"rank 0 \(pid \d+\)", r"init\(resume=True\)", r"init\(fresh=True\)")

    def test_a_refusal_names_the_commit(self):
        self.crash(COMMITS="1")
        self.refused(self.run_by((), 7, 1),
                     r"step 3, committed 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC, by rank 0 "
                     r"\(pid \d+\)")

    def test_resume_continues(self):
        losses = self.alone(0, 4)
        self.assertEqual(self.crash(), losses[:3])
        done = self.run_by((), 7, 0, "dies", ASKED='{"resume": true}')
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        self.said()
        done = self.run_by((), 7, 1, SHARDD_ON_EXISTING="resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        # it is step 0's data with the parameters after three steps
        self.assertNotIn(self.said()[0][0], (self.alone(7)[0], losses[0]))

    def test_fresh_begins(self):
        expected = self.alone(7)
        for how in (dict(ASKED='{"fresh": true}'), dict(ASKED='{"on_existing": "fresh"}'),
                    dict(SHARDD_ON_EXISTING="fresh")):
            self.crash()
            done = self.run_by((), 7, 1, **how)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.said()[0], expected)

    def test_a_clean_end_leaves_nothing(self):
        expected = self.alone(7)
        for _ in range(2):
            done = self.run_by((), 7, 1)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(self.said()[0], expected)

    def test_words_that_are_none(self):
        self.refused(self.run_by((), 7, 1, SHARDD_ON_EXISTING="new"), "on_existing is 'new'")
        self.refused(self.run_by((), 7, 1, ASKED='{"fresh": true, "resume": true}'), "give one")

    def test_a_guarded_program_continues_by_itself(self):
        done = self.run_by((), 0, 2, "dies once", GUARDED="1", COMMITS="1")
        # the second life commits step 1 again, which the daemon refuses
        self.assertIn("continues job", done.stderr)
        self.assertNotIn("on_existing", done.stderr)

    def test_a_session_after_another_is_no_restart(self):
        code = ("import os, shardd, sys; os.environ['SHARDD_RUN'] = 'one';"
                "keep = dict(lifetime=shardd.Lifetime.KEEP, on_existing='error');"
                "c = shardd.connect(); c.join('kept', 1, 0, **keep); c.commit(1); c.leave();"
                "c.join('kept', 1, 0, **keep)")
        done = subprocess.run([sys.executable, "-B", "-c", code], text=True, capture_output=True,
                              env=launchers.environment(self.socket), timeout=60)
        self.assertIn("has state of an earlier run: step 1, committed", done.stderr)
        self.assertIn("of run one", done.stderr)

    # ------------------------------------------------------------------ launchers

    def torchrun(self, *options, ranks=2):
        return [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node",
                str(ranks), "--no-python"]

    def test_a_rerun_of_torchrun_on_the_same_port(self):
        [port] = support.free_ports(1)
        torchrun = self.torchrun("--master-port", str(port))
        self.crash(*torchrun, SHARDD_JOB="")
        self.refused(self.run_by(torchrun, 7, 1, SHARDD_JOB=""),
                     rf"job 'torch-{port}' has state of an earlier run: \d steps")
        # attempts after the first one are restarts of the run that was refused
        again = self.torchrun("--master-port", str(port), "--max-restarts", "2")
        done = self.run_by(again, 7, 1, SHARDD_JOB="")
        self.refused(done, "of an earlier run")
        self.assertNotIn("continues job", done.stderr)
        self.assertFalse((self.folder / "said.0").exists())
        done = self.run_by(torchrun, 7, 1, SHARDD_JOB="", SHARDD_ON_EXISTING="fresh")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.said()[0], self.alone(7))

    def test_a_restart_by_torchrun(self):
        done = self.run_by(self.torchrun("--standalone", "--max-restarts", "1"), 7, 2, "dies once",
                           SHARDD_JOB="")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(self.said()), 2)
        self.assertRegex(done.stderr, r"rank \d was started again in its run and continues job")

    def test_a_rerun_by_shardctl(self):
        launcher = launchers.shardctl(2)
        self.crash(*launcher)
        self.refused(self.run_by(launcher, 7, 1), r"\(pid \d+\) of run run-[0-9a-f]{16}")
        restarting = [*launcher[:-1], "--max-restarts", "1", "--"]
        self.refused(self.run_by(restarting, 7, 1), "of an earlier run")
        self.assertFalse((self.folder / "said.0").exists())

    # ---------------------------------------------------------- the optimizer's state

    def test_parameters_over_an_older_optimizer(self):
        expected = self.alone(7, 2, LOADED="1")
        self.crash()
        self.refused(self.run_by((), 7, 2, "ends", LOADED="1", SHARDD_ON_EXISTING="resume"),
                     "the optimizer still has the state that was found in the job")
        done = self.run_by((), 7, 2, LOADED="reset", SHARDD_ON_EXISTING="resume")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.said()[0], expected)


class Wire(unittest.TestCase):
    def test_a_job_with_trainers_is_not_created_again(self):
        with support.daemon() as socket, shardd.connect(socket) as one:
            one.join("j", 2, 0)
            other = shardd.connect(socket)
            with unittest.mock.patch.dict(os.environ, SHARDD_RUN="another"):
                other.join("j", 2, 1, on_existing="fresh")  # the job's run is not known: one of it
            other.close()
            with unittest.mock.patch.dict(os.environ, SHARDD_RUN="a"), shardd.connect(socket) as a:
                a.join("k", 2, 0)
                os.environ["SHARDD_RUN"] = "b"
                b = shardd.connect(socket)
                said = r"cannot be created again while it has 1 trainers, such as rank 0"
                with self.assertRaisesRegex(shardd.FailedPrecondition, said):
                    b.join("k", 2, 1, on_existing="fresh")
                b.close()

    def test_a_job_that_is_created_again_keeps_its_settings(self):
        with support.daemon() as socket:
            with shardd.connect(socket) as one:
                one.join("j", 1, 0, lifetime=shardd.Lifetime.KEEP, quota_bytes=1 << 20)
                one.commit(4)
            with shardd.connect(socket) as two:
                member = two.join("j", 1, 0, on_existing="fresh")
                self.assertTrue(member.created)
                self.assertFalse(member.resumed)
                [job] = two.status("j")["jobs"]
                self.assertEqual(job["lifetime"], "KEEP")
                self.assertEqual(re.sub(r"\D", "", str(job["quota_bytes"])), str(1 << 20))


if __name__ == "__main__":
    support.main()
