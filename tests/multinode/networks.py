"""Networks that are slow, lossy or broken for a while: a relay stands in for a node's cable."""

import contextlib
import json
import os
import pathlib
import random
import time

from lab import PEER_PORT, Failed, Lab, wait_for
from relay import Relay
from replicas import Elastic, has_replicas, no_step_twice
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
        t.expect_calm()


def data_is_silent():
    """Frames of data are lost, all of them, and those of links are not: the ranks are told within
    seconds, and go on when data pass again."""
    with Lab(2) as x, relayed(x, "b") as relay:
        t = Training(x, TWO, steps=100000)
        t.wait_step(20)
        t.mark()
        begun = time.monotonic()
        relay.silent = lambda ports: not {PEER_PORT, ETCD_PORT} & set(ports)
        t.wait_said(t.ranks, "returns to the last commit", ("node ",))
        seconds = time.monotonic() - begun
        print(f"# {seconds:.1f} s")
        if seconds > 15 or gone_links(x):
            raise Failed(f"after {seconds:.1f} s; {gone_links(x)} links have ended")
        time.sleep(3)
        relay.silent = None
        t.wait_step(t.step() + 20, WAIT_S)
        t.expect_calm()


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


def goes_on_in(t, world):
    """On which nodes ranks have made steps with so many of them."""
    def made(rank):
        texts = [t.ranks[rank].text()]
        if rank == 0:
            texts.append(pathlib.Path(t.path("out")).read_text())
        return any(json.loads(line)["world"] == world for text in texts
                   for line in text.split("\n")[:-1] if line.startswith("{"))
    return {t.places[rank][0].name for rank in t.ranks if made(rank)}


def halves_of_an_elastic_job():
    """Two nodes of an elastic job are cut from each other, and both reach etcd: one of them goes on
    alone, and the other one leaves it alone, and waits. All ranks go on when it is over."""
    with Lab(2, start=False) as x:
        for node in x.nodes.values():
            node.start(replicas=1)
        expected = Elastic(x, TWO, steps=400, options="2 4 0.5 0", job="calm").finish()
        # the half that waits knows that after two attempts of 4.5 s to reach the other one
        t = Elastic(x, TWO, steps=400, options="2 4 0.5 0.05")
        wait_for(lambda: t.check() or has_replicas(x, 5), "replicas on both nodes")
        with relayed(x, "b", "a") as relay:
            relay.loss = 1.0
            t.wait_step(t.wait_world(2)["step"] + 5)
            half = goes_on_in(t, 2)
            other = next(n for n in x.nodes.values() if n.name not in half)
            wait_for(lambda: t.check() or any("was decided without this node" in j["waits"]
                                              for j in other.ctl("status")["jobs"]), "it waits")
            epochs = ended_epochs(x)
            t.wait_step(t.step() + 20)
            if len(half) != 1 or goes_on_in(t, 2) != half:
                raise Failed(f"nodes {half} have made steps, and then {goes_on_in(t, 2)}")
            if ended_epochs(x) != epochs:
                raise Failed("the half that waits has ended the other one's epoch")
            relay.loss = 0.0
            t.wait_world(4)
            no_step_twice(t, 2)
        equal(t.finish(missing=60), expected)


DEFAULT = [far_away, frames_are_lost, cable_stalls, data_is_silent, connections_are_reset,
           halves_of_an_elastic_job]
