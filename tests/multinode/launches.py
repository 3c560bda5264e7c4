"""Ranks of one job that were started wrongly on two nodes: each is told what is wrong with it."""

import re
import time

from lab import BIN, Failed, Lab, Process, environment, wait_for
from training import SMALL, TWO, Training, text_file

WRONG = (
    # each: its node, rank and world size; and what all of them say, as regular expressions
    ("gaps", (("a", 0, 4), ("a", 2, 4), ("b", 1, 4), ("b", 3, 4)),
     ("the ranks of a node must follow each other: node a has rank 2", "rank 1 is expected")),
    ("twice", (("a", 0, 3), ("a", 1, 3), ("b", 1, 3), ("b", 2, 3)),
     ("rank 1 of job '0/twice' has joined on node (a and on node b|b and on node a): start each "
      "rank once",)),
    ("worlds", (("a", 0, 3), ("a", 1, 3), ("b", 2, 4), ("b", 3, 4)),
     ("job '0/worlds' has world size ", "4 on node b", "3 on node a")),
)


class Launch:
    """charlm for each of @ranks, of which nobody says how many are on a node."""

    def __init__(self, x, job, ranks, steps=5):
        self.x, self.job, self.steps = x, job, steps
        self.ranks = {}
        x.runs.append(self)
        for one in ranks:
            self.start(*one)

    def start(self, name, rank, world):
        env = environment(SHARDD_SOCKET=self.x[name].socket, SHARDD_JOB=self.job, RANK=str(rank),
                          WORLD_SIZE=str(world))
        argv = [BIN / "charlm", "--data", text_file(self.x), "--steps", self.steps, *SMALL.split()]
        i = len(self.ranks)
        self.ranks[i] = Process(name, argv, f"{self.x.folder}/{self.job}-{i}.log", env)

    def refused(self, words):
        """Which have ended: as they must, with @words."""
        ended = [p for p in self.ranks.values() if p.code is not None]
        for p in ended:
            if p.code != 1 or not all(re.search(w, p.text()) for w in words):
                raise Failed(f"{self.job}: {p.log.name} has ended with {p.code}: {p.text()}")
        return ended

    def end(self, words):
        """As a launcher does: when one is refused it ends the others, which may have come too late
        to be refused, and wait."""
        wait_for(lambda: self.refused(words), f"a refusal of job {self.job}")
        until = time.monotonic() + 2
        while len(self.refused(words)) < len(self.ranks) and time.monotonic() < until:
            time.sleep(0.02)
        for p in self.ranks.values():
            if p.code is None:
                p.kill()


def wrong_ranks():
    """Ranks with gaps, twice, or of other world sizes are refused, with what is wrong."""
    with Lab(2) as x:
        for job, ranks, words in WRONG:
            Launch(x, job, ranks).end(words)
            for node in x.nodes.values():
                node.ctl("job", "delete", "--force", job, check=False)
            Training(x, TWO, steps=3, job=job).finish()


def twice_at_any_moment():
    """A rank is started twice at any moment: who has joined is refused.

    The second comes before the epoch begins, while units are registered, or when steps are made.
    Nobody waits for what is gone with the epoch."""
    with Lab(2) as x:
        for n in range(16):
            t = Launch(x, f"at{n}", (("a", 0, 3), ("a", 1, 3), ("b", 2, 3)), steps=100000)
            time.sleep(0.006 * n)
            t.start("b", 1, 3)
            # which of the two was the first depends on the moment
            t.end((f"rank 1 of job '0/{t.job}' has joined on node ", " on node a", " on node b",
                   ": start each rank once"))
            # one that joins, or joins again, after the others were refused waits for them
            stuck = [p.log.name for p in t.ranks.values() if p.code < 0 and p.text()
                     and not re.search("joins on node [ab]: epoch", p.text().splitlines()[-1])]
            if stuck:
                raise Failed(f"ranks whose epoch has ended are not told: {stuck}")


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


DEFAULT = [wrong_ranks, twice_at_any_moment, too_few]
