#!/usr/bin/env python3
"""The exporter to OpenTelemetry, against a collector of our own (otlp_collector.py): traces, the
metrics beside a scrape, and collectors that refuse, are slow, speak TLS, or are not there."""

import array
import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import support
import web

import shardd

GRPC = os.environ.get("SHARDD_GRPC_VENV", "/none") + "/bin/python"
LONG = os.environ.get("SHARDD_TEST_LONG") == "1"
COLLECTOR = pathlib.Path(__file__).with_name("otlp_collector.py")


def has_collector():
    command = [GRPC, "-c", "import grpc_status, opentelemetry.proto.trace.v1.trace_pb2"]
    return os.access(GRPC, os.X_OK) and subprocess.run(command, stderr=-3).returncode == 0


def attributes(item):
    """Of a resource, span or point, as Python's values."""
    values = {}
    for pair in item.get("attributes", []):
        [(kind, value)] = pair["value"].items()
        values[pair["key"]] = int(value) if kind == "int_value" else value
    return values


class Collector:
    def __init__(self, *files, port=0):
        self.process = subprocess.Popen(
            [GRPC, str(COLLECTOR), str(port), *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = json.loads(self.process.stdout.readline())["port"]
        self.requests, self._lines = [], queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def order(self, **what):
        """How requests are answered from now on."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        support.wait_until(lambda: self.look() == "ordered", 20)

    def look(self):
        """Take what has come."""
        try:
            line = self._lines.get(timeout=0.02)
        except queue.Empty:
            return None
        if "ordered" in line:
            return "ordered"
        self.requests.append(line)
        return line

    def of(self, kind, answered=True):
        return [
            r
            for r in self.requests
            if r["kind"] == kind and not (answered and "status" in r["answer"])
        ]

    def resources(self, kind):
        for request in self.of(kind):
            yield from request["resources"]["resource_" + ("spans" if kind == "traces" else kind)]

    def spans(self):
        return [
            span
            for resource in self.resources("traces")
            for scope in resource["scope_spans"]
            for span in scope["spans"]
        ]

    def roots(self):
        return [span for span in self.spans() if "parent_span_id" not in span]

    def wait(self, holds, seconds=30):
        def now():
            self.look()
            return holds()

        support.wait_until(now, seconds)

    def metrics(self, after):
        """Of the first request of metrics that came after that time."""
        found = lambda: [r for r in self.of("metrics") if r["at"] > after]  # noqa: E731
        self.wait(found)
        return {
            metric["name"]: metric
            for resource in found()[0]["resources"]["resource_metrics"]
            for scope in resource["scope_metrics"]
            for metric in scope["metrics"]
        }


def exporting(collector, *arguments, every=1, interval="100ms", scheme="http"):
    return web.daemon(
        "--set",
        f"otlp={scheme}://localhost:{collector if isinstance(collector, int) else collector.port}",
        "--set",
        f"otlp_trace_every={every}",
        "--set",
        f"otlp_interval_ms={interval}",
        *arguments,
    )


def train(rank, world, socket, job, steps, local=None):
    """@socket: one, or those of the ranks' nodes."""
    at = socket if isinstance(socket, str) else socket[rank]
    with shardd.connect(at) as client:
        client.join(job, world, rank, local=local)
        spec = shardd.TensorSpec("w", (64,), shardd.Init.CONSTANT, 2.0)
        adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.05)
        [unit] = client.register([shardd.UnitSpec("block", [spec], optimizer=adamw)])
        unit.init_seed(1)
        for number in range(1, steps + 1):
            values = array.array("f", unit.gather().view())
            unit.release()
            unit.gradient().view()[:] = values
            unit.reduce()
            client.step()
            client.commit(number)
        client.leave()


PRIVATE = """
import os, shardd
os.setuid(65534)
with shardd.connect({!r}) as client:
    client.join("secret", 1, 0, private=True)
    [unit] = client.register([shardd.UnitSpec("b", [shardd.TensorSpec("w", (8,))])])
    unit.init_seed(1)
    client.commit(1)
"""


def status(daemon):
    return support.shardctl(daemon.socket, "status")["otlp"]


def number(text):
    return int(text)


def number_of(daemon, what):
    return number(status(daemon).get(what, 0))


@unittest.skipUnless(
    has_collector(), f"no opentelemetry-proto for {GRPC}, which tests/run makes (SHARDD_GRPC_VENV)"
)
class Exporter(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)

    def enter(self, context):
        return self.stack.enter_context(context)

    def test_a_trace_of_each_sampled_step(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector, every=2))
        support.ranks(train, 2, daemon.socket, "traced", 5)
        roots = lambda: [s for s in collector.spans() if "parent_span_id" not in s]  # noqa: E731
        collector.wait(lambda: len(roots()) == 2)
        self.assertEqual({s["name"] for s in roots()}, {"step 2", "step 4"})
        for root in roots():
            spans = [s for s in collector.spans() if s["trace_id"] == root["trace_id"]]
            own = attributes(root)
            self.assertTrue(own["shardd.committed"])
            self.assertEqual(own["shardd.ops"], len(spans) - 1)
            self.assertEqual(own["shardd.job"], "traced")
            self.assertEqual(f"step {own['shardd.step']}", root["name"])
            self.assertEqual(len({s["span_id"] for s in spans}), len(spans))
            self.check_children(root, [s for s in spans if s is not root])
        resource = attributes(next(collector.resources("traces"))["resource"])
        self.assertEqual(resource["service.name"], "shardd")
        self.assertEqual(resource["process.pid"], daemon.process.pid)
        self.assertRegex(resource["service.instance.id"], "^[0-9a-f]{32}$")
        self.assertTrue(resource["host.name"] and resource["service.version"])

    def check_children(self, root, children):
        names = [s["name"] for s in children]
        for name, per_rank in (("Gather", 1), ("Reduce", 1), ("Step", 1), ("Commit", 1)):
            self.assertEqual(names.count(name), 2 * per_rank, names)
        for span in children:
            begin, end = int(span["start_time_unix_nano"]), int(span["end_time_unix_nano"])
            self.assertEqual(span["parent_span_id"], root["span_id"])
            self.assertLessEqual(int(root["start_time_unix_nano"]), begin)
            self.assertLessEqual(begin, end)
            self.assertLessEqual(end, int(root["end_time_unix_nano"]))
            self.assertLess(abs(end / 1e9 - time.time()), 120)
            self.assertNotIn("status", span)
            self.assertIn(attributes(span)["shardd.rank"], (0, 1))
            for event in span.get("events", []):
                self.assertTrue(begin <= int(event["time_unix_nano"]) <= end)
        for span in (s for s in children if s["name"] == "Reduce"):
            self.assertEqual(attributes(span)["shardd.unit"], "block")
        lasts = {attributes(s).get("shardd.last_rank") for s in children if s["name"] == "Commit"}
        self.assertEqual(len(lasts), 1)
        self.assertTrue(lasts <= {0, 1}, lasts)

    def test_metrics_are_those_of_a_scrape(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector))
        with shardd.connect(daemon.socket) as client:
            client.join("held", 1, 0)
            [unit] = client.register([shardd.UnitSpec("b", [shardd.TensorSpec("w", (8,))])])
            unit.init_seed(1)
            client.commit(1)
            text = web.scrape(daemon.http)
            exported = collector.metrics(time.time())
            begun = time.time()
        sampled = {name for name, _ in text.samples}
        changing = (  # between the scrape and the export
            "shardd_http",
            "shardd_otlp",
            "shardd_rpc",
            "shardd_user",
            "shardd_rank_waiting",
            "shardd_open_fds",
        )
        for name, kind in text.types.items():
            if kind == "histogram":
                self.check_histogram(text, name, exported.pop(name))
                continue
            if name not in sampled:
                self.assertNotIn(name, exported)
                continue
            metric = exported.pop(name)
            data = metric["sum" if kind == "counter" else "gauge"]
            self.assertTrue(metric["description"])
            if kind == "counter":
                self.assertTrue(data["is_monotonic"])
                self.assertEqual(
                    data["aggregation_temporality"], "AGGREGATION_TEMPORALITY_CUMULATIVE"
                )
            values = {
                tuple(sorted(attributes(p).items())): float(p.get("as_int", p.get("as_double", 0)))
                for p in data["data_points"]
            }
            of_text = {has: value for (n, has), value in text.samples.items() if n == name}
            self.assertEqual(values.keys(), of_text.keys(), name)
            if not name.startswith(changing):
                self.assertEqual(values, of_text, name)
            for p in data["data_points"]:
                self.assertLess(abs(int(p["time_unix_nano"]) / 1e9 - begun), 60)
                if kind == "counter":
                    self.assertLess(int(p["start_time_unix_nano"]), int(p["time_unix_nano"]))
        self.assertEqual(exported, {})

    def check_histogram(self, text, name, metric):
        self.assertEqual(metric["unit"], "s")
        self.assertTrue(metric["histogram"]["data_points"])
        for point in metric["histogram"]["data_points"]:
            op = attributes(point)["op"]
            bounds = [*point["explicit_bounds"], float("inf")]
            counts = [int(n) for n in point["bucket_counts"]]
            so_far = [sum(counts[: i + 1]) for i in range(len(counts))]
            said = text.of(name + "_bucket", op=op)
            self.assertEqual({float(le): n for (le,), n in said.items()}, dict(zip(bounds, so_far)))
            self.assertEqual(int(point["count"]), text.one(name + "_count", op=op))
            self.assertAlmostEqual(point["sum"], text.one(name + "_sum", op=op), places=6)

    def test_a_job_of_the_same_name_has_traces_of_its_own(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector))
        for _ in range(2):
            train(0, 1, daemon.socket, "again", 1)
        collector.wait(lambda: len(collector.roots()) == 2)
        self.assertEqual({s["name"] for s in collector.roots()}, {"step 1"})
        self.assertEqual(len({s["trace_id"] for s in collector.roots()}), 2)
        self.assertEqual(len({s["span_id"] for s in collector.roots()}), 2)

    def test_counters_of_a_job_start_with_it(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector))
        starts = []
        for _ in range(2):
            with shardd.connect(daemon.socket) as client:
                client.join("again", 1, 0)
                client.barrier()
                seen = [collector.metrics(time.time()) for _ in range(2)]
            points = [
                [m[name]["sum"]["data_points"][0]["start_time_unix_nano"] for m in seen]
                for name in (
                    "shardd_rpc_calls_total",
                    "shardd_job_ops_total",
                    "shardd_rank_waiting_seconds_total",
                )
            ]
            for first, second in points:
                self.assertEqual(first, second)
            starts.append([int(first) for first, _ in points])
        (first, job, rank), (second, next_job, next_rank) = starts
        self.assertEqual(first, second)
        self.assertTrue(first < job <= rank < next_job <= next_rank, starts)

    def test_a_trace_has_one_root_with_more_jobs_than_places(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector))
        clients = [self.enter(shardd.connect(daemon.socket)) for _ in range(70)]
        for number, client in enumerate(clients):
            client.join(f"job{number}", 1, 0)
        for client in 2 * clients:  # the first steps go on while the last ones begin
            client.barrier()
        for client in clients:
            client.leave()
        collector.wait(lambda: number_of(daemon, "spans_sent") == len(collector.spans()) >= 64)
        ids = [s["span_id"] for s in collector.roots()]
        self.assertEqual(len(set(ids)), len(ids))
        self.assertGreater(number_of(daemon, "spans_dropped"), 0)

    def test_a_failed_op_is_an_error(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector))
        with shardd.connect(daemon.socket) as client:
            client.join("failing", 1, 0)
            [unit] = client.register([shardd.UnitSpec("b", [shardd.TensorSpec("w", (8,))])])
            with self.assertRaises(shardd.SharddError):
                unit.reduce()
        failed = lambda: [s for s in collector.spans() if "status" in s]  # noqa: E731
        collector.wait(lambda: {s["name"] for s in failed()} >= {"Reduce", "step 1"})
        by_name = {s["name"]: s for s in failed()}
        self.assertEqual(by_name["Reduce"]["status"]["code"], "STATUS_CODE_ERROR")
        self.assertRegex(by_name["Reduce"]["status"]["message"], "^[A-Z_]+: .")
        self.assertRegex(by_name["step 1"]["status"]["message"], "^1 of [0-9]+ ops failed$")
        self.assertFalse(attributes(by_name["step 1"])["shardd.committed"])

    def test_a_checkpoint_is_in_the_trace_of_its_step(self):
        folder = self.enter(tempfile.TemporaryDirectory())
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector, "--set", f"checkpoint_roots={folder}"))
        with shardd.connect(daemon.socket) as client:
            client.join("saved", 1, 0)
            [unit] = client.register([shardd.UnitSpec("b", [shardd.TensorSpec("w", (8,))])])
            unit.init_seed(1)
            client.commit(7)
            os.mkdir(folder + "/one")
            support.shardctl(daemon.socket, "checkpoint", "save", "saved", folder + "/one")
        spans = lambda: {s["name"]: s for s in collector.spans()}  # noqa: E731
        collector.wait(lambda: {"Checkpoint", "step 7"} <= spans().keys())
        checkpoint, root = spans()["Checkpoint"], spans()["step 7"]
        self.assertEqual(checkpoint["parent_span_id"], root["span_id"])
        self.assertEqual(checkpoint["trace_id"], root["trace_id"])
        self.assertEqual(attributes(checkpoint)["shardd.bytes"], 32)
        self.assertNotIn("status", checkpoint)

    def test_a_collector_that_comes_later_gets_what_waited(self):
        [port] = support.free_ports(1)
        daemon = self.enter(exporting(port))
        support.ranks(train, 1, daemon.socket, "early", 3)
        support.wait_until(lambda: status(daemon).get("error"))
        self.assertRegex(status(daemon)["error"], "^(traces|metrics).*: UNAVAILABLE: ")
        collector = self.enter(Collector(port=port))
        names = lambda: {s["name"] for s in collector.spans()}  # noqa: E731
        collector.wait(lambda: {"step 1", "step 2", "step 3"} <= names())
        support.wait_until(lambda: not status(daemon).get("error"))
        said = status(daemon)
        self.assertEqual(number(said["spans_sent"]), len(collector.spans()))
        self.assertEqual(number(said.get("spans_dropped", 0)), 0)
        self.assertGreater(number(said["requests_failed"]), 0)
        log = daemon.log()
        for kind in ("traces", "metrics"):
            self.assertEqual(log.count(f"the collector does not take {kind} "), 1, log)
            self.assertEqual(log.count(f"the collector takes {kind} again "), 1, log)

    def test_refusals(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector, interval="300ms"))
        collector.order(kind="traces", status="UNAVAILABLE", retry_ms=700)
        support.ranks(train, 1, daemon.socket, "refused", 1)
        collector.wait(lambda: len(collector.of("traces", answered=False)) >= 2)
        first, again = collector.of("traces", answered=False)[:2]
        self.assertGreater(again["at"] - first["at"], 0.69)
        self.assertEqual(first["resources"], again["resources"])
        collector.order(kind="traces")

        def counts_agree():  # another batch may be on its way
            return len(collector.spans()) == number(status(daemon)["spans_sent"]) > 0

        collector.wait(counts_agree)
        # refused for good: dropped at once
        collector.order(kind="traces", status="INVALID_ARGUMENT", message="not \x01 this")
        support.ranks(train, 1, daemon.socket, "dropped", 1)
        support.wait_until(lambda: number(status(daemon).get("spans_dropped", 0)))
        self.assertIn("INVALID_ARGUMENT", status(daemon)["error"])
        collector.wait(counts_agree)  # the collector does not have what it refused
        # a part is not taken
        collector.order(kind="traces", rejected=2, message="two are too old")
        support.ranks(train, 1, daemon.socket, "partly", 1)
        support.wait_until(lambda: number(status(daemon).get("spans_rejected", 0)) >= 2)
        self.assertEqual(daemon.log().count("has not taken all traces"), 1)
        self.assertIn("two are too old", daemon.log())

    def test_a_slow_collector_holds_nobody_up(self):
        collector = self.enter(Collector())
        with exporting(collector) as daemon:
            collector.order(delay=0.3)
            support.ranks(train, 1, daemon.socket, "quick", 2)
            collector.wait(lambda: len(collector.of("metrics")) >= 3)
            self.assertEqual({r["open"] for r in collector.requests}, {1})  # one at a time
            collector.order(delay=30)
            so_far = len(collector.requests)
            support.ranks(train, 1, daemon.socket, "again", 2)
            web.get(daemon.http, "/api/v1/status")
            began = time.monotonic()
        self.assertLess(time.monotonic() - began, 15)  # the daemon's end waits for a second
        while collector.look():
            pass
        self.assertLessEqual(len(collector.requests), so_far + 2)

    def test_the_end_sends_what_is_left(self):
        collector = self.enter(Collector())
        with exporting(collector, interval="1h") as daemon:
            support.ranks(train, 1, daemon.socket, "last", 2)
            self.assertEqual(collector.requests, [])
        collector.wait(lambda: {"step 1", "step 2"} <= {s["name"] for s in collector.spans()})
        collector.wait(lambda: collector.of("metrics"))

    @unittest.skipUnless(LONG, "only in the long form: an etcd and two daemons")
    def test_nodes_have_one_trace(self):
        support.need_etcd(self)
        collector = self.enter(Collector())
        keys = {
            "SHARDD_OTLP": f"http://localhost:{collector.port}",
            "SHARDD_OTLP_INTERVAL_MS": "100",
            "SHARDD_OTLP_TRACE_EVERY": "1",
        }
        with mock.patch.dict(os.environ, keys):
            at = self.enter(support.cluster("a", "b"))
        support.ranks(train, 2, [at["a"], at["b"]], "wide", 2, (0, 1))
        by_host = lambda: {  # noqa: E731
            (attributes(resource["resource"])["host.name"], span["name"]): span
            for resource in collector.resources("traces")
            for scope in resource["scope_spans"]
            for span in scope["spans"]
        }
        wanted = {(node, name) for node in "ab" for name in ("step 1", "step 2", "Commit")}
        collector.wait(lambda: wanted <= by_host().keys())
        spans = by_host()
        for step in ("step 1", "step 2"):
            root, other = spans["a", step], spans["b", step]
            self.assertEqual(root["trace_id"], other["trace_id"])
            self.assertNotIn("parent_span_id", root)
            self.assertEqual(other["parent_span_id"], root["span_id"])
            self.assertTrue(attributes(other)["shardd.committed"])
        self.assertNotEqual(spans["a", "step 1"]["trace_id"], spans["a", "step 2"]["trace_id"])
        resource = attributes(next(collector.resources("traces"))["resource"])
        self.assertEqual(resource["service.namespace"], "test")

    def test_a_handover_leaves_nothing_behind(self):
        collector = self.enter(Collector())
        settings = {"otlp": f"http://localhost:{collector.port}", "otlp_trace_every": 1}
        settings["otlp_interval_ms"] = "1h"
        arguments = [a for pair in settings.items() for a in ("--set", "{}={}".format(*pair))]
        held = self.enter(support.held_daemon(*arguments))
        support.ranks(train, 1, held.socket, "before", 1)
        old = held.pid()
        support.shardctl(held.socket, "handover")
        support.wait_until(lambda: held.pid() not in (0, old), 30)
        collector.wait(lambda: "step 1" in {s["name"] for s in collector.spans()})
        self.assertEqual(collector.of("metrics"), [])  # the successor has them
        support.ranks(train, 1, held.socket, "after", 1)
        self.assertEqual(support.shardctl(held.socket, "status")["otlp"]["error"], "")

    @unittest.skipUnless(os.geteuid() == 0, "only root can be another user")
    def test_private_jobs_of_others_have_no_spans(self):
        collector = self.enter(Collector())
        daemon = self.enter(exporting(collector))
        os.chmod(os.path.dirname(daemon.socket), 0o755)
        paths = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        command = [sys.executable, "-c", PRIVATE.format(daemon.socket)]
        subprocess.run(command, check=True, timeout=60, env=paths)
        support.ranks(train, 1, daemon.socket, "open", 1)
        collector.wait(lambda: "step 1" in {s["name"] for s in collector.spans()})
        self.assertEqual({attributes(s)["shardd.job"] for s in collector.spans()}, {"open"})

    def test_headers_and_tls(self):
        folder = self.enter(tempfile.TemporaryDirectory())
        subprocess.run(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
            f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {folder}/key "
            f"-out {folder}/cert",
            shell=True,
            check=True,
            capture_output=True,
        )
        headers = pathlib.Path(folder, "headers")
        headers.write_text("# of the vendor\nAuthorization: Bearer secret-1\nx-tenant:  a\r\n\n")
        headers.chmod(0o600)
        collector = self.enter(Collector(f"{folder}/cert", f"{folder}/key"))
        daemon = self.enter(
            exporting(
                collector,
                "--set",
                f"otlp_ca={folder}/cert",
                "--set",
                f"otlp_headers_file={headers}",
                scheme="https",
            )
        )
        collector.wait(lambda: collector.of("metrics"))
        got = collector.of("metrics")[0]["headers"]
        self.assertEqual((got["authorization"], got["x-tenant"]), ("Bearer secret-1", "a"))
        headers.write_text("authorization: Bearer secret-2\n")
        daemon.process.send_signal(1)
        collector.wait(
            lambda: collector.of("metrics")[-1]["headers"]["authorization"] == "Bearer secret-2"
        )
        self.assertNotIn("x-tenant", collector.of("metrics")[-1]["headers"])
        self.assertNotIn("secret", daemon.log())
        with exporting(collector, scheme="https") as other:  # that CA is none of the machine's
            support.wait_until(lambda: status(other).get("error"))
            self.assertIn("certificate is not accepted", status(other)["error"])
        with exporting(collector) as other:
            support.wait_until(lambda: status(other).get("error"))
            self.assertIn("write https:// in otlp", status(other)["error"])
        plain = self.enter(Collector())
        plain.order(status="UNAUTHENTICATED")
        with exporting(plain, scheme="https") as other:
            support.wait_until(lambda: status(other).get("error"))
            self.assertIn("speaks no TLS", status(other)["error"])
        with exporting(plain) as other:
            support.wait_until(lambda: status(other).get("error"))
            self.assertIn("wants other headers", status(other)["error"])

    @unittest.skipUnless(LONG, "only in the long form: ten thousand ops")
    def test_what_finds_no_place_is_counted(self):
        collector = self.enter(Collector())
        collector.order(status="UNAVAILABLE")
        daemon = self.enter(exporting(collector))
        support.ranks(train, 1, daemon.socket, "many", 1700)  # of six ops and a root
        support.wait_until(lambda: number(status(daemon).get("spans_dropped", 0)))
        collector.order()

        def all_came():
            sent = number(status(daemon).get("spans_sent", 0))
            return sent == len(collector.spans()) and sent > 4096

        collector.wait(all_came, 120)
        self.assertLess(max(r["bytes"] for r in collector.requests), 2 << 20)
        dropped = number(status(daemon)["spans_dropped"])
        self.assertEqual(web.scrape(daemon.http).one("shardd_otlp_spans_dropped_total"), dropped)
        self.assertGreater(len(collector.spans()) + dropped, 1700 * 7)


