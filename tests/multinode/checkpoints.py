"""Checkpoints of jobs with ranks on several nodes."""

import pathlib
import re
import subprocess
import sys

from lab import BIN, Failed, Lab, Node, Process, environment, sh, wait_for

RANK = pathlib.Path(__file__).with_name("rank.py")
TWO = (("a", 1), ("b", 1))
THREE = (("a", 1), ("b", 2), ("c", 1))


class Ranks:
    """rank.py on the nodes @shape, as in Training, with @steps. @own: those of single ranks.
    @start: ranks to start now; None: all."""

    def __init__(self, lab, shape, *steps, job="j", own=None, start=None):
        self.lab, self.job, self.steps, self.own = lab, job, steps, own or {}
        self.places = [lab[name] for name, n in shape for _ in range(n)]
        self.out, self.number = f"{lab.folder}/{job}{len(lab.runs)}.out", len(lab.runs)
        self.ranks = {}
        lab.runs.append(self)
        for rank in range(len(self.places)) if start is None else start:
            self.start(rank)

    def start(self, rank):
        node = self.places[rank]
        env = environment(SHARDD_SOCKET=node.socket, SHARDD_JOB=self.job)
        argv = [sys.executable, RANK, len(self.places), rank, *self.own.get(rank, self.steps)]
        log = f"{self.lab.folder}/{self.job}{self.number}-{rank}.log"
        self.ranks[rank] = Process(node.name, argv, log, env, None if rank else self.out)

    def said(self):
        return pathlib.Path(self.out).read_text().split()

    def step(self):
        return int(self.said()[-1]) if self.said() else 0

    def check(self):
        for rank, p in self.ranks.items():
            if p.code:
                raise Failed(f"rank {rank} has ended with {p.code}: {p.text()[-600:]}")

    def wait_step(self, step):
        wait_for(lambda: self.check() or self.step() >= step, f"step {step}")

    def finish(self):
        wait_for(lambda: self.check() or all(p.code == 0 for p in self.ranks.values()), "its end")

    def stop(self):
        for p in self.ranks.values():
            p.kill()


def checkpoint(node, *args):
    """Return: its exit code, what it says."""
    r = subprocess.run([BIN / "shardctl", "--socket", node.socket, "checkpoint", *map(str, args)],
                       capture_output=True, text=True, env=environment())
    return r.returncode, r.stdout + r.stderr


def whole(folder):
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("step-"))


def rest(folder):
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith("step-"))


def folders(x):
    """Return: the folder that all nodes see."""
    folder = pathlib.Path(x.folder, "checkpoints")
    folder.mkdir()
    for node in x.nodes.values():
        node.start(checkpoint_roots=folder)
    return folder


def finish_from(x, shape, folder, name, job):
    """The parameters after two more steps, of a job that begins with the checkpoint."""
    note, more = pathlib.Path(x.folder, name), pathlib.Path(x.folder, f"{name}-more")
    Ranks(x, shape, f"load={folder}", f"note={note}", "train=5", f"note={more}", job=job).finish()
    return note.read_text(), more.read_text()


def checkpoints_move():
    """A job of two nodes is saved, and goes on on one node and on three with the same bits."""
    with Lab(4, start=False) as x:
        x.nodes["alone"] = alone = Node(x, "alone", 20)
        folder = folders(x)
        expected = [pathlib.Path(x.folder, name) for name in ("at3", "at5")]
        go = pathlib.Path(x.folder, "go")
        t = Ranks(x, TWO, "init", "train=3", f"note={expected[0]}", f"wait={go}", "train=5",
                  f"note={expected[1]}")
        wait_for(lambda: t.check() or expected[0].exists(), "step 3")
        for node in ("a", "b"):  # one of them leads the job
            code, said = checkpoint(x[node], "save", "j", folder / node)
            if code == 0 or "there is no such folder" not in said:
                raise Failed(f"saving without a folder on node {node}: {said}")
            (folder / node).mkdir()
            code, said = checkpoint(x[node], "save", "j", folder / node)
            if code or whole(folder / node) != ["step-000000000003"] or rest(folder / node):
                raise Failed(f"saving on node {node}: {said}, {list((folder / node).iterdir())}")
            code, said = checkpoint(x[node], "verify", folder / node)
            if code:
                raise Failed(said)
        go.touch()
        t.finish()
        at3, at5 = (path.read_text() for path in expected)
        for name, shape in (("one", (("alone", 3),)), ("three", THREE), ("other", TWO)):
            got = finish_from(x, shape, folder / "b", name, name)
            if got != (at3, at5):
                raise Failed(f"the parameters of job {name} are others: "
                             f"{[a == b for a, b in zip(got, (at3, at5))]}")
        if alone.daemon.code is not None:
            raise Failed("the daemon has ended")


