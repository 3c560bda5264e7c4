"""The processes of a round, what rank 0 says, and what is left of them."""

import collections
import contextlib
import ctypes
import datetime
import hashlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time

import mounts
from control import Control
from published import lines
from trainers import RUN, children

JOB = "chaos"
READS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reads.py")
PR_SET_CHILD_SUBREAPER = 36
# Only connections that are there are made again, in Python inside a step of resilient. A process
# that ends so is started again.
UNCONNECTED = (
    "closed the connection before it answered",
    "no daemon answers at",
    "DaemonRestarted",
)
# A daemon that is away for longer than reconnect_ms (rounds that set it), and the end of a wait.
LATE = ("did not come back within",)
# What a limit may say to the process that meets it (rounds of limits).
LIMITED = (
    "RESOURCE_EXHAUSTED",
    "ResourceExhausted",
    "Too many open files",
    "Cannot allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "No space left",
    "MemoryError",
    "can't start new thread",
)
LEFT_S = 20  # for what is freed after the call that frees it


class Failed(Exception):
    pass


# Other ends than by SIGKILL, and what the daemon refused because of a limit.
# Signal 11 is not the daemon's own fault in rounds of limits: a holder whose address space is
# limited starts it, and the kernel ends an exec that has no room for its stack so, before its first
# instruction. In other rounds it is the point inside launch_run.
ENDED = re.compile(r"the daemon (?:was killed by signal (?!9;)|has ended with exit code )\d+")
REFUSED = re.compile(r"Too many open files|Cannot allocate memory|RESOURCE_EXHAUSTED|no memory to")


# Of the timeline of an outage: the begin of a daemon, its listening, and the ranks.
TIMED = ("server device", "server ready", "rank=0", "rank=1", "epoch ended")


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def descendants(pid):
    below = children(pid)
    return below + [d for p in below for d in descendants(p)]


def odd_tensors(want, got):
    """The names of those that differ, or that only one of the two has."""
    return sorted(n for n in want.keys() | got.keys() if want.get(n) != got.get(n))


def descriptors(pid):
    return [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]