class Configuration(unittest.TestCase):
    def check(self, *settings):
        arguments = [a for s in settings for a in ("--set", s)]
        done = subprocess.run(
            [os.path.join(support.BIN_DIR, "shardd"), "--check-config", *arguments],
            text=True,
            capture_output=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    def refused(self, words, *settings):
        code, text = self.check(*settings)
        self.assertEqual(code, 2, text)
        self.assertIn(words, text)

    def test_what_is_wrong_is_refused(self):
        self.assertEqual(self.check("otlp=http://[::1]:4317/")[0], 0)
        self.assertEqual(self.check("otlp=https://collector.example:4317")[0], 0)
        for url in ("localhost:4317", "grpc://localhost:4317", "http://localhost", "http://:4317",
                    "http://localhost:4317/v1/traces", "http://0.0.0.0:4317", "http://h:99999"):
            self.refused("http://localhost:4317", f"otlp={url}")
        self.refused("otlp_ca is set, and otlp is not", "otlp_ca=/etc/hosts")
        self.refused("not encrypted", "otlp=http://localhost:1", "otlp_ca=/etc/hosts")
        self.refused("no text in PEM form", "otlp=https://localhost:1", "otlp_ca=/etc/hosts")
        self.refused("otlp_interval_ms", "otlp=http://localhost:1", "otlp_interval_ms=5ms")

    def test_headers_that_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "headers")
            at = f"otlp_headers_file={path}"
            self.refused("no such file", "otlp=http://localhost:1", at)
            path.touch(0o644)
            self.refused("chmod o=", "otlp=http://localhost:1", at)
            path.chmod(0o600)
            for text, words in (
                ("authorization Bearer x", "has no colon"),
                (": x", "has no name"),
                ("a b: x", "other characters than letters"),
                ("a-bin: x", "ends in -bin"),
                ("Content-Type: x", "gRPC uses itself"),
                ("grpc-timeout: 1S", "gRPC uses itself"),
                ("a: \x7f", "printable ASCII"),
                ("\n".join(f"a{i}: x" for i in range(17)), "one header too many"),
                ("a: " + "x" * 9000, "at most 8191 bytes"),
            ):
                path.write_text(text)
                self.refused(words, "otlp=http://localhost:1", at)
            path.write_text("a: secret")
            self.assertEqual(self.check("otlp=http://localhost:1", at)[0], 0)
            self.refused("in clear to another machine", "otlp=http://c.example:1", at)


if __name__ == "__main__":
    support.main()
