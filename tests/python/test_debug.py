#!/usr/bin/env python3
"""SHARDD_DEBUG=1 in a Python process: a use after release ends with a sentence."""

import os
import signal
import subprocess
import sys
import unittest

import support

TRAINER = """
import ctypes, resource, sys, shardd

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with shardd.connect() as client:
    client.join("debug", 1, 0)
    unit, = client.register([shardd.UnitSpec(
        "layer3", [shardd.TensorSpec("w", (3, 5), shardd.Init.CONSTANT, 2.0)])])
    unit.init_seed(1)
    address = unit.gather().address
    assert ctypes.c_float.from_address(address).value == 2
    unit.release()
    assert unit.gather().tobytes()[:4] == bytes(ctypes.c_float(2))
    unit.release()
    gradient = unit.gradient()
    gradient.write(bytes(gradient.nbytes))
    written = gradient.address
    unit.accumulate()
    print(hex(address), hex(written), flush=True)
    if sys.argv[1] == "read":
        print(ctypes.c_float.from_address(address).value, flush=True)
    elif sys.argv[1] == "write":
        ctypes.c_float.from_address(written).value = 1
    elif sys.argv[1] == "torch":
        import torch
        view = torch.frombuffer((ctypes.c_float * 15).from_address(address), dtype=torch.float32)
        print(view.sum().item(), flush=True)
"""


def run_trainer(how, python=sys.executable):
    with support.daemon() as socket:
        path = os.pathsep.join([str(support.ROOT / "client/python"),
                                os.environ.get("PYTHONPATH", "")])
        return subprocess.run([python, "-c", TRAINER, how], text=True, capture_output=True,
                              timeout=60, env={**os.environ, "SHARDD_SOCKET": socket,
                                               "SHARDD_DEBUG": "1", "PYTHONPATH": path})


class Debug(unittest.TestCase):
    def check(self, how, word, sentence):
        done = run_trainer(how)
        self.assertEqual(-signal.SIGSEGV, done.returncode, done.stderr)
        at = done.stdout.split()
        self.assertEqual(2, len(at), done.stdout)
        self.assertEqual(f"shardd: {word} {at[how == 'write']} in {sentence}\n", done.stderr)

    def test_a_read_after_release_is_told(self):
        self.check("read", "read of", "the parameters of unit 'layer3', which Release gave back "
                   "(rank 0): gather it before you read it")

    def test_a_write_after_accumulate_is_told(self):
        self.check("write", "write to", "the gradient buffer of unit 'layer3', which Accumulate "
                   "gave back (rank 0): ask for the gradient buffer before you use it")

    def test_a_trainer_without_mistakes_is_told_nothing(self):
        done = run_trainer("nothing")
        self.assertEqual((0, ""), (done.returncode, done.stderr))

    def test_a_tensor_of_torch_is_told(self):
        try:
            import torch  # noqa: F401
        except ImportError:
            self.skipTest("no PyTorch")
        self.check("torch", "read of", "the parameters of unit 'layer3', which Release gave back "
                   "(rank 0): gather it before you read it")


if __name__ == "__main__":
    support.main()
