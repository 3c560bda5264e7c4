"""The folder of a job's checkpoints: what the status says of it, and what is in it."""

import json
import os
import subprocess
import sys
import time

from crew import JOB, Failed

ERRORS = ("No space left", "Read-only")
LOADED = os.path.join(os.path.dirname(__file__), "loaded.py")


def contents(path):
    """The data of the only checkpoint in the folder, by key, and how often it was stepped."""
    [step] = (d for d in os.listdir(path) if d.startswith("step-"))
    with open(f"{path}/{step}/index.json") as f:
        index = json.load(f)["checkpoint"]
    found = {}
    for file in index["files"]:
        with open(f"{path}/{step}/{file['name']}", "rb") as f:
            raw = f.read()
        begin = 8 + int.from_bytes(raw[:8], "little")
        for key, of in json.loads(raw[8:begin]).items():
            if key != "__metadata__":
                at = of["data_offsets"]
                found[key] = raw[begin + at[0] : begin + at[1]]
    return found, {p["key"]: p["steps"] for p in index["pieces"] if "steps" in p}


class Folder:
    def __init__(self, path):
        self.path = path
        os.mkdir(path)

    def _last(self, crew):
        """Of the job's checkpoints, as its daemon says; a new one has made none."""
        done = crew.ctl("status", check=False)
        jobs = json.loads(done.stdout)["jobs"] if done.returncode == 0 else []
        return next((j.get("checkpoint") or {} for j in jobs if j["name"] == JOB), {})

    def await_failure(self, crew):
        """The status has the error, while the job trains on."""
        until = time.monotonic() + crew.trainer.fail_s
        while not crew.near_end():
            last = self._last(crew)
            if last.get("state") == "FAILED":
                words = [w for w in ERRORS if w in last["error"]]
                if not words:
                    raise Failed(f"a checkpoint failed: {last['error']}")
                crew.seen[f"checkpoints failed: {words[0]}"] += 1
                return
            crew.check(until)
            crew.read(0.01)

    def await_writing(self, crew, rng):
        """One is being written; its daemon is a random moment further."""
        until = time.monotonic() + crew.trainer.fail_s
        while not crew.near_end():
            if any(d.startswith(".saving-") for d in os.listdir(self.path)):
                crew.read(rng.random() * 0.002)
                crew.seen["checkpoints were being written when their daemon died"] += 1
                return
            crew.check(until)
            crew.read(0)

    def compare(self, crew):
        """All that have the name of a whole one are whole; the newest has what a calm run has at
        its step, and so has a job that is loaded from it."""
        steps = sorted(d for d in os.listdir(self.path) if d.startswith("step-"))
        if not steps:
            raise Failed("no checkpoint is there")
        for name in steps:
            crew.ctl("checkpoint", "verify", self.path, "--step", str(int(name[5:])))
        crew.ctl("checkpoint", "prune", self.path, "--keep", "1")
        if os.listdir(self.path) != steps[-1:]:
            raise Failed(f"beside {steps[-1]} there is {sorted(os.listdir(self.path))}")
        calm = Folder(f"{os.path.dirname(self.path)}/calm")
        calm.save_at(crew, int(steps[-1][5:]))
        self.compare_with(calm, "the calm run's", crew.trainer.same_blobs)
        loaded = Folder(f"{os.path.dirname(self.path)}/loaded")
        self.load(crew, loaded)
        self.compare_with(loaded, "that of a job that was loaded from it", True)

    def save_at(self, crew, step):
        """Of a run that ends there."""
        last, crew.trainer.steps = crew.trainer.steps, step
        crew.begin_job(False)
        crew.await_end(time.monotonic() + crew.trainer.fail_s)
        crew.trainer.steps = last
        crew.ctl("checkpoint", "save", JOB, self.path)
        crew.end_job()

    def load(self, crew, into):
        """And save it again, in the folder @into."""
        command = [sys.executable, "-B", LOADED, crew.bins["shardctl"], self.path, into.path]
        done = subprocess.run(
            command, env=crew.env | {"SHARDD_JOB": "loaded"}, capture_output=True, text=True
        )
        if done.returncode:
            raise Failed(f"{self.path} is not loaded: {done.stderr}")

    def compare_with(self, other, whose, blobs):
        mine, theirs = contents(self.path), contents(other.path)
        differ = [
            sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
            for a, b in zip(mine, theirs, strict=True)
        ]
        # a job of one rank has only that rank's
        differ[0] = [k for k in differ[0] if k[:5] != "blob/" or (blobs and k in theirs[0])]
        if differ[0] or differ[1]:
            raise Failed(f"the newest checkpoint differs from {whose}: {differ}")
