#!/usr/bin/env python3
"""Models of which several units use one tensor (T5, Whisper): the order in which autograd adds its
gradients is FSDP2's. shardd.torch.fully_shard against torch.distributed.fsdp.fully_shard over gloo,
on two ranks bit for bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import dataclasses
import sys
import warnings
from typing import NamedTuple

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
BF16 = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------- transformers


def _run(api, rank, model, blocks, batch, policy, checkpoints=False):
    model.train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in [m for m in model.modules() if type(m).__name__ in blocks]:
        api.fully_shard(module, **({"mp_policy": policy} if policy else {}))
    api.fully_shard(model, **({"mp_policy": policy} if policy else {}))
    return shared.loop(api, model, lambda model, step: model(**batch(step)).loss.float(), rank,
                       steps=6, lr=1e-2)


def t5(api, rank, policy, checkpoints=False):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(5)
    model = T5ForConditionalGeneration(T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0))

    def batch(step):
        torch.manual_seed(100 * step + rank)
        return {"input_ids": torch.randint(2, 97, (3, 11)), "labels": torch.randint(2, 97, (3, 7))}

    return _run(api, rank, model, ("T5Block",), batch, policy, checkpoints)


def whisper(api, rank, policy, checkpoints=False):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(5)
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=97, num_mel_bins=8, encoder_layers=2, decoder_layers=3, d_model=32,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=20, max_target_positions=16, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, use_cache=False))

    def batch(step):
        torch.manual_seed(100 * step + rank)
        return {"input_features": torch.randn(3, 8, 40), "labels": torch.randint(3, 97, (3, 7))}

    return _run(api, rank, model, ("WhisperEncoderLayer", "WhisperDecoderLayer"), batch, policy,
                checkpoints)


for _model in (t5, whisper):
    for _name, _policy in (("fp32", None), ("bf16", BF16)):
        CASES[f"{_model.__name__}_in_{_name}"] = (
            lambda api, rank, m=_model, p=_policy: m(api, rank, p))
CASES["t5_in_bf16_with_checkpoints"] = lambda api, rank: t5(api, rank, BF16, True)


# ------------------------------------------------------------------------ by hand


@dataclasses.dataclass
class Inside:
    memory: torch.Tensor
    length: int


class Pair(NamedTuple):
    memory: torch.Tensor
    length: int


class Reads(nn.Module):
    """Uses what it is given three times. @form: how it gets it."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.k, self.v, self.q = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, given=None, **more):
        memory = {"plain": lambda: given, "keyword": lambda: more["memory"],
                  "inside": lambda: given.memory, "nested": lambda: given["a"][0]}[self.form]()
        mixed = torch.softmax(self.q(x) @ self.k(memory).transpose(1, 2), -1) @ self.v(memory)
        return x + mixed + memory.mean(1, keepdim=True)


class Shared(nn.Module):
    def __init__(self, form, give, checkpoints):
        super().__init__()
        torch.manual_seed(7)
        self.give, self.checkpoints = give, checkpoints
        self.encoder, self.last = nn.Linear(6, 16), nn.Linear(16, 2)
        self.blocks = nn.ModuleList([Reads(form) for _ in range(4)])

    def forward(self, x):
        memory = self.encoder(x)
        x = torch.tanh(memory)
        for block in self.blocks:
            args, kwargs = self.give(memory)
            x = checkpoint(block, x, *args, use_reentrant=self.checkpoints == "reentrant",
                           **kwargs) if self.checkpoints else block(x, *args, **kwargs)
        return self.last(x)


FORMS = {
    "as_an_argument": ("plain", lambda m: ((m,), {})),
    "as_a_keyword": ("keyword", lambda m: ((), {"memory": m})),
    "in_a_dataclass": ("inside", lambda m: ((Inside(m, 3),), {})),
    "in_a_named_tuple": ("inside", lambda m: ((Pair(m, 3),), {})),
    "in_a_dictionary": ("nested", lambda m: (({"a": [m, None]},), {}))}


def by_hand(form, checkpoints=None, frozen=False):
    def run(api, rank):
        model = Shared(*FORMS[form], checkpoints)
        if frozen:
            for block in model.blocks:
                block.k.requires_grad_(False)
        for block in model.blocks:
            api.fully_shard(block)
        api.fully_shard(model)
        return shared.loop(api, model, lambda model, step: model(
            shared.numbers(rank, step, 5 * 4, 6).view(5, 4, 6)).pow(2).mean(), rank, lr=1e-2)

    return run


for _form in FORMS:
    CASES["one_tensor_" + _form] = by_hand(_form)
CASES["one_tensor_with_checkpoints"] = by_hand("as_an_argument", "plain")
CASES["one_tensor_with_reentrant_checkpoints"] = by_hand("as_an_argument", "reentrant")
CASES["one_tensor_and_frozen_parameters"] = by_hand("as_a_keyword", frozen=True)


def both(name, rank):
    theirs = CASES[name](Fsdp2(), rank)
    api = Shardd(name)
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    return differences(ours, theirs)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted(CASES), both)))
