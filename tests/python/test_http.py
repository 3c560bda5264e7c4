#!/usr/bin/env python3
"""HTTP: probes, metrics, the status as JSON, who may see what, and clients that do not behave."""

import contextlib
import encodings.idna
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.parse

import support
import web

import shardd

TOKEN = "0123456789abcdef-first"
OTHER = "fedcba9876543210-second"
NOBODY, WATCHER = 65534, 64123


class Job:
    """Ranks of this process, one client each, whose unit has one tensor."""

    def __init__(self, daemon, name, world=1, **options):
        self.clients = [shardd.connect(daemon.socket) for _ in range(world)]
        self.units = []
        sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0)
        for rank, client in enumerate(self.clients):
            client.join(name, world, rank, **options)
        self.units = self.all(
            lambda rank: self.clients[rank].register(
                [
                    shardd.UnitSpec(
                        "block",
                        [shardd.TensorSpec("w", (8,), shardd.Init.CONSTANT, 2.0)],
                        optimizer=sgd,
                    )
                ]
            )[0]
        )
        self.all(lambda rank: self.units[rank].init_seed(1))
        self.commit(0)

    def all(self, act, late=None):
        """@act(rank) in a thread for each rank; rank late[0] begins when late[1]() has returned."""
        results, failures = [None] * len(self.clients), []

        def run(rank):
            try:
                if late and late[0] == rank:
                    late[1]()
                results[rank] = act(rank)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(r,)) for r in range(len(self.clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if failures:
            raise failures[0]
        return results

    def commit(self, step):
        self.all(lambda rank: self.clients[rank].commit(step))

    def step(self, number, late=None):
        def act(rank):
            gradient = self.units[rank].gradient()
            gradient.write(bytes(gradient.nbytes))
            self.units[rank].reduce()
            self.clients[rank].step()
            self.clients[rank].commit(number)

        self.all(act, late)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self.clients:
            with contextlib.suppress(shardd.SharddError):
                client.leave()
            client.close()


encodings.idna.ToASCII("x")  # now: as another user the module may not be found


def as_user(uid, function, groups=()):
    """What @function returns in a process of that user, through JSON."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def shardctl_as(uid, daemon, *arguments):
    """Also where that user may not search the folder of the program."""
    program = os.open(os.path.join(support.BIN_DIR, "shardctl"), os.O_RDONLY)
    os.set_inheritable(program, True)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.execve(program, ["shardctl", "--socket", daemon.socket, *arguments], {})
        finally:
            os._exit(99)
    os.close(program)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, status


@contextlib.contextmanager
def secret(text=TOKEN + "\n", mode=0o600):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "token")
        path.write_text(text)
        path.chmod(mode)
        yield path


def check_config(*arguments):
    done = subprocess.run(
        [os.path.join(support.BIN_DIR, "shardd"), "--check-config", *arguments],
        text=True,
        capture_output=True,
        timeout=30,
    )
    return done.returncode, done.stdout + done.stderr


long_only = unittest.skipUnless(os.environ.get("SHARDD_TEST_LONG") == "1", "only in the long form")
needs_root = unittest.skipUnless(os.geteuid() == 0, "needs root, to be other users")


class Shared(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = web.daemon(*cls.arguments)
        cls.daemon = cls.context.__enter__()
        cls.http = cls.daemon.http

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)


class Paths(Shared):
    arguments = ("--set", "stall_after_ms=300")

    def test_the_probes(self):
        self.assertEqual((200, "ok\n"), web.ask(self.http, "/healthz")[::2])
        self.assertEqual((200, "ok\n"), web.ask(self.http, "/readyz")[::2])
        support.shardctl(self.daemon.socket, "cordon")
        try:
            code, _, text = web.ask(self.http, "/readyz")
            self.assertEqual((503, "the daemon admits no new jobs\n"), (code, text))
            self.assertEqual(200, web.ask(self.http, "/healthz")[0])
            self.assertEqual(1, web.scrape(self.http).one("shardd_cordoned"))
        finally:
            support.shardctl(self.daemon.socket, "uncordon")
        self.assertEqual(200, web.ask(self.http, "/readyz")[0])

    def test_wrong_requests(self):
        for path, code in (
            ("/no", 404),
            ("/metrics/", 404),
            ("/api/v1/", 404),
            ("/api/v2/jobs", 404),
            ("/metrics?job=x", 400),
            ("/api/v1/jobs?job=", 400),
            ("/api/v1/jobs?units=maybe", 400),
            ("/api/v1/ops?limit=-1", 400),
            ("/api/v1/ops?limit=1e3", 400),
            ("/api/v1/ops?limit=99999999999999999999", 400),
            ("/api/v1/ops?after=1&run=1", 400),
            ("/api/v1/events?after=1", 400),
            ("/api/v1/events?after=1&run=18446744073709551616", 400),
            ("/api/v1/events?after=x&run=1", 400),
            ("/api/v1/events?after=1&run=", 400),
            ("/api/v1/units", 400),
            ("/api/v1/jobs?job=none", 404),
            ("/api/v1/blame?job=none", 404),
            ("/api/v1/jobs?x%00y=1", 400),
        ):
            got, headers, text = web.ask(self.http, path)
            self.assertEqual(code, got, (path, text))
            self.assertEqual({"code", "message"}, set(json.loads(text)), path)
            self.assertEqual("application/json", headers["Content-Type"])
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "XYZZY"):
            code, headers, _ = web.ask(self.http, "/metrics", method)
            self.assertEqual((405, "GET, HEAD"), (code, headers["Allow"]), method)

    def test_events_go_on_from_an_answer(self):
        def events(**of):
            return web.get(self.http, "/api/v1/events?" + urllib.parse.urlencode(of))

        for name in ("one", "two"):
            support.shardctl(self.daemon.socket, "job", "create", name, "--world-size", "1")
        both = events()
        first = both["events"][-2]
        self.assertEqual(["one", "two"], [e["job"] for e in both["events"][-2:]])
        self.assertEqual([], events(after=both["last"], run=both["run"])["events"])
        later = events(after=first["id"], run=both["run"])
        self.assertEqual(["two"], [e["job"] for e in later["events"]])
        self.assertEqual((both["last"], both["run"]), (later["last"], later["run"]))
        self.assertEqual([], events(after=first["id"], run=both["run"], job="one")["events"])
        other = events(after=both["last"], run=both["run"] + 1)
        self.assertEqual(both, other)
        for name in ("one", "two"):
            support.shardctl(self.daemon.socket, "job", "delete", name)

    def test_an_error_has_an_age(self):
        def age():
            job = web.get(self.http, "/api/v1/jobs?job=errs")["jobs"][0]
            return job["ops_failed"], job["last_error_us"]

        with Job(self.daemon, "errs") as job:
            self.assertEqual((0, 0), age())
            with self.assertRaises(shardd.SharddError):
                job.clients[0].alloc([1 << 40])
            failed, first = age()
            self.assertEqual(1, failed)
            self.assertTrue(0 < first < 60e6, first)
            self.assertGreater(age()[1], first)

    def test_head_has_the_headers_of_get_and_no_body(self):
        for path in ("/metrics", "/api/v1/status", "/healthz", "/no"):
            got, head = web.ask(self.http, path), web.ask(self.http, path, "HEAD")
            self.assertEqual((got[0], ""), head[::2], path)
            self.assertEqual(set(got[1]), set(head[1]))
            self.assertEqual(got[1]["Content-Type"], head[1]["Content-Type"])
            self.assertGreater(int(head[1]["Content-Length"]), 0)
            self.assertEqual(
                ("no-store", "nosniff"), (got[1]["Cache-Control"], got[1]["X-Content-Type-Options"])
            )

    def test_a_host_that_is_not_ours_is_refused(self):
        port = self.http.rpartition(":")[2]
        for host, code in (
            ("localhost", 200),
            (f"LocalHost:{port}", 200),
            (f"127.0.0.1:{port}", 200),
            ("[::1]:80", 200),
            ("10.1.2.3", 200),
            ("evil.example", 403),
            (f"evil.example:{port}", 403),
            ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("a b", 403),
        ):
            self.assertEqual(code, web.ask(self.http, "/api/v1/status", Host=host)[0], host)

    # What changes between two readings, or is only the command's own.
    VOLATILE = {
        "uptime_s",
        "connections",
        "open_descriptors",
        "age_s",
        "requests",
        "refused",
        "users",
        "holders",
        "idle_us",
        "last_error_us",
        "state_ms",
        "now_us",
        "pid",
        "inode",
        "op_us",
        "process_state",
    }

    def strip(self, value):
        if isinstance(value, dict):
            return {k: self.strip(v) if k not in self.VOLATILE else "" for k, v in value.items()}
        return [self.strip(v) for v in value] if isinstance(value, list) else value

    def test_the_api_is_what_shardctl_prints(self):
        with Job(self.daemon, "same", 2) as job:
            job.step(1)
            support.wait_until(
                lambda: (
                    not any(
                        r["pending_ops"]
                        for r in web.get(self.http, "/api/v1/jobs?job=same")["jobs"][0]["ranks"]
                    )
                )
            )
            for path, verb in (
                ("status", ["status"]),
                ("jobs", ["jobs"]),
                ("blame", ["blame"]),
                ("status?job=same", ["status", "same"]),
                ("health", ["health"]),
                ("memory", ["memory"]),
                ("units?job=same", ["units", "same"]),
                ("sessions", ["sessions"]),
                ("ops?limit=7", ["ops", "-n", "7"]),
                ("ops?job=same", ["ops", "same"]),
            ):
                with self.subTest(path):
                    here = web.get(self.http, "/api/v1/" + path)
                    there = support.shardctl(self.daemon.socket, *verb)
                    self.assertEqual(self.strip(there), self.strip(here))
            here, there = (
                web.get(self.http, "/api/v1/users"),
                support.shardctl(self.daemon.socket, "users"),
            )
            self.assertEqual(
                [(u["uid"], [x["name"] for x in u["usage"]]) for u in there["users"]],
                [(u["uid"], [x["name"] for x in u["usage"]]) for u in here["users"]],
            )
            jobs = web.get(self.http, "/api/v1/jobs?job=same&units=no")["jobs"]
            self.assertEqual(([], 1), (jobs[0]["units"], jobs[0]["unit_count"]))
            self.assertEqual(
                "block", web.get(self.http, "/api/v1/jobs?units=yes")["jobs"][0]["units"][0]["name"]
            )

    def test_counters_count(self):
        with Job(self.daemon, "counts", 2) as job:
            before = web.scrape(self.http)
            for number in range(1, 4):
                job.step(number, late=(1, lambda: time.sleep(0.15)))
            after = web.scrape(self.http)

            def grown(name, **labels):
                return after.one(name, **labels) - before.one(name, **labels)

            mine = {"job_name": "counts", "uid": str(os.geteuid())}
            self.assertEqual(
                (3, 3),
                (grown("shardd_job_commits_total", **mine), after.one("shardd_job_step", **mine)),
            )
            self.assertEqual(
                (2, 2),
                (
                    after.one("shardd_job_ranks_joined", **mine),
                    after.one("shardd_job_world_size", **mine),
                ),
            )
            late = [grown("shardd_rank_late_seconds_total", rank=str(r), **mine) for r in (0, 1)]
            self.assertTrue(0.3 < late[1] < 20 and late[0] < late[1] / 2, late)
            waiting = [
                grown("shardd_rank_waiting_seconds_total", rank=str(r), **mine) for r in (0, 1)
            ]
            self.assertGreater(waiting[0], 0.3)
            self.assertLess(waiting[1], waiting[0] / 2)
            self.assertEqual(6, grown("shardd_op_duration_seconds_count", op="Commit"))
            self.assertEqual(
                grown("shardd_job_ops_total", **mine),
                sum(after.of("shardd_op_duration_seconds_count").values())
                - sum(before.of("shardd_op_duration_seconds_count").values()),
            )
            self.assertGreater(grown("shardd_ring_completions_total"), 12)
            self.assertEqual(1, grown("shardd_http_requests_total"))
            self.histograms(after)
            self.monotone(before, after)
        with self.subTest("state"):
            self.assertEqual(
                {("RUNNING",): 1},
                {k[-1:]: v for k, v in after.of("shardd_job_state", **mine).items()},
            )

    def histograms(self, metrics):
        name = "shardd_op_duration_seconds"
        for (op,), count in metrics.of(name + "_count").items():
            buckets = metrics.of(name + "_bucket", op=op)
            steps = sorted((float(le), n) for (le,), n in buckets.items())
            self.assertEqual(float("inf"), steps[-1][0])
            self.assertEqual(count, steps[-1][1], op)
            self.assertEqual(sorted(n for _, n in steps), [n for _, n in steps], op)
            total = metrics.one(name + "_sum", op=op)
            most = sum((n - m) * b for (b, n), (_, m) in zip(steps[:-1], [(0, 0), *steps[:-2]]))
            if steps[-2][1] == count:  # none beyond the last bucket: its limits bound the sum
                self.assertLessEqual(total, most + 1e-6, op)
            waited = sum(metrics.of("shardd_op_waiting_seconds_total", op=op).values())
            self.assertLessEqual(waited, total + 1e-6, op)

    def monotone(self, before, after):
        for (name, labels), value in before.samples.items():
            family = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            if (
                before.types.get(name, before.types.get(family)) != "gauge"
                and (name, labels) in after.samples
            ):
                self.assertLessEqual(value, after.samples[name, labels], (name, labels))

    def test_a_stall_is_counted(self):
        mine = {"job_name": "stalls", "uid": str(os.geteuid())}
        with Job(self.daemon, "stalls", 2) as job:
            seen, seconds, done, failed = [], [], threading.Event(), []

            def look():
                while not done.is_set():
                    try:
                        metrics = web.scrape(self.http)
                    except Exception as error:
                        failed.append((repr(error), self.daemon.log()[-4000:]))
                        return
                    seen.append(metrics.one("shardd_job_stalled", **mine))
                    seconds.append(metrics.one("shardd_job_stalled_seconds_total", **mine))

            looker = threading.Thread(target=look)
            looker.start()
            job.step(1, late=(1, lambda: support.wait_until(lambda: failed or 1 in seen, 20)))
            support.wait_until(lambda: failed or seen[-1] == 0, 20)
            done.set()
            looker.join(30)
            self.assertEqual([], failed)
            self.assertIn(1, seen)
            # it was 0 for a moment at the end of a stall, before the stall was counted
            self.assertEqual(sorted(seconds), seconds)
            self.assertGreater(seconds[-1], 0.3)
            self.assertGreaterEqual(web.scrape(self.http).one("shardd_job_stalls_total", **mine), 1)

    def test_a_death_is_counted(self):
        trainer = (
            "import os, shardd; c = shardd.connect(); c.join('dies', 1, 0, "
            "lifetime=shardd.Lifetime.KEEP); os.kill(os.getpid(), 9)"
        )
        for _ in range(2):
            subprocess.run(
                ["python3", "-c", trainer],
                env={
                    **os.environ,
                    "SHARDD_SOCKET": self.daemon.socket,
                    "PYTHONPATH": str(support.ROOT / "client" / "python"),
                },
                timeout=60,
            )
        support.wait_until(
            lambda: (
                web.scrape(self.http).one(
                    "shardd_job_rank_deaths_total", job_name="dies", uid=str(os.geteuid())
                )
                == 2
            ),
            20,
        )
        support.shardctl(self.daemon.socket, "job", "delete", "dies", "--force")
        self.assertEqual({}, web.scrape(self.http).of("shardd_job_state", job_name="dies"))


@needs_root
class Users(Shared):
    """Over TCP of this machine: who connects is known."""

    arguments = ("--set", f"observer_uids={WATCHER}")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        for uid, name in ((NOBODY, "theirs"), (WATCHER, "watchers")):
            shardctl_as(uid, cls.daemon, "job", "create", name, "--world-size", "1", "--keep")
        shardctl_as(
            NOBODY,
            cls.daemon,
            "job",
            "create",
            "hidden",
            "--world-size",
            "1",
            "--keep",
            "--private",
        )
        mine = ("job", "create", "secret", "--world-size", "1", "--keep", "--private")
        shardctl_as(WATCHER, cls.daemon, *mine)
        support.shardctl(cls.daemon.socket, *mine)
        support.shardctl(cls.daemon.socket, "job", "create", "roots", "--world-size", "1", "--keep")

    def names(self):
        jobs = {j["name"] for j in web.get(self.http, "/api/v1/jobs")["jobs"]}
        metrics = web.scrape(self.http)
        labels = {dict(has).get("job_name") for _, has in metrics.samples} - {None}
        assert labels == jobs, (labels, jobs)
        uids = {dict(has)["uid"] for n, has in metrics.samples if n == "shardd_user_used"}
        return sorted(jobs), sorted(uids)

    def test_a_user_sees_its_own(self):
        self.assertEqual([["hidden", "theirs"], [str(NOBODY)]], as_user(NOBODY, self.names))
        self.assertEqual([[], []], [as_user(12345, self.names)[0], []])

    def test_root_and_observers_see_all_and_of_private_jobs_the_outside(self):
        everything = ["hidden", "roots", "secret", "theirs", "watchers"]
        for uid in (0, WATCHER):
            self.assertEqual(everything, as_user(uid, self.names)[0])
            metrics = as_user(uid, lambda: web.ask(self.http, "/metrics")[2])
            read = web.Metrics(metrics)
            self.assertEqual(6, len(read.of("shardd_job_used_bytes")))
            self.assertEqual(4, len(read.of("shardd_job_world_size")))
            self.assertEqual({}, read.of("shardd_job_world_size", job_name="hidden"))
            # of two private jobs of one name each sees the inside of its own
            [labels] = read.of("shardd_job_world_size", job_name="secret")
            self.assertIn(str(uid), labels)

    def test_what_has_been_is_seen_by_the_same_rule(self):
        def created():
            events = web.get(self.http, "/api/v1/events")["events"]
            return {f"{e['uid']}/{e['job']}": e["text"] for e in events}

        said = as_user(NOBODY, created)
        self.assertEqual({f"{NOBODY}/hidden", f"{NOBODY}/theirs"}, set(said))
        self.assertNotIn("", said.values())
        for uid, other in ((0, WATCHER), (WATCHER, 0)):
            said = as_user(uid, created)
            self.assertEqual(6, len(said))
            self.assertEqual("", said[f"{other}/secret"])
            self.assertEqual("", said[f"{NOBODY}/hidden"])
            self.assertNotEqual("", said[f"{uid}/secret"])
            own = as_user(uid, lambda: web.get(self.http, "/api/v1/events?job=secret")["events"])
            self.assertEqual([uid], [e["uid"] for e in own])

    def test_a_job_of_another_user_is_not_found(self):
        for path in (
            "jobs?job=0/roots",
            "units?job=0/roots",
            "ops?job=0/roots",
            "blame?job=0/roots",
            "jobs?job=roots",
        ):
            code, text = as_user(
                NOBODY, lambda path=path: web.ask(self.http, "/api/v1/" + path)[::2]
            )
            self.assertEqual(404, code, text)
        self.assertEqual(
            200, as_user(WATCHER, lambda: web.ask(self.http, "/api/v1/jobs?job=0/roots")[0])
        )

    def test_a_token_that_nobody_set_is_refused(self):
        code, text = as_user(0, lambda: web.ask(self.http, "/metrics", **web.bearer(TOKEN))[::2])
        self.assertEqual(401, code)
        self.assertIn("http_token_file is not set", text)


@needs_root
class UsersOfASocket(Users):
    @classmethod
    def setUpClass(cls):
        real, web.daemon = web.daemon, lambda *a: real(*a, http="unix")
        try:
            super().setUpClass()
        finally:
            web.daemon = real


@needs_root
class Limits(unittest.TestCase):
    def test_allow_uids_and_allow_gids_hold(self):
        allowed, member, other = 64301, 64302, 64303
        gid = 64310
        arguments = ("--set", f"allow_uids={allowed}", "--set", f"allow_gids={gid}")
        arguments += ("--set", f"observer_uids={WATCHER}")

        def status(http):
            return web.ask(http, "/api/v1/status?units=no")[::2]

        for place in (None, "unix"):
            with web.daemon(*arguments, http=place) as daemon:
                for uid in (0, allowed, WATCHER):
                    self.assertEqual(200, as_user(uid, lambda: status(daemon.http))[0], uid)
                code, text = as_user(other, lambda: status(daemon.http))
                self.assertEqual(403, code)
                self.assertIn(f"user {other} may not use this daemon", text)
                self.assertEqual(200, as_user(other, lambda: web.ask(daemon.http, "/healthz")[0]))
                code, text = as_user(member, lambda: status(daemon.http), groups=[gid])
                # the kernel tells the groups of the other end of a unix socket only
                self.assertEqual(200 if place else 403, code, text)

    def test_answers_are_on_the_account_of_their_user(self):
        limit = f"{NOBODY}:max_daemon_bytes=1000"
        with web.daemon("--set", f"user_limits={limit}") as daemon:
            code, text = as_user(NOBODY, lambda: web.ask(daemon.http, "/metrics")[::2])
            self.assertEqual(503, code)
            self.assertIn("max_daemon_bytes", text)
            self.assertEqual(200, as_user(WATCHER, lambda: web.ask(daemon.http, "/metrics")[0]))


class Token(unittest.TestCase):
    def test_it_shows_all_and_a_wrong_one_nothing(self):
        with secret() as path, web.daemon("--set", f"http_token_file={path}") as daemon:
            self.assertEqual(200, web.ask(daemon.http, "/metrics", **web.bearer(TOKEN))[0])
            for wrong in (TOKEN[:-1], TOKEN + "x", "", "x" * 5000, TOKEN.upper()):
                code, headers, text = web.ask(daemon.http, "/metrics", **web.bearer(wrong))
                self.assertEqual(401, code, wrong)
                self.assertEqual('Bearer realm="shardd"', headers["WWW-Authenticate"])
                self.assertNotIn(TOKEN, text)
            self.assertEqual(
                401, web.ask(daemon.http, "/metrics", Authorization="Basic " + TOKEN)[0]
            )
            self.assertEqual(200, web.ask(daemon.http, "/healthz", **web.bearer("wrong"))[0])
            path.write_text(OTHER + "\n")
            self.assertEqual(200, web.ask(daemon.http, "/metrics", **web.bearer(TOKEN))[0])
            daemon.process.send_signal(signal.SIGHUP)
            support.wait_until(
                lambda: web.ask(daemon.http, "/metrics", **web.bearer(OTHER))[0] == 200, 20
            )
            self.assertEqual(401, web.ask(daemon.http, "/metrics", **web.bearer(TOKEN))[0])
            path.write_text("short\n")  # the one before stays
            daemon.process.send_signal(signal.SIGHUP)
            support.wait_until(lambda: "16 to 255" in daemon.log(), 20)
            self.assertEqual(200, web.ask(daemon.http, "/metrics", **web.bearer(OTHER))[0])
            self.assertNotIn(TOKEN, daemon.log() + repr(support.shardctl(daemon.socket, "status")))

    def test_files_that_are_refused(self):
        cases = (
            ("short\n", 0o600, "16 to 255"),
            (TOKEN + "\n" + TOKEN + "\n", 0o600, "one line"),
            ("x" * 256, 0o600, "16 to 255"),
            (TOKEN, 0o604, "other users"),
            ("", 0o600, "16 to 255"),
        )
        for text, mode, why in cases:
            with secret(text, mode) as path:
                code, said = check_config(
                    "--http", "127.0.0.1:9400", "--set", f"http_token_file={path}"
                )
                self.assertEqual(2, code, said)
                self.assertIn(why, said)
        code, said = check_config(
            "--http", "127.0.0.1:9400", "--set", "http_token_file=/nonexistent"
        )
        self.assertEqual((2, True), (code, "no such file" in said), said)

    def test_other_machines_need_one(self):
        for address in ("0.0.0.0:9400", "[::]:9400", "10.0.0.1:9400"):
            code, said = check_config("--http", address)
            self.assertEqual(2, code, said)
            self.assertIn("which other machines reach", said)
            with secret() as path:
                self.assertEqual(
                    0, check_config("--http", address, "--set", f"http_token_file={path}")[0]
                )
        for address in ("127.0.0.1:9400", "localhost:9400", "[::1]:9400", "unix:/tmp/x"):
            self.assertEqual(0, check_config("--http", address)[0], address)
        for address in (
            "127.0.0.1",
            "127.0.0.1:99999",
            "unix:",
            "unix:relative",
            ":9400",
            "http://x:1",
        ):
            self.assertEqual(2, check_config("--http", address)[0], address)


class Address(unittest.TestCase):
    def test_one_in_use_is_taken_later(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            with web.daemon(http=address, wait=False) as daemon:
                support.wait_until(lambda: "not listening" in daemon.log())
                self.assertIn("in use", support.shardctl(daemon.socket, "status")["http"]["error"])
                self.assertEqual("SERVING", support.shardctl(daemon.socket, "health")["status"])
                taken.close()
                support.wait_until(daemon.listens, 20)
                self.assertEqual(200, web.ask(address, "/healthz")[0])

    def test_a_daemon_that_drains_says_so(self):
        with web.daemon("--set", "drain_timeout_ms=20s") as daemon, Job(daemon, "drains") as job:
            daemon.process.send_signal(signal.SIGTERM)
            support.wait_until(lambda: web.ask(daemon.http, "/readyz")[0] == 503, 20)
            self.assertEqual(200, web.ask(daemon.http, "/healthz")[0])
            self.assertEqual(1, web.scrape(daemon.http).one("shardd_draining"))
            self.assertEqual("NOT_SERVING", web.get(daemon.http, "/api/v1/health")["status"])
            job.clients[0].leave()
            self.assertEqual(0, daemon.process.wait(30))

    def test_sigterm_with_requests_under_way(self):
        with web.daemon() as daemon, contextlib.ExitStack() as stack:
            host, _, port = daemon.http.rpartition(":")
            for _ in range(20):
                one = stack.enter_context(socket.create_connection((host, int(port))))
                one.sendall(
                    b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5 + b"GET /metr"
                )

    def test_sigterm_while_answers_are_made(self):
        """Threads make the texts of a large job, which is gone before they are ready."""
        with web.daemon() as daemon, contextlib.ExitStack() as stack:
            client = stack.enter_context(shardd.connect(daemon.socket))
            client.join("large", 1, 0)
            client.register(
                [
                    shardd.UnitSpec(f"unit{i}", [shardd.TensorSpec("w", (8,))])
                    for i in range(20000)
                ]
            )
            host, _, port = daemon.http.rpartition(":")
            for _ in range(2):
                one = stack.enter_context(socket.create_connection((host, int(port))))
                one.sendall(b"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            support.wait_until(lambda: web.ask(daemon.http, "/healthz")[0] == 200, 20)
            daemon.process.send_signal(signal.SIGTERM)
            client.leave()
            self.assertEqual(0, daemon.process.wait(30))


class Handover(unittest.TestCase):
    def test_each_process_has_its_start(self):
        """That of the daemon stays, as its jobs do: alerts about restarts need both."""
        address = f"127.0.0.1:{support.free_ports(1)[0]}"
        with support.held_daemon("--http", address) as held:

            def is_served(by):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    return web.scrape(address).one("process_start_time_seconds") > by

            began = time.time()
            support.wait_until(lambda: is_served(began - 60))
            before = web.scrape(address)
            starts = [before.one("process_start_time_seconds")]
            self.assertEqual(starts[0], web.scrape(address).one("process_start_time_seconds"))
            self.assertLess(starts[0], time.time())
            os.kill(held.pid(), signal.SIGKILL)
            support.wait_until(lambda: is_served(starts[0]))
            after = web.scrape(address)
            self.assertLess(starts[0], after.one("process_start_time_seconds"))
            name = "shardd_start_time_seconds"
            self.assertEqual(before.one(name), after.one(name))

    @long_only
    def test_with_requests_under_way(self):
        address = f"127.0.0.1:{support.free_ports(1)[0]}"
        with support.held_daemon("--http", address) as held:

            class This:
                socket = held.socket

            stop, answers = threading.Event(), []

            def work():
                while not stop.is_set():
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        answers.append(web.ask(address, "/api/v1/status")[0])

            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            with Job(This, "moves", 2) as job:
                job.step(1)
                for number in range(2, 5):
                    old = held.pid()
                    support.shardctl(held.socket, "handover")
                    support.wait_until(lambda old=old: held.pid() not in (0, old), 30)
                    with contextlib.suppress(shardd.SharddError):
                        job.step(number)
                    before = len(answers)
                    support.wait_until(lambda before=before: len(answers) > before + 20, 30)
            stop.set()
            for thread in threads:
                thread.join(20)
            self.assertEqual({200}, set(answers))


if __name__ == "__main__":
    support.main()
