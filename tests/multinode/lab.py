"""Nodes: each a network namespace with a daemon and trainers, all on one bridge with an etcd.

The suite runs in namespaces of its own for networks, mounts and processes (multinode). So nothing
here has a name that others see, and all of it goes with the suite, however that ends.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("SHARDD_BIN_DIR", ROOT / "build/bin"))
NET = "10.88.0."
ETCD_AT = NET + "250"
PEER_PORT = 7100
SIMULATOR = BIN.parent / "tests/sim"
HEADERS = 14 + 20 + 32  # Ethernet, IP, TCP with time stamps
PATIENCE_S = 40  # for what takes a second on a machine that does nothing else
PR_SET_PDEATHSIG = 1
KEPT = ("SHARDD_KERNELS", "SHARDD_TEST_ID")  # of the environment
# A broken CHECK, or what a sanitizer says.
BROKEN = re.compile(r"broken invariant|ERROR: \w+Sanitizer|runtime error:|WARNING: ThreadSanitizer")


class Failed(Exception):
    pass


def sh(command, check=True):
    r = subprocess.run(command.split(), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if check and r.returncode:
        raise Failed(f"{command}: {r.stderr or r.stdout}")
    return r.stdout


def wait_for(condition, what, s=PATIENCE_S):
    """Return: what the condition gives, when that is true."""
    until = time.monotonic() + s
    while not (got := condition()):
        if time.monotonic() > until:
            raise Failed(f"{what}: not within {s} s")
        time.sleep(0.02)
    return got


def die_with_us():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def environment(**more):
    clean = {k: v for k, v in os.environ.items()
             if not k.startswith(("SHARDD_", "NOTIFY_", "LISTEN_")) or k in KEPT}
    return clean | more


class Process:
    """A program in namespace @net; what it says is in the file @log, after what was there."""

    def __init__(self, net, argv, log, env=None, stdout=None):
        self.log = pathlib.Path(log)
        with open(log, "ab") as err, open(stdout or log, "ab") as out:
            self.popen = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{net}", "--", *map(str, argv)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env or environment(),
                preexec_fn=die_with_us)

    @property
    def code(self):
        return self.popen.poll()

    def text(self):
        return self.log.read_text(errors="replace")

    def send(self, number):
        self.popen.send_signal(number)

    def kill(self):
        self.popen.kill()
        self.popen.wait()

    def wait(self, s=PATIENCE_S):
        wait_for(lambda: self.code is not None, f"the end of {self.log.name}", s)
        return self.code


class Node:
    def __init__(self, lab, name, index):
        self.lab, self.name, self.address = lab, name, f"{NET}{index + 1}"
        self.socket = f"{lab.folder}/{name}.sock"
        self.log = pathlib.Path(f"{lab.folder}/{name}.log")
        self.options, self.daemon, self.may_end = {}, None, False
        self.within = ()  # what runs the daemon, which are its last arguments
        self.gpus = 0  # simulated ones; 0: host memory
        self.config = None  # a file, read again at each start
        self.more = {}  # of the daemon's environment
        self.program = BIN / "shardd"
        lab.add_net(name, self.address)

    def env(self, **more):
        """Of its daemon and of its trainers."""
        if self.gpus:
            more |= {"SHARDD_LIBCUDA": f"{SIMULATOR}/libcuda.so.1",
                     "SHARDD_LIBNCCL": f"{SIMULATOR}/libnccl.so.2",
                     "SHARDD_SIM_DEVICES": str(self.gpus), "SHARDD_SIM_NCCL_SERIAL": "1",
                     "SHARDD_SIM_MEMORY": str(512 << 20), "NCCL_HOSTID": self.name}
        return environment(**more)

    def run(self, keys, held=False):
        argv = [*self.within] + [BIN / "shardd-holder", "--"] * held
        argv += [self.program, "--socket", self.socket, "--backend",
                 "cuda" if self.gpus else "host"]
        argv += ["--config", self.config] if self.config else []
        keys |= {"gpu_measure_overlap": "no"} if self.gpus else {}
        for key, value in keys.items():
            argv += ["--set", f"{key}={value}"]
        self.daemon = Process(self.name, argv, self.log, self.env(**self.more))
        self.may_end = False

    def start(self, wait=True, held=False, **options):
        """@options: keys of the configuration, also for the next starts. @held: its memory outlives
        it (shardd-holder), which starts it again."""
        self.options |= options
        keys = {"node_name": self.name, "peer_listen": f"{self.address}:{PEER_PORT}",
                "peer_insecure": "yes", "coord": f"etcd://{ETCD_AT}:2379", "threads": "1",
                "drain_timeout_ms": "1s", "memory_bytes": "512MiB",
                "data_address": self.address} | self.options
        before = self.joined()
        self.run(keys, held)
        if wait:
            self.await_member(before)

    def joined(self):
        return self.said().count("joined node=")

    def await_member(self, before):
        wait_for(lambda: self.joined() > before or self.check(), f"node {self.name} is a member")

    def start_alone(self):
        """Without other nodes."""
        self.run({"drain_timeout_ms": "1s", "memory_bytes": "512MiB"})
        wait_for(lambda: self.ctl("health", check=False) is not None or self.check(),
                 f"node {self.name} serves")

    def check(self):
        if not self.may_end and self.daemon and self.daemon.code is not None:
            raise Failed(f"the daemon of node {self.name} has ended: {self.daemon.code}")

    def kill(self):
        self.may_end = True
        self.daemon.kill()

    def signal_held(self, number):
        """To the daemon, and not to what holds its memory."""
        pid = self.daemon.popen.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise Failed(f"node {self.name} has no daemon just now")
        os.kill(int(children[0]), number)

    def kill_held(self):
        self.signal_held(signal.SIGKILL)

    def stop(self):
        self.daemon.send(signal.SIGTERM)
        self.await_end()

    def await_end(self):
        """It was asked to end."""
        if code := self.daemon.wait():
            raise Failed(f"the daemon of node {self.name} has ended with {code}")
        self.may_end = True

    def said(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ctl(self, *args, check=True):
        """Return: what shardctl says; None: it has failed."""
        r = subprocess.run([BIN / "shardctl", "--socket", self.socket, "--json", *args],
                           capture_output=True, text=True, env=environment())
        if check and r.returncode:
            raise Failed(f"shardctl {' '.join(args)} on node {self.name}: {r.stderr or r.stdout}")
        return None if r.returncode else json.loads(r.stdout or "{}")

    def link(self, up):
        """Its cable, at the side of the bridge."""
        sh(f"ip link set v-{self.name} {'up' if up else 'down'}")

    def payload(self):
        """Bytes received and sent by the node, without those of TCP and below."""
        text = sh(f"ip -n {self.name} -json -statistics link show dev eth0")
        stats = json.loads(text)[0]["stats64"]
        return [stats[way]["bytes"] - HEADERS * stats[way]["packets"] for way in ("rx", "tx")]


class Lab:
    """Use it in a with statement. @nodes: how many, with the names a, b, ... @etcd: beside them."""

    def __init__(self, nodes=2, start=True, etcd=True):
        self.folder = tempfile.mkdtemp(prefix="lab.")
        self.nodes, self.runs, self.etcd, self.nets = {}, [], None, []
        try:
            sh("ip link add br0 type bridge")
            sh("ip link set br0 up")
            self.add_net("etcd", ETCD_AT)
            for i, name in enumerate("abcdefgh"[:nodes]):
                self.nodes[name] = Node(self, name, i)
            if etcd:
                self.start_etcd()
            for node in self.nodes.values():
                if start:
                    node.start()
        except BaseException:
            self.end()
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.check_end()
        except Failed:
            self.tell()
            raise
        finally:
            if kind:
                self.tell()
            self.end()

    def __getitem__(self, name):
        return self.nodes[name]

    def add_net(self, name, address):
        self.nets.append(name)
        sh(f"ip netns add {name}")
        sh(f"ip link add v-{name} type veth peer name eth0 netns {name}")
        sh(f"ip link set v-{name} master br0 up")
        sh(f"ip -n {name} link set lo up")
        sh(f"ip -n {name} address add {address}/24 dev eth0")
        sh(f"ip -n {name} link set eth0 up")

    def start_etcd(self):
        """Also again, with the data of before."""
        client, peer = f"http://{ETCD_AT}:2379", "http://127.0.0.1:2380"
        log = f"{self.folder}/etcd.log"
        self.etcd = Process("etcd", [
            "etcd", "--name", "one", "--data-dir", f"{self.folder}/etcd", "--logger", "zap",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}"], log)

    def check(self):
        for node in self.nodes.values():
            node.check()
        if self.etcd and self.etcd.code is not None:
            raise Failed(f"etcd has ended: {self.etcd.code}")

    # ------------------------------------------------------------ the end

    def check_logs(self):
        for path in pathlib.Path(self.folder).glob("*.log"):
            if found := BROKEN.search(path.read_text(errors="replace")):
                raise Failed(f"{path.name} has '{found.group()}'")

    def check_end(self):
        """Daemons end when they are asked to, and nobody has found a mistake of our own."""
        running = [n for n in self.nodes.values() if n.daemon and not n.may_end]
        for node in running:
            node.check()
            node.daemon.send(signal.SIGTERM)
        for node in running:
            node.await_end()
        self.check_logs()

    def tell(self):
        """The logs, for a person."""
        for path in sorted(pathlib.Path(self.folder).glob("*.log")):
            if path.name != "etcd.log":
                lines = path.read_text(errors="replace").splitlines()[-40:]
                print("".join(f"  {path.name}: {line}\n" for line in lines), end="")

    def end(self):
        processes = [n.daemon for n in self.nodes.values()] + [self.etcd]
        processes += [p for run in self.runs for p in run.ranks.values()]
        for p in processes:
            if p and p.code is None:
                p.kill()
        for net in self.nets:
            with contextlib.suppress(Failed):
                sh(f"ip netns del {net}")
            sh(f"ip link del v-{net}", check=False)
        sh("ip link del br0", check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
