#!/usr/bin/env python3
"""Ranges of NVTX around what the daemon puts on (simulated) GPUs, as a tool gets them
(tests/preload/nvtxtool.c, which is made with NVIDIA's header)."""

import collections
import contextlib
import os
import pathlib
import tempfile
import unittest
from unittest import mock

import simulator
import support

import shardd

TOOL = pathlib.Path(support.LIB_DIR, "libnvtxtool.so")
STEPS = 3


def train(rank, world, socket):
    with shardd.connect(socket) as client:
        client.join("traced", world, rank)
        spec = shardd.TensorSpec("w", (64,), shardd.Init.CONSTANT, 2.0)
        adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.05)
        [unit] = client.register([shardd.UnitSpec("block", [spec], optimizer=adamw)])
        unit.init_seed(1)
        for number in range(1, STEPS + 1):
            unit.gather()
            unit.release()
            unit.gradient()
            unit.reduce()
            client.step()
            client.commit(number)
        client.leave()


@unittest.skipUnless(simulator.THERE, simulator.WHY_NOT)
@unittest.skipUnless(TOOL.exists(), f"no {TOOL.name}: this build has no header of NVTX")
class Ranges(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)
        self.file = pathlib.Path(self.stack.enter_context(tempfile.TemporaryDirectory()), "ranges")
        self.stack.enter_context(mock.patch.dict(os.environ))
        simulator.use(2)

    def lines(self):
        return self.file.read_text().splitlines() if self.file.exists() else []

    def run_daemon(self, tool):
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ):
                os.environ.update(NVTX_INJECTION64_PATH=str(tool), NVTX_TOOL_FILE=str(self.file))
                socket = stack.enter_context(support.daemon(backend="cuda"))
            support.ranks(train, 2, socket)

    def test_each_op_on_a_gpu_has_ranges_with_its_name(self):
        self.run_daemon(TOOL)
        domains = [s.split()[1:] for s in self.lines() if " domain " in s]
        self.assertEqual(domains, [["domain", "shardd"]])
        depth, names = collections.Counter(), collections.Counter()
        for line in self.lines():
            thread, what, domain, *rest = line.split(" ", 4)
            self.assertEqual(domain, "shardd")
            if what == "domain":
                continue
            depth[thread] += 1 if what == "push" else -1
            self.assertIn(depth[thread], (0, 1), line)  # balanced, and not nested
            if what == "push":
                self.assertGreater(int(rest[0]), 0, line)
                names[rest[1]] += 1
        self.assertEqual(set(depth.values()), {0})
        self.assertGreaterEqual(names["Reduce traced/block"], STEPS)
        self.assertGreaterEqual(names["Initialise traced/block"], 1)
        self.assertTrue(any(n.startswith(("Step traced", "Commit traced")) for n in names), names)

    def test_a_tool_that_cannot_be_loaded_is_none(self):
        self.run_daemon("/nonexistent/tool.so")
        self.assertEqual(self.lines(), [])


if __name__ == "__main__":
    support.main()
