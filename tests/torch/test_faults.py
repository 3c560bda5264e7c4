#!/usr/bin/env python3
"""Uses of a unit's memory while it is released, and writes to it: each ends with a sentence that
names the parameter."""

import os
import signal
import subprocess
import sys
import unittest

import fsdp
import support
import torch
from torch import nn
from torch.nn import functional as F

import shardd
from shardd.torch import SGD, fully_shard

PROGRAM = """
import faulthandler, resource, sys
import torch
from torch import nn
import shardd.torch

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
shardd.torch.init(job="faults", world_size=1, rank=0)
if sys.argv[2] == "python":
    faulthandler.enable()


class Layer(nn.Linear):
    def forward(self, x):
        if sys.argv[1] == "write":
            self.weight.data.mul_(2.0)
        self.kept = self.weight
        return super().forward(x)


model = nn.Sequential(Layer(4, 4), nn.Linear(4, 4))
shardd.torch.fully_shard(model[0])
shardd.torch.fully_shard(model)
optimizer = shardd.torch.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("trained", flush=True)
print(model[0].kept.sum().item(), flush=True)
print("survived", flush=True)
"""


class Ends(unittest.TestCase):
    """What nothing can turn into an error."""

    def ends(self, how, handler="none"):
        with support.daemon() as socket:
            path = os.pathsep.join([str(support.ROOT / "client/python"),
                                    os.environ.get("PYTHONPATH", "")])
            done = subprocess.run([sys.executable, "-c", PROGRAM, how, handler], text=True,
                                  capture_output=True, timeout=60,
                                  env={**os.environ, "SHARDD_SOCKET": socket, "PYTHONPATH": path})
        self.assertEqual(-signal.SIGSEGV, done.returncode, done.stderr)
        return done

    def test_a_read_of_a_parameter_that_was_kept(self):
        done = self.ends("read")
        self.assertEqual("trained\n", done.stdout)
        self.assertIn("shardd: read of parameter 'weight' of unit '0', which is released",
                      done.stderr)
        self.assertIn("summon_full_params", done.stderr)

    def test_a_write_in_forward(self):
        done = self.ends("write")
        self.assertEqual("", done.stdout)
        self.assertIn("shardd: write to parameter 'weight' of unit '0', which is read-only",
                      done.stderr)

    def test_the_handler_of_python_comes_after_ours(self):
        done = self.ends("read", "python")
        self.assertIn("shardd: read of parameter 'weight'", done.stderr)
        self.assertIn("Fatal Python error: Segmentation fault", done.stderr)


class Seen(nn.Module):
    """What its norm has computed goes another way than its output."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.RMSNorm(7).requires_grad_(False), nn.Linear(7, 3)

    def forward(self, x):
        self.seen = F.rms_norm(x, (7,), self.norm.weight, 1e-5)
        return self.last(x)


class Raises(fsdp.OneRank):
    """What is in forward and backward."""

    def test_backward_through_an_output_that_no_hook_sees(self):
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.inner = nn.Linear(7, 7), Seen()

            def forward(self, x):
                x = self.first(x)
                y = self.inner(x)
                return x.sum() + (self.inner.seen.sum() if self.hidden else y.sum())

        torch.manual_seed(1)
        model = Around()
        for part in (model.first, model.inner):
            fully_shard(part)
        model = fully_shard(model)
        optimizer = SGD(model.parameters(), lr=0.1)
        model.hidden = True
        loss = model(torch.ones(5, 7)).sum()
        with self.assertRaises(shardd.FailedPrecondition) as caught:
            loss.backward()
        self.assertIn("read of parameter 'norm.weight' of unit 'inner', which is released",
                      str(caught.exception))
        optimizer.zero_grad()
        model.hidden = False
        model(torch.ones(5, 7)).sum().backward()
        optimizer.step()

    def test_a_forward_that_uses_what_another_has_kept(self):
        class Keeps(nn.Linear):
            def forward(self, x):
                kept.append(self.weight)
                return super().forward(x)

        class Uses(nn.Linear):
            def forward(self, x):
                return super().forward(x) + kept[0].detach().sum()

        kept = []
        model = nn.Sequential(Keeps(4, 4), Uses(4, 4))
        for part in model:
            fully_shard(part)
        model = fully_shard(model)
        SGD(model.parameters(), lr=0.1)
        with self.assertRaises(shardd.FailedPrecondition) as caught:
            model(torch.ones(2, 4))
        self.assertIn("read of parameter 'weight' of unit '0', which is released",
                      str(caught.exception))
        with self.assertRaises(shardd.FailedPrecondition):  # again, not only the first time
            model(torch.ones(2, 4))


if __name__ == "__main__":
    support.main()
