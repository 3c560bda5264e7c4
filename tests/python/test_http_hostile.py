#!/usr/bin/env python3
"""HTTP clients that do not behave: floods, halves of requests, connections that say nothing."""

import contextlib
import os
import signal
import socket
import threading
import time

import support
import web
from test_http import NOBODY, Job, Shared, as_user, long_only


def talk(http, data, seconds=5.0):
    """What comes until the other end closes, or @seconds have passed."""
    host, _, port = http.rpartition(":")
    said = b""
    with (
        socket.create_connection((host, int(port)), timeout=seconds) as one,
        contextlib.suppress(OSError),
    ):
        one.sendall(data)
        while more := one.recv(65536):
            said += more
    return said


class Hostile(Shared):
    """None of these harms the daemon or the trainers, and nothing of them stays."""

    arguments = ("--set", "stall_after_ms=10s")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.job = Job(cls.daemon, "trains", 2)
        cls.step = 0

    @classmethod
    def tearDownClass(cls):
        with cls.job:
            pass
        super().tearDownClass()

    def train(self, steps):
        for _ in range(steps):
            type(self).step += 1
            self.job.step(self.step)

    def setUp(self):
        self.train(1)
        web.scrape(self.http)
        self.settle()
        self.before = self.daemon.fds(), self.daemon.rss()

    def settle(self):
        last, since = self.daemon.fds(), time.monotonic()
        while time.monotonic() - since < 0.2:
            time.sleep(0.02)
            if self.daemon.fds() != last:
                last, since = self.daemon.fds(), time.monotonic()

    def tearDown(self):
        self.train(1)
        support.wait_until(lambda: self.daemon.fds() <= self.before[0], 30)
        self.assertLess(self.daemon.rss(), self.before[1] + (64 << 20))
        self.assertEqual(200, web.ask(self.http, "/healthz")[0])
        self.assertEqual(
            self.step, web.get(self.http, "/api/v1/jobs?job=trains")["jobs"][0]["step"]
        )
        self.assertNotIn("CHECK", self.daemon.log())

    def test_garbage(self):
        get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
        for data in (
            b"\0" * 4096,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
            os.urandom(8192),
            b"\r\n" * 500,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET /healthz\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET " + b"/" * 100000 + b" HTTP/1.1\r\n\r\n",
            get + b"X: " + b"y" * 200000 + b"\r\n\r\n",
            get + b"".join(b"X%d: y\r\n" % i for i in range(5000)) + b"\r\n",
            get + b"Content-Length: -1\r\n\r\n",
            get + b"Content-Length: 99999999999999999999\r\n\r\n",
            get + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
            get + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"GET /api/v1/jobs?job=%00%00 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            b"GET /%00/metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
            b"GET /api/v1/jobs?job=%zz%&=&&==& HTTP/1.1\r\nHost: localhost\r\n\r\n",
        ):
            said = talk(self.http, data, 0.3)
            self.assertNotRegex(said, b"^HTTP/1.1 200", data[:60])

    def test_a_flood_of_requests_leaves_the_loop_to_others(self):
        """One connection sends without an end, until a call by gRPC is answered."""
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500
        answered, sent = threading.Event(), 0
        host, _, port = self.http.rpartition(":")

        def call():
            support.shardctl(self.daemon.socket, "status")
            answered.set()

        with socket.create_connection((host, int(port))) as one:
            one.setblocking(False)
            caller = threading.Thread(target=call)
            until = time.monotonic() + 20
            while not answered.is_set() and time.monotonic() < until:
                with contextlib.suppress(BlockingIOError):
                    sent += one.send(request[sent % len(request) :])
                with contextlib.suppress(BlockingIOError):
                    one.recv(1 << 20)
                if sent > len(request) and not caller.ident:
                    caller.start()
            self.assertTrue(answered.is_set(), "nothing else is served beside the flood")
        caller.join(20)

    def test_requests_that_fail_at_once_beside_others_that_end(self):
        """A process that is stopped meanwhile finds all of it at once."""
        bad = b"GET /api/v1/units HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        host, _, port = self.http.rpartition(":")
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                every = [
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
                    for _ in range(12)
                ]
                support.wait_until(lambda: self.daemon.fds() >= self.before[0] + 12, 20)
                os.kill(self.daemon.process.pid, signal.SIGSTOP)
                for i, one in enumerate(every):
                    if i % 3 == 1:
                        one.close()
                    else:
                        one.sendall(bad)
                os.kill(self.daemon.process.pid, signal.SIGCONT)
                for i, one in enumerate(every):
                    if i % 3 != 1:
                        self.assertRegex(one.recv(100), b"^HTTP/1.1 400")
            # one client may have 32 connections: those of the next turn would be too many
            support.wait_until(lambda: self.daemon.fds() <= self.before[0], 20)

    def test_a_body_is_refused(self):
        for method in (b"GET", b"POST"):
            said = talk(
                self.http,
                method
                + b" /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
                + b"x" * 100000,
                0.5,
            )
            self.assertNotIn(b" 200 ", said[:20])

    def test_pipelined_requests_are_answered_in_order(self):
        rest = b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
        one = b"GET /healthz" + rest + b"GET /metrics" + rest
        said = talk(
            self.http,
            one * 20 + b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        )
        self.assertEqual(41, said.count(b"HTTP/1.1 200 OK"))
        self.assertEqual(20, said.count(b"# TYPE shardd_build_info"))

    def test_half_closed_and_reset_connections(self):
        host, _, port = self.http.rpartition(":")
        for i in range(200):
            with (
                socket.create_connection((host, int(port)), timeout=5) as one,
                contextlib.suppress(OSError),  # refused, if too many of those before are open
            ):
                one.sendall(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if i % 2:
                    one.shutdown(socket.SHUT_WR)
                else:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.assertEqual("SERVING", support.shardctl(self.daemon.socket, "health")["status"])

    def test_more_connections_than_are_allowed(self):
        host, _, port = self.http.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                one = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
                with contextlib.suppress(OSError):
                    one.sendall(b"GET /heal")  # headers that never end
            support.wait_until(lambda: self.daemon.fds() <= self.before[0] + 40, 20)
            refused = support.shardctl(self.daemon.socket, "status")["http"]["refused"]
            self.assertGreaterEqual(refused, 300 - 32)
            self.assertEqual("SERVING", support.shardctl(self.daemon.socket, "health")["status"])

    def test_trainers_train_on_while_scrapers_scrape(self):
        stop, scrapes = threading.Event(), [0] * 8

        def work(i):
            while not stop.is_set():
                web.scrape(self.http)
                scrapes[i] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(scrapes))]
        for thread in threads:
            thread.start()
        self.train(50)
        stop.set()
        for thread in threads:
            thread.join(20)
        self.assertEqual([], [i for i in scrapes if i == 0])

    @long_only
    def test_ten_thousand_scrapes_at_once(self):
        host, _, port = self.http.rpartition(":")
        answered, lock, calm = [0], threading.Lock(), self.times(30)

        def flood(n):
            with contextlib.ExitStack() as stack:
                many = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(n)]
                for one in many:
                    one.settimeout(10)
                    with contextlib.suppress(OSError):
                        one.connect((host, int(port)))
                        one.sendall(
                            b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                        )
                for one in many:
                    with contextlib.suppress(OSError):
                        said = b""
                        while more := one.recv(1 << 16):
                            said += more
                        with lock:
                            answered[0] += said.startswith(b"HTTP/1.1 200 OK") and said.endswith(
                                b"\n"
                            )

        threads = [threading.Thread(target=flood, args=(100,)) for _ in range(100)]
        for thread in threads:
            thread.start()
        busy = self.times(30)
        for thread in threads:
            thread.join(120)
        self.assertGreater(answered[0], 32)
        # beside a hundred threads that compute on the same cores
        self.assertLess(sorted(busy)[15], 20 * sorted(calm)[15] + 0.25, (calm, busy))

    def times(self, steps):
        """How long steps take."""
        took = []
        for _ in range(steps):
            began = time.monotonic()
            self.train(1)
            took.append(time.monotonic() - began)
        return took

    @long_only
    def test_slow_headers_end_and_block_nobody_else(self):
        host, _, port = self.http.rpartition(":")
        with contextlib.ExitStack() as stack:
            slow = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
                for _ in range(32)
            ]
            with contextlib.suppress(OSError):
                for byte in b"GET /metrics HTTP/1.1\r\n":
                    for one in slow:
                        one.sendall(bytes([byte]))
                    time.sleep(0.05)
            if os.geteuid() == 0:  # another user has room
                self.assertEqual(200, as_user(NOBODY, lambda: web.ask(self.http, "/metrics")[0]))
            began = time.monotonic()
            for one in slow:
                with contextlib.suppress(ConnectionError):
                    one.recv(100)
            self.assertTrue(8 < time.monotonic() - began < 25)


if __name__ == "__main__":
    support.main()
