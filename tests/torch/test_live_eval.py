#!/usr/bin/env python3
"""Live parameters: shardd.torch.live, and live_eval.py beside train_gpt.py."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest

import fsdp  # noqa: F401  finds the package
import support
import torch
from torch import nn

import shardd
import shardd.torch

EXAMPLES = support.ROOT / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import live_eval  # noqa: E402

STEPS = 25
SAMPLES = 500  # an evaluation takes longer than a step: without a hold steps would mix in it
MODEL = ["--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--data",
         str(support.ROOT / "README.md")]


def environment(socket):
    return dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"),
                SHARDD_SOCKET=socket, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")


class LiveEval(unittest.TestCase):
    def test_each_loss_is_that_of_the_parameters_of_its_step(self):
        with support.daemon("--set", "reader_hold_ms=20s") as socket, \
                tempfile.TemporaryDirectory() as folder:
            trainer = subprocess.Popen(
                [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "run", "-n", "2",
                 "--job", "gpt", "--", sys.executable,
                 str(pathlib.Path(__file__).with_name("gpt_states.py")), *MODEL, "--batch", "4",
                 "--steps", str(STEPS), "--resilient", folder],
                env=environment(socket), text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)
            looker = subprocess.Popen(
                [sys.executable, str(EXAMPLES / "live_eval.py"), *MODEL, "--samples",
                 str(SAMPLES), "--job", "gpt", "--json"], env=environment(socket), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            said, _ = trainer.communicate(timeout=240)
            self.assertEqual(trainer.returncode, 0, said)
            out, err = looker.communicate(timeout=60)
            self.assertEqual((looker.returncode, err), (0, ""))
            seen = [json.loads(line) for line in out.splitlines()]
            self.compare(seen, pathlib.Path(folder))

    def compare(self, seen, folder):
        steps = [one["step"] for one in seen]
        self.assertEqual(steps, sorted(set(steps)))
        options = types.SimpleNamespace(samples=SAMPLES, length=16, data=support.ROOT / "README.md")
        given, wanted = live_eval.samples(options)
        model = live_eval.Gpt(2, 32, 2, 16).eval()
        losses = set()
        for one in seen:
            model.load_state_dict(torch.load(folder / f"{one['step']}.pt"))
            self.assertEqual(one["loss"], live_eval.loss_of(model, given, wanted), one["step"])
            losses.add(one["loss"])
        self.assertEqual(len(losses), len(seen))  # they are no constant
        self.assertGreater(len(steps), STEPS // 3, steps)


@contextlib.contextmanager
def trained(job, build, wrap):
    """A socket where @job has the parameters of a model; that model as it was before."""
    with support.daemon("--set", "reader_hold_ms=10s") as socket:
        torch.manual_seed(3)
        model = build()
        plain = build()
        plain.load_state_dict(model.state_dict())
        shardd.torch.init(socket, job, 0, 1)
        try:
            wrap(model)
            optimizer = shardd.torch.SGD(model.parameters(), lr=0.0)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            shardd.torch.commit(1)
            yield socket, plain
        finally:
            del optimizer, model
            shardd.torch.shutdown()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.c.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(self.norm(self.a(x)))))


def shard(model):
    shardd.torch.fully_shard(model.b)
    shardd.torch.fully_shard(model)


class Live(unittest.TestCase):
    def check(self, wrap):
        with trained("live", Tied, wrap) as (socket, plain):
            x = torch.randn(4, 3)
            plain.eval()
            wanted = plain(x)
            model = Tied().eval()
            before = dict(model.named_parameters())
            with shardd.torch.live(model, "live", socket) as step:
                self.assertEqual(step, 1)
                self.assertIs(model.c.weight, model.a.weight)
                self.assertFalse(any(p.requires_grad for p in model.parameters()))
                addresses = {n: p.data_ptr() for n, p in model.named_parameters()}
                self.assertTrue(torch.equal(model(x), wanted))
            self.assertEqual({n: id(p) for n, p in model.named_parameters()},
                             {n: id(p) for n, p in before.items()})
            with shardd.read("live", socket) as reader:
                for _ in range(2):
                    with shardd.torch.live(model, reader):
                        self.assertTrue(torch.equal(model(x), wanted))
                with reader.snapshot():  # the memory itself, not a copy
                    lent = {reader[name].address - reader["b.weight"].address
                            for name in reader.tensors if name.startswith("b.")}
            self.assertEqual(lent, {addresses[n] - addresses["b.weight"]
                                    for n in ("b.weight", "b.bias")} if wrap is shard else lent)

    def test_of_fully_shard(self):
        self.check(shard)

    def test_of_replicate(self):
        self.check(lambda model: shardd.torch.replicate(model, bucket_cap_mb=1e-5))

    def test_of_the_second_of_two_models(self):
        with support.daemon("--set", "reader_hold_ms=10s") as socket:
            shardd.torch.init(socket, "both", 0, 1)
            try:
                models = [nn.Linear(3, 2), nn.Linear(3, 2)]
                wanted = [m.weight.detach().clone() for m in models]
                for model in models:
                    shardd.torch.fully_shard(model)
                optimizers = [shardd.torch.SGD(m.parameters(), lr=0.0) for m in models]
                shardd.torch.session().commit(1)
                for number in (1, 2):
                    seen = nn.Linear(3, 2)
                    with shardd.torch.live(seen, "both", socket, model=number):
                        self.assertTrue(torch.equal(seen.weight, wanted[number - 1]))
                del optimizers, models, model
            finally:
                shardd.torch.shutdown()

    def test_refusals(self):
        with trained("live", Tied, shard) as (socket, _):
            for model, kind in ((nn.Linear(3, 4), shardd.NotFound),
                                (Tied().double(), shardd.InvalidArgument)):
                before = [id(p) for p in model.parameters()]
                with self.assertRaises(kind), shardd.torch.live(model, "live", socket):
                    pass
                self.assertEqual([id(p) for p in model.parameters()], before)
            wide = Tied()
            wide.b = nn.Linear(3, 4)
            with self.assertRaises(shardd.InvalidArgument) as caught, \
                    shardd.torch.live(wide, "live", socket):
                pass
            self.assertIn("'b.weight' has shape [4, 3]", str(caught.exception))

    def test_what_is_kept_is_told_and_not_lost(self):
        with trained("live", Tied, shard) as (socket, _):
            model = Tied()
            with self.assertRaises(shardd.InUse), shardd.torch.live(model, "live", socket):
                kept = model.b.weight
            self.assertTrue(torch.isfinite(kept).all())


if __name__ == "__main__":
    support.main()
