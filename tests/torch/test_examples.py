#!/usr/bin/env python3
"""What the examples say where something is wrong: a sentence, and no traceback."""

import concurrent.futures
import contextlib
import io
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import fsdp  # noqa: F401  finds the package
import launchers
import support

import shardd

EXAMPLES = support.ROOT / "client" / "python" / "examples"
README = str(support.ROOT / "README.md")
MODEL = ("--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--data", README)
NOBODY = "/nonexistent/socket"


@contextlib.contextmanager
def trainer(socket, job, commit):
    """A job of one rank, whose parameters are past its last commit unless @commit."""
    sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=0.1)
    with shardd.connect(socket) as client:
        client.join(job, 1, 0)
        [unit] = client.register([shardd.UnitSpec("u", [shardd.TensorSpec("w", (2,))],
                                                  optimizer=sgd)])
        unit.init_seed(1)
        client.commit(1)
        unit.gradient().view()[:] = memoryview(bytes(8)).cast("f")
        unit.reduce()
        client.step()
        if commit:
            client.commit(2)
        yield


class Arguments(unittest.TestCase):
    """Refused before anything is done, so that it need not be a process of its own."""

    def refused(self, program, *arguments):
        """(exit status, what it says)."""
        said = io.StringIO()
        with mock.patch.object(sys, "argv", [program, *arguments]), \
                mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]), \
                mock.patch.object(sys, "excepthook"), mock.patch.dict(os.environ), \
                contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as caught:
            os.environ.pop("SHARDD_JOB", None)
            os.environ.pop("RANK", None)
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        code = caught.exception.code
        return (code, said.getvalue()) if isinstance(code, int) else (1, code)

    def check(self, code, words, *command):
        with self.subTest(command):
            got, said = self.refused(*command)
            self.assertEqual(got, code, said)
            self.assertIn(words, said.splitlines()[-1])

    def test_of_train_gpt(self):
        program = ("train_gpt.py", "--data")
        with tempfile.TemporaryDirectory() as folder:
            short = pathlib.Path(folder, "short")
            short.write_bytes(b"abc")
            self.check(2, "cannot read a file '/nonexistent'", *program, "/nonexistent")
            self.check(2, "cannot read a file", *program, folder)
            self.check(2, "--data must have at least 66 bytes", *program, str(short))
        for words, *options in (("--steps: 'x' is not a whole number", "--steps", "x"),
                                ("'0' is not a whole number of at least 1", "--batch", "0"),
                                ("not a multiple of --heads 3", "--heads", "3"),
                                ("with torchrun", "--engine", "fsdp2"),
                                ("--bf16 needs", "--engine", "single", "--bf16"),
                                ("--resilient needs", "--engine", "ddp", "--resilient")):
            self.check(2, words, *program, README, *options)

    def test_of_live_eval(self):
        program = ("live_eval.py", "--job", "x", "--data")
        self.check(2, "cannot read a file '/nonexistent'", *program, "/nonexistent")
        self.check(2, "--job is missing", "live_eval.py", "--data", README)
        self.check(2, "--samples: '1e3' is not", *program, README, "--samples", "1e3")
        self.check(2, "--wait nan", *program, README, "--wait", "nan")
        self.check(1, "bytes, 640001 are needed", *program, README, "--samples", "10000")


    def test_of_rl_loop(self):
        self.check(2, "--steps: '1' is not a whole number of at least 24", "rl_loop.py", "--steps",
                   "1")
        self.check(1, f"no daemon answers at {NOBODY}", "rl_loop.py", "--socket", NOBODY)


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon("--set", "op_timeout_ms=2s")
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def run_one(self, case):
        _, _, (program, *arguments), env = case
        done = subprocess.run(launchers.python(EXAMPLES / program, *arguments), text=True,
                              env=launchers.environment(self.socket, **env), timeout=120,
                              stdin=subprocess.DEVNULL, capture_output=True)
        return case, done

    def check(self, *cases):
        """Each is (exit status, words of the sentence, command, variables)."""
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for (code, words, command, env), done in pool.map(self.run_one, cases):
                with self.subTest(command, env=env):
                    said = done.stderr
                    self.assertEqual((done.returncode, done.stdout), (code, ""), said)
                    self.assertTrue(said.startswith(command[0].split(".")[0]), said)
                    for word in words:
                        self.assertIn(word, said)
                    self.assertEqual(said.count("\n"), 1, said)

    def test_no_daemon_and_no_library(self):
        train, look = ("train_gpt.py", *MODEL), ("live_eval.py", *MODEL, "--job", "x")
        for command in (train, look):
            self.check((1, ["Start one with"], command, {"SHARDD_SOCKET": NOBODY}),
                       (1, ["libshardd.so was not found"], command, {"SHARDD_LIBRARY": NOBODY}))

    def test_wrong_jobs(self):
        train = ("train_gpt.py", *MODEL)
        with trainer(self.socket, "taken", commit=True):
            self.check(
                (1, ["job.name", "allowed"], train, {"SHARDD_JOB": "a b"}),
                (1, ["RANK='q'"], train, {"RANK": "q", "WORLD_SIZE": "2"}),
                (1, ["set SHARDD_JOB"], train, {"RANK": "0", "WORLD_SIZE": "2"}),
                (1, ["world size"], train,
                 {"SHARDD_JOB": "taken", "RANK": "1", "WORLD_SIZE": "2"}),
                (1, ["not a multiple of the 3 ranks"], train,
                 {"SHARDD_JOB": "three", "RANK": "1", "WORLD_SIZE": "3"}),
                (1, ["waits for rank 1 (not joined)"], train,
                 {"SHARDD_JOB": "half", "RANK": "0", "WORLD_SIZE": "2"}))

    def test_jobs_that_cannot_be_evaluated(self):
        look = ("live_eval.py", *MODEL, "--wait", "0.5", "--job")
        with trainer(self.socket, "late", commit=False), \
                trainer(self.socket, "other", commit=True):
            self.check(
                (1, ["no job 'nobody' appeared within 0.5 s", "--job nobody"],
                 (*look, "nobody"), {}),
                (1, ["the commit that follows step 1", "--resilient"], (*look, "late"), {}),
                (1, ["no tensor 'tokens.weight'", "as its trainers do"], (*look, "other"), {}))


class RlLoop(unittest.TestCase):
    def test_the_reward_rises_while_a_sampler_is_killed(self):
        """With a daemon of its own, which has ended afterwards."""
        env = {k: v for k, v in launchers.environment(NOBODY).items() if k != "SHARDD_SOCKET"}
        env["PATH"] = support.BIN_DIR + os.pathsep + env["PATH"]
        done = subprocess.run(
            launchers.python(EXAMPLES / "rl_loop.py", "--steps", "40", "--every", "20"), text=True,
            env=env, timeout=240, stdin=subprocess.DEVNULL, capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        lines = done.stdout.splitlines()
        self.assertRegex(lines[-1], r"^The reward rose from 0.*: the policy has improved\.")
        self.assertIn("step 13: sampler 0 is killed", lines)
        self.assertTrue(any(line.endswith("sampler 0 is back") for line in lines), done.stdout)
        rows = [line.split() for line in lines if line[:1] in ("0", "1")]
        self.assertEqual([(row[0], row[2]) for row in rows], [("0", "2"), ("1", "1")])
        for words in ("publish time, mean", "stall of a step", "generations made, skipped"):
            self.assertEqual(sum(line.startswith(words) for line in lines), 1, words)


if __name__ == "__main__":
    support.main()
