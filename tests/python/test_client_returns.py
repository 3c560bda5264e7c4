#!/usr/bin/env python3
"""The daemon dies under shardd-holder, and a client is connected again in the same process."""

import os
import subprocess
import sys
import tempfile
import unittest

import held
import support

import shardd


def one_unit(client, value=2.0):
    w = shardd.TensorSpec("w", (64, 64), shardd.Init.CONSTANT, value)
    [unit] = client.register([shardd.UnitSpec("block", [w])])
    if not unit.initialised:
        unit.init_seed(1)
    return unit


def run(code, socket, **environ):
    path = os.pathsep.join([str(support.ROOT / "client" / "python"),
                            str(support.ROOT / "tests" / "python")])
    return subprocess.run([sys.executable, "-B", "-c", code], text=True, capture_output=True,
                          timeout=120, env=dict(os.environ, PYTHONPATH=path, SHARDD_SOCKET=socket,
                                                **environ))


TOLD = """
import os, sys
import held, shardd
client = shardd.connect()
client.join("told", 1, 0)
client.commit(1)
held.kill_daemon(int(os.environ["HOLDER"]))
try:
    client.barrier()
except shardd.DaemonRestarted as error:
    print("raised", error.text)
print("again", client.rejoin().step)
client.leave()
"""

# The daemon is gone for good, and the library still tries when the interpreter ends.
LEFT = """
import os
import held, shardd
told = []
client = shardd.connect(on_connection=lambda event: told.append(event.state.name))
client.join("left", 1, 0)
ticket = client.submit("barrier", 0, finish=lambda r: None)
os.kill(int(os.environ["HOLDER"]), 9)
try:
    os.kill(int(os.environ["DAEMON"]), 9)
except ProcessLookupError:
    pass
try:
    client.submit("barrier", 0, finish=lambda r: None).wait(timeout=0.5)
except shardd.SharddError as error:
    print(type(error).__name__, told[:1])
"""


class Reconnect(unittest.TestCase):
    def test_a_client_goes_on_in_its_process(self):
        told = []
        with held.daemon() as one, shardd.connect(one.socket,
                                                  on_connection=told.append) as client:
            first = client.join("goes-on", 1, 0)
            unit = one_unit(client)
            client.commit(7, b"mine")
            weights = unit.gather()
            address, before = weights.address, weights.tobytes()
            del weights
            unit.release()
            one.kill()
            with self.assertRaises(shardd.DaemonRestarted) as raised:
                client.barrier()
            self.assertIsInstance(raised.exception, shardd.Aborted)
            self.assertRegex(raised.exception.text,
                             "was restarted.*join again.*the step that Join returns")
            with self.assertRaises(shardd.DaemonRestarted):
                unit.gather()
            again = client.rejoin()
            self.assertGreater(again.epoch, first.epoch)
            self.assertEqual((again.step, again.blob, again.torn), (7, b"mine", False))
            unit = one_unit(client)
            weights = unit.gather()
            self.assertEqual((weights.address, weights.tobytes()), (address, before))
            del weights
            unit.release()
        states = [event.state.name for event in told]
        self.assertEqual((states[0], states[-1]), ("LOST", "BACK"))
        self.assertLessEqual(set(states[1:-1]), {"RETRYING"})
        self.assertTrue(all(event.text for event in told))
        self.assertGreaterEqual(told[-1].attempt, 1)

    def test_standard_error_says_it(self):
        with held.daemon() as one:
            done = run(TOLD, one.socket, HOLDER=str(one.holder))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?s)raised the daemon at .* was restarted.*again 1")
        self.assertRegex(done.stderr, r"has broken; connecting again \(rank 0 of job 'told'\)\n"
                                      r"shardd: the daemon is back, with its state, after "
                                      r".* s \(rank 0 of job 'told'\)\n")

    def test_a_rank_is_of_the_process_that_comes_first(self):
        with held.daemon() as one:
            former = shardd.connect(one.socket)
            former.join("rank", 1, 0)
            one_unit(former)
            former.commit(3, b"former")
            one.kill()
            with self.assertRaises(shardd.DaemonRestarted):
                former.barrier()
            other = shardd.connect(one.socket)
            member = other.join("rank", 1, 0)
            self.assertEqual((member.step, member.blob), (3, b"former"))
            with self.assertRaisesRegex(shardd.FailedPrecondition,
                                        f"rank 0 of job 'rank' is taken by pid {os.getpid()}"):
                former.rejoin()
            one_unit(other)
            other.commit(4, b"other")
            other.close()
            # as after any death: who comes next continues
            for _ in range(2000):
                try:
                    member = former.rejoin()
                    break
                except shardd.FailedPrecondition:
                    pass
            self.assertEqual((member.step, member.blob), (4, b"other"))
            former.leave()
            former.close()

    def test_without_it_the_loss_is_an_error_at_once(self):
        told = []
        with held.daemon() as one:
            client = shardd.connect(one.socket, reconnect=0, on_connection=told.append)
            client.join("off", 1, 0)
            one.kill()
            with self.assertRaises(shardd.Unavailable):
                client.barrier()
            client.close()
        self.assertEqual(told, [])

    def test_a_daemon_that_does_not_come_back(self):
        told = []
        with tempfile.TemporaryDirectory() as folder:
            one = held.Held(folder)
            client = shardd.connect(one.socket, reconnect=0.4, on_connection=told.append)
            client.join("gone", 1, 0)
            one.end_hard()
            with self.assertRaisesRegex(shardd.Unavailable, "did not come back within 400 ms"):
                client.barrier()
            with self.assertRaisesRegex(shardd.Unavailable, "did not come back"):
                client.rejoin()
            client.close()
        self.assertEqual((told[0].state.name, told[-1].state.name), ("LOST", "GIVEN_UP"))

    def test_a_program_that_ends_meanwhile(self):
        with tempfile.TemporaryDirectory() as folder:
            one = held.Held(folder)
            done = run(LEFT, one.socket, HOLDER=str(one.holder),
                       DAEMON=str(held.daemon_of(one.holder)))
            one.end_hard()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout, "WaitTimeout ['LOST']\n", done.stderr)

    def test_an_exception_in_the_callback_changes_nothing(self):
        seen = []

        def call(event):
            seen.append(event.state.name)
            raise ValueError("of the program")

        hook, sys.unraisablehook = sys.unraisablehook, lambda said: seen.append(said.exc_value)
        try:
            with held.daemon() as one, shardd.connect(one.socket, on_connection=call) as client:
                client.join("raises", 1, 0)
                one.kill()
                with self.assertRaises(shardd.DaemonRestarted):
                    client.barrier()
                client.rejoin()
        finally:
            sys.unraisablehook = hook
        self.assertIn("BACK", seen)
        self.assertIn("of the program", [str(x) for x in seen])

    def test_times_that_are_not_allowed(self):
        for seconds in (-1, float("nan"), float("inf"), 1e10):
            with self.subTest(seconds), self.assertRaises(shardd.InvalidArgument) as raised:
                shardd.connect("/nonexistent/socket", reconnect=seconds)
            self.assertEqual(raised.exception.field, "reconnect")


if __name__ == "__main__":
    support.main()
