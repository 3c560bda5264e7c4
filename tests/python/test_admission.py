#!/usr/bin/env python3
"""Jobs that wait for memory: trainers of several users, the commands and metrics that show it."""

import json
import os
import subprocess
import threading
import unittest
import urllib.request

import support

import shardd

MIB = 1 << 20
CTL = os.path.join(support.BIN_DIR, "shardctl")


def unit(mib, name="u"):
    """A unit without an optimizer in fp32: parameters and gradients are so many MiB."""
    return shardd.UnitSpec(name, [shardd.TensorSpec("w", (mib * MIB // 8,))])


class Trainer(threading.Thread):
    """Registers in a thread, since that may take long."""

    def __init__(self, at, job, mib, **how):
        super().__init__()
        self.client = shardd.connect(at)
        self.client.join(job, 1, 0, **how)
        self.mib, self.error = mib, None
        self.start()

    def run(self):
        try:
            self.client.register([unit(self.mib)])
        except shardd.SharddError as error:
            self.error = error

    def end(self):
        """It leaves, and its job is gone."""
        self.join(30)
        self.client.leave()
        self.client.close()


def ctl(at, *arguments, code=0):
    done = subprocess.run([CTL, "--socket", at, *arguments], text=True, capture_output=True,
                          timeout=60)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def line(at):
    """Names of the jobs in the line, in its order."""
    waits = [(job["memory_wait"]["position"], job["name"])
             for job in support.shardctl(at, "status")["jobs"] if job["memory_wait"]]
    return [name for _, name in sorted(waits)]


class Line(unittest.TestCase):
    def test_jobs_get_memory_by_priority(self):
        with support.daemon("--set", "memory_bytes=64MiB", "--set", "user_limits=0:priority=100",
                            "--http", "127.0.0.1:0") as at:
            first = Trainer(at, "first", 40)
            first.join(30)
            low = Trainer(at, "low", 40, priority=-5, wait_for_memory=60)
            support.wait_until(lambda: line(at) == ["low"])
            high = Trainer(at, "high", 40, priority=5, wait_for_memory=60)
            support.wait_until(lambda: line(at) == ["high", "low"])
            self.look(at)
            first.end()
            high.join(30)
            self.assertIsNone(high.error)
            self.assertTrue(low.is_alive())
            self.assertEqual(line(at), ["low"])
            high.end()
            low.join(30)
            self.assertIsNone(low.error)
            self.assertEqual(line(at), [])
            self.assertEqual(support.shardctl(at, "status")["memory_line"]["admitted"], 2)
            events = [json.loads(text) for text in ctl(at, "--json", "events").splitlines()]
            kinds = [event["kind"] for event in events if event["job"] == "low"]
            self.assertLess(kinds.index("WAITS_FOR_MEMORY"), kinds.index("ADMITTED"))
            low.end()

    def look(self, at):
        """What people see of it."""
        text = ctl(at, "status", "low")
        self.assertIn("Jobs that wait for memory", text)
        self.assertIn("1 job is before it", text)
        self.assertIn("number 2 in the line", ctl(at, "blame", "low"))
        url = "http://" + support.shardctl(at, "status")["http"]["address"] + "/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            metrics = answer.read().decode()
        self.assertIn("\nshardd_memory_line_jobs 2\n", metrics)

    def test_time_over_is_resource_exhausted(self):
        with support.daemon("--set", "memory_bytes=64MiB") as at:
            first = Trainer(at, "first", 40)
            first.join(30)
            late = Trainer(at, "late", 40, wait_for_memory=0.3)
            late.join(30)
            self.assertIsInstance(late.error, shardd.ResourceExhausted)
            self.assertIn("no memory within 300 ms (wait_for_memory_ms): cannot allocate",
                          str(late.error))
            at_once = Trainer(at, "at-once", 40)
            at_once.join(30)
            self.assertIsInstance(at_once.error, shardd.ResourceExhausted)
            for trainer in (late, at_once, first):
                trainer.end()

    def test_a_trainer_that_dies_leaves_the_line(self):
        with support.daemon("--set", "memory_bytes=64MiB") as at:
            first = Trainer(at, "first", 40)
            first.join(30)
            child = subprocess.Popen(
                ["python3", "-B", "-c",
                 "import support, sys, test_admission as t\n"
                 "t.Trainer(sys.argv[1], 'dies', 40, wait_for_memory=60).join()", at],
                cwd=os.path.dirname(__file__))
            support.wait_until(lambda: line(at) == ["dies"])
            child.kill()
            child.wait()
            support.wait_until(lambda: line(at) == [])
            first.end()

    def test_wrong_arguments_are_refused(self):
        with support.daemon() as at, shardd.connect(at) as client:
            for how in ({"priority": 101}, {"priority": -101}, {"wait_for_memory": -1}):
                with self.assertRaises(shardd.InvalidArgument):
                    client.join("j", 1, 0, **how)
            client.join("j", 1, 0, wait_for_memory=2)
            with (shardd.connect(at) as other,
                  self.assertRaisesRegex(shardd.FailedPrecondition, "memory_ms of 2000, not 3000")):
                other.join("j", 1, 0, wait_for_memory=3)

    def test_the_launcher_says_it(self):
        code = ("import os, sys, shardd\n"
                "client = shardd.connect()\n"
                "client.join()\n"
                "job, = client.status()['jobs']\n"
                "print(job['priority'], job['wait_for_memory_ms'])\n")
        said = subprocess.run([CTL, "run", "-n", "1", "--standalone", "--priority", "-7",
                               "--wait-for-memory", "5", "--", "python3", "-c", code], text=True,
                              capture_output=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": str(support.ROOT / "client/python")})
        self.assertIn("[0] -7 5000\n", said.stdout, said.stderr)


class Teams(unittest.TestCase):
    def setUp(self):
        if os.geteuid() != 0:
            self.skipTest("only the superuser is several users")

    def test_an_administrator_creates_a_job_for_a_user(self):
        with support.daemon() as at:
            os.chmod(os.path.dirname(at), 0o755)
            os.chmod(at, 0o666)
            text = ctl(at, "job", "create", "theirs", "--user", "nobody", "--world-size", "1",
                       "--priority", "30", "--wait-for-memory", "7")
            self.assertIn("created", text)
            job, = support.shardctl(at, "status")["jobs"]
            self.assertEqual((job["uid"], job["priority"], job["wait_for_memory_ms"]),
                             (65534, 30, 7000))
            for wrong, why in ((["root/y", "--user", "nobody"], "exclude each other"),
                               (["y", "--user", "no-such-user"], "no such user"),
                               (["y", "--user", "4000000"], "give --user UID:GID"),
                               (["y", "--user", "4000000:0"], "group 0"),
                               (["y", "--priority", "101"], "from -100 to 100"),
                               (["y", "--wait-for-memory", "x"], "whole number of seconds")):
                self.assertIn(why, ctl(at, "job", "create", *wrong, "--world-size", "1", code=2))
            self.assertIn("created", ctl(at, "job", "create", "y", "--user", "4000000:4000000",
                                         "--world-size", "1"))
            drop = {"user": 65534, "group": 65534, "extra_groups": []}
            done = subprocess.run([CTL, "--socket", at, "job", "create", "z", "--user", "daemon",
                                   "--world-size", "1"], text=True, capture_output=True, **drop)
            self.assertEqual(done.returncode, 1)
            self.assertIn("DENIED: only an administrator creates", done.stderr)

    def test_groups_have_totals(self):
        with support.daemon("--set", "user_limits=@65534:total_state_bytes=8MiB") as at:
            os.chmod(os.path.dirname(at), 0o755)
            os.chmod(at, 0o666)
            code = ("import sys, support, shardd, test_admission as t\n"
                    "t1 = t.Trainer(sys.argv[1], 'a', 6)\n"
                    "t1.join()\n"
                    "print(t1.error)\n"
                    "t2 = t.Trainer(sys.argv[1], 'b', 6)\n"
                    "t2.join()\n"
                    "print(t2.error)\n"
                    "print(t.ctl(sys.argv[1], 'users'))\n")
            done = subprocess.run(["python3", "-B", "-c", code, at], text=True, capture_output=True,
                                  cwd=os.path.dirname(__file__), user=65534, group=65534,
                                  extra_groups=[], timeout=60)
            first, second, *users = done.stdout.splitlines()
            self.assertEqual(first, "None", done.stderr)
            self.assertIn("the members of group 65534", second)
            self.assertTrue([row for row in users
                             if row.split()[:1] == ["@65534"] and "state_bytes" in row], users)
            mine = [row.split()[0] for row in ctl(at, "users").splitlines()]
            self.assertIn("@65534", mine)


if __name__ == "__main__":
    support.main()
