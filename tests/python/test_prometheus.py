#!/usr/bin/env python3
"""Prometheus: what the daemon exports against docs/metrics.md, the rules and the dashboard; the
rules by promtool; and with SHARDD_TEST_LONG=1 a Prometheus that scrapes the daemon and raises an
alert."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import unittest
import urllib.parse

import support
import web
import yaml

import shardd

ROOT = support.ROOT
RULES = ROOT / "deploy/prometheus/shardd.rules.yml"
CASES = ROOT / "deploy/prometheus/shardd.rules.test.yml"
BOARD = ROOT / "deploy/grafana/shardd.json"
PAGE = ROOT / "docs/metrics.md"
TOKEN = "the-token-of-a-test"
NOBODY = 65534
# Only jobs with ranks on several nodes have them.
WITHOUT_SAMPLES = {"shardd_job_replica_step"}
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$job": ".*", "$op": ".*"}


def said_by(*command):
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, cwd=RULES.parent)
    return done.returncode, done.stdout + done.stderr


def rules():
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def alerts():
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def targets():
    """Of each panel and annotation: title, query and legend."""
    board = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for one in board["annotations"]["list"]:
        yield one["name"], one["expr"], one["titleFormat"]


def without_variables(query):
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def names_in(query):
    """Metrics that @query names; a recorded one (with ':') is no metric of the daemon."""
    return {
        re.sub(r"_(bucket|sum|count)$", "", name) if name.startswith("shardd_op_duration") else name
        for name in re.findall(r"(?<![\w:])(?:shardd|process)_\w+(?![\w:])", query)
    }


def documented():
    """Type and labels by name."""
    name = r"`((?:shardd|process)_\w+)`"
    rows = re.findall(rf"^\| {name} \| (\w+) \|([^|]*)\| (\S.*) \|$", PAGE.read_text(), re.M)
    assert len({row[0] for row in rows}) == len(rows)
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows
    }


class Exported(unittest.TestCase):
    """A scrape of a daemon that has one of everything."""

    @classmethod
    def setUpClass(cls):
        if not shutil.which("etcd") and os.environ.get("SHARDD_TEST_INSTALLED") != "1":
            raise unittest.SkipTest("not installed: etcd (deploy/install-deps --test)")
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            os.mkdir(folder + "/all")
            store, [port] = stack.enter_context(support.etcd()), support.free_ports(1)
            daemon = stack.enter_context(
                web.daemon(
                    "--set",
                    f"coord=etcd://{store}",
                    "--set",
                    "cluster=test",
                    "--set",
                    "otlp=http://localhost:1",
                    "--set",
                    "node_name=a",
                    "--set",
                    f"peer_listen=127.0.0.1:{port}",
                    "--set",
                    f"checkpoint_roots={folder}",
                    "--set",
                    f"user_limits={os.geteuid()}:max_jobs=9,@{os.getegid()}:total_jobs=99",
                )
            )
            support.wait_until(
                lambda: support.shardctl(daemon.socket, "status")["cluster"]["state"] == "IN"
            )
            with shardd.connect(daemon.socket) as client:
                client.join("all", 1, 0)
                [unit] = client.register(
                    [
                        shardd.UnitSpec(
                            "block", [shardd.TensorSpec("w", (8,), shardd.Init.CONSTANT, 2.0)]
                        )
                    ]
                )
                unit.init_seed(1)
                client.commit(1)
                shardd.declare_publication({"name": "engine"}, "all", client)
                shardd.publish("engine", "all", client)
                support.shardctl(daemon.socket, "checkpoint", "save", "all", folder + "/all")
                cls.text = web.ask(daemon.http, "/metrics")[2]
        cls.metrics = web.Metrics(cls.text)

    def labels(self):
        """By name; the limits of a histogram are no label of it."""
        found = {}
        for name, has in self.metrics.samples:
            name = (
                re.sub(r"_(bucket|sum|count)$", "", name)
                if name.startswith("shardd_op_duration")
                else name
            )
            found.setdefault(name, set()).add(frozenset(k for k, _ in has if k != "le"))
        return found

    def test_the_page_names_all_and_nothing_else(self):
        self.assertEqual(
            {name: kind for name, (kind, _) in documented().items()}, self.metrics.types
        )

    def test_the_page_has_the_labels(self):
        labels = self.labels()
        self.assertEqual(WITHOUT_SAMPLES, set(self.metrics.types) - set(labels))
        for name, (_, said) in documented().items():
            if name not in WITHOUT_SAMPLES:
                self.assertEqual({said}, labels[name], name)

    def test_rules_and_dashboard_name_only_what_there_is(self):
        for where, query in [(r.get("alert", r.get("record")), r["expr"]) for r in rules()] + [
            (title, query) for title, query, _ in targets()
        ]:
            self.assertEqual(set(), names_in(query) - set(self.metrics.types), where)

    def test_legends_and_texts_name_only_labels_that_there_are(self):
        known = {label for one in self.labels().values() for labels in one for label in labels}
        for title, _, legend in targets():
            self.assertEqual(
                set(), set(re.findall(r"{{(\w+)}}", legend)) - known - {"instance", "le"}, title
            )
        for name, rule in alerts().items():
            used = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
            self.assertEqual(set(), set(used) - known - {"instance"}, name)

    def test_promtool_accepts_the_scrape(self):
        web.need(self, "promtool")
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=self.text,
            text=True,
            capture_output=True,
            timeout=60,
        )
        self.assertEqual((0, ""), (done.returncode, done.stdout + done.stderr))


class Rules(unittest.TestCase):
    def test_promtool_accepts_rules_and_configuration(self):
        web.need(self, "promtool")
        for command in (
            ("check", "rules", str(RULES)),
            ("check", "config", "--syntax-only", "prometheus.yml"),
        ):
            code, said = said_by("promtool", *command)
            self.assertEqual(0, code, said)

    def test_each_alert_fires_and_keeps_quiet(self):
        web.need(self, "promtool")
        code, said = said_by("promtool", "test", "rules", str(CASES))
        self.assertEqual(0, code, said)

    def test_each_alert_has_both_cases(self):
        cases = {case["name"]: case for case in yaml.safe_load(CASES.read_text())["tests"]}
        for name in alerts():
            [fires] = cases[f"{name} fires"]["promql_expr_test"]
            self.assertIn(f'alertname="{name}"', fires["exp_samples"][0]["labels"])
            [quiet] = cases[f"{name} does not fire"]["promql_expr_test"]
            self.assertNotIn("exp_samples", quiet)
            self.assertEqual(fires["eval_time"], quiet["eval_time"])
            read = {
                name
                for s in cases[f"{name} fires"]["input_series"]
                for name in names_in(s["series"])
            }
            self.assertLessEqual(
                read, names_in(alerts()[name]["expr"]) | {"shardd_rank_late_seconds_total"}
            )

    def test_each_alert_has_its_section_and_texts(self):
        sections = re.findall(r"^### (Shardd\w+)$", PAGE.read_text(), re.M)
        self.assertEqual(list(alerts()), sections)
        for name, rule in alerts().items():
            self.assertEqual({"summary", "description", "runbook"}, set(rule["annotations"]), name)
            self.assertEqual(f"docs/metrics.md#{name.lower()}", rule["annotations"]["runbook"])
            self.assertIn(rule["labels"]["severity"], ("info", "warning", "critical"))


class Dashboard(unittest.TestCase):
    def test_its_queries_are_promql(self):
        web.need(self, "promtool")
        queries = [
            {"record": f"query:{i}", "expr": without_variables(query)}
            for i, (_, query, _) in enumerate(targets())
        ]
        for query in queries:
            self.assertNotIn("$", query["expr"])
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            yaml.safe_dump(
                {
                    "groups": [
                        {
                            "name": "dashboard",
                            "rules": [
                                {**q, "record": q["record"].replace(":", ":n")} for q in queries
                            ],
                        }
                    ]
                },
                file,
            )
            file.flush()
            code, said = said_by("promtool", "check", "rules", file.name)
        self.assertEqual(0, code, said)
        self.assertIn(f"{len(queries)} rules", said)

    def test_it_shows_what_there_is_of_publications(self):
        """All but bytes, which follow from the others, and streams."""
        shown = {name for _, query, _ in targets() for name in names_in(query)}
        page = set(re.findall(r"`(shardd_publication_\w+)`", PAGE.read_text()))
        self.assertIn("shardd_publication_lag_steps", page)
        self.assertEqual(
            {n for n in page if "bytes" not in n and "streams" not in n},
            {n for n in shown if n.startswith("shardd_publication_")},
        )
        board = json.loads(BOARD.read_text())
        [table] = [p for p in board["panels"] if p["title"] == "Publications of jobs"]
        merge, organize = table["transformations"]
        names = organize["options"]["renameByName"]
        self.assertEqual("merge", merge["id"])
        self.assertEqual([f"Value #{t['refId']}" for t in table["targets"]], list(names))
        for target, name in zip(table["targets"], names.values()):
            wanted = {"Newest": "newest_number", "Made": "generations"}.get(name, name.lower())
            self.assertIn(f"(shardd_publication_{wanted}", target["expr"])

    def test_its_panels_are_in_their_places(self):
        board = json.loads(BOARD.read_text())
        self.assertEqual(
            ["datasource", "instance", "job", "op"],
            [v["name"] for v in board["templating"]["list"]],
        )
        ids, taken = [p["id"] for p in board["panels"]], set()
        self.assertEqual(sorted(set(ids)), sorted(ids))
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            self.assertEqual(set(), cells & taken, panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells
            self.assertTrue(
                panel["type"] == "row" or (panel["description"] and panel["targets"]), at
            )


@unittest.skipUnless(
    os.environ.get("SHARDD_TEST_LONG") == "1", "only in the long form: half a minute"
)
@unittest.skipUnless(os.geteuid() == 0, "needs root, to be another user")
class Scraped(unittest.TestCase):
    """A Prometheus scrapes a daemon by token and as an observer. It has a copy of the rules in
    which all waits are a second."""

    CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{folder}/rules.yml]
scrape_configs:
  - job_name: shardd
    static_configs: [{{targets: ['{http}']}}]
  - job_name: by_token
    authorization: {{credentials_file: {folder}/token}}
    static_configs: [{{targets: ['{http}']}}]
  - job_name: by_wrong_token
    authorization: {{credentials: wrong}}
    static_configs: [{{targets: ['{http}']}}]
"""

    @contextlib.contextmanager
    def prometheus(self, http):
        [port] = support.free_ports(1)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "rules.yml").write_text(re.sub(r"for: \w+", "for: 1s", RULES.read_text()))
            (folder / "token").write_text(TOKEN)
            (folder / "config.yml").write_text(self.CONFIG.format(folder=name, http=http))
            for one in (folder, *folder.iterdir()):
                os.chown(one, NOBODY, NOBODY)
            process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={name}/config.yml",
                    f"--storage.tsdb.path={name}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=error",
                ],
                cwd=name,
                user=NOBODY,
                group=NOBODY,
                extra_groups=[],
                stdin=subprocess.DEVNULL,
            )
            try:
                at = f"127.0.0.1:{port}"
                support.wait_until(lambda: self.is_ready(at), 30)
                yield at
            finally:
                process.terminate()
                process.wait(60)

    def is_ready(self, at):
        try:
            return web.ask(at, "/-/ready")[0] == 200
        except OSError:
            return False

    def query(self, at, expression):
        """Values by their labels."""
        code, _, text = web.ask(
            at, "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        )
        self.assertEqual(200, code, (expression, text))
        return {
            tuple(sorted(r["metric"].items())): float(r["value"][1])
            for r in json.loads(text)["data"]["result"]
        }

    @contextlib.contextmanager
    def trainers(self, daemon):
        environment = {
            **os.environ,
            "SHARDD_SOCKET": daemon.socket,
            "SHARDD_JOB": "watched",
            "WORLD_SIZE": "2",
        }
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(2):
                ranks.append(
                    stack.enter_context(
                        subprocess.Popen(
                            [
                                os.path.join(support.BIN_DIR, "charlm"),
                                "--data",
                                str(ROOT / "LICENSE"),
                                "--steps",
                                "1000000",
                            ],
                            env={**environment, "RANK": str(rank)},
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                        )
                    )
                )
                stack.callback(ranks[-1].kill)
            yield ranks

    def firing(self, at):
        return {
            dict(labels)["alertname"] for labels in self.query(at, 'ALERTS{alertstate="firing"}')
        }

    def test_a_stopped_rank_fires(self):
        web.need(self, "prometheus")
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            token = pathlib.Path(folder, "token")
            token.write_text(TOKEN + "\n")
            token.chmod(0o600)
            daemon = stack.enter_context(
                web.daemon(
                    "--set",
                    f"observer_uids={NOBODY}",
                    "--set",
                    f"http_token_file={token}",
                    "--set",
                    "stall_after_ms=500",
                )
            )
            ranks = stack.enter_context(self.trainers(daemon))
            at = stack.enter_context(self.prometheus(daemon.http))

            def up():
                return {dict(k)["job"]: v for k, v in self.query(at, "up").items()}

            support.wait_until(
                lambda: up() == {"shardd": 1, "by_token": 1, "by_wrong_token": 0}, 30
            )
            rate = 'rate(shardd_job_commits_total{job="shardd",job_name="watched"}[5s])'
            support.wait_until(lambda: sum(self.query(at, rate).values()) > 0, 30)
            self.assertNotIn("SharddJobStalled", self.firing(at))
            for title, query, _ in targets():
                self.query(at, without_variables(query))
                if not re.search(
                    r"replica|checkpoint_step|> 0$|cluster|store_max|user_limit", query
                ):
                    self.assertNotEqual(
                        {}, self.query(at, without_variables(query).replace("5m", "5s")), title
                    )
            ranks[1].send_signal(signal.SIGSTOP)
            support.wait_until(lambda: "SharddJobStalled" in self.firing(at), 40)
            ranks[1].send_signal(signal.SIGCONT)
            support.wait_until(lambda: "SharddJobStalled" not in self.firing(at), 40)
            ranks[1].kill()
            support.wait_until(lambda: "SharddRankDied" in self.firing(at), 40)


if __name__ == "__main__":
    support.main()
