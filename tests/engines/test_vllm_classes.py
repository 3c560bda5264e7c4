#!/usr/bin/env python3
"""vLLM's worker, factories, base classes and reload with the backend shardd, and a small module in
place of a model: also for a vLLM that does not run here.

    python -m pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl -d folder
    PYTHONPATH=folder tests/engines/test_vllm_classes.py     # where what it imports is installed
"""

import contextlib
import inspect
import sys
import types
import unittest
from importlib.util import find_spec
from unittest import mock

if find_spec("vllm") is None:
    print("there is no vLLM in this environment: tests/run --nightly installs it")
    sys.exit(77)

import llama  # noqa: F401  finds the package
import support
import torch
import vllm
from test_live import Trainer
from torch import nn
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
    base,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.v1.worker.gpu_worker import Worker

import shardd
from shardd.engines import _weights, register_vllm
from shardd.engines import vllm as ours

DECLARATION = {"name": "engine", "type": "bf16",
               "rules": [{"name": "", "sources": ["model.unwanted"]}]}


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in {"q": (4, 3), "k": (2, 3)}.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 9.0), False))


class Model(nn.Module):
    """Loads as vLLM's models do: by the loader of the parameter, if it has one."""

    def __init__(self):
        super().__init__()
        self.model = Part()
        self.model.norm = nn.ParameterList([nn.Parameter(torch.full((5,), 9.0), False)
                                            for _ in range(2)])
        self.keeps = None

    def load_weights(self, weights):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
            loaded.add(name)
            if self.keeps is not None:
                self.keeps.append(weight)
        return loaded

    def values(self):
        return {value.item() for parameter in self.parameters() for value in parameter.unique()}


