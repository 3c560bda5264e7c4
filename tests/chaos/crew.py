"""The processes of a round, what rank 0 says, and what is left of them."""

import collections
import contextlib
import ctypes
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import time

from control import Control

JOB = "chaos"
PR_SET_CHILD_SUBREAPER = 36
# Only connections that are there are made again; a process that ends so is started again.
UNCONNECTED = ("closed the connection before it answered", "no daemon answers at")
LEFT_S = 20  # for what is freed after the call that frees it


class Failed(Exception):
    pass


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(n) for n in f.read().split()]
    except OSError:
        return []


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


class Crew:
    def __init__(self, folder, bins, ranks, steps, committed):
        self.folder, self.bins, self.ranks, self.steps = folder, bins, ranks, steps
        # The job resumes at its commits: then more than one step, and half a step, may be lost.
        self.committed = committed
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.socket, self.log = f"{folder}/s", f"{folder}/log"
        self.control = Control(f"{folder}/points")
        rng = random.Random(1)
        with open(f"{folder}/text", "w") as f:
            f.write("".join(rng.choice("abcdefgh ") for _ in range(3000)))
        self.env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SHARDD_", "NOTIFY_", "LISTEN_"))
        }
        self.env |= {
            "SHARDD_SOCKET": self.socket,
            "SHARDD_JOB": JOB,
            "SHARDD_TEST_CHAOS": f"{folder}/points",
        }
        self.trainers, self.runner, self.held, self.lone, self.unconnected = {}, None, True, None, 0
        self.steps_read, self.news, self.news_s, self.text, self.losses = 0, 0, 0.0, b"", {}
        self.out, self.into = os.pipe()
        os.set_blocking(self.out, False)
        with open(self.log, "ab") as log:
            self.holder = subprocess.Popen(
                [
                    bins["shardd-holder"],
                    "--",
                    bins["shardd"],
                    "--socket",
                    self.socket,
                    "--backend",
                    "host",
                ],
                stdout=log,
                stderr=log,
                env=self.env,
            )
        self.await_health()

    def await_health(self):
        until = time.monotonic() + LEFT_S
        while self.ctl("health", check=False).returncode:
            self.check(until)

    def replace_daemon(self):
        old = self.daemon()
        self.kill(old)
        while self.daemon() in (None, old):
            time.sleep(0.001)
        self.await_health()

    # ------------------------------------------------------------ the daemon

    def daemon(self):
        if not self.held:
            return self.lone
        pids = children(self.holder.pid)
        return pids[0] if pids and state_of(pids[0]) != "Z" else None

    def kill(self, pid):
        """Return: how many died."""
        try:
            if pid and state_of(pid) not in "ZX":
                os.kill(pid, signal.SIGKILL)
                return 1
        except ProcessLookupError:
            pass
        return 0

    def kill_holder(self):
        self.lone, self.held = self.daemon(), False
        self.holder.kill()
        self.holder.wait()
        return 1

    def ctl(self, *args, check=True):
        r = subprocess.run(
            [self.bins["shardctl"], "--socket", self.socket, "--json", *args],
            capture_output=True,
            text=True,
            env=self.env,
        )
        if check and r.returncode:
            raise Failed(f"shardctl {' '.join(args)}: {r.stderr or r.stdout}")
        return r

    # ------------------------------------------------------------ trainers

    def command(self):
        return [
            self.bins["charlm"],
            "--data",
            f"{self.folder}/text",
            "--steps",
            str(self.steps),
            "--json",
            "--batch",
            "4",
            "--hidden",
            "16",
            "--context",
            "4",
            "--embed",
            "4",
            *(["--in-backward", "--clip", "0", "--commit-every", "3"] if self.committed else []),
        ]

    def start_trainer(self, rank):
        env = self.env | {"RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
        with open(f"{self.folder}/err{rank}", "ab") as err:
            self.trainers[rank] = subprocess.Popen(
                self.command(), env=env, stderr=err, stdout=self.into if rank == 0 else err
            )

    def start_run(self):
        command = [
            self.bins["shardctl"],
            "--socket",
            self.socket,
            "run",
            "-n",
            str(self.ranks),
            "--job",
            JOB,
            "--",
        ]
        with open(f"{self.folder}/err", "ab") as err:
            self.runner = subprocess.Popen(
                command + self.command(), env=self.env, stdout=self.into, stderr=err
            )

    def begin_job(self, by_run):
        self.losses, self.text = {}, b""
        resume = "committed" if self.committed else "applied"
        size = str(self.ranks)
        self.ctl("job", "create", "--world-size", size, "--keep", "--resume", resume, JOB)
        if by_run:
            self.start_run()
        for rank in range(0 if by_run else self.ranks):
            self.start_trainer(rank)

    def pid_of(self, rank):
        return self.trainers[rank].pid

    def kill_trainer(self, rank):
        t = self.trainers[rank]
        if t.poll() is not None:
            return 0
        t.kill()
        t.wait()
        self.start_trainer(rank)
        return 1

    def kill_run(self):
        """Its trainers end with it."""
        if self.runner.poll() is not None:
            return 0
        pids = children(self.runner.pid)
        self.runner.kill()
        self.runner.wait()
        until = time.monotonic() + LEFT_S
        while any(state_of(p) not in "ZX" for p in pids):
            self.read(0.005)
            if time.monotonic() > until:
                raise Failed("trainers outlive shardctl run")
        self.reap(pids)
        self.start_run()
        return 1

    def reap(self, pids):
        for p in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(p, os.WNOHANG)

    def stop_for(self, pid, s):
        try:
            os.kill(pid, signal.SIGSTOP)
            self.read_for(s)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    # ------------------------------------------------------------ what rank 0 says

    def read_for(self, s):
        until = time.monotonic() + s
        while (left := until - time.monotonic()) > 0:
            self.read(left)

    def read(self, timeout):
        if not select.select([self.out], [], [], timeout)[0]:
            return
        *lines, self.text = (self.text + os.read(self.out, 1 << 16)).split(b"\n")
        for line in lines:
            self.take(line)

    def take(self, line):
        at = line.find(b'{"step"')
        if at < 0:
            return
        try:
            said = json.loads(line[at:])
        except ValueError:
            return  # of one that was killed meanwhile, or with the line of another behind it
        step, loss = said["step"], said["loss"]
        if self.losses.setdefault(step, loss) != loss:
            raise Failed(
                f"step {step} has loss {loss} the second time, {self.losses[step]} the first time"
            )
        self.steps_read += 1
        self.news, self.news_s = step, time.monotonic()

    def drop_news(self):
        while select.select([self.out], [], [], 0)[0]:
            self.read(0)
        self.news = 0

    def finished(self):
        if self.runner:
            return self.runner.poll() is not None
        return all(t.poll() == 0 for t in self.trainers.values())

    def died_connecting(self, rank):
        """Did it end because the daemon died while it connected for the first time?"""
        with open(f"{self.folder}/err{rank}", errors="replace") as f:
            last = (f.readlines() or [""])[-1]
        return any(words in last for words in UNCONNECTED)

    def check(self, until):
        for rank, t in list(self.trainers.items()):
            if t.poll() and self.died_connecting(rank):
                self.unconnected += 1
                self.start_trainer(rank)
            elif t.poll():
                raise Failed(f"rank {rank} ended with {t.returncode}")
        if self.runner and self.runner.poll():
            raise Failed(f"shardctl run ended with {self.runner.returncode}")
        if self.held and self.holder.poll() is not None:
            raise Failed(f"the holder ended with {self.holder.returncode}")
        if time.monotonic() > until:
            raise Failed(f"nothing goes on after step {max(self.losses, default=0)}")

    def await_end(self, until):
        while not self.finished():
            self.check(until)
            self.read(0.1)
        self.check(until)
        self.drop_news()

    # ------------------------------------------------------------ what is left

    def slabs(self):
        """Hashes of the memory that a holder has of the job: parameters, optimizer state, copies.

        Without it, of all that the daemon has: gradients that nobody keeps, too.
        """
        hashes, keeper = [], self.holder.pid if self.held else self.lone
        for fd in os.listdir(f"/proc/{keeper}/fd"):
            path = f"/proc/{keeper}/fd/{fd}"
            try:
                if os.readlink(path).startswith("/memfd:shardd ("):
                    with open(path, "rb") as f:
                        hashes.append(hashlib.sha256(f.read()).hexdigest())
            except OSError:
                pass
        return sorted(hashes)

    def status(self):
        return json.loads(self.ctl("status").stdout)

    def end_job(self):
        """Return: the hashes, and the loss of each step."""
        self.control.disarm()
        self.await_health()  # it may have died after the last step
        result = (self.slabs(), dict(self.losses))
        self.trainers, self.runner = {}, None
        self.ctl("job", "delete", JOB)
        return result

    def count(self):
        """Descriptors of the holder and of the daemon, and the status's bytes."""
        until, last = time.monotonic() + LEFT_S, None
        while True:
            now = (
                len(os.listdir(f"/proc/{self.holder.pid}/fd")) if self.held else 0,
                len(os.listdir(f"/proc/{self.daemon()}/fd")),
                self.used(),
            )
            if now == last and now[2] == 0:
                return now
            if time.monotonic() > until:
                raise Failed(f"bytes are left: {now}")
            last = now
            time.sleep(0.05)

    def used(self):
        return sum(int(d["used_bytes"]) for d in self.status()["devices"])

    def compare(self, want, got):
        for step, loss in got[1].items():
            if want[1].get(step) != loss:
                raise Failed(f"step {step}: loss {loss} instead of {want[1].get(step)}")
        missing = collections.Counter(want[0]) - collections.Counter(got[0])
        if missing or (self.held and want[0] != got[0]):
            raise Failed(
                f"memory differs: {len(set(want[0]) ^ set(got[0]))} of {len(want[0])} slabs"
            )
        if not want[0]:
            raise Failed("no memory was compared")

    def compare_counts(self, base):
        until = time.monotonic() + LEFT_S
        while (now := self.count())[0] > base[0] * self.held or now[1] > base[1]:
            if time.monotonic() > until:
                raise Failed(f"descriptors of holder and daemon, bytes: {now}, before {base}")
        files = sorted(os.listdir(self.folder))
        odd = [
            f for f in files if f not in ("s", "log", "points", "text") and not f.startswith("err")
        ]
        if odd:
            raise Failed(f"files are left: {odd}")

    def stop(self):
        pid = self.daemon()
        if self.held:
            self.holder.terminate()
            until = time.monotonic() + LEFT_S
            while self.holder.poll() is None and time.monotonic() < until:
                self.read(0.01)
            if self.holder.returncode != 0:
                raise Failed(f"the holder ended with {self.holder.returncode}")
        else:
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + LEFT_S
        while state_of(pid) not in "ZX":
            self.read(0.01)
            if time.monotonic() > until:
                raise Failed("the daemon does not end")
        self.reap([pid])
        if os.path.exists(self.socket):
            raise Failed("the socket is left")
        if left := [p for p in children(os.getpid()) if state_of(p) != "Z"]:
            raise Failed(f"processes are left: {left}")

    def show(self):
        for name in sorted(os.listdir(self.folder)):
            if name.startswith(("err", "log")):
                with open(f"{self.folder}/{name}", errors="replace") as f:
                    for line in f.readlines()[-25:]:
                        print(f"# {name}: {line.rstrip()}")

    def kill_all(self):
        pid = self.daemon()
        for p in [self.holder, self.runner, *self.trainers.values()]:
            if p and p.poll() is None:
                p.kill()
                p.wait()
        self.kill(pid)
        self.reap(children(os.getpid()))
        os.close(self.out)
        os.close(self.into)
