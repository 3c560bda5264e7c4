"""What these tests share: a daemon, ranks as processes, and results as TAP."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client" / "python"))
LIB_DIR = os.environ.get("SHARDD_LIB_DIR", str(ROOT / "build" / "lib"))
BIN_DIR = os.environ.get("SHARDD_BIN_DIR", str(ROOT / "build" / "bin"))
os.environ.setdefault("SHARDD_LIBRARY", LIB_DIR + "/libshardd.so.0")
sys.dont_write_bytecode = True

spawn = multiprocessing.get_context("spawn")


def _listens(at):
    """Whether a process listens on the socket @at; its file is there a moment earlier. A connection
    would count as a client."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as sockets:
        for line in sockets:
            fields = line.split(maxsplit=7)  # Num RefCount Protocol Flags Type St Inode Path
            if fields[-1].rstrip("\n") == str(at) and int(fields[3], 16) & 0x10000:
                return True
    return False


def _await_start(process, at, seconds=60):
    """Until it listens, or has ended. GPUs take their time, on a busy machine more of it than
    shardd.connect gives a daemon to appear."""
    until = time.monotonic() + seconds
    while not _listens(at) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


@contextlib.contextmanager
def daemon(*arguments, backend="host"):
    """The socket of a daemon of its own; it must end well."""
    with tempfile.TemporaryDirectory() as folder:
        at = os.path.join(folder, "socket")
        with open(os.path.join(folder, "log"), "w+") as log:
            process = subprocess.Popen(
                [os.path.join(BIN_DIR, "shardd"), "--socket", at, "--backend", backend,
                 *arguments], stdout=log, stderr=log)
            try:
                _await_start(process, at)
                yield at
            finally:
                process.terminate()
                code = process.wait(60)
                log.seek(0)
                if code:
                    sys.exit(f"the daemon ended with {code}:\n{log.read()}")


def free_ports(n):
    """Ports that nobody uses."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


@contextlib.contextmanager
def etcd():
    """The address of a store of its own."""
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["etcd", "--name", "one", "--data-dir", folder, "--listen-client-urls", client,
             "--advertise-client-urls", client, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield client.removeprefix("http://")
        finally:
            process.kill()
            process.wait()


def need_etcd(test):
    """Skip @test where it is not installed; where tests/run installs what it needs, fail."""
    if shutil.which("etcd") is None:
        why = "not installed: etcd (deploy/install-deps --test)"
        if os.environ.get("SHARDD_TEST_INSTALLED") == "1":
            test.fail(why)
        test.skipTest(why)


def shardctl(at, *arguments):
    """What it prints of the daemon at @at, from JSON."""
    said = subprocess.run([os.path.join(BIN_DIR, "shardctl"), "--socket", at, "--json", *arguments],
                          text=True, capture_output=True, check=True, timeout=60)
    return json.loads(said.stdout)


@contextlib.contextmanager
def cluster(*names, cluster="test"):
    """The sockets of daemons, by their nodes' names, that are in one cluster on this machine."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(etcd())
        at = {}
        for name, port in zip(names, free_ports(len(names))):
            at[name] = stack.enter_context(daemon(
                "--set", f"coord=etcd://{store}", "--set", f"cluster={cluster}",
                "--set", f"node_name={name}", "--set", f"peer_listen=127.0.0.1:{port}"))
        for one in at.values():
            wait_until(lambda one=one: shardctl(one, "status")["cluster"]["state"] == "IN")
        yield at


class Held:
    """A daemon under shardd-holder, which starts the next one when it dies."""

    def __init__(self, socket, holder):
        self.socket, self._holder = socket, holder

    def pid(self):
        """Of the daemon that runs now; 0: none."""
        own = self._holder.pid
        with open(f"/proc/{own}/task/{own}/children") as children:
            return int((children.read().split() or ["0"])[0])

    def kill(self, sig=signal.SIGKILL, seconds=30):
        """Kill the daemon, and wait until another one has been started."""
        old, end = self.pid(), time.monotonic() + seconds
        os.kill(old, sig)
        while self.pid() in (0, old):
            assert time.monotonic() < end, "no other daemon was started"
            time.sleep(0.001)


@contextlib.contextmanager
def held_daemon(*arguments, backend="host", kill_after=None):
    """A Held of its own; it must end well. @kill_after: seconds to the death of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        socket = os.path.join(folder, "socket")
        with open(os.path.join(folder, "log"), "w+") as log:
            process = subprocess.Popen(
                [os.path.join(BIN_DIR, "shardd-holder"), "--", os.path.join(BIN_DIR, "shardd"),
                 "--socket", socket, "--backend", backend, *arguments], stdout=log, stderr=log)
            try:
                held = Held(socket, process)
                if kill_after is not None:
                    time.sleep(kill_after)
                    if held.pid():  # else it has not been forked yet
                        os.kill(held.pid(), signal.SIGKILL)
                _await_start(process, socket)
                yield held
            finally:
                process.terminate()
                code = process.wait(60)
                log.seek(0)
                if code:
                    sys.exit(f"the holder ended with {code}:\n{log.read()}")


def wait_until(holds, seconds=60):
    """Until @holds() is true; fails after @seconds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds} s: {holds}"
        time.sleep(0.005)


def _rank(function, rank, world, arguments, results):
    try:
        results.put((rank, True, function(rank, world, *arguments)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def ranks(function, world, *arguments, seconds=300):
    """What @function(rank, world, *arguments) returns in processes of their own, by rank."""
    results = spawn.Queue()
    processes = [spawn.Process(target=_rank, args=(function, rank, world, arguments, results))
                 for rank in range(world)]
    for process in processes:
        process.start()
    try:
        got = {}
        for _ in processes:
            rank, well, value = results.get(timeout=seconds)
            assert well, f"rank {rank}:\n{value}"
            got[rank] = value
        return [got[rank] for rank in range(world)]
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


class _Tap(unittest.TestResult):
    def _say(self, test, line):
        print(line, flush=True)

    def addSuccess(self, test):
        print("ok - " + test.id().replace("__main__.", ""), flush=True)

    def _failed(self, test, err):
        text = "".join(traceback.format_exception(*err))
        print("".join("# " + line + "\n" for line in text.splitlines()), end="")
        print("not ok - " + test.id().replace("__main__.", ""), flush=True)

    def addError(self, test, err):
        super().addError(test, err)
        self._failed(test, err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._failed(test, err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(subtest, err)

    def addSkip(self, test, reason):
        print(f"ok - {test.id()} # SKIP {reason}", flush=True)


def main():
    """Run the tests of the calling script; its arguments choose by a part of the name."""
    suite = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    wanted = sys.argv[1:]
    flat = [t for case in suite for t in case]
    chosen = [t for t in flat if not wanted or any(w in t.id() for w in wanted)]
    print(f"1..{len(chosen)}")
    result = _Tap()
    classes = {}
    for test in chosen:
        classes.setdefault(type(test), unittest.TestSuite()).addTest(test)
    for one in classes.values():
        one.run(result)
    sys.exit(not chosen or not result.wasSuccessful())
