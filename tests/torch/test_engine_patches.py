#!/usr/bin/env python3
"""What engines write of a delta, and when they load all: SGLang's loader with a small model. vLLM's
is tested with its own classes (tests/engines/test_vllm_classes.py)."""

import array
import contextlib
import unittest

import fsdp  # noqa: F401  finds the package
import support
import torch
from test_live import Trainer
from torch import nn

import shardd
from shardd.engines import _weights
from shardd.engines import sglang as ours

PLACES = {"model.q": 0, "model.k": 12, "model.norm.0": 18, "model.norm.1": 23}  # in the unit


class Model(nn.Module):
    """As SGLang has models: q and k are one parameter, and the loader writes in place."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.qk = nn.Parameter(torch.zeros(6, 3), False)
        self.model.norm = nn.ParameterList([nn.Parameter(torch.zeros(5), False) for _ in range(2)])
        self.asked = []  # names that the loader got

    def load_weights(self, weights):
        for name, weight in weights:
            self.asked.append(name)
            if name in ("model.q", "model.k"):
                first = 0 if name == "model.q" else 4
                self.model.qk.data[first:first + len(weight)] = weight
            else:
                dict(self.named_parameters())[name].data.copy_(weight)

    def flat(self):
        return torch.cat([p.flatten() for p in self.parameters()]).tolist()


class EnginePatches(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.job = self.id().rsplit(".", maxsplit=1)[-1][:60]
        self.trainer = stack.enter_context(Trainer(self.socket, self.job))
        self.model, self.values, self.step = Model(), [2.0] * 28, 0
        self.stack = stack

    def declare(self, **more):
        shardd.declare_publication(
            {"name": "engine", "type": "bf16", "delta_percent": 100, "keep": 1, "buffers": 4,
             "rules": [{"name": "", "sources": ["model.unwanted"]}], **more},
            self.job, self.trainer.client)
        self.live = self.stack.enter_context(shardd.Live(self.job, "engine", self.socket))

    def train(self, **changed):
        """A step that adds 1 to these flat elements of tensors, and its generation."""
        self.step += 1
        gradient = self.trainer.unit.gradient()
        values = array.array("f", [0.0] * gradient.elements)
        for name, at in changed.items():
            for i in at:
                place = PLACES["model." + name.replace("_", ".")] + i
                values[place] = -1.0
                self.values[place] += 1
        gradient.view()[:] = values
        self.trainer.unit.reduce()
        self.trainer.client.step()
        self.trainer.client.commit(self.step)
        shardd.publish("engine", self.job, self.trainer.client)

    def load(self, **wanted):
        """Return: what was done. The model then has the values of the step."""
        self.model.asked.clear()
        found = self.live.acquire(wait=30)
        given = ours._fields({"job": self.job, "patches": True, **wanted})
        done = ours._load(self.model, found, given, (self.job, given["names"]))
        del found
        self.live.release()
        self.assertEqual(self.model.flat(), self.values)
        return done

    def test_others_are_loaded_as_they_are(self):
        self.declare()
        self.train(q=range(12))
        self.assertEqual(self.load(), "loaded")
        self.assertEqual(len(self.model.asked), 4)
        self.train(norm_0=[3], norm_1=[0, 4])
        self.assertEqual(self.load(), "wrote 3 values and loaded 0 tensors of")
        self.assertEqual(self.model.asked, [])
        self.train(q=[1], norm_1=[2])
        self.assertEqual(self.load(), "wrote 1 values and loaded 1 tensors of")
        self.assertEqual(self.model.asked, ["model.q"])
        self.assertEqual(self.load(), "wrote 0 values and loaded 0 tensors of")
        self.assertEqual(self.load(patches=False), "loaded")
        self.train(k=[5])
        self.assertEqual(self.load(), "loaded", "nothing was noted of a load without patches")

    def test_parameters_are_written_value_by_value(self):
        self.declare(rules=[{"name": "", "sources": ["model.unwanted"]},
                            {"name": "model.qk", "sources": ["model.q", "model.k"]}], type="fp32")
        self.train(q=[0])
        self.assertEqual(self.load(names="parameters"), "loaded")
        self.train(q=[11], k=[0, 5], norm_0=[1])
        self.assertEqual(self.load(names="parameters"), "wrote 4 values and loaded 0 tensors of")

    def test_a_missed_delta_is_a_whole_load(self):
        self.declare()
        for _ in range(2):
            self.train(norm_0=[1])
            self.assertEqual(self.load(), "loaded")
            self.train(norm_0=[2])
            self.train(norm_0=[3])
            self.assertEqual(self.load(), "loaded")
            self.train(norm_0=[4])
            self.assertEqual(self.load(), "wrote 1 values and loaded 0 tensors of")
            self.train(norm_0=[4])

    def test_a_model_that_somebody_has_changed_is_loaded(self):
        self.declare()
        self.train(q=[0])
        self.load()
        self.train(q=[1])
        self.model.model.norm[1].data.fill_(float("nan"))
        self.assertEqual(self.load(), "loaded")
        self.train(q=[1])
        self.assertEqual(self.load(), "wrote 0 values and loaded 1 tensors of")

    def test_a_failure_is_a_whole_load(self):
        self.declare()
        self.train(q=[0])
        self.load()
        self.train(q=[1], norm_0=[1])
        fine, self.model.load_weights = self.model.load_weights, None

        def fails(weights):
            self.model.load_weights = fine
            raise RuntimeError("by design")

        self.model.load_weights = fails
        with self.assertLogs("vllm.shardd", "WARNING") as said:
            self.assertEqual(self.load(), "loaded")
        self.assertIn("by design", said.output[0])

    def test_a_model_that_makes_other_values_of_its_weights_is_loaded(self):
        self.declare()
        self.model.post_load_weights = lambda: None
        for i in range(2):
            self.train(norm_0=[i])
            self.assertEqual(self.load(), "loaded")

    def test_a_parameter_of_another_layout_is_not_patched(self):
        """Its loader turns it: it has the shape, and other values at a place."""
        self.declare()
        load_weights = self.model.load_weights

        def turns(weights):
            load_weights((n, w.flip(0) if n == "model.norm.0" else w) for n, w in weights)
            self.values[18:23] = self.model.model.norm[0].tolist()

        self.model.load_weights = turns
        self.train(norm_0=[0], norm_1=[0])
        self.load()
        self.values[18:23] = [3.0, 2.0, 2.0, 2.0, 2.0]
        self.train(norm_0=[1], norm_1=[1])
        self.assertEqual(self.load(), "wrote 1 values and loaded 1 tensors of")
        self.assertEqual(self.model.model.norm[0].tolist(), [2.0, 2.0, 2.0, 3.0, 3.0])

    def test_what_does_not_fit_is_refused_before_anything_is_written(self):
        one = _weights.Change("model.norm.0", (5,), torch.tensor([0]), torch.tensor([7.0]))
        for name, shape in (("model.none", (5,)), ("model.norm.1", (6,))):
            other = _weights.Change(name, shape, torch.tensor([0]), torch.tensor([7.0]))
            with self.assertRaisesRegex(shardd.InvalidArgument, name):
                _weights.patch_parameters(self.model, [one, other])
        self.assertEqual(set(self.model.flat()), {0.0})

    def test_fp8_is_fp8_in_the_model(self):
        """Bytes were loaded as numbers: 0xfe became 254 instead of -448."""
        declaration = {"name": "engine", "delta_percent": 100, "rules_only": True, "rules": [
            {"name": "q", "sources": ["model.q"], "type": "e4m3"},
            {"name": "norm", "sources": ["model.norm.0"], "type": "bf16"}]}
        shardd.declare_publication(declaration, self.job, self.trainer.client)
        model, held = nn.Module(), _weights.Held()
        model.q = nn.Parameter(torch.zeros(4, 3, dtype=torch.float8_e4m3fn), False)
        model.q_scale = nn.Parameter(torch.zeros(()), False)
        model.norm = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), False)

        def same(found):
            for name, value in _weights.tensors(found):
                mine = dict(model.named_parameters())[name]
                self.assertEqual(value.dtype, mine.dtype)
                self.assertTrue(torch.equal(_weights.bits(value), _weights.bits(mine.data)), name)
            want = torch.tensor(self.values[:12]).view(4, 3)
            self.assertTrue(torch.allclose(model.q.float() * model.q_scale, want, rtol=0.07))

        with shardd.Live(self.job, "engine", self.socket) as live:
            self.train(q=range(12), norm_0=[1])
            found = live.acquire(wait=30)
            _weights.copy_parameters(model, found, True)
            held.note(model, found.number)
            same(found)
            self.train(q=[5], norm_0=[2])  # another scale
            del found
            found = live.acquire(wait=30)
            changes = held.changes(model, found, False)
            self.assertTrue({change.name for change in changes} >= {"q", "q_scale", "norm"})
            _weights.patch_parameters(model, changes)
            same(found)


if __name__ == "__main__":
    support.main()
