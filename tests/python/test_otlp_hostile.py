#!/usr/bin/env python3
"""The exporter to OpenTelemetry, against collectors that do not behave (otlp_hostile.py): trainers
go on, memory is bounded, the log has a line, status says what is wrong, and the daemon ends in
time."""

import contextlib
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import support
import web
from otlp_hostile import GOAWAY, OPENING, Collector, frame, partial, retry_info

import shardd

LONG = os.environ.get("SHARDD_TEST_LONG") == "1"
SECRET = "Bearer secret-token"
CONTROL = "%1b[31m%0alevel=error " + "%e2%82%ac" * 300


def settings(port, interval="100ms", host="127.0.0.1"):
    return (
        *("--set", f"otlp=http://{host}:{port}"),
        *("--set", "otlp_trace_every=1"),
        *("--set", f"otlp_interval_ms={interval}"),
    )


def status(at):
    return support.shardctl(at, "status")["otlp"]


def said(at):
    command = [os.path.join(support.BIN_DIR, "shardctl"), "--socket", at, "status"]
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=60).stdout


def peak(pid):
    """The most memory that the process has had, in bytes."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", text)[1])


def goaway(request):
    request.send(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 11) + b"too_many_pings"))


def huge(request):
    request.send(request.headers(OPENING), request.message(bytes(5 << 20)))


def no_metrics(request):
    request.answer(status=12 if request.kind == "metrics" else 0, text="unknown service")


def good(request):
    request.answer()


# In a network of its own, where a name server takes questions and has no answers.
UNHEARD = """
import socket, support, web, test_otlp_hostile as own
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
with web.daemon(*own.settings(4317, host="collector.example")) as daemon:
    support.wait_until(lambda: own.status(daemon.socket).get("error"), 30)
    print(own.status(daemon.socket)["error"])
