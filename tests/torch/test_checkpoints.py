#!/usr/bin/env python3
"""Checkpoints of the daemon, read with the safetensors library."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import support
import torch
from safetensors.torch import load_file

import shardd

ROWS, COLUMNS = 7, 5


def ctl(socket, *words):
    done = subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "--json",
                           *words], text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def train(client):
    """A unit of bf16 and fp32 numbers, one step of AdamW: what the files must hold."""
    client.join("job", 1, 0)
    adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.5)
    [unit] = client.register([shardd.UnitSpec("block/1", [
        shardd.TensorSpec("w", (ROWS, COLUMNS), shardd.Init.CONSTANT, 2.0),
        shardd.TensorSpec("f", (3,), shardd.Init.CONSTANT, 1.0, frozen=True)], optimizer=adamw)])
    unit.init_seed(1)
    gradient = unit.gradient()
    wanted = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    torch.frombuffer(gradient.view(), dtype=torch.float32)[:ROWS * COLUMNS] = wanted.flatten()
    unit.reduce()
    client.step()
    client.commit(1, b"position")
    return wanted


class Checkpoints(unittest.TestCase):
    def test_the_library_reads_parameters_optimizer_state_and_blobs(self):
        with tempfile.TemporaryDirectory() as root, \
                support.daemon("--set", f"checkpoint_roots={root}") as socket:
            with shardd.connect(socket) as client:
                gradient = train(client)
                saved = ctl(socket, "checkpoint", "save", "job", root)
                client.leave()
            index = ctl(socket, "checkpoint", "inspect", root)["checkpoint"]
            state = load_file(os.path.join(root, "step-000000000001", "shard-00000.safetensors"))
        self.assertEqual(int(saved["step"]), 1)
        self.assertEqual(sorted(state), sorted(piece["key"] for piece in index["pieces"]))
        self.assertEqual(bytes(state["blob/0"].tolist()), b"position")
        average = state["exp_avg/block%2F1/w"]
        torch.testing.assert_close(average, gradient * 0.1)
        self.assertTrue(torch.equal(state["param/block%2F1/f"], torch.ones(3)))
        parameter = torch.full((ROWS, COLUMNS), 2.0, requires_grad=True)
        parameter.grad = gradient
        torch.optim.AdamW([parameter], lr=0.5, weight_decay=0).step()
        torch.testing.assert_close(state["param/block%2F1/w"], parameter.detach())
        [piece] = [p for p in index["pieces"] if p["key"] == "param/block%2F1/w"]
        self.assertEqual((piece["steps"], piece["shape"]), (1, [ROWS, COLUMNS]))


PROGRAM = """
import sys
import torch
from torch import nn
import shardd
import shardd.torch as st

st.init(lifetime=shardd.Lifetime.KEEP)
torch.manual_seed(3)
inner = nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7))
model = nn.Sequential(nn.Linear(5, 7), inner, nn.Linear(7, 3))
st.fully_shard(model[1])
st.fully_shard(model)
optimizer = st.AdamW(model.parameters(), lr=0.1)
run = st.resilient(model)
while run.step < 2:
    with run:
        model(torch.randn(4, 5)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
state = {k: v.full_tensor() if hasattr(v, "full_tensor") else v
         for k, v in model.state_dict().items()}
if st.rank() == 0:
    torch.save(state, sys.argv[1])
"""


class Models(unittest.TestCase):
    """One file of a wrapped model has its state_dict."""

    def test_the_consolidated_file_is_the_state_dict(self):
        with tempfile.TemporaryDirectory() as root, \
                support.daemon("--set", f"checkpoint_roots={root}") as socket:
            program, out = os.path.join(root, "program.py"), os.path.join(root, "all.safetensors")
            folder, kept = os.path.join(root, "saved"), os.path.join(root, "state.pt")
            os.mkdir(folder)
            with open(program, "w") as file:
                file.write(PROGRAM)
            done = subprocess.run(
                [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "run", "-n", "2",
                 "--job", "model", "--", sys.executable, program, kept], text=True,
                capture_output=True, timeout=240, check=False,
                env=dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python")))
            self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
            ctl(socket, "checkpoint", "save", "model", folder)
            ctl(socket, "checkpoint", "consolidate", folder, "--out", out, "--root", "root")
            wanted, got = torch.load(kept), load_file(out)
        self.assertEqual(sorted(got), sorted(wanted))
        for name, value in wanted.items():
            self.assertTrue(torch.equal(got[name], value), name)


if __name__ == "__main__":
    unittest.main()