class Crew:
    """@trainer: of trainers.py. @memory: of the daemon, in bytes; 0: its own choice. @reconnect_ms:
    of the trainers; 0: their own choice."""

    def __init__(self, folder, bins, ranks, trainer, memory=0, reconnect_ms=0):
        self.folder, self.bins, self.ranks, self.trainer = folder, bins, ranks, trainer
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
        for name in "tmp", "disk":
            os.makedirs(f"{folder}/{name}")
        self.env |= {
            "SHARDD_SOCKET": self.socket,
            "SHARDD_JOB": JOB,
            "SHARDD_RUN": RUN,
            "SHARDD_TEST_CHAOS": f"{folder}/points",
            "TMPDIR": f"{folder}/tmp",
        }
        if reconnect_ms:
            self.env["SHARDD_RECONNECT_MS"] = str(reconnect_ms)
        self.trainers, self.runner, self.held, self.lone = {}, None, True, None
        self.readers = []
        # Errors that the round allows: a process that ends with one is started again.
        self.excuses = LATE * bool(reconnect_ms) + UNCONNECTED
        self.seen = collections.Counter()
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
                    "--set",
                    f"checkpoint_roots={folder}/disk",
                    *(["--set", f"memory_bytes={memory}"] if memory else []),
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

    def start_trainer(self, rank):
        env = self.env | self.trainer.env | {"RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
        with open(f"{self.folder}/err{rank}", "ab") as err:
            self.trainers[rank] = subprocess.Popen(
                self.trainer.command(), env=env, stderr=err, stdout=self.into if rank == 0 else err
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
                command + self.trainer.command(),
                env=self.env | self.trainer.env,
                stdout=self.into,
                stderr=err,
            )

    def begin_job(self, by_run, policy=()):
        """@policy: of the job's checkpoints, as shardctl takes it."""
        self.losses, self.text = {}, b""
        resume = "committed" if self.trainer.committed else "applied"
        size = str(self.ranks)
        self.ctl("job", "create", "--world-size", size, "--keep", "--resume", resume, JOB)
        if policy:
            self.ctl("checkpoint", "policy", JOB, *policy)
        if by_run:
            self.start_run()
        for rank in range(0 if by_run else self.ranks):
            self.start_trainer(rank)

    # ------------------------------------------------------------ readers

    def start_reader(self, i):
        publications = self.trainer.publications
        name = publications[i % len(publications)]["name"]
        declares = [json.dumps(p) for p in publications] if i == 0 else []
        env = self.env | {"SHARDD_LIBRARY": self.bins["library"]}
        with open(f"{self.folder}/err-reads{i}", "ab") as out:
            return subprocess.Popen(
                [sys.executable, "-B", READS, name, *declares], env=env, stdout=out, stderr=out
            )

    def begin_readers(self, n):
        """They wait for the job."""
        self.trainer.read = True
        self.readers = [self.start_reader(i) for i in range(n)]
        until = time.monotonic() + LEFT_S
        while not all(os.path.getsize(f"{self.folder}/err-reads{i}") for i in range(n)):
            self.check(until)
            time.sleep(0.01)

    def kill_reader(self, i):
        """Return: how many died."""
        died = self.kill(self.readers[i].pid)
        self.readers[i].wait()
        self.readers[i] = self.start_reader(i)
        return died

    def end_readers(self):
        """All generations that were read are what the masters of their steps make, whoever died; a
        number is of one generation."""
        for reader in self.readers:
            reader.kill()
            reader.wait()
        n = len(self.trainer.publications)
        for publication in range(n):
            said = [s for i in range(publication, len(self.readers), n) for s in self.reads_of(i)]
            if not said:
                raise Failed(f"no reader has read anything of publication {publication}")
            self.compare_generations(publication, said)
        self.readers = []

    def compare_generations(self, publication, all_said):
        want = self.trainer.published(publication, {said["step"] for said in all_said})
        numbers = {}
        for said in all_said:
            step, found = said["step"], said["tensors"]
            if said["delta"] not in (None, found):
                raise Failed(f"a copy of step {step} differs after its delta")
            if odd := odd_tensors(want[step], found):
                raise Failed(f"a generation of step {step} is not what its masters make: {odd}")
            if numbers.setdefault(said["number"], step) != step:
                raise Failed(f"two generations have the number {said['number']}")
        self.seen["generations read, by number"] += len(numbers)
        self.seen["deltas applied"] += sum(said["delta"] is not None for said in all_said)

    def reads_of(self, i):
        """What a reader has said; the last line of one that died may be short."""
        path = f"{self.folder}/err-reads{i}"
        with open(path, errors="replace") as f:
            if "Traceback" in (text := f.read()):
                raise Failed(f"reader {i}: {text[text.rindex('Traceback') :]}")
        yield from (said for said in lines(path) if said)

    def pid_of(self, rank):
        """The process that trains; None: it is being made."""
        return self.trainer.dying(self.trainers[rank].pid)

    def kill_trainer(self, rank):
        return self.kill_together([rank], False, None)[0]

    def kill_run(self):
        """Its trainers end with it."""
        return self.kill_together([], True, None)[0]

    def kill_together(self, ranks, run, daemon):
        """All signals are sent before anybody is started again. Return: how many others than the
        daemon died, and how many daemons."""
        ranks = [r for r in ranks if self.trainers[r].poll() is None]
        run = run and self.runner.poll() is None
        pids = [self.pid_of(r) for r in ranks]
        if run:
            pids.append(self.runner.pid)
        below = descendants(self.runner.pid) if run else []
        died = sum([self.kill(p) for p in pids]), self.kill(daemon)
        for r in ranks:
            if not self.trainer.forks:
                self.trainers[r].wait()
                self.start_trainer(r)
        if run:
            self.runner.wait()
            self.await_end_of(below)
            self.start_run()
        return died

    def await_end_of(self, pids):
        until = time.monotonic() + LEFT_S
        while any(state_of(p) not in "ZX" for p in pids):
            self.read(0.005)
            if time.monotonic() > until:
                raise Failed("trainers outlive shardctl run")
        self.reap(pids)

    @contextlib.contextmanager
    def hog(self, hidden):
        """Another job takes memory meanwhile, or is refused."""
        fixed = "--steps 1000000 --batch 1 --context 4 --embed 4 --hidden".split()
        command = [self.bins["charlm"], "--data", f"{self.folder}/text", *fixed, str(hidden)]
        env = self.env | {"SHARDD_JOB": "hog", "RANK": "0", "WORLD_SIZE": "1"}
        with open(f"{self.folder}/err-hog", "ab") as err:
            p = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=err)
        try:
            yield
        finally:
            p.kill()
            if p.wait() > 0 and not self.is_excused("err-hog", 0):
                raise Failed(f"the other job's trainer ended with {p.returncode}")
            self.delete("hog")

    def delete(self, job):
        """Also if the daemon dies meanwhile."""
        until = time.monotonic() + LEFT_S
        while self.ctl("job", "delete", "--force", job, check=False).returncode:
            self.await_health()
            if all(j["name"] != job for j in self.status()["jobs"]):
                return
            self.check(until)

    def reap(self, pids):
        for p in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(p, os.WNOHANG)

    @contextlib.contextmanager
    def stopped(self, pid):
        """It stands still meanwhile."""
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(pid, signal.SIGCONT)

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

    def near_end(self):
        last = self.trainer.steps - self.trainer.margin
        return self.finished() or max(self.losses, default=0) > last

    def is_excused(self, name, code):
        """Did it end with an error that the round allows?"""
        with open(f"{self.folder}/{name}", errors="replace") as f:
            last = f.readlines()[-6 if name == "err" else -1 :]
        words = [w for w in self.excuses if any(w in line for line in last)]
        words += ["the guard gives up"] * self.trainer.gave_up(code)
        self.seen.update(f"ended with: {w}" for w in words[:1])
        return bool(words)

    def check(self, until):
        for rank, t in list(self.trainers.items()):
            if t.poll() and self.is_excused(f"err{rank}", t.returncode):
                self.start_trainer(rank)
            elif t.poll():
                raise Failed(f"rank {rank} ended with {t.returncode}")
        if self.runner and self.runner.poll() and self.is_excused("err", 0):
            self.start_run()
        elif self.runner and self.runner.poll():
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

        Pools are left out: what is in their memory means nothing. Without a holder, of what the
        daemon has.
        """
        until = time.monotonic() + LEFT_S
        while not self.held_slabs() <= self.slabs_of(JOB) and self.held:
            self.check(until)  # of a job that was deleted just before
        hashes, shards = [], self.slabs_of(JOB, ("shard",))
        for path in self.memory_of(self.keeper()):
            if os.stat(path).st_ino in shards:
                with open(path, "rb") as f:
                    hashes.append(hashlib.sha256(f.read()).hexdigest())
        return sorted(hashes)

    def keeper(self):
        return self.holder.pid if self.held else self.lone

    def memory_of(self, pid):
        """Its descriptors of slabs."""
        for path in descriptors(pid):
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith("/memfd:shardd ("):
                    yield path

    def held_slabs(self):
        return {os.stat(path).st_ino for path in self.memory_of(self.keeper())}

    def slabs_of(self, job, classes=("shard", "full", "grad", "control")):
        rows = json.loads(self.ctl("memory").stdout)["slabs"]
        return {int(row["inode"]) for row in rows if row["job"] == job and row["class"] in classes}

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
        """Descriptors of holder and daemon, when nothing of a job is left: no mapping and
        no descriptor of a slab, no used or quarantined byte, no process of theirs."""
        until, last = time.monotonic() + LEFT_S, None
        while True:
            daemon = self.daemon()
            with open(f"/proc/{daemon}/maps") as f:
                slabs = sum("/memfd:shardd (" in line for line in f)
            slabs += sum(len(list(self.memory_of(pid))) for pid in {daemon, self.keeper()})
            now = (
                len(descriptors(self.holder.pid)) if self.held else 0,
                len(descriptors(daemon)),
                slabs,
                self.used(),
                [p for p in children(daemon) + self.zombies() if state_of(p) != "X"],
            )
            if now == last and not any(now[2:]):
                return now
            if time.monotonic() > until:
                self.show_descriptors()
                raise Failed(f"slabs, bytes or processes are left: {now}")
            last = now
            time.sleep(0.05)

    def show_descriptors(self):
        for pid in self.keeper(), self.daemon():
            links = sorted(os.readlink(path) for path in descriptors(pid))
            print(f"# descriptors of {pid}: {links}")

    def zombies(self):
        pids = children(self.holder.pid) if self.held else []
        return [p for p in pids if state_of(p) == "Z"]

    def used(self):
        """Of devices, slabs and jobs; quarantined bytes are among them."""
        memory = json.loads(self.ctl("memory").stdout)
        rows = [row for name in ("devices", "slabs", "jobs") for row in memory[name]]
        return sum(int(row["used_bytes"]) + int(row["quarantined_bytes"]) for row in rows)

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
        until, base = time.monotonic() + LEFT_S, (base[0] * self.held, base[1])
        while True:
            now = self.count()
            if all(a <= b for a, b in zip(now, base, strict=False)):
                break
            if time.monotonic() > until:
                self.show_descriptors()
                raise Failed(f"descriptors of holder and daemon: {now}, before {base}")
        with open(self.log, errors="replace") as f:
            for line in f:
                if any(w in line for w in ("broken invariant", "Sanitizer")):
                    raise Failed(f"the log says: {line.strip()}")
                for how in ENDED.findall(line) + REFUSED.findall(line):
                    self.seen[f"the daemon's log: {how}"] += 1

    def compare_files(self):
        """What the end of all leaves: of the round's folder, of its TMPDIR, of shared memory."""
        known = ("log", "points", "text", "tmp", "disk", "inductor")
        odd = [f for f in os.listdir(self.folder) if f not in known and not f.startswith("err")]
        odd += os.listdir(f"{self.folder}/tmp") + os.listdir(f"{self.folder}/disk")
        if mounts.own:
            odd += os.listdir("/dev/shm")
        if odd:
            raise Failed(f"files are left: {sorted(odd)}")
        with open("/proc/net/unix") as f:
            if left := [line.split()[-1] for line in f if self.folder in line]:
                raise Failed(f"sockets are left: {left}")

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
        self.compare_files()
        if left := [p for p in children(os.getpid()) if state_of(p) != "Z"]:
            raise Failed(f"processes are left: {left}")

    def timeline(self, since, gone_s):
        """Milliseconds after @since (of the monotonic clock) until what matters. @gone_s: the end
        of the process that was killed, if it was seen."""
        began, said, daemon = time.time() - (time.monotonic() - since), [], self.daemon()
        with open(self.log, errors="replace") as f:
            for line in f:
                at, _, words = line.partition(" ")
                what = next((w for w in TIMED if w in words), None)
                if words.startswith("the daemon") and "pause" in words:
                    said.append("(the holder pauses)")
                with contextlib.suppress(ValueError):
                    at_s = datetime.datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()
                    if what and at_s > began:
                        said.append(f"{what} {(at_s - began) * 1e3:.0f}")
                    elif at_s <= began:
                        said.clear()
        said.append(f"the next step {(self.news_s - since) * 1e3:.0f}")
        with contextlib.suppress(OSError):
            with open(f"/proc/{daemon}/stat") as f:
                forked_s = int(f.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
            with open(f"/proc/{daemon}/schedstat") as f:
                ran, waited = (int(n) / 1e6 for n in f.read().split()[:2])
            if gone_s < self.news_s:
                said.insert(0, f"gone {(gone_s - since) * 1e3:.0f}")
            said.insert(1, f"forked {(forked_s - since) * 1e3:.0f}")
            said.append(f"its loop has run {ran:.0f} and waited for a processor {waited:.0f}")
        return ", ".join(said)

    def show(self):
        for name in sorted(os.listdir(self.folder)):
            if name.startswith(("err", "log")):
                with open(f"{self.folder}/{name}", errors="replace") as f:
                    for line in [s for s in f if name != "log" or " info " not in s][-14:]:
                        print(f"# {name}: {line.rstrip()}")

    def kill_all(self):
        pid = self.daemon()
        for p in [self.holder, self.runner, *self.trainers.values(), *self.readers]:
            if p and p.poll() is None:
                p.kill()
                p.wait()
        self.kill(pid)
        self.reap(children(os.getpid()))
        os.close(self.out)
        os.close(self.into)
