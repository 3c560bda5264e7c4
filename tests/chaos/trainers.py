"""What trains in a round: charlm, a GPT of PyTorch under its guard, or chaos-exact."""

import os
import pathlib
import subprocess

import published

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = "chaos"


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(n) for n in f.read().split()]
    except OSError:
        return []


class Charlm:
    """@committed: the job resumes at its commits: then more than one step may be lost. @backward:
    its optimizers run there: half a step is rolled back."""

    name = "charlm"
    disk_kib = 256  # room for three of its checkpoints
    fail_s = 60  # without a step
    margin = 0  # no death in the last steps
    same_blobs = True  # of a step, after whatever deaths
    forks = False  # a rank that died is made again by its own process
    read = False  # are there readers?
    env: dict[str, str] = {}

    def __init__(self, bins, folder, steps, committed, backward):
        self.program, self.data = bins["charlm"], f"{folder}/text"
        self.steps, self.committed, self.backward = steps, committed, backward

    def command(self):
        fixed = "--json --batch 4 --hidden 16 --context 4 --embed 4".split()
        fixed += "--in-backward --clip 0".split() if self.backward else []
        fixed += "--commit-every 3".split() if self.committed else []
        return [self.program, "--data", self.data, "--steps", str(self.steps), *fixed]

    def sort(self):
        """Rounds with the same one compute the same."""
        return self.name, self.committed, self.backward

    def dying(self, pid):
        """The process that dies, of a rank that was started as @pid."""
        return pid

    def gave_up(self, code):
        """May a rank end so without an error of its own?"""
        del code
        return False


class Exact(Charlm):
    """Its masters, and what is published of them, can be computed without a daemon (exact.h)."""

    name = "exact"
    publications = published.EXACT
    models: dict[str, published.Model] = {}  # of all rounds, by program

    def __init__(self, bins, folder, steps, committed, backward):
        super().__init__(bins, folder, steps, committed, backward)
        self.program = bins["exact"]

    def command(self):
        command = [self.program, "--steps", str(self.steps)]
        command += ["--in-backward"] * self.backward
        return command + ["--commit-every", "3"] * self.committed

    def published(self, publication, steps):
        """Return: by step, the digests of what publication number @publication must have."""
        model = self.models.setdefault(self.program, published.Model(self.program))
        return model.at(publication, steps)


class Torch(Charlm):
    """The rank's process is the guard of shardd.torch; its child trains and dies. A rank that comes
    after the others have ended would wait for them: nobody dies in the last steps."""

    name = "torch"
    disk_kib = 2048
    fail_s = 180
    margin = 12
    same_blobs = False  # pickled: equal states may have other bytes
    forks = True
    publications = published.GPT

    def __init__(self, bins, folder, steps, committed, backward):
        super().__init__(bins, folder, steps, committed, backward)
        self.program, self.masters = bins["torch"], f"{folder}/err-published"
        client = ROOT / "client/python"
        self.env = {
            "PYTHONPATH": os.pathsep.join((str(client), f"{client}/examples")),
            "SHARDD_LIBRARY": bins["library"],
            "SHARDD_RUN": RUN,
            "SHARDD_ON_EXISTING": "resume",  # another shardctl run is another run
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }

    def command(self):
        script = str(ROOT / "tests/chaos/gpt.py")
        command = [self.program, "-B", script, "--data", self.data, "--steps", str(self.steps)]
        command += ["--published", self.masters] * self.read
        return command + ["--in-backward"] * self.backward

    def published(self, publication, steps):
        """As above: what rank 0 has written down, in each of its lives the same."""
        known = {}
        for said in published.lines(self.masters):
            step, found = said["step"], said["tensors"][publication]
            if known.setdefault(step, found) != found:
                raise ValueError(f"step {step} has other masters the second time")
        return {step: known.get(step, {}) for step in steps}

    def dying(self, pid):
        return next(iter(children(pid)), None)

    def gave_up(self, code):
        """The guard does not fork again after two lives without a commit."""
        return code == -9


def torch_is_missing(python):
    """Return: why PyTorch cannot be had; None: it can."""
    if not os.access(python, os.X_OK):
        return f"there is no {python}: tests/run --with-torch makes it"
    done = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"{python}: {(done.stderr.splitlines() or ['?'])[-1]}"
