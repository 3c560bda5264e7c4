"""Nodes that are cut from each other, or from etcd, in each phase of a commit, and connected again.

Daemons stop at a point of tests/chaos/points.h. So the network is cut in a known phase, and what
was sent before has arrived."""

import contextlib
import itertools
import os
import random
import time

import lab
import replicas
from cases import BACK, LONG_RUN, commit_waits, leader_of
from lab import BIN, Failed, Lab, Process, sh, wait_for
from states import POINTS, Control
from training import Training

SHAPE = (("a", 1), ("b", 2), ("c", 1))
# The nodes that stop, and the point; then one of them goes on to the last point, if there is one.
ALL, LEADER = "abc", ""
PHASES = {
    "no node has announced the commit": (ALL, "before a commit is announced", None),
    "one node has announced the commit": (ALL, "before a commit is announced",
                                          "after a commit is announced"),
    "all nodes have announced the commit": (LEADER, "before decide_begin", None),
    "the store was asked": (LEADER, "after decide_begin", None),
    "the store has decided, and no node knows": (LEADER, "before order_decided", None),
    "the leader tells the nodes": (LEADER, "after order_decided", None),
}
CUTS = ("the leader from the other nodes", "another node from the leader", "the leader from etcd",
        "the leader from all")
TOGETHER_S = 0.5  # links wait for 1.25 s


class Cable:
    """Of nodes and etcd, pair by pair: what one sends to the other one is lost at both ends."""

    def __init__(self, x):
        self.addresses = {n.name: n.address for n in x.nodes.values()} | {"etcd": lab.ETCD_AT}
        self.pairs = []

    def route(self, verb, pairs):
        for one, other in pairs:
            sh(f"ip -n {one} route {verb} blackhole {self.addresses[other]}/32")
            sh(f"ip -n {other} route {verb} blackhole {self.addresses[one]}/32")

    def cut(self, what, leader, other):
        others = [n for n in self.addresses if n not in (leader, "etcd")]
        self.pairs = {
            CUTS[0]: [(leader, n) for n in others],
            CUTS[1]: [(leader, other)],
            CUTS[2]: [(leader, "etcd")],
            CUTS[3]: [(leader, n) for n in (*others, "etcd")],
        }[what]
        self.route("add", self.pairs)

    def heal(self):
        self.route("del", self.pairs)


class Stops:
    """Daemons that stop at points."""

    def __init__(self, x):
        self.x, self.controls = x, {}
        for node in x.nodes.values():
            path = f"{x.folder}/{node.name}.points"
            self.controls[node.name] = Control(path)
            node.program = BIN.parent / "tests/shardd-chaos"
            node.more = {"SHARDD_TEST_CHAOS": path}

    def stopped(self, name):
        pid = self.x[name].daemon.popen.pid
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "T"

    def go_on(self, *names):
        for name in names:
            self.x[name].daemon.send(lab.signal.SIGCONT)

    def stop(self, t, names, point):
        """All of them in one phase: else they go on, and it is tried again."""
        def together():
            t.check()
            for name in names:
                self.controls[name].arm(POINTS.index(point), 1, stops=True)
            with contextlib.suppress(Failed):
                return wait_for(lambda: all(map(self.stopped, names)), point, TOGETHER_S)
            for name in names:
                self.controls[name].disarm()
            self.go_on(*names)
            time.sleep(0.1)
            return False
        wait_for(together, f"nodes {names} stop: {point}")

    def pass_point(self, name, point):
        """The node goes on, and passes the point."""
        control, number = self.controls[name], POINTS.index(point)
        before = control.passes(number)
        self.go_on(name)
        wait_for(lambda: control.passes(number) > before, f"node {name}: {point}")


def committed(node):
    return next(j["step"] for j in node.ctl("status")["jobs"] if j["name"] == "j")


def agree(x, t):
    """While no rank does anything, all nodes and the store have one step."""
    for p in t.ranks.values():
        p.send(lab.signal.SIGSTOP)
    steps = []

    def same():
        steps[:] = [committed(n) for n in x.nodes.values()] + [replicas.store_step()[0]]
        return len(set(steps)) == 1
    try:
        wait_for(same, "all nodes and the store are at one step")
    except Failed as e:
        raise Failed(f"{e}: {steps}") from e
    for p in t.ranks.values():
        p.send(lab.signal.SIGCONT)


def history(x):
    """Of the key in the store that has the last commit. Return: each commit: its step and epoch."""
    last = replicas.store_step()
    log = f"{x.folder}/commits"
    watch = Process("etcd", ["etcdctl", "--endpoints", f"http://{lab.ETCD_AT}:2379", "watch",
                             "/shardd/shardd/jobs/0/j/step", "--rev", "1"], log,
                    lab.environment(ETCDCTL_API="3"))

    def commits():
        lines = watch.text().split("\n")[:-1]
        return [tuple(map(int, lines[i + 2].split()[:2])) for i in range(len(lines) - 2)
                if lines[i] == "PUT"]
    wait_for(lambda: last in commits(), "the store has told all commits")
    watch.kill()
    return commits()


def one_after_the_other(commits):
    """Never two commits of one step, and never one of an earlier epoch."""
    for i, (step, _) in enumerate(commits):
        if step != i + 1:
            raise Failed(f"commit {i + 1} in the store is of step {step}: {commits[i - 3:i + 3]}")
    epochs = [epoch for _, epoch in commits]
    if epochs != sorted(epochs):
        raise Failed(f"a commit of an earlier epoch was decided: {epochs}")


def disturb(x, t, stops, phase, what, seconds, rng):
    names, point, last = PHASES[phase]
    cable, leader = Cable(x), leader_of(x["a"])
    other = rng.choice([n for n in x.nodes if n != leader])
    stops.stop(t, names or leader, point)
    if last:
        stops.pass_point(rng.choice(names), last)
    t.mark()
    cable.cut(what, leader, other)
    stops.go_on(*x.nodes)
    if what == CUTS[2]:
        wait_for(lambda: t.check() or "the store" in commit_waits(x[leader]),
                 "a commit waits for the store")
    else:
        t.wait_said(t.ranks, BACK, ("node ",), s=20)
    time.sleep(seconds)
    step = t.step()
    cable.heal()
    t.wait_step(step + 5)
    agree(x, t)


def cut_in_each_phase():
    """Nodes are cut from each other, or from etcd, in each phase of a commit, and no step is lost.
    The short form has every other pair of phase and cut: each phase twice, each cut three times."""
    long = os.environ.get("SHARDD_TEST_LONG") == "1"
    turns = 3 if long else 1
    chosen = [(phase, what) for (i, phase), (k, what)
              in itertools.product(enumerate(PHASES), enumerate(CUTS)) if long or (i + k) % 2 == 0]
    rng = random.Random(11)
    with Lab(3, start=False) as x:
        stops = Stops(x)
        for node in x.nodes.values():
            node.start()
        t = Training(x, SHAPE, steps=LONG_RUN)
        t.wait_step(10)
        for turn in range(turns):
            for phase, what in chosen:
                # in the long form also for longer than the lease of a node
                seconds = 12 if turn and rng.random() < 0.25 else rng.random()
                try:
                    disturb(x, t, stops, phase, what, seconds, rng)
                except Failed as e:
                    raise Failed(f"{phase}; {what} is cut: {e}") from e
        one_after_the_other(history(x))
        t.expect_calm()


DEFAULT = [cut_in_each_phase]
