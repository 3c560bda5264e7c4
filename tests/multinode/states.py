"""Daemons that are killed in each state of what their nodes do together.

Their points are those of tests/chaos/points.h: before and after functions of a collective's way."""

import os
import pathlib
import random
import sys

from cases import LONG_RUN, leader_of
from lab import BIN, Lab, wait_for
from training import Training

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "chaos"))
from control import POINTS, Control

SHAPE = (("a", 1), ("b", 2), ("c", 1))
# The state of a collective before a function, and after it. Of the leader alone: the decision.
STATES = {
    "order_announce": ("all ranks of the node have asked for it", "the leader was told"),
    "match_start": ("the leader has started it", "it is in the node's line"),
    "turn_start": ("a gather was started", "it is in the node's line"),
    "comm_all_gather": ("its part of a gather is ready", "it is under way"),
    "comm_sum": ("its ranks can be added", "it is under way"),
    "comm_all_reduce": ("its part of an all-reduce is ready", "it is under way"),
    "comm_complete": ("the data of others are there", "they were used"),
    "decide_begin": ("all nodes have announced a commit", "the store was asked"),
    "order_decided": ("the store has decided, and no node knows", "all were told"),
    "apply_allow": ("a step is prepared on all nodes", "it may be applied"),
}
LEADS = ("decide_begin", "order_decided")


def daemon_dies_in_each_state():
    """A daemon is killed in each named state of a collective and a commit: no step is lost."""
    turns = 5 if os.environ.get("SHARDD_TEST_LONG") == "1" else 1
    rng = random.Random(7)
    with Lab(3, start=False) as x:
        points = {}
        for node in x.nodes.values():
            path = f"{x.folder}/{node.name}.points"
            points[node.name] = Control(path)
            node.program = BIN.parent / "tests/shardd-chaos"
            node.more = {"SHARDD_TEST_CHAOS": path}
            node.start(held=True)
        t = Training(x, SHAPE, steps=LONG_RUN)
        killed = 0
        for turn in range(turns):
            for name, texts in STATES.items():
                for when, text in zip(("before", "after"), texts):
                    t.wait_step(t.step() + 5)
                    leader = leader_of(x["a"])
                    others = [n for n in x.nodes if n != leader]
                    leads = name in LEADS or (killed + turn) % 3 == 0
                    victim = leader if leads else rng.choice(others)
                    die(t, points[victim], POINTS.index(f"{when} {name}"), rng.randrange(1, 6),
                        f"node {victim} dies: {text}")
                    killed += 1
        t.wait_step(t.step() + 20)
        t.expect_calm()


def die(t, control, point, passes, what):
    before = control.deaths()[point]
    control.arm(point, passes)
    wait_for(lambda: t.check() or control.deaths()[point] > before, what)


DEFAULT = [daemon_dies_in_each_state]
