"""Replicas: a node is gone with its memory, and the job goes on from copies on other nodes."""

import json
import pathlib
import re
import statistics
import subprocess
import sys

import checkpoints
from lab import ETCD_AT, Failed, Lab, environment, wait_for
from training import SMALL, TWO, Training

LONG_RUN = 4000
SHAPE = (("a", 1), ("b", 2), ("c", 1))
FOUR = (("a", 1), ("b", 1), ("c", 1), ("d", 1))
STAMP = r"(\d\d):(\d\d):([\d.]+)Z"


def replica(node, job="j"):
    """What status says there."""
    jobs = [j for j in node.ctl("status")["jobs"] if j["name"] == job]
    return (jobs[0].get("replica") if jobs else None) or {}


def has_replicas(x, step, job="j"):
    return all(replica(n, job).get("has_step") and replica(n, job)["step"] >= step
               for n in x.nodes.values())


def seconds(text, what):
    """When the last line with @what was written."""
    stamps = re.findall(STAMP + ".*" + what, text)
    return sum(float(v) * s for v, s in zip(stamps[-1], (3600, 60, 1))) if stamps else None


def lose(x, t, victims):
    """The nodes are gone, with their memory and their ranks, and come back empty. Return: seconds
    from their death until the next epoch begins."""
    other = next(n for n in x.nodes.values() if n.name not in victims)
    begun = other.said().count("epoch begins job=0/j ")
    for victim in victims:
        x[victim].kill()
        for rank in t.on(victim):
            t.ranks[rank].kill()
    for victim in victims:
        x[victim].start()
        for rank in t.on(victim):
            t.start(rank)
    wait_for(lambda: t.check() or other.said().count("epoch begins job=0/j ") > begun,
             f"the epoch without what node {' and '.join(victims)} had")
    began, ended = (seconds(other.said(), f"epoch {what} job=0/j ") for what in ("begins", "ends"))
    return began - ended


def nodes_are_lost():
    """Each node is gone once with its memory, also the one that leads: the losses are the same."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(replicas=1)
        steps = 400
        expected = Training(x, SHAPE, steps=steps, job="calm").finish()
        t = Training(x, SHAPE, steps=steps)
        took = []
        for i, victim in enumerate("bac"):
            t.wait_step(t.step() + 20)
            wait_for(lambda i=i: t.check() or has_replicas(x, 10 * i + 5), "replicas on all nodes")
            took.append(lose(x, t, victim))
        losses = t.finish(missing=60)
        if any(expected[step] != loss for step, loss in losses.items()):
            raise Failed(f"losses {losses}, {expected} without deaths")
        if not any("restores from replicas job=0/j" in n.said() for n in x.nodes.values()):
            raise Failed("no node has restored the job")
        print(f"# from the end of the epoch to the next one's begin: "
              f"{statistics.median(took):.2f} s", file=sys.stderr)


def restored(x):
    """How often a node that led has restored the job."""
    return sum(n.said().count("restores from replicas job=0/j") for n in x.nodes.values())


def two_apart_are_lost():
    """Two of four nodes that do not follow each other are lost at once: no part of the state is.

    Each is lost once, also the one that leads, and those at the two ends of the list."""
    with Lab(4, start=False) as x:
        for node in x.nodes.values():
            node.start(replicas=1)
        steps = 300
        expected = Training(x, FOUR, steps=steps, job="calm").finish()
        t = Training(x, FOUR, steps=steps)
        for turn, victims in enumerate(("ac", "db")):
            t.wait_step(t.step() + 20)
            wait_for(lambda turn=turn: t.check() or has_replicas(x, 20 * turn + 10),
                     "replicas on all nodes")
            before = restored(x)
            lose(x, t, victims)
            if restored(x) == before:
                raise Failed(f"nodes {victims} were lost, and no node has restored the job")
        losses = t.finish(missing=60)
        if any(expected[step] != loss for step, loss in losses.items()):
            raise Failed(f"losses {losses}, {expected} without deaths")



class Elastic(Training):
    """elastic_rank.py in place of charlm. Its losses are hashes of the parameters."""

    def command(self, rank):
        return [sys.executable, pathlib.Path(__file__).with_name("elastic_rank.py"), self.steps,
                *self.options.split()]

    def lines(self):
        """Of the process that is rank 0 of its epoch: without the first one, it is another."""
        texts = [p.text() for rank, p in self.ranks.items() if rank]
        others = [json.loads(line) for text in texts for line in text.split("\n")[:-1]
                  if line.startswith("{")]
        return sorted(super().lines() + others, key=lambda line: line["step"])

    def wait_world(self, world):
        """A step that was made by so many ranks. Return: its line."""
        return wait_for(lambda: self.check() or (
            self.lines() and self.lines()[-1]["world"] == world and self.lines()[-1]),
            f"a step of {world} ranks")


def goes_on_without_a_node():
    """An elastic job goes on with the ranks that remain, and grows when the others come back."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(replicas=1)
        steps = 120
        expected = Elastic(x, SHAPE, steps, options="2 4 0.5", job="calm").finish()
        for victim in ("b", "c"):
            t = Elastic(x, SHAPE, steps, options="2 4 0.5", job=f"j{victim}")
            wait_for(lambda t=t: t.check() or has_replicas(x, 10, t.job), "replicas on all nodes")
            x[victim].kill()
            for rank in t.on(victim):
                t.ranks.pop(rank).kill()
            rest = 4 - len(t.on(victim))
            step = t.wait_world(rest)["step"]
            t.wait_step(step + 10)
            x[victim].start()
            for rank in t.on(victim):
                t.start(rank)
            t.wait_world(4)
            begun = next(i for i, line in enumerate(t.lines()) if line["world"] == rest)
            made = [line["step"] for line in t.lines()[begun:]]
            if made != sorted(set(made)):
                raise Failed(f"steps were made twice: {t.lines()[begun:]}")
            losses = t.finish(missing=60)
            if any(expected[s] != loss for s, loss in losses.items()):
                raise Failed(f"parameters differ: {losses}, {expected}")


