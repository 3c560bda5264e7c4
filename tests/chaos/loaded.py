"""loaded.py SHARDCTL DIR OUT: a job of one rank is loaded from the checkpoint in DIR, and saved in
OUT."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client/python"))

import shardd  # noqa: E402


def units(folder):
    """As the index names them, with AdamW."""
    [path] = pathlib.Path(folder).glob("step-*/index.json")
    found = {}
    for piece in json.loads(path.read_text())["checkpoint"]["pieces"]:
        if piece["array"] == "param":
            tensor = shardd.TensorSpec(piece["tensor"], piece["shape"])
            found.setdefault(piece["unit"], []).append(tensor)
    adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.1)
    return [shardd.UnitSpec(name, tensors, optimizer=adamw) for name, tensors in found.items()]


def main(shardctl, folder, out):
    with shardd.connect() as client:
        client.join(world_size=1, rank=0)
        client.register(units(folder))
        step = client.load_checkpoint(folder)
        found = client.rejoin()
        if (found.has_commit, found.step) != (True, step):
            sys.exit(f"the job is at {found} instead of step {step}")
        client.register(units(folder))
        subprocess.run([shardctl, "checkpoint", "save", "loaded", out], check=True)
        client.leave()


main(*sys.argv[1:])
