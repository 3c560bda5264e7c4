"""charlm over the nodes of a lab."""

import json
import pathlib
import random
import sys

from lab import BIN, PATIENCE_S, ROOT, Failed, Process, wait_for

LIBRARY = BIN.parent / "lib/libshardd.so.0"
SHAPES = ((("a", 2), ("b", 2)), (("a", 1), ("b", 1), ("c", 1), ("d", 1)),
          (("a", 1), ("b", 2), ("c", 3)))
TWO = SHAPES[0]
SMALL = "--batch 12 --hidden 16 --context 4 --embed 4"


def text_file(lab):
    path = pathlib.Path(lab.folder, "text")
    if not path.exists():
        rng = random.Random(1)
        path.write_text("".join(rng.choice("abcdefgh ") for _ in range(3000)))
    return path


def expect_same(losses, expected, what=""):
    """Of the steps that both have."""
    if wrong := {s: (x, expected[s]) for s, x in losses.items() if x != expected.get(s, x)}:
        raise Failed(f"{what} losses by step (of it, as expected) {wrong}")


class Training:
    """@shape: of each node its name and how many of the ranks it has, in their order. @start: ranks
    to start now; None: all."""

    def __init__(self, lab, shape, steps=10, options=SMALL, job="j", own=None, start=None):
        self.lab, self.shape, self.steps, self.options, self.job = lab, shape, steps, options, job
        self.places = [(lab[name], i) for name, n in shape for i in range(n)]
        self.own = own or {}  # options of single ranks
        self.ranks, self.marks, self.number = {}, {}, len(lab.runs)
        lab.runs.append(self)
        for rank in range(len(self.places)) if start is None else start:
            self.start(rank)

    def command(self, rank):
        return [BIN / "charlm", "--data", text_file(self.lab), "--steps", self.steps, "--json",
                *self.options.split(), *self.own.get(rank, "").split()]

    def path(self, what):
        return f"{self.lab.folder}/{self.job}{self.number}-{what}"

    def start(self, rank):
        node, local = self.places[rank]
        env = node.env(SHARDD_SOCKET=node.socket, SHARDD_JOB=self.job, RANK=str(rank),
                       WORLD_SIZE=str(len(self.places)), LOCAL_RANK=str(local),
                       LOCAL_WORLD_SIZE=str(len(self.on(node.name))),
                       SHARDD_LIBRARY=str(LIBRARY), PYTHONPATH=str(ROOT / "client/python"),
                       PYTHONDONTWRITEBYTECODE="1")
        out = self.path("out") if rank == 0 else None
        self.ranks[rank] = Process(node.name, self.command(rank), self.path(f"{rank}.log"), env,
                                   out)

    def on(self, name):
        return [r for r, (node, _) in enumerate(self.places) if node.name == name]

    def said(self, rank):
        """Since the last mark."""
        return self.ranks[rank].text()[self.marks.get(rank, 0):]

    def mark(self):
        self.marks = {rank: len(p.text()) for rank, p in self.ranks.items()}

    def lines(self):
        path = pathlib.Path(self.path("out"))
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def losses(self):
        """Of each step. A step that was done again has the same."""
        losses = {}
        for line in self.lines():
            if losses.setdefault(line["step"], line["loss"]) != line["loss"]:
                raise Failed(f"step {line['step']} has loss {line['loss']} the second time, "
                             f"{losses[line['step']]} the first time")
        return losses

    def step(self):
        return self.lines()[-1]["step"] if self.lines() else 0

    def wait_step(self, step, s=PATIENCE_S):
        def there():
            self.check()
            return self.step() >= step
        wait_for(there, f"step {step} of job {self.job}", s)

    def stop(self):
        for p in self.ranks.values():
            p.kill()

    def check(self):
        """Nobody has failed."""
        for rank, p in self.ranks.items():
            if p.code:
                raise Failed(f"rank {rank} has ended with {p.code}: {p.text()[-600:]}")

    def missed(self):
        """Of how many steps rank 0 may not have said the loss: an epoch ended after the commit,
        before it knew of it. Then it has resumed at that step. A machine with much to do may end an
        epoch where the test does not: links wait for 1.25 s."""
        return self.ranks[0].text().count("rank 0 resumed at step")

    def finish(self, s=PATIENCE_S, missing=0):
        """To the last step. Return: the losses. @missing: of so many steps they may not be there,
        or of those that rank 0 has missed."""
        def ended():
            self.check()
            return all(p.code == 0 for p in self.ranks.values())
        wait_for(ended, f"the end of job {self.job} (step {self.step()})", s)
        losses = self.losses()
        missing = max(missing, self.missed())
        if not self.steps - missing <= len(losses) <= self.steps or max(losses) != self.steps:
            raise Failed(f"losses of steps {sorted(losses)}")
        return losses

    def expect_calm(self):
        """Stop it: its losses are those of a run in which nothing happens."""
        self.stop()
        wait_for(lambda: not any(n.ctl("sessions")["sessions"] for n in
                                 {node for node, _ in self.places}), "all ranks are gone")
        losses = self.losses()
        last = max(losses)
        if len(losses) < last - self.missed():
            raise Failed(f"losses of steps {sorted(losses)}")
        calm = Training(self.lab, self.shape, last, self.options, job="calm").finish()
        expect_same(losses, calm)

    def wait_said(self, ranks, what, names, s=PATIENCE_S):
        """Until each of @ranks has said @what in a line with one of @names."""
        def said(rank):
            lines = [line for line in self.said(rank).splitlines() if what in line]
            return any(name in line for line in lines for name in names)
        for rank in ranks:
            wait_for(lambda rank=rank: said(rank), f"rank {rank} says {what} ... {names}", s)


class Wandering(Training):
    """wander.py in place of charlm. Its losses are hashes of the parameters."""

    def __init__(self, lab, shape, steps, detours, job="j"):
        self.detours = detours
        super().__init__(lab, shape, steps, job=job)

    def command(self, rank):
        return [sys.executable, pathlib.Path(__file__).parent / "wander.py", self.steps,
                *self.detours]