def store_step(job="j"):
    """The last commit that the store has: step, epoch."""
    r = subprocess.run(["nsenter", "--net=/run/netns/etcd", "--", "etcdctl", "--endpoints",
                        f"http://{ETCD_AT}:2379", "get", "--print-value-only", "--prefix",
                        f"/shardd/shardd/jobs/0/{job}/step"],
                       capture_output=True, text=True, env=environment(ETCDCTL_API="3"))
    return tuple(map(int, r.stdout.split()[:2])) or (0, 0)


def lose_node(x, t, victim):
    """With its memory and its ranks."""
    x[victim].kill()
    for rank in t.on(victim):
        t.ranks.pop(rank).kill()


def come_back(x, t, victim, **how):
    x[victim].start(**how)
    for rank in t.on(victim):
        t.start(rank)


def no_step_twice(t, world):
    """From when so many ranks went on, and when all were there again. Steps that all had made
    before that, and that were in no copies, are made again."""
    alone = [line["step"] for line in t.lines() if line["world"] == world]
    together = [line["step"] for line in t.lines() if line["world"] != world]
    before = 0
    while before < len(together) and together[before] == before + 1:
        before += 1
    later = together[before:]
    if alone != sorted(set(alone)) or later != sorted(set(later)) or later[:1] <= alone[-1:]:
        raise Failed(f"steps were made twice: alone {alone}, together {together}")


def expect_alone(x, t, node):
    """Its commits are in the store, and status and blame answer. Return: the step."""
    step = t.wait_world(2)["step"]
    t.wait_step(step + 10)
    begun = re.findall(rf"epoch begins job=0/{t.job} epoch=(\d+) nodes=1", node.said())
    epoch = int(begun[-1])
    decided = store_step(t.job)
    if decided[0] < step + 9 or decided[1] != epoch:
        raise Failed(f"the store has commit {decided}, step {step + 10} of epoch {epoch} was made")
    [job] = [j for j in node.ctl("status")["jobs"] if j["name"] == t.job]
    if job["world_size"] != 2 or node.ctl("blame", t.job, check=False) is None:
        raise Failed(f"status of the node that is left: {job}")
    return t.step()


def one_node_goes_on():
    """An elastic job over two nodes, one of which dies with its memory: the other one goes on
    alone, from the copy of it, and its commits are in the store. Then the job grows again."""
    with Lab(2, start=False) as x:
        for node in x.nodes.values():
            node.options["replicas"] = 1
        folder = checkpoints.folders(x)
        expected = Elastic(x, TWO, steps=200, options="2 4 0.5", job="calm").finish()
        for victim in "ab":  # one of them leads
            t = Elastic(x, TWO, steps=200, options="2 4 0.5", job=f"j{victim}")
            wait_for(lambda t=t: t.check() or has_replicas(x, 10, t.job), "replicas on all nodes")
            lose_node(x, t, victim)
            left = x["b" if victim == "a" else "a"]
            expect_alone(x, t, left)
            own = folder / t.job
            own.mkdir()
            code, said = checkpoints.checkpoint(left, "save", t.job, own)
            if code or not checkpoints.whole(own):
                raise Failed(said)
            come_back(x, t, victim)
            t.wait_world(4)
            no_step_twice(t, 2)
            wait_for(lambda t=t: t.check() or has_replicas(x, t.step() - 5, t.job),
                     "replicas on both nodes again")
            losses = t.finish(missing=60)
            if any(expected[s] != loss for s, loss in losses.items()):
                raise Failed(f"parameters differ: {losses}, {expected}")


def two_nodes_are_lost():
    """Checkpoints at each commit and replicas take turns. Two nodes that follow each other are lost
    at once, and a part with them: the job is refused, and goes on from its checkpoint.

    Node a has the copy of what node d has: the last one is before the first one."""
    with Lab(4, start=False) as x:
        for node in x.nodes.values():
            node.options["replicas"] = 1
        folder = checkpoints.folders(x)
        expected = Training(x, FOUR, steps=400, job="calm").finish()
        t = Training(x, FOUR, steps=LONG_RUN)
        t.wait_step(3)
        code, said = checkpoints.checkpoint(x["a"], "policy", "j", folder, "--every-steps", 1,
                                            "--keep", 2)
        if code:
            raise Failed(said)
        wait_for(lambda: t.check() or (has_replicas(x, 10) and checkpoints.whole(folder)),
                 "replicas and a checkpoint")
        for victim in "da":
            x[victim].kill()
            for rank in t.on(victim):
                t.ranks[rank].kill()
        for victim in "da":
            x[victim].start()
            for rank in t.on(victim):
                t.start(rank)
        t.wait_said(t.ranks, "the nodes of job '0/j' are not at the same step",
                    ("has nothing of it",))
        for p in t.ranks.values():
            p.wait()
        for node in x.nodes.values():
            node.ctl("job", "delete", "--force", "j", check=False)
        t = Training(x, FOUR, steps=400, options=f"{SMALL} --load {folder}")
        wait_for(lambda: all(p.code == 0 for p in t.ranks.values()) or t.check(), "the end")
        losses = t.losses()
        if not losses or any(expected[step] != loss for step, loss in losses.items()):
            raise Failed(f"losses {losses}, {expected} without deaths")


DEFAULT = [nodes_are_lost, goes_on_without_a_node, one_node_goes_on, two_apart_are_lost,
           two_nodes_are_lost]
