#!/usr/bin/env python3
"""Checkpoints of the daemon, read with the safetensors library."""

import json
import os
import subprocess
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


if __name__ == "__main__":
    unittest.main()
