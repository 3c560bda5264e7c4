"""A small Llama that trains, for tests of inference engines: the job, its publications, and the
weights of a step in the engine's types, computed by PyTorch from the trainer's parameters."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
import support  # noqa: F401  finds the package
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardd
import shardd.torch

os.environ["HF_HUB_OFFLINE"] = "1"
PROMPT = [1, 2, 3, 4]


def build(seed, tied=False):
    """vLLM's processor kernels want heads of 32 elements or more, and weights that differ enough
    that each step says something else."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


class Job:
    """One rank that trains the model of @seed. After each step ``weights`` is a copy of it."""

    def __init__(self, socket, name, seed=2, tied=False):
        self.name, self.tied = name, tied
        shardd.torch.init(socket, name, 0, 1)
        self.model = build(seed, tied)
        shardd.torch.fully_shard(self.model)
        self.optimizer = shardd.torch.SGD(self.model.parameters(), lr=0.5)
        self.step = 0
        self.client = shardd.Client(socket)

    def declare(self, name="engine", **more):
        shardd.declare_publication({"name": name, "type": "bf16", **more}, self.name, self.client)

    def train(self):
        """One step, with another loss each time."""
        self.step += 1
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(self.step))
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        shardd.torch.commit(self.step)
        return self.step

    def expected(self):
        """The parameters of the last step in bf16, by name."""
        with shardd.torch.summon_full_params(self.model, writeback=False):
            return {name: value.detach().to(torch.bfloat16).clone()
                    for name, value in self.model.named_parameters()}

    def close(self):
        self.client.close()
        shardd.torch.shutdown()


def cut():
    """Rules that make a rank's parameters as vLLM and SGLang have them."""
    layer = "model.layers.{i}."

    def part(name, dim):
        return {"tensor": name, "slice": {"dim": dim}}

    return [
        {"name": layer + "self_attn.qkv_proj.weight",
         "sources": [part(layer + f"self_attn.{x}_proj.weight", 0) for x in "qkv"]},
        {"name": layer + "mlp.gate_up_proj.weight",
         "sources": [part(layer + f"mlp.{x}_proj.weight", 0) for x in ("gate", "up")]},
        {"name": layer + "self_attn.o_proj.weight",
         "sources": [part(layer + "self_attn.o_proj.weight", 1)]},
        {"name": layer + "mlp.down_proj.weight",
         "sources": [part(layer + "mlp.down_proj.weight", 1)]},
        {"name": "model.embed_tokens.weight", "sources": [part("model.embed_tokens.weight", 0)]},
        {"name": "lm_head.weight", "sources": [part("lm_head.weight", 0)]},
    ]


def says(weights, tokens=8, tied=False):
    """What a model with @weights generates."""
    model = build(0, tied)
    model.load_state_dict({name: value.float() for name, value in weights.items()}, strict=not tied)
    if tied:
        model.tie_weights()
    with torch.no_grad():
        out = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False,
                             eos_token_id=None, pad_token_id=0)
    return out[0, len(PROMPT):].tolist()
