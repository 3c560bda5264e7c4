"""A daemon under shardd-holder, which starts another one when it dies."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import support


def daemon_of(holder):
    """The process of the daemon; None: between two."""
    children = pathlib.Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
    return int(children[0]) if children else None


def kill_daemon(holder):
    """Return: the process that was killed."""
    while True:
        pid = daemon_of(holder)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return pid
        time.sleep(0.001)


def mappings():
    """How many of the daemon's memory this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("memfd:" in line for line in maps)


class Held:
    """``holder``: its process."""

    def __init__(self, folder):
        self.socket = os.path.join(folder, "socket")
        self.log = os.path.join(folder, "log")
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [os.path.join(support.BIN_DIR, "shardd-holder"), "--",
                 os.path.join(support.BIN_DIR, "shardd"), "--socket", self.socket, "--backend",
                 "host"], stdout=log, stderr=log)
        self.holder = self._process.pid
        support._await_start(self._process, self.socket)

    def kill(self):
        """Kill the daemon, not the holder. Return: the process that was killed."""
        return kill_daemon(self.holder)

    def end(self):
        """Holder and daemon; with the job's state."""
        self._process.terminate()
        code = self._process.wait(60)
        text = pathlib.Path(self.log).read_text(errors="replace")
        if code or "Sanitizer" in text or "broken invariant" in text:
            sys.exit(f"the holder ended with {code}:\n{text}")

    def end_hard(self):
        """Holder and daemon, at once and for good."""
        pid = daemon_of(self.holder)
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def daemon():
    """A Held, which must end well."""
    with tempfile.TemporaryDirectory() as folder:
        one = Held(folder)
        try:
            yield one
        finally:
            one.end()