class Classes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register_vllm()
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()
        cls.trainer = Trainer(cls.socket, "classes")
        shardd.declare_publication(DECLARATION, "classes", cls.trainer.client)
        cls.step = 0

    @classmethod
    def tearDownClass(cls):
        cls.trainer.__exit__()
        cls.context.__exit__(None, None, None)

    def setUp(self):
        """A worker, of which only what concerns weights is there."""
        self.model = Model()
        record_metadata_for_reloading(self.model)
        model_config = types.SimpleNamespace(quantization=None, dtype=torch.float32)
        parallel = types.SimpleNamespace(world_size=1, enable_expert_parallel=False,
                                         data_parallel_size=1, data_parallel_index=0)
        config = types.SimpleNamespace(parallel_config=parallel, model_config=model_config)
        self.worker = types.SimpleNamespace(
            rank=0, vllm_config=config, _weight_update_active=False, _weight_update_is_draft=False,
            get_draft_model=lambda: None,
            model_runner=types.SimpleNamespace(reset_lora_state=lambda: None),
            weight_transfer_engine=WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="shardd"), config, torch.device("cpu"), self.model))
        for name in ("_check_weight_transfer_engine", "_start_weight_update"):
            setattr(self.worker, name, types.MethodType(getattr(Worker, name), self.worker))

    def call(self, name, *arguments):
        """As vLLM does it on a processor, where there is no accelerator to wait for."""
        with mock.patch("vllm.v1.worker.gpu_worker.set_current_vllm_config",
                        lambda _: contextlib.nullcontext()), \
                mock.patch("torch.accelerator.synchronize"):
            return getattr(Worker, name)(self.worker, *arguments)

    # vLLM's protocol for a trainer
    def init_weight_transfer_engine(self, info):
        self.call("init_weight_transfer_engine", info)

    def start_weight_update(self):
        self.call("start_weight_update")

    def update_weights(self, info):
        self.call("update_weights", info)

    def finish_weight_update(self, weight_version=None):
        self.call("finish_weight_update")
        self.version = weight_version

    def sender(self):
        made = WeightTransferTrainerFactory.trainer_init(
            ours.ShardTrainerInitInfo(rank=0, job="classes", socket=self.socket,
                                      worker={"socket": self.socket}), client=self)
        self.addCleanup(made.shutdown)
        return made

    def train(self):
        type(self).step += 1
        self.trainer.step(self.step)
        return 2.0 + self.step

    def test_what_vllm_calls_is_there(self):
        """With the arguments that it passes."""
        for ours_, theirs in ((ours.ShardWeightTransferEngine, base.WeightTransferEngine),
                              (ours.ShardTrainerWeightTransferEngine,
                               base.TrainerWeightTransferEngine)):
            self.assertEqual(ours_.__abstractmethods__, frozenset())
            for name in theirs.__abstractmethods__:
                self.assertEqual(
                    list(inspect.signature(getattr(ours_, name)).parameters),
                    list(inspect.signature(getattr(theirs, name)).parameters), name)
        self.assertIsInstance(self, base.VLLMWeightSyncClient)

    def test_a_trainer_sends(self):
        sender = self.sender()
        for _ in range(2):
            value = self.train()
            sender.send_weights()
            self.assertEqual(self.model.values(), {value})
            self.assertGreater(int(self.version), 0)

    def test_what_fails_leaves_the_model_as_it_was(self):
        sender = self.sender()
        value = self.train()
        sender.send_weights()
        self.train()
        number = shardd.publish("engine", "classes", self.trainer.client)
        self.start_weight_update()
        with self.assertRaises(shardd.DeadlineExceeded):
            self.update_weights({"number": number + 1, "wait": 0.1})
        self.assertEqual(self.model.values(), {value})
        self.start_weight_update()
        self.model.load_weights, fine = self.fails, self.model.load_weights
        with self.assertRaisesRegex(KeyError, "by design"):
            self.update_weights({"number": number})
        self.model.load_weights = fine
        self.assertEqual(self.model.values(), {value})
        self.assertFalse(any(parameter.is_meta for parameter in self.model.parameters()))
        value = self.train()
        sender.send_weights()
        self.assertEqual(self.model.values(), {value})

    def fails(self, weights):
        """After half of a layer."""
        name, weight = next(iter(weights))
        parameter = dict(self.model.named_parameters())[name]
        parameter.weight_loader(parameter, weight)
        raise KeyError("by design")

    def test_a_model_that_keeps_what_it_was_given_is_refused(self):
        """Its tensors would become another generation's."""
        sender = self.sender()
        self.train()
        self.model.keeps = []
        with self.assertRaisesRegex(RuntimeError, "copy: true"):
            sender.send_weights()
        self.model.keeps = []
        self.init_weight_transfer_engine({"job": "classes", "socket": self.socket, "copy": True})
        value = self.train()
        shardd.publish("engine", "classes", self.trainer.client)
        self.start_weight_update()
        self.update_weights({})
        self.finish_weight_update()
        self.assertEqual(self.model.values(), {value})
        self.assertEqual(len(self.model.keeps), 4)

    def test_parameters_of_the_same_names(self):
        self.model.to(torch.bfloat16)
        self.init_weight_transfer_engine(
            {"job": "classes", "socket": self.socket, "names": "parameters"})
        value = self.train()
        shardd.publish("engine", "classes", self.trainer.client)
        at = [parameter.data_ptr() for parameter in self.model.parameters()]
        self.start_weight_update()
        self.update_weights({})
        self.finish_weight_update()
        self.assertEqual(self.model.values(), {value})
        self.assertEqual([parameter.data_ptr() for parameter in self.model.parameters()], at)
        self.model.model.extra = nn.Parameter(torch.zeros(3), False)
        self.train()
        shardd.publish("engine", "classes", self.trainer.client)
        self.start_weight_update()
        with self.assertRaisesRegex(shardd.InvalidArgument, r"has no 'model\.extra'"):
            self.update_weights({})
        self.assertEqual(self.model.values(), {value, 0.0})

    # ------------------------------------------------------------------------------ patches

    def patched(self, name, **more):
        """A publication with deltas, and the engine with patches."""
        shardd.declare_publication({**DECLARATION, "name": name, "delta_percent": 100, **more},
                                   "classes", self.trainer.client)
        self.addCleanup(shardd.drop_publication, name, "classes", self.trainer.client)
        self.init_weight_transfer_engine(
            {"job": "classes", "publication": name, "socket": self.socket, "patches": True})
        self.name, self.engine = name, self.worker.weight_transfer_engine

    def update(self, **info):
        """Return: how many values were patched; None: all were loaded."""
        number = shardd.publish(self.name, "classes", self.trainer.client)
        self.start_weight_update()
        self.update_weights({"number": number, **info})
        self.finish_weight_update()
        self.assertEqual(self.engine.loaded, (number, self.step))
        return self.engine.patched

    def elements(self):
        return sum(parameter.numel() for parameter in self.model.parameters())

    def test_only_what_has_changed_is_written(self):
        self.patched("deltas")
        value = self.train()
        self.assertIsNone(self.update())
        for _ in range(3):
            value = self.train()
            at = [parameter.data_ptr() for parameter in self.model.parameters()]
            self.assertEqual(self.update(), self.elements())
            self.assertEqual(self.model.values(), {value})
            self.assertEqual([p.data_ptr() for p in self.model.parameters()], at)
        self.assertEqual(self.update(), 0, "there is no newer one")
        self.assertEqual(self.model.values(), {value})
        self.train()
        self.assertIsNone(self.update(whole=True))
        self.train()
        self.assertEqual(self.update(), self.elements())

    def test_a_few_values(self):
        """Others stay as they are: their bits are not written at all."""
        self.patched("few")
        self.train()
        self.update()
        held = self.engine._held[self.model]
        one = dict(self.model.named_parameters())["model.q"]
        with mock.patch.object(type(held), "changes", lambda *_: [_weights.Change(
                "model.q", (4, 3), torch.tensor([1, 11]),
                torch.tensor([5.0, -0.0], dtype=torch.bfloat16))]):
            self.train()
            self.assertEqual(self.update(), 2)
        self.assertEqual(one.view(-1)[[1, 11]].tolist(), [5.0, 0.0])
        self.assertEqual(one.view(-1)[[0, 2, 10]].unique().numel(), 1)
        self.assertEqual((one == 5).sum(), 1)

    def test_a_missed_delta_is_a_whole_load(self):
        self.patched("missed", keep=1)
        self.train()
        self.update()
        self.train()
        shardd.publish("missed", "classes", self.trainer.client)
        value = self.train()
        self.assertIsNone(self.update())
        self.assertEqual(self.model.values(), {value})
        value = self.train()
        self.assertEqual(self.update(), self.elements())
        self.assertEqual(self.model.values(), {value})

    def test_without_deltas_all_is_loaded(self):
        self.patched("none", delta_percent=0)
        for _ in range(2):
            value = self.train()
            self.assertIsNone(self.update())
            self.assertEqual(self.model.values(), {value})

    def test_a_model_that_somebody_has_changed_is_loaded(self):
        """As after a sleep that has given up the weights."""
        self.patched("changed")
        self.train()
        self.update()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        value = self.train()
        self.assertIsNone(self.update())
        self.assertEqual(self.model.values(), {value})

    def test_patches_that_fail_are_a_whole_load(self):
        self.patched("fails")
        self.train()
        self.update()
        value = self.train()
        written = self.engine._load_patches

        def fails(changes):
            written(changes[:1])
            raise RuntimeError("by design")

        with mock.patch.object(self.engine, "_load_patches", fails), \
                self.assertLogs("vllm.shardd", "WARNING") as said:
            self.assertIsNone(self.update())
        self.assertIn("by design", said.output[0])
        self.assertEqual(self.model.values(), {value})
        value = self.train()
        self.assertEqual(self.update(), self.elements())

    def refuses(self, text):
        """Each update is whole, and right."""
        for i in range(3):
            value = self.train()
            said = contextlib.nullcontext() if i else self.assertLogs("vllm.shardd", "WARNING")
            with said as lines:
                self.assertIsNone(self.update())
            if not i:
                self.assertRegex(lines.output[0], text)
            self.expected(value)

    def expected(self, value):
        self.assertEqual(self.model.values(), {value})

    def test_a_layer_that_keeps_values_in_another_way_takes_no_patches(self):
        """Of the right shape: nothing but the values tells it."""
        self.patched("doubled")

        class Doubles(QuantizeMethodBase):
            def create_weights(self, *_, **__):
                pass

            def apply(self, *_, **__):
                pass

            def process_weights_after_loading(self, layer):
                layer.q.data.mul_(2)

        self.model.model.quant_method = Doubles()
        self.expected = lambda value: self.assertEqual(self.model.values(), {value, 2 * value})
        self.refuses("kept in another way")

    def test_a_loader_that_does_not_copy_takes_no_patches(self):
        """vLLM's marks of what does not change would be in the model, and are removed."""
        self.patched("assigns")

        def assign(param, loaded_weight):
            param.data[:] = loaded_weight

        self.model.model.q.weight_loader = assign
        record_metadata_for_reloading(self.model)
        self.refuses(r"does not only copy: model\.q")

    def test_a_quantized_model_takes_no_patches(self):
        self.patched("quantized")
        self.engine.model_config.quantization = "some"
        self.refuses("quantized")

    def test_patches_of_parameters(self):
        self.model.to(torch.bfloat16)
        self.patched("own")
        self.init_weight_transfer_engine(
            {"job": "classes", "publication": "own", "socket": self.socket, "patches": True,
             "names": "parameters"})
        self.train()
        self.assertIsNone(self.update())
        value = self.train()
        self.assertEqual(self.update(), self.elements())
        self.assertEqual(self.model.values(), {value})
        self.model.model.q.data = self.model.model.q.data.clone().T.contiguous().T
        self.train()
        self.update()
        with self.assertLogs("vllm.shardd", "WARNING") as said:
            value = self.train()
            self.assertIsNone(self.update())
        self.assertIn("no plain parameter 'model.q'", said.output[0])
        self.assertEqual(self.model.values(), {value})

    def test_another_publication_begins_anew(self):
        self.patched("former")
        self.train()
        self.update()
        self.patched("latter")
        value = self.train()
        self.assertIsNone(self.update())
        self.assertEqual(self.model.values(), {value})


if __name__ == "__main__":
    print("# vLLM", vllm.__version__)
    support.main()
