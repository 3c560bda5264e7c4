"""What the tests of HTTP share: requests, Prometheus' text, and a daemon that serves it."""

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile

import support


class Unix(http.client.HTTPConnection):
    def __init__(self, path, timeout=30):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def connect(address, timeout=30):
    if address.startswith("unix:"):
        return Unix(address.removeprefix("unix:"), timeout)
    host, _, port = address.rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=timeout)


def ask(address, path, method="GET", body=None, **headers):
    """Status, headers and body."""
    with contextlib.closing(connect(address)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def get(address, path, **headers):
    """The JSON of @path, which must be answered well."""
    code, _, text = ask(address, path, **headers)
    assert code == 200, (code, text)
    return json.loads(text)


def bearer(token):
    return {"Authorization": "Bearer " + token}


NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(,|$)')


class Metrics:
    """Prometheus' text format, read strictly."""

    def __init__(self, text):
        self.types, self.samples = {}, {}
        assert text.endswith("\n")
        family = None
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split()[2]
                assert family not in self.types, f"{family} is there twice"
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                assert name == family, line
                self.types[name] = kind
            else:
                self._sample(line, family)

    def _sample(self, line, family):
        match = re.fullmatch(rf"({NAME})(?:\{{(.*)\}})? (\S+)", line)
        assert match, line
        name, labels, value = match.groups()
        parts = [family + part for part in ("_bucket", "_sum", "_count")]
        allowed = parts if self.types[family] == "histogram" else [family]
        assert name in allowed, (family, line)
        found, at = {}, 0
        while at < len(labels or ""):
            label = LABEL.match(labels, at)
            assert label, line
            found[label[1]], at = label[2], label.end()
        key = (name, tuple(sorted(found.items())))
        assert key not in self.samples, f"twice: {line}"
        self.samples[key] = float(value)

    def of(self, name, **labels):
        """Values by the labels that are not given."""
        want = set(labels.items())
        return {
            tuple(v for k, v in has if (k, v) not in want): value
            for (n, has), value in self.samples.items()
            if n == name and want <= set(has)
        }

    def one(self, name, **labels):
        [value] = self.of(name, **labels).values()
        return value


def scrape(address, **headers):
    code, _, text = ask(address, "/metrics", **headers)
    assert code == 200, (code, text)
    return Metrics(text)


class Daemon:
    def __init__(self, process, socket, http, log):
        self.process, self.socket, self.http, self._log = process, socket, http, log

    def log(self):
        with open(self._log, encoding="utf-8") as file:
            return file.read()

    def fds(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def rss(self):
        """Bytes."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return 1024 * int(re.search(r"VmRSS:\s+(\d+)", file.read())[1])

    def listens(self):
        return not support.shardctl(self.socket, "status")["http"]["error"]


@contextlib.contextmanager
def daemon(*arguments, http=None, wait=True):
    """A Daemon that serves HTTP; it must end well."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        http = http or f"127.0.0.1:{support.free_ports(1)[0]}"
        if http == "unix":
            http = f"unix:{folder}/http"
        at, log = folder + "/socket", folder + "/log"
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                [
                    os.path.join(support.BIN_DIR, "shardd"),
                    "--socket",
                    at,
                    "--backend",
                    "host",
                    "--set",
                    "socket_mode=0666",
                    "--http",
                    http,
                    *arguments,
                ],
                stdout=file,
                stderr=file,
            )
        one = Daemon(process, at, http, log)
        try:
            support._await_start(process, at)
            if wait:
                support.wait_until(one.listens)
            yield one
        finally:
            process.terminate()
            code = process.wait(60)
            assert code == 0, f"the daemon ended with {code}:\n{one.log()}"


def need(test, *programs):
    """Skip @test where one is not installed; where tests/run installs what it needs, fail."""
    missing = [p for p in programs if shutil.which(p) is None]
    if missing:
        why = f"not installed: {', '.join(missing)} (deploy/install-deps --monitoring)"
        if os.environ.get("SHARDD_TEST_INSTALLED") == "1":
            test.fail(why)
        test.skipTest(why)
