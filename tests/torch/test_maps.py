#!/usr/bin/env python3
"""Ready maps: generations against what an engine's loaders make of the same state dict. The loaders
here follow vLLM's rules (column, row, qkv and vocabulary parallel layers, fused experts), tensor by
tensor, on plain PyTorch."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

import fsdp  # noqa: F401  finds the package
import support
import torch
import transformers

import shardd
import shardd.torch
from shardd.maps import publication_map

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200,
         "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 200, "n_positions": 16,
        "bos_token_id": 0, "eos_token_id": 1}


def built(kind, config):
    torch.manual_seed(1)
    model = kind(config)
    for value in model.parameters():  # no zeros and ones, which would be equal anywhere
        value.data = torch.randn_like(value)
    return model


def copied(memory):
    assert memory.dtype == shardd.Dtype.BF16
    return torch.frombuffer(bytearray(memory.tobytes()), dtype=torch.bfloat16).view(memory.shape)


class Loader:
    """What the parameters of one rank of an engine are after all tensors were loaded."""

    def __init__(self, state, config, size, rank):
        self.state, self.config, self.size, self.rank = state, config, size, rank
        self.made = {}

    def rows(self, value, dim, ranks=None, rank=None):
        ranks, rank = ranks or self.size, self.rank if rank is None else rank
        assert value.shape[dim] % ranks == 0
        each = value.shape[dim] // ranks
        return value.narrow(dim, rank * each, each)

    def column(self, name, value):
        self.made[name] = self.rows(value, 0)

    def row(self, name, value):
        self.made[name] = self.rows(value, 1) if name.endswith("weight") else value

    def vocabulary(self, name, value):
        padded = torch.zeros(-(-value.shape[0] // 64) * 64, value.shape[1])
        padded[:value.shape[0]] = value
        self.made[name] = self.rows(padded, 0)

    def qkv(self, name, q, k, v):
        heads = self.config.num_key_value_heads
        replicas = max(1, self.size // heads)
        ranks = min(self.size, heads)
        self.made[name] = torch.cat([self.rows(q, 0)] + [
            self.rows(one, 0, ranks, self.rank // replicas) for one in (k, v)])

    def attention(self, prefix):
        for kind in ("weight", "bias"):
            three = [self.state.get(f"{prefix}{one}_proj.{kind}") for one in "qkv"]
            if three[0] is not None:
                self.qkv(f"{prefix}qkv_proj.{kind}", *three)
        self.row(prefix + "o_proj.weight", self.state[prefix + "o_proj.weight"])
        for norm in ("q_norm.weight", "k_norm.weight"):
            if prefix + norm in self.state:
                self.made[prefix + norm] = self.state[prefix + norm]

    def gated(self, prefix):
        self.made[prefix + "gate_up_proj.weight"] = torch.cat(
            [self.rows(self.state[prefix + one], 0)
             for one in ("gate_proj.weight", "up_proj.weight")])
        self.row(prefix + "down_proj.weight", self.state[prefix + "down_proj.weight"])

    def experts(self, source, prefix):
        joined = self.state[source + "experts.gate_up_proj"]
        gates, ups = joined.chunk(2, dim=1)
        downs = self.state[source + "experts.down_proj"]
        w13 = torch.stack([torch.cat([self.rows(gate, 0), self.rows(up, 0)])
                           for gate, up in zip(gates, ups)])
        w2 = torch.stack([self.rows(down, 1) for down in downs])
        for kind in ("experts.", "experts.routed_experts."):
            self.made[f"{prefix}{kind}w13_weight"] = w13
            self.made[f"{prefix}{kind}w2_weight"] = w2
        self.made[prefix + "gate.weight"] = self.state[source + "gate.weight"]

    def embeddings(self, embedding):
        self.vocabulary(embedding, self.state[embedding])
        self.vocabulary("lm_head.weight", self.state["lm_head.weight"])

    def llama(self, moe=None):
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}."
            self.attention(layer + "self_attn.")
            if layer + "mlp.gate_proj.weight" in self.state:
                self.gated(layer + "mlp.")
            else:
                self.experts(layer + "mlp.", layer + moe)
            for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                self.made[layer + norm] = self.state[layer + norm]
        self.made["model.norm.weight"] = self.state["model.norm.weight"]
        self.embeddings("model.embed_tokens.weight")

    def gpt2(self):
        for name, value in self.state.items():
            if any(p in name for p in ("c_attn", "c_proj", "c_fc")) and name.endswith("weight"):
                value = value.t()
            if "c_attn" in name:
                self.made[name] = torch.cat([self.rows(one, 0) for one in value.chunk(3)])
            elif "c_fc" in name:
                self.column(name, value)
            elif "c_proj" in name:
                self.row(name, value)
            elif "wte" not in name and "lm_head" not in name:
                self.made[name] = value
        self.embeddings("transformer.wte.weight")


def fill_llama(loader):
    loader.llama()


MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL), fill_llama),
    "llama, tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=True), fill_llama),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(**SMALL), fill_llama),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SMALL), fill_llama),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SMALL, head_dim=8),
              fill_llama),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **SMALL, num_local_experts=3), lambda loader: loader.llama("block_sparse_moe.")),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16,
        mlp_only_layers=[1]), lambda loader: loader.llama("mlp.")),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**GPT2),
             lambda loader: loader.gpt2()),
}


class Maps(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def check(self, which):
        kind, config, fill = MODELS[which]
        model = built(kind, config)
        model.tie_weights()
        state = {n: v.detach().clone() for n, v in model.state_dict().items()}
        job = which.replace(", ", "-")
        shardd.torch.init(self.socket, job, 0, 1)
        try:
            for module in model.modules():
                if type(module).__name__.endswith(("DecoderLayer", "GPT2Block")):
                    shardd.torch.fully_shard(module)
            shardd.torch.fully_shard(model)
            optimizer = shardd.torch.SGD(model.parameters(), lr=0.0)
            shardd.torch.commit(1)
            for size in (1, 2, 4):
                for rank in range(size):
                    with self.subTest(size=size, rank=rank):
                        self.compare(job, config, state, fill, size, rank)
            del optimizer, model
        finally:
            shardd.torch.shutdown()

    def compare(self, job, config, state, fill, size, rank):
        name = f"tp{rank}of{size}"
        declaration = publication_map(config, name, tp_size=size, tp_rank=rank)
        with shardd.Client(self.socket) as client:
            shardd.declare_publication(declaration, job, client)
            shardd.publish(name, job, client)
        loader = Loader(state, config, size, rank)
        fill(loader)
        with shardd.Live(job, name, self.socket) as live, live.generation() as weights:
            self.assertEqual(sorted(weights), sorted(loader.made))
            for one, wanted in loader.made.items():
                seen = copied(weights[one])
                self.assertEqual(seen.shape, wanted.shape, one)
                self.assertTrue(torch.equal(seen, wanted.bfloat16()), one)

    def test_llama(self):
        self.check("llama")

    def test_llama_with_tied_embeddings(self):
        self.check("llama, tied")

    def test_mistral(self):
        self.check("mistral")

    def test_qwen2(self):
        self.check("qwen2")

    def test_qwen3(self):
        self.check("qwen3")

    def test_mixtral(self):
        self.check("mixtral")

    def test_qwen3_moe(self):
        self.check("qwen3_moe")

    def test_gpt2(self):
        self.check("gpt2")

    def test_experts_of_their_own(self):
        """As transformers before 5.0 had them."""
        names = {f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight": shape
                 for e in range(3) for w, shape in (("w1", (8, 6)), ("w2", (6, 8)), ("w3", (8, 6)))}
        with shardd.connect(self.socket) as client:
            client.join("own", 1, 0)
            [unit] = client.register([shardd.UnitSpec("root", [
                shardd.TensorSpec(name, shape) for name, shape in names.items()])])
            unit.init_seed(1)
            held = torch.frombuffer(bytearray(unit.gather().tobytes()), dtype=torch.float32)
            values = {name: held[place.offset:place.offset + place.elements].view(names[name])
                      for name, place in unit.places.items()}
            unit.release()
            client.commit(1)
            declaration = publication_map(
                {**SMALL, "model_type": "mixtral"}, "own", tp_size=2, tp_rank=1)
            declaration["rules"] = [r for r in declaration["rules"] if "stack" in r]
            shardd.declare_publication(declaration, "own", client)
            shardd.publish("own", "own", client)
            with shardd.Live("own", "own", self.socket) as live, live.generation() as weights:
                prefix = "model.layers.0.block_sparse_moe.experts."
                for e in range(3):
                    one = {w: values[f"{prefix}{e}.{w}.weight"].bfloat16()
                           for w in ("w1", "w2", "w3")}
                    self.assertTrue(torch.equal(
                        copied(weights[prefix + "w13_weight"])[e],
                        torch.cat([one["w1"][4:], one["w3"][4:]])))
                    self.assertTrue(torch.equal(
                        copied(weights[prefix + "w2_weight"])[e], one["w2"][:, 4:]))
            client.leave()

    def test_refusals(self):
        llama = MODELS["llama"][1]
        for config, options, words in (
                (llama, {"tp_size": 3}, "4 attention heads are not divisible by tp_size 3"),
                (llama, {"tp_size": 2, "tp_rank": 2}, "tp_rank 2 of tp_size 2"),
                (llama, {"tp_size": 0}, "tp_size 0"),
                ({"model_type": "x", "num_attention_heads": 1}, {}, "no map for model_type 'x'"),
                ({"model_type": ["gpt2"]}, {}, "no map for model_type"),
                ([], {}, "no map for model_type None"),
                ({"model_type": "gpt2"}, {}, "num_attention_heads None"),
                ({**SMALL, "model_type": "llama", "vocab_size": 40}, {"tp_size": 4, "tp_rank": 3},
                 "a vocabulary of 40, padded to 64")):
            with self.assertRaisesRegex(shardd.InvalidArgument, words):
                publication_map(config, **options)

    def test_a_file_of_gpt2_does_not_say_that_it_is_tied(self):
        """The map had a source "lm_head.weight", which no job has, and was refused."""
        tied = {key: value for key, value in MODELS["gpt2"][1].to_dict().items()
                if key != "tie_word_embeddings"}
        self.assertEqual(publication_map(tied), publication_map(MODELS["gpt2"][1]))
        self.assertNotEqual(publication_map({**tied, "tie_word_embeddings": False}),
                            publication_map(tied))

    def test_the_command(self):
        env = dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"))
        with tempfile.TemporaryDirectory() as folder:
            MODELS["qwen2"][1].save_pretrained(folder)
            path = os.path.join(folder, "config.json")
            said = subprocess.run(
                [sys.executable, "-m", "shardd.maps", path, "--tp-size", "2", "--tp-rank", "1",
                 "--every-steps", "4"], text=True, capture_output=True, check=True, env=env)
            self.assertEqual(json.loads(said.stdout), publication_map(
                MODELS["qwen2"][1], tp_size=2, tp_rank=1, every_steps=4))
            for arguments in ((path, "--tp-size", "3"), (os.path.join(folder, "none"),),
                              (__file__,)):
                said = subprocess.run([sys.executable, "-m", "shardd.maps", *arguments], text=True,
                                      capture_output=True, env=env)
                self.assertEqual((said.returncode, said.stdout, said.stderr.count("\n")),
                                 (1, "", 1), said.stderr)


if __name__ == "__main__":
    support.main()
