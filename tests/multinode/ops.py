"""All ops over nodes (ops.c): ranks read there what they read on one node."""

import re

import lab
from lab import BIN, ROOT, Failed, Lab
from training import TWO

SHARED_PARTS = ("own", "replicas", "units")  # where ranks share a GPU
UNEVEN = (("a", 1), ("b", 3))
ALONE = (("alone", 4),)

# Methods that ops.c does not run over nodes, and what does.
ELSEWHERE = {
    "ReadBytes": "tests/unit/test_span_more.c: the library maps memory, and has no use for it",
    "WriteBytes": "the same",
    "CreateJob": "jobs of several nodes begin with Join; it makes a job on the node that is asked",
    "DeleteJob": "delete_on_all", "DrainJob": "drains_on_all",
    "Checkpoint": "checkpoints_move", "LoadCheckpoint": "checkpoints_move",
    "SetCheckpoints": "checkpoints_regularly",
    "ResizeJob": "delete_on_all, which is refused",
}
# Methods that are no ops, of which the recorder has nothing: joining, registering and reading.
CALLS = {"Attach", "Watch", "ShareEvents", "Join", "Leave", "CreateGroup", "RegisterUnits",
         "DeclarePublication", "DropPublication",
         "PublishGeneration", "AcquireGeneration", "DescribeGeneration", "ReleaseGeneration",
         "OpenReader", "CloseReader", "StreamGeneration", "ListPublications",
         "ReadBase"}


class Ranks:
    """multinode_ops on the nodes of @shape, with @args."""

    def __init__(self, x, shape, job, *args):
        places = [(x[name], i) for name, n in shape for i in range(n)]
        self.job, self.ranks = job, {}
        x.runs.append(self)
        for rank, (node, local) in enumerate(places):
            env = node.env(SHARDD_SOCKET=node.socket, SHARDD_JOB=job, RANK=str(rank),
                           WORLD_SIZE=str(len(places)), LOCAL_RANK=str(local),
                           LOCAL_WORLD_SIZE=str(dict(shape)[node.name]))
            self.ranks[rank] = lab.Process(
                node.name, [BIN.parent / "tests/multinode_ops", *args],
                f"{x.folder}/{job}-{rank}.log", env)

    def said(self):
        """When they have ended. Return: the lines of each."""
        failed = [r for r, p in self.ranks.items() if p.wait()]
        if failed:
            raise Failed("\n".join(f"rank {r} of job {self.job}: {self.ranks[r].text()[-500:]}"
                                   for r in failed))
        return [p.text().splitlines() for p in self.ranks.values()]


def compare(said, expected, job):
    for rank, (lines, alone) in enumerate(zip(said, expected)):
        part, wrong = "", []
        for line, other in zip(lines, alone):
            part = line if line.startswith("part ") else part
            if line != other:
                wrong.append(f"{part}: {line}, {other} alone")
        if wrong or len(lines) != len(alone):
            raise Failed(f"rank {rank} of job {job}: {len(wrong)} of {len(alone)} lines differ: "
                         f"{wrong[:5]}")


def methods():
    """Return: the names of proto/methods.h, of ops and of the other calls."""
    text = (ROOT / "proto/methods.h").read_text()
    return [set(re.findall(rf"^\t{kind}\(\w+, +(\w+),", text, re.M)) for kind in ("OP", "CALL")]


def ended(node, jobs):
    """The ops of these jobs that have ended well on a node, by its daemon's recorder."""
    return {o["op"] for o in node.ctl("ops", "-n", "65536")["ops"]
            if o["job"] in jobs and o["finished_us"] and not o["error"]}


def check_all_ran(seen):
    """Each method of the protocol has been run, or is said to be elsewhere."""
    all_ops, calls = methods()
    if forgotten := all_ops - seen - ELSEWHERE.keys():
        raise Failed(f"ops that are not run over nodes: {sorted(forgotten)}: add them to ops.c")
    if forgotten := calls - CALLS - ELSEWHERE.keys():
        raise Failed(f"calls that are not run over nodes: {sorted(forgotten)}")
    if wrong := ELSEWHERE.keys() & seen:
        raise Failed(f"ops.c runs {sorted(wrong)}")


# What all ranks are told over nodes of an op that one node does.
REFUSED = {
    "whole job": "a norm over all groups is not possible: job 'refused' has ranks on 2 nodes",
    "divide by active": "divide_by_active is not possible: group 'world'",
    "require even": "error_if_uneven is not possible: group 'world'",
    "write a shard": "the ranks of unit 'refused' are on several devices, and rank {}'s piece is "
                     "not on its own alone: summon the unit instead",
}


def check_refused(x):
    """On all ranks, which then go on."""
    for rank, lines in enumerate(Ranks(x, TWO, "refused", "refused").said()):
        for what, words in REFUSED.items():
            line = next(line for line in lines if line.startswith(f"{what}: "))
            if not line.startswith(f"{what}: UNIMPLEMENTED: {words.format(rank)}"):
                raise Failed(f"rank {rank}: {line}")


def ops():
    """All ops over nodes: all ranks read what they read on one node."""
    with Lab(2, start=False) as x:
        x.nodes["alone"] = lab.Node(x, "alone", 20)
        x.nodes["alone"].start_alone()
        for name in "ab":
            x[name].start(flight_recorder_ops=65536)
        one = Ranks(x, ALONE, "one").said()
        for shape, job in ((TWO, "two"), (UNEVEN, "uneven")):
            compare(Ranks(x, shape, job).said(), one, job)
        one = Ranks(x, ALONE, "oneshards", "shards").said()
        compare(Ranks(x, TWO, "twoshards", "shards").said(), one, "twoshards")
        for node in (x["a"], x["b"]):
            check_all_ran(ended(node, ("two", "twoshards")))
        check_refused(x)


def gpus_ops():
    """The same on two nodes with two simulated GPUs each, also where ranks share one."""
    with Lab(2, start=False) as x:
        alone = x.nodes["alone"] = lab.Node(x, "alone", 20)
        alone.gpus = 4
        alone.start_alone()
        for name in "ab":
            x[name].gpus = 2
            x[name].start(flight_recorder_ops=65536)
        for job, shape, parts in (("all", TWO, ()), ("shards", TWO, ("shards",)),
                                  ("shared", UNEVEN, SHARED_PARTS)):
            one = Ranks(x, ALONE, f"{job}-one", *parts).said()
            compare(Ranks(x, shape, job, *parts).said(), one, job)
        for name in "ab":
            check_all_ran(ended(x[name], ("all", "shards")))


DEFAULT = [ops, gpus_ops]
