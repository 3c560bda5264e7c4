#!/usr/bin/env python3
"""The guard: a process whose child runs the program, again when a signal has ended it."""

import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import support

import shardd
from shardd import _restart

BEGIN = """
import os, signal, sys, time
from shardd import _restart
print("imported", os.getpid())
restarts = _restart.guard({restarts})
print("life", restarts, os.getpid(), flush=True)
"""


def start(code, restarts=3, **environ):
    path = str(support.ROOT / "client" / "python")
    return subprocess.Popen(
        [sys.executable, "-B", "-c", BEGIN.format(restarts=restarts) + code], text=True,
        env=dict(os.environ, PYTHONPATH=path, **environ), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)


def run(code, restarts=3, **environ):
    process = start(code, restarts, **environ)
    out, err = process.communicate(timeout=60)
    return process, out.splitlines(), err


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


class Guard(unittest.TestCase):
    def test_an_exit_code_is_the_guards(self):
        for code, expected in (("", 0), ("sys.exit(7)", 7), ("raise KeyError(1)", 1)):
            process, out, _ = run(code)
            self.assertEqual(process.returncode, expected)
            self.assertEqual(out[0], f"imported {process.pid}")  # once: it was flushed
            self.assertEqual(len(out), 2)
            self.assertNotEqual(out[1].split()[2], str(process.pid))

    def test_a_death_is_followed_by_a_life(self):
        process, out, err = run(f"if restarts == 0: {KILL}")
        self.assertEqual(process.returncode, 0)
        self.assertEqual([line.split()[:2] for line in out[1:]], [["life", "0"], ["life", "1"]])
        self.assertRegex(err, r"was killed by signal 9 \(Killed\); restart 1 of 3")

    def test_two_lives_without_a_commit_are_enough(self):
        process, out, err = run(KILL, 9)
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertEqual(len(out), 3)
        self.assertIn("two processes in a row committed no step", err)

    def test_lives_with_commits_are_as_many_as_may_be(self):
        process, out, err = run("_restart.committed()\nos.kill(os.getpid(), signal.SIGSEGV)", 4)
        self.assertEqual(process.returncode, -signal.SIGSEGV)
        self.assertEqual(len(out), 6)
        self.assertIn("all 4 allowed restarts are used", err)

    def test_signals_go_to_the_child(self):
        process = start("signal.signal(signal.SIGTERM, lambda *a: sys.exit(5))\n"
                        "signal.signal(signal.SIGUSR1, lambda *a: print('told', flush=True))\n"
                        "print('ready', flush=True)\nwhile True: time.sleep(0.01)")
        with process:
            for line in process.stdout:
                if line == "ready\n":
                    process.send_signal(signal.SIGUSR1)
                elif line == "told\n":
                    process.send_signal(signal.SIGTERM)
            self.assertEqual((process.wait(30), process.stderr.read()), (5, ""))

    def test_who_was_asked_to_end_is_not_restarted(self):
        for asked in (signal.SIGTERM, signal.SIGINT):
            process = start("signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
                            "print('ready', flush=True)\nwhile True: time.sleep(0.01)")
            with process:
                for line in process.stdout:
                    if line == "ready\n":
                        process.send_signal(asked)
                self.assertEqual((process.wait(30), process.stderr.read()), (-asked, ""))

    def test_a_child_dies_with_its_guard(self):
        process = start("print('ready', flush=True)\nwhile True: time.sleep(0.01)")
        with process:
            lines = [process.stdout.readline() for _ in range(3)]
            child = int(lines[1].split()[2])
            self.assertTrue(is_running(child))
            process.kill()
            process.wait(30)
            until(lambda: not is_running(child))

    def test_the_guard_has_no_memory_of_the_child(self):
        process = start("held = b'x' * (64 << 20)\nprint('ready', flush=True)\n"
                        "while True: time.sleep(0.01)")
        with process:
            while process.stdout.readline() != "ready\n":
                pass
            with open(f"/proc/{process.pid}/smaps_rollup") as lines:
                rss = next(int(line.split()[1]) for line in lines if line.startswith("Rss"))
            self.assertLess(rss, 60 << 10)
            process.kill()

    def test_twice_is_once_and_0_is_never(self):
        process, out, _ = run("print(_restart.guard(1), flush=True)\n" + KILL, 1)
        self.assertEqual([line.split()[0] for line in out],
                         ["imported", "life", "0", "life", "1"])
        process, out, _ = run("", SHARDD_GUARD="0")
        self.assertEqual(out[1], f"life 0 {process.pid}")

    def test_what_is_refused(self):
        def refused(kind, text):
            return self.assertRaisesRegex(kind, text)

        with refused(shardd.InvalidArgument, "max_restarts"):
            _restart.guard(-1)
        stop = threading.Event()
        other = threading.Thread(target=stop.wait)
        other.start()
        before = signal.getsignal(signal.SIGCHLD), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with refused(shardd.FailedPrecondition, "2 threads, which a fork would leave behind"):
            _restart.guard(1)
        self.assertEqual(before, (signal.getsignal(signal.SIGCHLD),
                                  signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        stop.set()
        other.join()
        said = []

        def elsewhere():
            try:
                _restart.guard(1)
            except shardd.FailedPrecondition as error:
                said.append(str(error))

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        self.assertIn("main thread", said[0])
        with support.daemon() as socket, shardd.connect(socket), \
                refused(shardd.FailedPrecondition, "already connected"):
            _restart.guard(1)


if __name__ == "__main__":
    support.main()
