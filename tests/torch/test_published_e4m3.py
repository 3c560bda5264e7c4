#!/usr/bin/env python3
"""Published weights of type e4m3: bit by bit what PyTorch makes of the masters."""

import unittest

import fsdp  # noqa: F401  finds the package
import support
import torch

import shardd
import shardd.torch
from shardd.torch._types import TORCH_DTYPES

ROWS, COLUMNS = 300, 500  # the last tiles are not whole
BLOCK = (128, 128)
DECLARATION = {
    "name": "engine", "every_steps": 1, "type": "bf16",
    "rules": [
        {"name": "whole", "sources": ["m.w"], "type": "e4m3"},
        {"name": "blocks", "sources": ["m.w"], "type": "e4m3", "scale_block": list(BLOCK),
         "scale_name": "blocks_scale_inv"},
        {"name": "turned", "sources": [{"tensor": "m.w", "transpose": True}], "type": "e4m3",
         "scale_block": list(BLOCK)},
        {"name": "both", "sources": ["m.w", "m.z"], "type": "e4m3", "scale_block": [1, COLUMNS]},
        {"name": "nothing", "sources": ["m.z"], "type": "e4m3"},
    ],
}


def quantised(x, rows, columns):
    """Values and scales, by PyTorch."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            amax = x[at].abs().max()
            scales[i, j] = amax / 448 if amax else 1
            codes[at] = (x[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def tensor(memory):
    return torch.from_dlpack(memory).view(TORCH_DTYPES[memory.dtype])


class PublishedE4m3(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def check(self, weights, name, scale_name, x, rows, columns):
        codes, scales = quantised(x, rows, columns)
        got, scale = tensor(weights[name]), tensor(weights[scale_name])
        self.assertEqual((got.dtype, scale.dtype), (torch.float8_e4m3fn, torch.float32))
        self.assertTrue(torch.equal(scale.reshape(scales.shape), scales), name)
        self.assertTrue(torch.equal(got.view(torch.uint8), codes.view(torch.uint8)), name)

    def test_as_pytorch_quantises(self):
        with shardd.connect(self.socket) as client:
            client.join("job", 1, 0)
            [unit] = client.register([shardd.UnitSpec("m", [
                shardd.TensorSpec("w", (ROWS, COLUMNS), shardd.Init.NORMAL, 0.0, 0.02),
                shardd.TensorSpec("z", (20, COLUMNS), shardd.Init.CONSTANT, 0.0)],
                optimizer=shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0))])
            unit.init_seed(1)
            client.commit(0)
            shardd.declare_publication(DECLARATION, "job", client)
            shardd.publish("engine", "job", client)
            shardd.declare_publication({"name": "masters"}, "job", client)
            shardd.publish("masters", "job", client)
            with shardd.Live("job", "masters", self.socket) as live, \
                    live.generation(wait=30) as masters:
                w, z = tensor(masters["m.w"]).clone(), tensor(masters["m.z"]).clone()
            self.assertGreater(float(w.std()), 0.01)
            with shardd.Live("job", "engine", self.socket) as live, \
                    live.generation(wait=30) as weights:
                self.assertEqual(tuple(weights["whole_scale"].shape), ())
                self.assertEqual(tuple(weights["blocks_scale_inv"].shape), (3, 4))
                self.assertEqual(weights["blocks"].dtype, shardd.Dtype.E4M3)
                self.check(weights, "whole", "whole_scale", w, ROWS, COLUMNS)
                self.check(weights, "blocks", "blocks_scale_inv", w, *BLOCK)
                self.check(weights, "turned", "turned_scale", w.T.contiguous(), *BLOCK)
                self.check(weights, "both", "both_scale", torch.cat([w, z]), 1, COLUMNS)
                self.check(weights, "nothing", "nothing_scale", z, *z.shape)
                back = tensor(weights["whole"]).float() * tensor(weights["whole_scale"])
                self.assertLess(float((back - w).abs().max()), float(w.abs().max()) / 16 * 1.01)
                del back
            client.leave()


if __name__ == "__main__":
    unittest.main()
