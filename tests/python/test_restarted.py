#!/usr/bin/env python3
"""A daemon that is started again has no state: who goes on from it is told, and begins nothing."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import unittest

import support

import shardd
from shardd import _again

WORKER = """
import os, signal, sys, time
import shardd
from shardd import _restart
"""


class Daemon:
    """One that can be killed and started again on its socket."""

    def __init__(self, folder):
        self.socket, self._log = os.path.join(folder, "socket"), os.path.join(folder, "log")
        self._process = None

    def start(self):
        with open(self._log, "a") as log:
            self._process = subprocess.Popen(
                [os.path.join(support.BIN_DIR, "shardd"), "--socket", self.socket, "--backend",
                 "host"], stdout=log, stderr=log)
        with shardd.connect(self.socket, connect_timeout=30):
            pass

    def restart(self):
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self):
        self._process.terminate()
        assert self._process.wait(60) == 0

    def jobs(self):
        with shardd.connect(self.socket) as client:
            return [job["name"] for job in client.status()["jobs"]]


@contextlib.contextmanager
def daemon():
    with tempfile.TemporaryDirectory() as folder:
        one = Daemon(folder)
        one.start()
        try:
            yield one
        finally:
            one.stop()


def start(code, socket, **environ):
    return subprocess.Popen(
        [sys.executable, "-B", "-c", WORKER + code], text=True,
        env=dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"),
                 SHARDD_SOCKET=socket, **environ),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def another_second():
    """Until what begins now is seen to begin later than what was there: times are in seconds."""
    end = int(time.time()) + 3
    while time.time() < end:
        time.sleep(0.01)


# Stands for torchrun: it stays, and its workers are its children.
AGENT = """
import subprocess
print("began", flush=True)
sys.stdin.readline()
env = dict(os.environ, TORCHELASTIC_RESTART_COUNT=os.environ["COUNT"])
code = "import shardd; shardd.connect().join('t' + os.environ['COUNT'], 1, 0)"
sys.exit(subprocess.run([sys.executable, "-B", "-c", "import os; " + code], env=env).returncode)
"""


class Restarted(unittest.TestCase):
    def test_a_process_that_connects_again(self):
        with daemon() as d:
            client = shardd.connect(d.socket)
            self.assertTrue(client.join("j", 1, 0, lifetime=shardd.Lifetime.KEEP).created)
            client.commit(5)
            instance = client.instance
            self.assertRegex(instance, "^[0-9a-f]{32}$")
            d.restart()
            with self.assertRaises(shardd.Unavailable):
                client.barrier()
            client.close()
            for _ in range(2):
                client = shardd.connect(d.socket)
                self.assertNotEqual(client.instance, instance)
                with self.assertRaisesRegex(shardd.DataLoss,
                                            "the daemon was restarted at 20.*'j' is gone"):
                    client.join("j", 1, 0)
                client.close()
            self.assertEqual(d.jobs(), [])

    def test_a_guarded_process(self):
        code = """
restarts = _restart.guard(3)
client = shardd.connect()
client.join('g', 1, 0, lifetime=shardd.Lifetime.KEEP)
client.commit(5)
print("committed", restarts, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
        with daemon() as d:
            process = start(code, d.socket)
            self.assertEqual(process.stdout.readline(), "committed 0\n")
            d.restart()
            out, err = process.communicate("go\n", timeout=60)
            self.assertEqual(out, "")
            self.assertEqual(process.returncode, 1)
            self.assertRegex(err, "DATA_LOSS: the daemon was restarted at")
            self.assertEqual(d.jobs(), [])

    def test_a_guarded_process_goes_on_with_the_same_daemon(self):
        code = """
restarts = _restart.guard(3)
client = shardd.connect()
member = client.join('g', 1, 0, lifetime=shardd.Lifetime.KEEP)
print("step", member.step, flush=True)
client.commit(member.step + 1)
if restarts < 2:
    os.kill(os.getpid(), signal.SIGKILL)
client.leave()
"""
        with daemon() as d:
            process = start(code, d.socket)
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, err)
            self.assertEqual(out, "step 0\nstep 1\nstep 2\n")

    def test_workers_of_torchrun_when_the_daemon_is_younger(self):
        with daemon() as d:
            process = start(AGENT, d.socket, COUNT="1")
            self.assertEqual(process.stdout.readline(), "began\n")
            another_second()
            d.restart()
            _, err = process.communicate("go\n", timeout=60)
            self.assertEqual(process.returncode, 1)
            self.assertRegex(err, "DATA_LOSS: the daemon was restarted at .* after torchrun")
            self.assertEqual(d.jobs(), [])

    def test_workers_of_torchrun_when_nobody_can_know(self):
        with daemon() as d:
            another_second()
            for count, said in (("0", False), ("1", True)):
                process = start(AGENT, d.socket, COUNT=count)
                _, err = process.communicate("go\n", timeout=60)
                self.assertEqual(process.returncode, 0, err)
                self.assertEqual("Training begins at step 0" in err, said, err)

    def test_how_often_torchrun_has_begun(self):
        for text, expected in ((None, 0), ("0", 0), ("3", 3), ("x", 0), ("-1", 0)):
            env = {} if text is None else {"TORCHELASTIC_RESTART_COUNT": text}
            self.assertEqual(_again.restarts(env), expected)


if __name__ == "__main__":
    support.main()
