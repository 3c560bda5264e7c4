#!/usr/bin/env python3
"""The ready maps of shardd.maps against vLLM itself: its own model classes, built on the processor
for each rank, and its own loader of checkpoints say what the parameters of that rank are. The
backend shardd copies a generation into another model of the class: all bits must be the same.

    python -m pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl -d folder
    PYTHONPATH=folder tests/engines/test_vllm_maps.py     # where what it imports is installed
"""

import contextlib
import os
import sys
import tempfile
import unittest
from importlib.util import find_spec
from unittest import mock

if find_spec("vllm") is None:
    print("there is no vLLM in this environment: tests/run --nightly installs it")
    sys.exit(77)

# before vLLM is imported; the target is for files of a vLLM that was built for GPUs
os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

import llama  # noqa: F401  finds the package
import support
import torch
import transformers
import vllm
from vllm.config import set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

import shardd
import shardd.torch
from shardd.engines import _weights, register_vllm
from shardd.engines import vllm as ours
from shardd.maps import MODELS, publication_map

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200,
         "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
LENGTH = SMALL["max_position_embeddings"]
# the function of GPT-2's own layers needs vLLM's compiled parts, and does not concern weights
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 200, "n_positions": LENGTH,
        "bos_token_id": 0, "eos_token_id": 1, "activation_function": "gelu"}
SIZES = 1, 2, 4  # with 4 there are more ranks than heads of keys and values


def trained(socket, job, kind, config):
    """A job whose model has trained for one step. Return: a plain model with its parameters, in
    bf16, rounded by PyTorch."""
    torch.manual_seed(1)
    model = kind(config)
    for value in model.parameters():  # no zeros and ones, which would be equal anywhere
        value.data = torch.randn_like(value)
    model.tie_weights()
    shardd.torch.init(socket, job, 0, 1)
    for module in list(model.modules()):
        if type(module).__name__.endswith(("DecoderLayer", "GPT2Block")):
            shardd.torch.fully_shard(module)
    shardd.torch.fully_shard(model)
    optimizer = shardd.torch.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, config.vocab_size, (2, LENGTH))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    shardd.torch.commit(1)
    plain = kind(config).bfloat16()
    plain.load_state_dict(shardd.torch.state_dict(model))
    return plain


class Rank:
    """vLLM's classes for one rank of @size, without the others: what they make and load depends on
    the size of the group and on the rank in it, and no data is exchanged."""

    def __init__(self, vllm_config, size, rank):
        self.config, self.size, self.rank = vllm_config, size, rank

    @contextlib.contextmanager
    def _is_there(self):
        group, parallel = parallel_state.get_tp_group(), self.config.parallel_config
        with set_current_vllm_config(self.config), \
                mock.patch.multiple(group, world_size=self.size, rank_in_group=self.rank), \
                mock.patch.multiple(parallel, tensor_parallel_size=self.size,
                                    world_size=self.size), \
                mock.patch.object(ours, "_exchange", lambda _: None):
            yield

    def model(self):
        """One of vLLM's, with no values yet."""
        with self._is_there():
            self.config.compilation_config.static_forward_context.clear()  # those of the last one
            with set_default_torch_dtype(self.config.model_config.dtype):
                model = initialize_model(self.config)
        for value in model.parameters():
            value.data.fill_(float("nan"))
        return model

    def loaded(self):
        """What vLLM's loader makes of the checkpoint."""
        model = self.model()
        with self._is_there():
            get_model_loader(self.config.load_config).load_weights(model, self.config.model_config)
        return model

    def receives(self, socket, job, publication):
        """What the backend makes of a publication of vLLM's names."""
        model = self.model()
        with self._is_there():
            engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend="shardd"), self.config, torch.device("cpu"), model)
            engine.init_transfer_engine(engine.parse_init_info(
                {"job": job, "publication": publication, "socket": socket,
                 "names": "parameters"}))
            engine.receive_weights(engine.parse_update_info({"step": 1}))
            engine.shutdown()
        return model

    def reads(self, socket, job, publication):
        """What the model's own load_weights makes of a publication of the job's names."""
        model = self.model()
        with self._is_there(), shardd.Live(job, publication, socket) as live:
            model.load_weights(_weights.tensors(live.acquire()))
        return model