def checkpoint_of_a_killed_node():
    """A node dies in the midst of a checkpoint: nothing looks whole, and the next one is."""
    with Lab(2, start=False) as x:
        folder = folders(x)
        for victim in ("b", "a"):
            t = Ranks(x, TWO, "init", "train=2", f"wait={x.folder}/never", job=victim)
            t.wait_step(2)
            slow = Process("a", [BIN / "shardctl", "--socket", x["a"].socket, "checkpoint", "save",
                                 victim, folder, "--rate", "1000"], f"{x.folder}/slow.log")
            wait_for(lambda slow=slow: slow.code is not None or any(
                "shard-00001" in str(p) for p in folder.rglob("*")), "files of node b")
            x[victim].kill()
            slow.wait()
            if slow.code == 0 or whole(folder):
                raise Failed(f"{victim} has died: {slow.text()}, {whole(folder)}")
            t.stop()
            x[victim].start()
            for node in x.nodes.values():
                node.ctl("job", "delete", "--force", victim, check=False)
            t = Ranks(x, TWO, "init", "train=2", f"wait={x.folder}/never", job=victim)
            t.wait_step(2)
            code, said = checkpoint(x["b"], "save", victim, folder)
            if code or whole(folder) != ["step-000000000002"] or rest(folder):
                raise Failed(f"after the death of {victim}: {said}, {list(folder.iterdir())}")
            t.stop()
            for node in x.nodes.values():
                node.ctl("job", "delete", "--force", victim, check=False)
            sh(f"rm -r {folder}/step-000000000002")


def node_is_lost():
    """A node is gone with its memory: the job is deleted, and goes on from its checkpoint."""
    with Lab(2, start=False) as x:
        folder = folders(x)
        t = Ranks(x, TWO, "init", "train=2", f"wait={x.folder}/go", "train=4")
        t.wait_step(2)
        for args in (("save", "j", folder), ("policy", "j", folder, "--every-steps", 1000)):
            code, said = checkpoint(x["a"], *args)
            if code:
                raise Failed(f"{args}: {said}")
        x["b"].kill()
        t.ranks[1].kill()
        pathlib.Path(x.folder, "go").touch()
        wait_for(lambda: t.ranks[0].code, "the end of rank 0, which is not guarded")
        if not re.search("node b(, which leads| of) job '0/j'.* is gone", t.ranks[0].text()):
            raise Failed(t.ranks[0].text())
        x["b"].start()
        t = Ranks(x, TWO, "train=4")
        wait_for(lambda: all(p.code for p in t.ranks.values()), "all ranks are refused")
        for p in t.ranks.values():
            if "node b has nothing of it" not in p.text():
                raise Failed(p.text())
        x["b"].ctl("job", "delete", "j")
        there, note = pathlib.Path(x.folder, "there"), pathlib.Path(x.folder, "note")
        t = Ranks(x, TWO, f"loaded={there}", "train=5", f"note={note}")
        wait_for(lambda: t.check() or there.exists(), "all ranks have registered")
        for args in (("inspect", folder), ("verify", folder), ("load", "j", folder)):
            code, said = checkpoint(x["b"], *args)
            if code:
                raise Failed(f"{args}: {said}")
        t.finish()
        expected = pathlib.Path(x.folder, "calm")
        Ranks(x, TWO, "init", "train=5", f"note={expected}", job="calm").finish()
        if note.read_text() != expected.read_text():
            raise Failed("the parameters of step 5 are others than without the loss")


def checkpoints_regularly():
    """The policy, which one node is told, makes them."""
    with Lab(2, start=False) as x:
        folder = folders(x)
        go = [pathlib.Path(x.folder, f"go{step}") for step in (2, 4, 6)]
        t = Ranks(x, TWO, "init", "train=1", f"wait={go[0]}", "train=2", f"wait={go[1]}", "train=4",
                  f"wait={go[2]}", "train=6", f"wait={x.folder}/never")
        t.wait_step(1)
        code, said = checkpoint(x["b"], "policy", "j", folder, "--every-steps", 2, "--keep", 2)
        if code:
            raise Failed(said)
        wait_for(lambda: all(n.ctl("status")["jobs"][0].get("checkpoints")
                             for n in x.nodes.values()), "the policy on both nodes")
        for step, path in zip((2, 4, 6), go):
            path.touch()
            wait_for(lambda step=step: t.check() or f"step-{step:012}" in whole(folder),
                     f"the checkpoint of step {step}")
        wait_for(lambda: len(whole(folder)) == 2 and not rest(folder), "two of them")
        t.stop()


def checkpoints_not_shared():
    """A node that has another file system at the same place is named, and nothing is left."""
    with Lab(2, start=False) as x:
        folder = folders(x)
        x["b"].stop()
        x["b"].within = ("unshare", "--mount", "sh", "-c",
                         f'mount -t tmpfs none {folder} && exec "$@"', "sh")
        x["b"].start()
        t = Ranks(x, TWO, "init", "train=2", f"wait={x.folder}/never")
        t.wait_step(2)
        for name in "ab":  # the one that leads, and the other one
            code, said = checkpoint(x[name], "save", "j", folder)
            words = ("must see the same folder", "node a: it does not see",
                     "node b: it does not see")
            if code == 0 or words[0] not in said or not (words[1] in said or words[2] in said):
                raise Failed(f"the folder is not shared: {said}")
            wait_for(lambda: not list(folder.iterdir()), "nothing is left")  # removed behind it
        t.stop()
