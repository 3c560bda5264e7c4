"""Ranks of one job that were started wrongly on two nodes: each is told what is wrong with it."""

from lab import BIN, Failed, Lab, Process, environment, wait_for
from training import SMALL, TWO, Training, text_file

WRONG = (
    # each: its node, rank and world size; and what all of them say
    ("gaps", (("a", 0, 4), ("a", 2, 4), ("b", 1, 4), ("b", 3, 4)),
     ("the ranks of a node must follow each other: node a has rank 2", "rank 1 is expected")),
    ("twice", (("a", 0, 3), ("a", 1, 3), ("b", 1, 3), ("b", 2, 3)),
     ("rank 1 of job '0/twice' has joined on node a and on node b: start each rank once",)),
    ("worlds", (("a", 0, 3), ("a", 1, 3), ("b", 2, 4), ("b", 3, 4)),
     ("job '0/worlds' has world size ", "4 on node b", "3 on node a")),
)


class Launch:
    """charlm for each of @ranks, of which nobody says how many are on a node."""

    def __init__(self, x, job, ranks):
        self.ranks = {}
        x.runs.append(self)
        for i, (name, rank, world) in enumerate(ranks):
            env = environment(SHARDD_SOCKET=x[name].socket, SHARDD_JOB=job, RANK=str(rank),
                              WORLD_SIZE=str(world))
            argv = [BIN / "charlm", "--data", text_file(x), "--steps", 5, *SMALL.split()]
            self.ranks[i] = Process(name, argv, f"{x.folder}/{job}-{i}.log", env)


def wrong_ranks():
    """Ranks with gaps, twice, or of other world sizes: all are refused, with what is wrong."""
    with Lab(2) as x:
        for job, ranks, words in WRONG:
            for p in Launch(x, job, ranks).ranks.values():
                if p.wait() != 1 or not all(w in p.text() for w in words):
                    raise Failed(f"{job}: {p.log.name} has ended with {p.code}: {p.text()}")
            for node in x.nodes.values():
                node.ctl("job", "delete", "--force", job, check=False)
            Training(x, TWO, steps=3, job=job).finish()


def too_few():
    """Ranks that wait for others that nobody starts: status says on all nodes which are missing."""
    with Lab(2) as x:
        t = Launch(x, "few", (("a", 0, 4), ("a", 1, 4), ("b", 2, 4)))
        for node in x.nodes.values():
            wait_for(lambda node=node: any(
                "1 of 4 ranks have not joined on any node: 3" in j["waits"]
                for j in node.ctl("status")["jobs"]), f"node {node.name} names rank 3")
        for p in t.ranks.values():
            p.kill()


DEFAULT = [wrong_ranks, too_few]