class Maps(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        register_vllm()
        cls.socket = cls.enterClassContext(support.daemon())
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        parallel_state.init_distributed_environment(
            1, 0, f"file://{cls.folder}/group", 0, "gloo")
        cls.addClassCleanup(parallel_state.destroy_distributed_environment)
        cls.addClassCleanup(parallel_state.destroy_model_parallel)

    def same(self, seen, wanted):
        seen, wanted = (dict(one.named_parameters(remove_duplicate=False))
                        for one in (seen, wanted))
        self.assertEqual(list(seen), list(wanted))
        for name, value in wanted.items():
            self.assertFalse(value.isnan().any(), name)
            self.assertEqual((seen[name].dtype, seen[name].shape), (value.dtype, value.shape), name)
            self.assertTrue(torch.equal(seen[name].view(torch.int16), value.view(torch.int16)),
                            name)

    def check(self, kind, config, names=True):
        """@names: vLLM's model knows the names that the job's model has."""
        job = f"job-{self.id().rsplit('.', 1)[-1]}"
        self.addCleanup(shardd.torch.shutdown)
        folder = os.path.join(self.folder, job)
        trained(self.socket, job, kind, config).save_pretrained(folder)
        vllm_config = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="bfloat16",
                                 max_model_len=LENGTH, enforce_eager=True).create_engine_config()
        with set_current_vllm_config(vllm_config):  # of one process; some models want more groups
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(1, 1)
        with shardd.Client(self.socket) as client:
            self.publish({"name": "plain", "type": "bf16"}, job, client)
            for size in SIZES:
                for number in range(size):
                    self.publish(publication_map(
                        os.path.join(folder, "config.json"), f"engine-{number}-of-{size}",
                        tp_size=size, tp_rank=number), job, client)
                for number in range(size):
                    with self.subTest(size=size, rank=number):
                        rank = Rank(vllm_config, size, number)
                        wanted = rank.loaded()
                        self.same(rank.receives(self.socket, job,
                                                f"engine-{{tp_rank}}-of-{size}"), wanted)
                        self.check_names(f"engine-{number}-of-{size}", job, wanted)
                        if names:
                            self.same(rank.reads(self.socket, job, "plain"), wanted)
                        else:
                            with self.assertRaisesRegex(ValueError, "no module or parameter"):
                                rank.reads(self.socket, job, "plain")

    def publish(self, declaration, job, client):
        shardd.declare_publication(declaration, job, client)
        shardd.publish(declaration["name"], job, client)

    def check_names(self, publication, job, model):
        """A map makes nothing but the model's parameters, and the former names of experts."""
        known = dict(model.named_parameters(remove_duplicate=False))
        with shardd.Live(job, publication, self.socket) as live, live.generation() as weights:
            for name in set(weights) - set(known):
                self.assertIn(name.replace(".experts.", ".experts.routed_experts."), known)

    def test_gpt2(self):
        self.check(transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2))

    def test_llama(self):
        self.check(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL))

    def test_llama_with_tied_embeddings(self):
        self.check(transformers.LlamaForCausalLM,
                   transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))

    def test_mistral(self):
        self.check(transformers.MistralForCausalLM, transformers.MistralConfig(**SMALL))

    def test_mixtral(self):
        """transformers 5 has other names in memory than in a checkpoint."""
        self.check(transformers.MixtralForCausalLM, transformers.MixtralConfig(
            **SMALL, num_local_experts=4), names=False)

    def test_qwen2(self):
        self.check(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SMALL))

    def test_qwen3(self):
        self.check(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SMALL, head_dim=8))

    def test_qwen3_moe(self):
        self.check(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            mlp_only_layers=[1]))

    def test_there_is_a_test_of_each_map(self):
        tests = [name.removeprefix("test_") for name in dir(self) if name.startswith("test_")]
        self.assertLessEqual(set(MODELS), set(tests))


if __name__ == "__main__":
    print("# vLLM", vllm.__version__)
    torch.set_num_threads(1)
    support.main()
