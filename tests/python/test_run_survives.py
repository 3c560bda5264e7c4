#!/usr/bin/env python3
"""The daemon dies during `shardctl run`: what charlm, minimal and run do, and run's exit code."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import unittest

import held
import support

import shardd

STEPS = 40
DATA = str(support.ROOT / "LICENSE")


def program(name):
    return os.path.join(support.BIN_DIR, name)


CHARLM = [program("charlm"), "--data", DATA, "--steps", str(STEPS), "--json", "--hidden", "32"]


class Run:
    """A `shardctl run`, whose lines are read while it runs."""

    def __init__(self, arguments, command, socket=None, **environ):
        given = ["--socket", socket] if socket else []
        self.process = subprocess.Popen(
            [program("shardctl"), *given, "run", *arguments, "--", *command], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(os.environ, **environ))
        self.lines = []
        self._timer = threading.Timer(200, self.process.kill)
        self._timer.start()

    def until(self, pattern):
        """Read on until a line has @pattern. Return: the line."""
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no '{pattern}' in:\n{self.text}")

    @property
    def text(self):
        return "".join(self.lines)

    def end(self):
        """Return: the exit code."""
        self.lines += list(self.process.stdout)
        code = self.process.wait()
        self._timer.cancel()
        self.process.stdout.close()
        return code

    def losses(self):
        """By step, as rank 0 has printed them, with all their digits; of a step that was done twice
        the last."""
        found = [json.loads(line[line.index("{"):]) for line in self.lines if '"loss"' in line]
        return {f["step"]: f["loss"] for f in found}


def at_step(n):
    return rf'"step": ?{n}\b'


class RunSurvives(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with held.daemon() as one:
            run = Run(["-n", "2", "--job", "calm"], CHARLM, one.socket)
            assert run.end() == 0, run.text
            cls.calm = run.losses()
        assert sorted(cls.calm) == list(range(1, STEPS + 1)), run.text

    def ends(self, run, code):
        got = run.end()
        self.assertEqual(got, code, run.text)

    def test_trainers_that_connect_again(self):
        with held.daemon() as one:
            run = Run(["-n", "2", "--job", "again"], CHARLM, one.socket)
            for step in 5, 12, 20:
                run.until(at_step(step))
                one.kill()
            self.ends(run, 0)
        self.assertEqual(run.losses(), self.calm)
        self.assertRegex(run.text, "returns to the last commit: the daemon at .* was restarted")
        self.assertNotIn("exited with", run.text)

    def test_trainers_that_do_not_are_started_again(self):
        with held.daemon() as one:
            run = Run(["-n", "2", "--job", "started", "--max-restarts", "3"], CHARLM, one.socket,
                      SHARDD_RECONNECT_MS="0")
            for step in 5, 20:
                run.until(at_step(step))
                one.kill()
            self.ends(run, 0)
        self.assertEqual(run.losses(), self.calm)
        self.assertRegex(run.text, "exited with code 1; restart 1 of 3")
        self.assertEqual(run.text.count('"step":1,') + run.text.count('"step": 1,'), 1, run.text)

    def test_without_restarts_it_fails(self):
        with held.daemon() as one:
            run = Run(["-n", "2", "--job", "once"], CHARLM, one.socket, SHARDD_RECONNECT_MS="0")
            run.until(at_step(5))
            one.kill()
            self.ends(run, 1)
        self.assertIn("ending the others", run.text)
        self.assertNotIn(STEPS, run.losses())

    def test_another_daemon_without_the_state(self):
        for environ, words in (({}, "is gone"), ({"SHARDD_RECONNECT_MS": "0"}, "DATA_LOSS")):
            with self.subTest(environ), tempfile.TemporaryDirectory() as folder:
                one = held.Held(folder)
                run = Run(["-n", "2", "--job", "lost", "--max-restarts", "3"], CHARLM, one.socket,
                          **environ)
                run.until(at_step(5))
                one.end_hard()
                os.unlink(one.socket)
                two = held.Held(folder)
                self.ends(run, 1)
                two.end()
                self.assertIn(words, run.text)
                self.assertIn("step 0", run.text)
                self.assertLess(max(run.losses()), STEPS)

    def test_a_daemon_that_is_gone_for_good(self):
        with tempfile.TemporaryDirectory() as folder:
            one = held.Held(folder)
            run = Run(["-n", "2", "--job", "good", "--max-restarts", "1"], CHARLM, one.socket,
                      SHARDD_RECONNECT_MS="300")
            run.until(at_step(5))
            one.end_hard()
            self.ends(run, 1)
        self.assertIn("did not come back within 300 ms", run.text)
        self.assertLess(max(run.losses()), STEPS)

    def standalone(self, *arguments):
        """Return: the run, its holder."""
        run = Run(["-n", "2", "--standalone", *arguments], CHARLM)
        run.until(at_step(5))
        pid = run.process.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        [holder] = [int(c) for c in children if "shardd-holder" in
                    pathlib.Path(f"/proc/{c}/cmdline").read_text()]
        return run, holder

    def test_a_private_daemon(self):
        run, holder = self.standalone()
        held.kill_daemon(holder)
        run.until(at_step(15))
        held.kill_daemon(holder)
        self.ends(run, 0)
        self.assertEqual(run.losses(), self.calm)
        self.assertIn("returns to the last commit", run.text)

    def test_a_private_daemon_whose_holder_dies(self):
        run, holder = self.standalone("--max-restarts", "3")
        os.kill(holder, 9)
        code = run.end()
        self.assertEqual(code, 3, run.text)
        self.assertIn("private daemon", run.text)

    def test_a_drain_is_not_the_end_of_the_work(self):
        with held.daemon() as one:
            run = Run(["-n", "2", "--job", "drained"], CHARLM, one.socket)
            run.until(at_step(5))
            subprocess.run([program("shardctl"), "--socket", one.socket, "job", "drain",
                            "drained"], check=True, capture_output=True)
            self.ends(run, 3)
        self.assertLess(max(run.losses()), STEPS)

    def fails_in_a_world_of(self, world, then):
        """A script: its rank 1 runs @then there; all others, and before and after, are charlm."""
        return ["sh", "-c", f'if [ "$RANK $WORLD_SIZE" = "1 {world}" ]; then {then}; fi; exec "$@"',
                "charlm", *CHARLM, "--batch", "12"]

    def test_fewer_ranks_go_on(self):
        """The batch is the same for each number of ranks: only the order of additions differs."""
        with held.daemon() as one:
            run = Run(["-n", "3", "--min", "2", "--job", "fewer"],
                      [*CHARLM, "--batch", "12", "--kill-at", "20", "--kill-rank", "1"], one.socket)
            self.ends(run, 0)
        self.assertRegex(run.text, r"rank 1 \(pid \d+\) was killed by signal 9 \(Killed\); "
                                   "starting all again, 2 ranks")
        self.assertEqual(len(re.findall("rank [01] of 2:", run.text)), 2, run.text)
        self.assertRegex(run.text, "rank 0 resumed at step 19")
        self.assertIn(STEPS, run.losses())
        self.assertEqual(run.text.count('"step":1,') + run.text.count('"step": 1,'), 1, run.text)

    def test_no_fewer_than_the_minimum(self):
        with held.daemon() as one:
            run = Run(["-n", "2", "--min", "2", "--job", "two"],
                      self.fails_in_a_world_of(2, "exit 7"), one.socket)
            self.ends(run, 7)
        self.assertIn("exited with code 7; ending the others", run.text)

    def test_fewer_ranks_do_not_begin_again(self):
        """A rank deletes the job, and fails."""
        ctl = program("shardctl")
        with held.daemon() as one:
            gone = f"until {ctl} job delete gone --force; do sleep 0.02; done; exit 1"
            run = Run(["-n", "4", "--min", "1", "--job", "gone"],
                      ["sh", "-c", 'case "$RANK $WORLD_SIZE" in "1 4") sleep 0.3; exit 1;; '
                       f'"1 3") {gone};; "0 3") sleep 1; exit 1;; "2 3") sleep 1; exit 1;; esac; '
                       'exec "$@"', "charlm", *CHARLM, "--batch", "12", "--steps", "100000"],
                      one.socket)
            self.ends(run, 1)
        self.assertIn("DATA_LOSS: job 'gone' is gone, with its state", run.text)
        self.assertNotIn("of 2:", run.text)

    def test_minimal(self):
        """Rank 0 waits for rank 1 when the daemon dies, in whatever op it is then."""
        with tempfile.TemporaryDirectory() as folder, held.daemon() as one:
            go = pathlib.Path(folder, "go")
            script = f"test $RANK = 0 || until test -e {go}; do sleep 0.02; done; " \
                     f"exec {program('minimal')}"
            run = Run(["-n", "2", "--job", "minimal"], ["sh", "-c", script], one.socket)
            while not self.jobs(one):
                self.assertIsNone(run.process.poll(), "it ended")
            one.kill()
            run.until("ABORTED: the daemon at .* was restarted")
            go.touch()
            self.ends(run, 0)
            values = re.findall(r"w\[0\] was (\S+), is (\S+)", run.text)
            self.assertEqual(len(values), 2, run.text)
            self.assertEqual(values[0], values[1])
            self.assertAlmostEqual(float(values[0][0]) - float(values[0][1]), 0.75, places=5)

    def jobs(self, one):
        with shardd.connect(one.socket) as client:
            return client.status()["jobs"]


if __name__ == "__main__":
    support.main()
