"""What the tests of the dashboard share: daemons with trainers, and the browser."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import browser as chromium

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("SHARDD_BIN_DIR", ROOT / "build/bin"))
sys.path.insert(0, str(ROOT / "client/python"))
os.environ.setdefault(
    "SHARDD_LIBRARY",
    str(pathlib.Path(os.environ.get("SHARDD_LIB_DIR", ROOT / "build/lib")) / "libshardd.so"),
)
SHOTS = pathlib.Path(sys.argv[sys.argv.index("--shots") + 1]) if "--shots" in sys.argv else None
PATIENCE_S = 30
HOSTILE = "<img src=x onerror=document.title='bad'>"


class Daemon:
    """A daemon with its page, and what trains on it."""

    def __init__(self, **settings):
        self.folder = tempfile.TemporaryDirectory(prefix="shardd-p.")
        self.path = pathlib.Path(self.folder.name)
        self.socket = str(self.path / "s")
        self.address = f"127.0.0.1:{chromium.free_port()}"
        self.url = f"http://{self.address}/"
        self.settings = {
            "memory_bytes": "256MiB",
            "stall_after_ms": "1s",
            "drain_timeout_ms": "1s",
            **settings,
        }
        self.trainers = []
        self.threads = []
        self.start()

    def start(self):
        options = [
            word for key, value in self.settings.items() for word in ("--set", f"{key}={value}")
        ]
        with open(self.path / "log", "ab") as log:
            self.process = subprocess.Popen(
                [BIN / "shardd", "--socket", self.socket, "--http", self.address, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + PATIENCE_S
        while not self.answers():
            if time.monotonic() > until or self.process.poll() is not None:
                raise AssertionError(
                    f"the daemon does not answer: {(self.path / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.02)

    def answers(self):
        return self.ctl("health").returncode == 0

    def ctl(self, *words):
        return subprocess.run(
            [BIN / "shardctl", "--socket", self.socket, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def train(self, job, world):
        """Start charlm. Return: its processes, by rank."""
        started = []
        for rank in range(world):
            environment = {
                **os.environ,
                "SHARDD_SOCKET": self.socket,
                "SHARDD_JOB": job,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
            }
            started.append(
                subprocess.Popen(
                    [BIN / "charlm", "--data", ROOT / "README.md", "--steps", "1000000"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        self.trainers += started
        return started

    def each_rank(self, job, world, body, name=None):
        """body(client, rank) in a thread for each rank of the job; an error of shardd ends it."""
        import shardd

        def go(rank):
            with (
                contextlib.suppress(shardd.SharddError),
                shardd.Client(socket=self.socket, name=name) as client,
            ):
                client.join(job, world, rank)
                body(client, rank)

        self.threads += [
            threading.Thread(target=go, args=(rank,), daemon=True) for rank in range(world)
        ]
        for thread in self.threads[-world:]:
            thread.start()

    def stop(self):
        self.process.terminate()
        self.process.wait()

    def close(self):
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        self.folder.cleanup()


class TheBrowser:
    """The one that all tests use, after start."""

    def start(self, folder):
        self.one = chromium.Browser(folder)

    def __getattr__(self, name):
        return getattr(self.one, name)


the_browser = TheBrowser()


def look_at(daemon, sections="jobs,job,memory", job="", width=1280, height=900, dark=False):
    the_browser.look(width, height, dark)
    the_browser.open("about:blank")
    the_browser.open(f"{daemon.url}#open={sections}{f'&job={job}' if job else ''}")
    the_browser.wait(
        "return document.querySelector('#all') && !document.querySelector('#all').hidden;"
    )


def shot(name, height=None, parts=()):
    """A picture of the page, or of it from the first to the last of the parts."""
    if SHOTS:
        SHOTS.mkdir(parents=True, exist_ok=True)
        width = the_browser.run("return innerWidth;")
        if height is None:
            height = min(3000, the_browser.run("return document.documentElement.scrollHeight;"))
        the_browser.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        time.sleep(0.5)
        the_browser.screenshot(SHOTS / f"{name}.png", parts)


def must_be_quiet():
    """Scripts and the content security policy said nothing, but that a server did not answer."""
    said = [
        entry["message"]
        for entry in the_browser.console()
        if not any(known in entry["message"] for known in ("net::ERR_", " of 401 ", " of 503 "))
    ]
    assert not said, said


@contextlib.contextmanager
def running(**settings):
    daemon = Daemon(**settings)
    try:
        yield daemon
        must_be_quiet()
    finally:
        daemon.close()
