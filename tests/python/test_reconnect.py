#!/usr/bin/env python3
"""The daemon dies and the next one has its state: what a program in Python sees of it."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

import support  # finds the package

import shardd

State = shardd.ConnectionState


class Events(list):
    """Of one client; wait() until one of a state has come."""

    def __init__(self):
        self._changed = threading.Condition()

    def __call__(self, event):
        with self._changed:
            self.append(event)
            self._changed.notify_all()

    def wait(self, state):
        with self._changed:
            if not self._changed.wait_for(lambda: any(e.state == state for e in self), 60):
                raise AssertionError(f"no {state!r} in {list(self)}")


def spec():
    return shardd.UnitSpec("u", [shardd.TensorSpec("w", (4, 5), init=shardd.Init.CONSTANT, a=2.0)])


class Reconnect(unittest.TestCase):
    def test_memory_stays_and_the_job_goes_on(self):
        events = Events()
        with support.held_daemon() as held, \
                shardd.connect(held.socket, on_connection=events) as client:
            client.join("job", 1, 0)
            [unit] = client.register([spec()])
            unit.init_seed(1)
            client.commit(3, b"state")
            weights = unit.gather()
            before = weights.tobytes()
            instance, epoch = client.instance, client.member.epoch
            held.kill()
            with self.assertRaisesRegex(shardd.Aborted, f"epoch {epoch} has ended: join again"):
                client.barrier()
            self.assertEqual(weights.tobytes(), before)
            me = client.join("job", 1, 0)
            self.assertEqual((me.step, me.blob, me.torn), (3, b"state", False))
            self.assertEqual(client.instance, instance)
            [unit] = client.register([spec()])
            self.assertTrue(unit.initialised)
            self.assertEqual(unit.gather().tobytes(), before)
            unit.release()
            events.wait(State.BACK)
            self.assertEqual([events[0].state, events[-1].state], [State.LOST, State.BACK])
            self.assertGreater(events[-1].attempt, 0)
            self.assertIn("back", events[-1].text)

    def test_not_at_all(self):
        with support.held_daemon() as held, shardd.connect(held.socket, reconnect=0) as client:
            client.join("job", 1, 0)
            held.kill()
            with self.assertRaises(shardd.Unavailable):
                client.barrier()
            client.member = None  # there is nothing to leave

    def test_given_up(self):
        events = Events()
        with support.held_daemon() as held:
            client = shardd.connect(held.socket, reconnect=0.2, on_connection=events)
            client.join("job", 1, 0)
        # the holder has ended, and the daemon with it
        with self.assertRaisesRegex(shardd.Unavailable, "did not come back within 200 ms"):
            client.barrier()
        events.wait(State.GIVEN_UP)
        client.close()

    def test_a_line_on_standard_error(self):
        program = ("import os, sys, shardd\n"
                   "client = shardd.connect(sys.argv[1])\n"
                   "client.join('job', 1, 0)\n"
                   "print('joined', flush=True)\n"
                   "sys.stdin.readline()\n"
                   "try:\n"
                   "    client.barrier()\n"
                   "except shardd.Aborted:\n"
                   "    client.join('job', 1, 0)\n"
                   "    print('again', flush=True)\n")
        with support.held_daemon() as held:
            process = subprocess.Popen(
                [sys.executable, "-B", "-c", program, held.socket], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                cwd=support.ROOT / "client" / "python")
            self.assertEqual(process.stdout.readline(), "joined\n")
            held.kill()
            out, err = process.communicate("go\n", timeout=60)
        self.assertEqual((process.returncode, out), (0, "again\n"), err)
        lines = err.splitlines()
        self.assertEqual(lines[0], "shardd: the connection to the daemon has broken; connecting "
                                   "again (rank 0 of job 'job')")
        self.assertRegex(lines[1], "^shardd: the daemon is back, with its state, after .* s ")

    def test_killed_in_its_first_start(self):
        """At any instant: the next one begins, with what was left or without."""
        for instant in range(12):
            with support.held_daemon(kill_after=0.002 * instant) as held, \
                    shardd.connect(held.socket, connect_timeout=30) as client:
                client.join("job", 1, 0)

    def test_a_part_of_a_journal_is_dropped(self):
        """Of a daemon that died before it had a job."""
        with tempfile.TemporaryDirectory() as folder, \
                socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            path = os.path.join(folder, "socket")
            notify.bind("")  # an address that the kernel chooses
            part = os.memfd_create("part")
            program = ["sh", "-c", 'exec 3<&0; LISTEN_PID=$$ exec "$@"', "sh",
                       os.path.join(support.BIN_DIR, "shardd"), "--socket", path, "--backend",
                       "host"]
            env = dict(os.environ, LISTEN_FDS="1", LISTEN_FDNAMES="journal.0", FDSTORE="100",
                       NOTIFY_SOCKET="@" + notify.getsockname()[1:].decode())
            daemon = subprocess.Popen(program, env=env, stdin=part)
            os.close(part)
            with shardd.connect(path, connect_timeout=30) as client:
                client.join("job", 1, 0)
            daemon.terminate()
            self.assertEqual(daemon.wait(60), 0)
            notify.setblocking(False)
            told = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    told.append(notify.recv(4096).decode().split("\n"))
            about = [t for t in told if "FDNAME=journal.0" in t]
            self.assertEqual([t[0] for t in about], ["FDSTOREREMOVE=1", "FDSTORE=1"])

    def test_wrong_seconds(self):
        with self.assertRaisesRegex(shardd.InvalidArgument, "reconnect is -1"):
            shardd.connect("/nowhere", reconnect=-1)


if __name__ == "__main__":
    support.main()
