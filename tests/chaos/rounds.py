"""What dies in a round, where, and after how long."""

import math
import os
import random
import time

import limits
import mounts
from checkpoints import Folder
from control import POINTS
from crew import LIMITED

RANKS = 2
STEPS = 60
# What a round is about, and how often it is drawn.
KINDS = {
    "daemon": 6,
    "points": 8,
    "pairs": 2,
    "trainers": 1,
    "run": 1,
    "both": 2,
    "pauses": 1,
    "holder": 1,
    "triples": 2,
    "stops": 1,
    "limits": 2,
    "disk": 1,
    "readers": 2,
}
INSIDE = POINTS.index("inside launch_run")
# Of rounds that need them small.
MEMORY = 6 << 20
RECONNECT_MS = 400
READERS = 8 if os.environ.get("SHARDD_TEST_LONG") == "1" else 3
HIDDEN = (16, 100, 150, 200, 220, 240, 260, 300)  # of the other job's model


class Round:
    def __init__(self, crew, seed, kind, deaths, trace_ms=math.inf):
        self.crew, self.kind, self.n, self.trace_ms = crew, kind, deaths, trace_ms
        self.rng = random.Random(seed)
        self.seen_s = []  # from a death to the end of the next step
        self.daemons = self.others = 0

    def await_progress(self, since, daemon):
        """Until the daemon is another one than @daemon and rank 0 has ended a step with it."""
        crew, until = self.crew, time.monotonic() + self.crew.trainer.fail_s
        gone_s = math.inf
        while (now := crew.daemon()) in (None, daemon):
            gone_s = gone_s if now else min(gone_s, time.monotonic())
            crew.check(until)
            crew.read(0.002)
        crew.drop_news()
        while not crew.news and not crew.finished():
            crew.check(until)
            crew.read(0.2)
        if crew.news:
            self.seen_s.append(crew.news_s - since)
            if self.seen_s[-1] * 1000 > self.trace_ms:
                print(f"# {self.kind}: {crew.timeline(since, gone_s)}", flush=True)

    def await_steps(self, n):
        crew, until = self.crew, time.monotonic() + self.crew.trainer.fail_s
        want = crew.steps_read + n
        while crew.steps_read < want and not crew.finished():
            crew.check(until)
            crew.read(0.2)

    def pause(self, most_s):
        until = time.monotonic() + self.rng.random() * most_s
        while (left := until - time.monotonic()) > 0:
            self.crew.read(left)

    def kill_daemon(self):
        daemon = self.crew.daemon()
        since = time.monotonic()
        self.daemons += self.crew.kill(daemon)
        return since, daemon

    # ------------------------------------------------------------ what dies

    def daemon(self):
        self.pause(0.02)
        self.await_progress(*self.kill_daemon())

    def pairs(self):
        """A second and a third death while the next daemon starts, or just after."""
        since, daemon = self.kill_daemon()
        for _ in range(self.rng.randint(1, 2)):
            since, daemon = self.kill_next(daemon)
        self.await_progress(since, daemon)

    def kill_next(self, daemon):
        """Return: when, and which."""
        until = time.monotonic() + self.crew.trainer.fail_s
        while self.crew.daemon() in (None, daemon):
            self.crew.check(until)
            self.crew.read(0.001)
        self.pause(0.06)
        return self.kill_daemon()

    def points(self):
        """At a pass of an instrumented point, of this daemon or of the next one's start."""
        crew = self.crew
        known = [i for i in range(len(POINTS)) if crew.control.passes(i)]
        known += [INSIDE] * (len(known) // 4)
        point, daemon = self.rng.choice(known), crew.daemon()
        dead = sum(crew.control.deaths())
        crew.control.arm(point, self.rng.randint(1, 12 if crew.control.passes(point) > 50 else 2))
        until = time.monotonic() + 0.05
        while (
            sum(crew.control.deaths()) == dead and time.monotonic() < until and not crew.finished()
        ):
            crew.read(0.005)
        if sum(crew.control.deaths()) == dead:  # points of the start: now there is one
            daemon = crew.daemon()
            self.daemons += crew.kill(daemon)
            until = time.monotonic() + 0.3
            while sum(crew.control.deaths()) == dead and time.monotonic() < until:
                crew.read(0.005)
        crew.control.disarm()
        died = sum(crew.control.deaths()) - dead
        self.daemons += died
        self.await_progress(crew.control.died_s() if died else time.monotonic(), daemon)

    def trainers(self):
        self.pause(0.02)
        self.others += self.crew.kill_trainer(self.rng.randrange(RANKS))
        self.await_steps(2)

    def both(self):
        """The daemon and one or two trainers at once."""
        self.pause(0.02)
        for rank in self.rng.sample(range(RANKS), self.rng.randint(1, RANKS)):
            self.others += self.crew.kill_trainer(rank)
        self.await_progress(*self.kill_daemon())

    def run(self):
        """shardctl run, and its trainers with it; it is started again."""
        self.pause(0.05)
        self.others += self.crew.kill_run()
        self.await_steps(2)

    def pauses(self):
        """The daemon or a trainer stands still; what stands still may be killed."""
        crew = self.crew
        self.pause(0.02)
        daemon = crew.daemon()
        who = self.rng.choice((daemon, crew.pid_of(self.rng.randrange(RANKS))))
        with crew.stopped(who):
            crew.read_for(self.rng.random() * 0.1)
        if self.rng.random() < 0.5:
            self.await_progress(*self.kill_daemon())
        else:
            self.await_steps(2)

    def stops(self):
        """Longer than trainers look for a daemon (RECONNECT_MS); the holder, too."""
        crew, rng = self.crew, self.rng
        self.pause(0.02)
        who = rng.choice(("holder", "holder", "daemon", "trainer"))
        pids = {"holder": crew.holder.pid, "daemon": crew.daemon()}
        with crew.stopped(pids.get(who) or crew.pid_of(rng.randrange(RANKS))):
            dies = who != "daemon" and rng.random() < 0.7
            since, daemon = self.kill_daemon() if dies else (0, None)
            crew.read_for(rng.random() * 3 * RECONNECT_MS / 1000)
        if dies:
            self.await_progress(since, daemon)
        else:
            self.await_steps(2)

    def triples(self):
        """Three at once, or two at once and one of them, or the next daemon, once more."""
        crew, rng = self.crew, self.rng
        self.pause(0.02)
        daemon, since = crew.daemon(), time.monotonic()
        if crew.runner:
            others, daemons = crew.kill_together([], True, daemon)
        else:
            ranks = rng.sample(range(RANKS), rng.randint(1, RANKS))
            others, daemons = crew.kill_together(ranks, False, daemon)
        self.others, self.daemons = self.others + others, self.daemons + daemons
        if others + daemons < 3:
            since, daemon = self.kill_next(daemon)
        self.await_progress(since, daemon)

    def limits(self):
        """What a limit refuses, or ends, goes on without it."""
        crew, rng = self.crew, self.rng
        self.pause(0.02)
        who, what = rng.choice(("daemon", "holder", "trainer", "memory")), rng.choice(limits.ALL)
        rank = rng.randrange(RANKS)
        if who == "memory":
            with crew.hog(rng.choice(HIDDEN)):
                self.pause(0.1)
                self.disturb(rng.choice(("trainer", "daemon", "both")))
                self.pause(0.3)
        elif who == "daemon":
            with limits.lowered(rng, crew.daemon(), what, lambda: []):
                self.disturb("trainer")
                self.pause(0.3)
        elif who == "holder":
            with limits.lowered(rng, crew.holder.pid, what, lambda: [crew.daemon()]):
                self.disturb("daemon")
                self.pause(0.3)
        else:
            with limits.lowered(rng, crew.pid_of(rank), what, lambda: []):
                self.disturb("daemon")
                self.pause(0.3)
        self.await_steps(2)

    def disturb(self, who):
        if who != "daemon":
            self.others += self.crew.kill_trainer(self.rng.randrange(RANKS))
        if who != "trainer":
            self.kill_daemon()

    def disk(self):
        """Checkpoints are written meanwhile. The disk is full, read-only, or neither."""
        crew, rng = self.crew, self.rng
        what = rng.choice(("full", "full", "read-only", "writing"))
        if what == "writing":
            self.folder.await_writing(crew, rng)
        else:
            with self.mount.full(rng) if what == "full" else self.mount.read_only() as bad:
                if bad is not False:
                    self.folder.await_failure(crew)
                if rng.random() < 0.5:
                    self.await_progress(*self.kill_daemon())
        if what == "writing" or rng.random() < 0.3:
            self.await_progress(*self.kill_daemon())
        self.await_steps(4)

    def readers(self):
        """Beside readers of a publication, which die, too."""
        crew, rng = self.crew, self.rng
        who = rng.choice(("daemon", "daemon", "trainer", "reader", "all"))
        self.pause(0.05)
        if who in ("reader", "all"):
            self.others += crew.kill_reader(rng.randrange(READERS))
        if who in ("trainer", "all"):
            self.others += crew.kill_trainer(rng.randrange(RANKS))
        if who in ("daemon", "all"):
            self.await_progress(*self.kill_daemon())
        else:
            self.await_steps(2)

    def holder(self):
        """The daemon goes on without it; there is no second death that the state outlives."""
        if self.crew.held:
            self.pause(0.05)
            self.others += self.crew.kill_holder()
        self.await_steps(2)

    def play(self):
        """Return: what the job's memory was at its end, and the losses."""
        crew = self.crew
        if self.kind != "disk":
            return self.play_job(())
        with mounts.Disk(f"{crew.folder}/disk", crew.trainer.disk_kib) as self.mount:
            self.folder = Folder(f"{crew.folder}/disk/job")
            result = self.play_job((self.folder.path, "--every-steps", "3", "--keep", "2"))
            self.folder.compare(crew)
        return result

    def play_job(self, policy):
        crew = self.crew
        if self.kind == "limits":
            crew.excuses += LIMITED
        by_run = self.kind == "run" or (self.kind == "triples" and self.rng.random() < 0.5)
        if self.kind == "readers":
            crew.begin_readers(READERS)
        crew.begin_job(by_run, policy)
        self.await_steps(2)
        for _ in range(1 if self.kind == "holder" else self.n):
            if crew.near_end():
                break
            getattr(self, self.kind)()
        crew.await_end(time.monotonic() + crew.trainer.fail_s)
        if self.kind == "readers":
            crew.end_readers()
        return crew.end_job()