"""

# How a request is answered, and what status says then.
WRONG = {
    "GOAWAY": (goaway, "UNAVAILABLE: "),
    "an answer that is none": (lambda r: r.answer(b"\xff" * 99), "UNKNOWN: .*cannot be read"),
    "no status": (lambda r: r.send(r.headers(OPENING, end=True)), "UNKNOWN: "),
    "a status that is none": (lambda r: r.answer(status=99, text="what"), "UNKNOWN: what"),
    "5 MiB": (huge, "RESOURCE_EXHAUSTED: |INTERNAL: "),
    "60 MB of zeros, compressed": (lambda r: r.bomb(60_000_000), "."),
    "60 KB of a text": (lambda r: r.answer(status=14, text="x" * 60000), "RESOURCE_EXHAUSTED: "),
    "control characters": (
        lambda r: r.answer(status=14, text=CONTROL),
        r"UNAVAILABLE: \?\[31m\?level=error €+\??$",
    ),
    "the secret": (
        lambda r: r.answer(status=16, text=f"{SECRET} is old, {SECRET[7:]} too"),
        r"UNAUTHENTICATED: .*: \*{19} is old, \*{12} too$",
    ),
    "never again": (lambda r: r.answer(status=8, details=retry_info(-1)), "RESOURCE_EXHAUSTED: "),
    "details that are none": (
        lambda r: r.answer(status=8, text="busy", details="AAAA////"),
        "RESOURCE_EXHAUSTED: busy",
    ),
    "no metrics": (no_metrics, "^metrics: UNIMPLEMENTED: .*unknown service"),
}


class Hostile(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)

    def enter(self, context):
        return self.stack.enter_context(context)

    def daemon(self, *arguments):
        """It may be ended before the test is over."""
        return self.enter(web.daemon(*arguments))

    def trainer(self, at):
        client = shardd.connect(at)
        self.addCleanup(client.close)
        client.join("trained", 1, 0)
        [unit] = client.register([shardd.UnitSpec("b", [shardd.TensorSpec("w", (8,))])])
        unit.init_seed(1)
        return client

    def ends_soon(self, daemon):
        began = time.monotonic()
        daemon.process.terminate()
        self.assertEqual(daemon.process.wait(60), 0)
        self.assertLess(time.monotonic() - began, 2)

    def test_answers_that_are_wrong(self):
        headers = pathlib.Path(self.enter(tempfile.TemporaryDirectory()), "headers")
        headers.touch(0o600)
        headers.write_text(f"authorization: {SECRET}\n", encoding="ascii")
        answers = [good]
        collector = self.enter(Collector(lambda r: answers[0](r)))
        file = ("--set", f"otlp_headers_file={headers}")
        daemon = self.daemon(*settings(collector.port), *file)
        client = self.trainer(daemon.socket)
        support.wait_until(lambda: collector.of("metrics"))
        before = peak(daemon.process.pid)
        for step, (name, (answer, words)) in enumerate(WRONG.items(), 1):
            with self.subTest(name):
                answers[0] = answer
                support.wait_until(lambda: status(daemon.socket).get("error"))
                self.assertRegex(status(daemon.socket)["error"], words)
                client.commit(step)
                answers[0] = good
                support.wait_until(lambda: not status(daemon.socket).get("error"))
        self.assertLess(peak(daemon.process.pid), before + (24 << 20))
        self.assertRegex(said(daemon.socket), r"\b[1-9][0-9]* data points dropped")
        log = daemon.log()
        self.assertNotIn("secret", log)
        self.assertNotIn("\x1b", log)
        for kind in ("traces", "metrics"):  # it failed and worked again more often
            self.assertLessEqual(log.count(f"the collector does not take {kind} "), 1, log)
            self.assertLessEqual(log.count(f"the collector takes {kind} again "), 1, log)
        self.assertEqual(log.count("the collector does not take metrics "), 1, log)
        self.assertLessEqual(log.count("warn  rpc "), 4, log)  # gRPC core's own
        client.close()
        self.ends_soon(daemon)

    def test_core_does_not_repeat_itself(self):
        collector = self.enter(Collector(goaway))
        daemon = self.daemon(*settings(collector.port))
        support.wait_until(lambda: len(collector.requests) >= 4)
        lines = [line for line in daemon.log().splitlines() if "Received a GOAWAY" in line]
        self.assertIn(len(lines), (1, 2), lines)  # of one minute, or two

    def test_reloads_do_not_put_it_off(self):
        collector = self.enter(Collector(good))
        daemon = self.daemon(*settings(collector.port, interval="200ms"))
        # each comes long before the interval is over
        support.wait_until(
            lambda: daemon.process.send_signal(signal.SIGHUP) or collector.requests, 20
        )

    def test_counts_that_are_absurd(self):
        answers = [lambda r: r.answer(partial(-5, b'\x1b[31m\n"' + b"x" * 30000))]
        collector = self.enter(Collector(lambda r: answers[0](r)))
        daemon = self.daemon(*settings(collector.port))
        support.wait_until(lambda: int(status(daemon.socket).get("points_sent", 0)))
        self.assertEqual(int(status(daemon.socket).get("points_rejected", 0)), 0)
        answers[0] = lambda r: r.answer(partial((1 << 63) - 1, b"\xff"))
        support.wait_until(lambda: int(status(daemon.socket).get("points_rejected", 0)))
        self.assertLess(int(status(daemon.socket)["points_rejected"]), 1 << 20)
        lines = [line for line in daemon.log().splitlines() if "has not taken all" in line]
        self.assertEqual(len(lines), 1)
        self.assertLess(len(lines[0]), 400)

    def test_nobody_waits_for_a_silent_one(self):
        silent = Collector(accepted=lambda _: time.sleep(3600))
        for name, collector in {
            **({"connects and says nothing": silent} if LONG else {}),
            "closes at once": Collector(accepted=lambda _: True),
            "says what is no HTTP/2": Collector(
                accepted=lambda c: c.sendall(random.randbytes(1 << 16)) or True
            ),
            "never answers": Collector(),
        }.items():
            with self.subTest(name), collector:
                daemon = self.daemon(*settings(collector.port))
                client = self.trainer(daemon.socket)
                support.wait_until(lambda c=collector: c.connections)
                began = time.monotonic()
                client.commit(1)
                client.close()
                web.get(daemon.http, "/api/v1/status")
                self.assertLess(time.monotonic() - began, 2)
                self.ends_soon(daemon)
        self.assertIn("the daemon ends, and the collector has not answered", daemon.log())

    @unittest.skipUnless(LONG and os.geteuid() == 0, "only root, in the long form: a network")
    def test_a_name_server_that_says_nothing(self):
        file = pathlib.Path(self.enter(tempfile.TemporaryDirectory()), "resolv.conf")
        file.write_text("nameserver 127.0.0.1\n", encoding="ascii")
        begin = 'mount --bind "$1" /etc/resolv.conf && ip link set lo up && exec "$2" -c "$3"'
        parts = ("sh", file, sys.executable, UNHEARD)
        done = subprocess.run(
            ["unshare", "--mount", "--net", "sh", "-c", begin, *parts],
            text=True,
            capture_output=True,
            timeout=120,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("DNS resolution failed for collector.example:4317", done.stdout)

    @unittest.skipUnless(LONG, "only in the long form: until a call's time is over")
    def test_a_connection_that_has_died_is_replaced(self):
        """Its other end is gone without a word, as that of a machine that was switched off."""
        collector = self.enter(Collector())

        def answer(request):
            if request.connection is not collector.connections[0]:
                request.answer()

        collector._answer = answer
        daemon = self.daemon(*settings(collector.port))
        support.wait_until(lambda: "not answered in time" in status(daemon.socket)["error"], 30)
        support.wait_until(lambda: int(status(daemon.socket).get("points_sent", 0)), 30)

    @unittest.skipUnless(LONG, "only in the long form: until a call's time is over")
    def test_an_answer_that_comes_too_late(self):
        late = []

        def answer(request):
            time.sleep(11)  # longer than a call may take
            request.answer()
            late.append(request)

        collector = self.enter(Collector(answer))
        daemon = self.daemon(*settings(collector.port))
        support.wait_until(lambda: "not answered in time" in status(daemon.socket)["error"], 30)
        support.wait_until(lambda: late, 30)
        seen = len(collector.requests)
        support.wait_until(lambda: len(collector.requests) > seen, 30)  # it has gone on since
        self.assertEqual(int(status(daemon.socket).get("points_sent", 0)), 0)
        self.ends_soon(daemon)

    @unittest.skipUnless(LONG, "only in the long form: two daemons, one after the other")
    def test_a_handover_does_not_wait_for_it(self):
        collector = self.enter(Collector())
        held = self.enter(support.held_daemon(*settings(collector.port)))
        client = self.trainer(held.socket)
        client.commit(1)
        support.wait_until(lambda: len(collector.requests) >= 2)
        old, began = held.pid(), time.monotonic()
        support.shardctl(held.socket, "handover")
        support.wait_until(lambda: held.pid() not in (0, old), 30)
        support.wait_until(lambda: status(held.socket)["endpoint"], 30)
        self.assertLess(time.monotonic() - began, 5)

    @unittest.skipUnless(LONG, "only in the long form: names are looked up")
    def test_names_that_mean_nothing(self):
        for host in ("nowhere.invalid", "unix", "dns"):
            with self.subTest(host):
                daemon = self.daemon(*settings(1, host=host))
                client = self.trainer(daemon.socket)
                client.commit(1)
                client.close()
                support.wait_until(lambda d=daemon: status(d.socket).get("error"), 30)
                self.assertIn(f"{host}:1", status(daemon.socket)["error"])
                self.assertIn("DNS", status(daemon.socket)["error"])
                self.ends_soon(daemon)


if __name__ == "__main__":
    support.main()
