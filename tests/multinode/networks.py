"""Networks that are slow, lossy or broken for a while: a relay stands in for a node's cable."""

import contextlib
import os
import random
import time

from lab import PEER_PORT, Failed, Lab, wait_for
from relay import Relay
from replicas import LONG_RUN, Elastic, has_replicas
from training import TWO, Training

THREE = (("a", 1), ("b", 1), ("c", 1))
ETCD_PORT = 2379
WAIT_S = 90


@contextlib.contextmanager
def relayed(x, name, peers=()):
    relay = Relay(x, name, [x[p] for p in peers])
    try:
        yield relay
        if not relay.is_alive():
            raise Failed("the relay has ended")
    finally:
        relay.end()


def ended_epochs(x):
    return sum(n.said().count("cluster epoch ends") for n in x.nodes.values())


def gone_links(x):
    return sum(n.said().count("cluster link gone") for n in x.nodes.values())


def equal(losses, expected):
    if wrong := {s: (v, expected[s]) for s, v in losses.items() if expected[s] != v}:
        raise Failed(f"(loss, without the relay) of steps: {wrong}")


def far_away():
    """50 ms each way between two of three nodes: links stay up, and the losses are the same."""
    with Lab(3) as x:
        plain = Training(x, THREE, steps=4, job="plain").finish()
        before = ended_epochs(x)
        with relayed(x, "b", "c") as relay:
            relay.delay_s = 0.05
            begun = time.monotonic()
            equal(Training(x, THREE, steps=4).finish(WAIT_S), plain)
            seconds = time.monotonic() - begun
            print(f"# 4 steps in {seconds:.1f} s")
            if seconds < 4 * 0.1:
                raise Failed(f"4 steps took {seconds:.1f} s: nothing was delayed")
            if gone_links(x):
                raise Failed("a link has ended")
            if ended_epochs(x) > before + 3:  # one on each node, at the job's end
                raise Failed("an epoch has ended before its job")


def frames_are_lost():
    """Two frames in a hundred are lost: training goes on, with the same losses."""
    with Lab(2) as x:
        plain = Training(x, TWO, steps=40, job="plain").finish()
        with relayed(x, "b") as relay:
            relay.loss = 0.02
            t = Training(x, TWO, steps=40)
            equal(t.finish(WAIT_S, missing=5), plain)
            print(f"# {relay.lost} frames were lost")
            if relay.lost < 20:
                raise Failed(f"only {relay.lost} frames were lost")


def stall(x, t, relay, seconds):
    relay.stalled = True
    time.sleep(seconds)
    relay.stalled = False
    t.wait_step(t.step() + 20, WAIT_S)


def cable_stalls():
    """A cable is silent: for a moment nothing ends, for longer than links wait all go on after."""
    steps = 100000
    with Lab(2) as x, relayed(x, "b") as relay:
        t = Training(x, TWO, steps=steps)
        t.wait_step(20)
        for seconds in (0.2, 0.4):
            stall(x, t, relay, seconds)
        if gone_links(x) or ended_epochs(x):
            raise Failed("a link or an epoch has ended in a stall below 1.25 s")
        t.mark()
        stall(x, t, relay, 3)
        t.wait_said(t.ranks, "returns to the last commit", ("node ",))
        if not gone_links(x):
            raise Failed("no link has ended in a stall of 3 s")
        t.losses()
        t.stop()


def connections_are_reset():
    """Links, data and etcd: each is reset at a random byte, and all go on with the same losses."""
    resets = 60 if os.environ.get("SHARDD_TEST_LONG") == "1" else 6
    rng = random.Random(3)
    with Lab(2) as x:
        steps = 30 * resets
        plain = Training(x, TWO, steps=steps, job="plain").finish()
        with relayed(x, "b") as of_b, relayed(x, "etcd") as of_etcd:
            t = Training(x, TWO, steps=steps)
            for i in range(resets):
                t.wait_step(30 * i + 3, WAIT_S)
                relay, most, which = (
                    (of_b, 1000, lambda ports: PEER_PORT in ports),
                    (of_b, 50000, lambda ports: not {PEER_PORT, ETCD_PORT} & set(ports)),
                    (of_etcd, 3000, lambda ports: ETCD_PORT in ports))[i % 3]
                before, relay.reset_which = relay.resets, which
                relay.reset_after = rng.randrange(most)
                wait_for(lambda r=relay, n=before: t.check() or r.resets > n, f"reset {i}")
            equal(t.finish(WAIT_S, missing=resets), plain)
            broken = resets - resets // 3  # those of etcd end none
            print(f"# epochs have ended {ended_epochs(x)} times on both nodes")
            if ended_epochs(x) < 2 * broken:
                raise Failed(f"{broken} resets have ended {ended_epochs(x)} epochs on both nodes")


def halves_of_an_elastic_job():
    """Two nodes of an elastic job are cut from each other, and both reach etcd: none goes on alone.
    Both go on when it is over."""
    with Lab(2, start=False) as x:
        for node in x.nodes.values():
            node.start(replicas=1)
        t = Elastic(x, TWO, steps=LONG_RUN, options="2 4 0.5")
        wait_for(lambda: t.check() or has_replicas(x, 5), "replicas on both nodes")
        with relayed(x, "b", "a") as relay:
            relay.loss = 1.0
            wait_for(lambda: all("cluster link gone" in n.said() for n in x.nodes.values()),
                     "the ends of the link")
            wait_for(lambda: t.check() or any(
                "one node does not go on by itself" in j["waits"]
                for n in x.nodes.values() for j in n.ctl("status")["jobs"]), "what it waits for")
            step = t.step()
            time.sleep(3)  # six times as long as the job waits for ranks
            if t.step() != step:
                raise Failed(f"half of the job has made steps {step + 1} to {t.step()}")
            relay.loss = 0.0
            t.wait_step(step + 10)
            if t.lines()[-1]["world"] != 4:
                raise Failed(f"not all ranks are back: {t.lines()[-1]}")
        t.stop()


DEFAULT = [far_away, frames_are_lost, cable_stalls, connections_are_reset,
           halves_of_an_elastic_job]
