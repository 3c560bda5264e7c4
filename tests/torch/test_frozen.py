#!/usr/bin/env python3
"""Units with frozen parameters (LoRA by hand and by peft, biases only, frozen towers):
shardd.torch.fully_shard against torch.distributed.fsdp.fully_shard over gloo, on two ranks bit for
bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import sys
import warnings

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from test_fully_shard import loop, mlp, shard_mlp, square
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
BF16 = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------------ models


class Low(nn.Module):
    """A frozen linear map, and a trained one of low rank beside it."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Block(nn.Module):
    """Frozen but for what is of low rank. The norm comes first, and is last in backward."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width).requires_grad_(False)
        self.up, self.down = Low(width), nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Adapted(nn.Module):
    """@reentrant: None: no checkpoints."""

    def __init__(self, reentrant=None, width=16):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, width).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.norm = nn.RMSNorm(width).requires_grad_(False)
        self.head = Low(width)
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.reentrant:
            x = x.requires_grad_(True)  # as gradient_checkpointing_enable() does
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(
                block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def adapted(api, reentrant=None, **options):
    model = Adapted(reentrant)
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def tokens(rank, step):
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + 7)
    return torch.randint(0, 11, (2, 5), generator=draw)


def energy(rank, times=1):
    return lambda model, step: sum(
        model(tokens(rank, step + 100 * i)).float().pow(2).mean() for i in range(times))


# ------------------------------------------------------------------------- cases


@case
def low_rank(api, rank):
    return loop(api, adapted(api), energy(rank), rank)


@case
def low_rank_in_bf16(api, rank):
    return loop(api, adapted(api, mp_policy=BF16), energy(rank), rank)


@case
def low_rank_and_the_root_is_released_too(api, rank):
    return loop(api, adapted(api, reshard_after_forward=True), energy(rank), rank)


@case
def low_rank_of_two_forwards_before_a_backward(api, rank):
    return loop(api, adapted(api), energy(rank, 2), rank)


@case
def low_rank_with_checkpoints(api, rank):
    return loop(api, adapted(api, False), energy(rank), rank)


@case
def low_rank_with_reentrant_checkpoints(api, rank):
    return loop(api, adapted(api, True), energy(rank), rank)


@case
def low_rank_with_gradients_added_up(api, rank):
    def micro(model, step):
        for part in range(3):
            api.sync(model, part == 2)
            value = model(tokens(rank, step + 100 * part)).pow(2).mean()
            value.backward()
        return value

    return loop(api, adapted(api), None, rank, micro=micro)


@case
def low_rank_stepped_in_backward(api, rank):
    options = {"in_backward": True} if api.name == "shardd" else {}
    return loop(api, adapted(api), energy(rank), rank, **shared.ADAMW, **options)


@case
def low_rank_stepped_in_backward_on_the_shard(api, rank):
    api.exact, api.own = False, True
    options = {"in_backward": True} if api.name == "shardd" else {}
    return loop(api, adapted(api), energy(rank), rank, "Adagrad", lr=0.1, **options)


@case
def low_rank_evaluated_in_between(api, rank):
    def each(model, optimizer, step):
        with torch.no_grad():
            return {"eval": model(tokens(rank, 50 + step)).clone()}

    # FSDP2's root would keep the old values from here on
    model = adapted(api, reshard_after_forward=True)
    return loop(api, model, energy(rank), rank, each=each)


@case
def biases_only(api, rank):
    model = mlp()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return loop(api, shard_mlp(api, model), square(rank), rank)


class Towers(nn.Module):
    """A frozen tower between trained layers; two outputs, two inputs that are trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(7, 8), nn.Linear(7, 8)
        self.tower = Tower().requires_grad_(False)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        a, b = self.tower(self.first(x), [{"other": self.second(x)}])
        return self.last(a + torch.tanh(b))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, more):
        y = F.rms_norm(more[0]["other"], (8,), self.norm.weight)
        return torch.tanh(self.one(self.norm(x))), self.two(x * y)


@case
def a_frozen_tower_between_trained_layers(api, rank):
    model = Towers()
    for part in (model.first, model.second, model.tower, model.last):
        api.fully_shard(part)
    return loop(api, api.fully_shard(model), square(rank), rank)


@case
def a_frozen_tower_is_released_before_backward_ends(api, rank):
    model = Towers()
    for part in (model.first, model.second, model.tower, model.last):
        api.fully_shard(part)
    model = api.fully_shard(model)
    held, original = [], shared.square(rank)

    def loss(model, step):
        value = original(model, step)
        if api.name == "shardd":
            tree = model._unit().tree
            end = tree._end_backward
            tree._end_backward = lambda: (held.append(model.tower._unit().held), end())
        return value

    states = loop(api, model, loss, rank, steps=1)
    assert api.name != "shardd" or held == [False], held
    return states


class Nested(nn.Module):
    """A unit with frozen parameters of its own around another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.before, self.after = nn.Linear(7, 7), nn.Linear(7, 7)
        self.inner, self.scale = nn.Linear(7, 7), nn.Parameter(torch.ones(7))
        for frozen in (self.before, self.after):
            frozen.requires_grad_(False)

    def forward(self, x):
        return self.scale * self.after(torch.tanh(self.inner(torch.tanh(self.before(x)))))


@case
def a_unit_around_another(api, rank):
    model = nn.Sequential(Nested(), nn.Tanh(), Nested())
    for part in (model[0], model[2]):
        api.fully_shard(part.inner)
        api.fully_shard(part)
    return loop(api, api.fully_shard(model), square(rank), rank)


class Hidden(nn.Module):
    """Hands its input to a frozen unit by an attribute, which no hook sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.inner = nn.Linear(7, 7), Seen()

    def forward(self, x):
        self.inner.given = torch.tanh(self.first(x))
        return self.inner(x)


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.RMSNorm(7).requires_grad_(False), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(self.norm(self.given) + x)


@case
def an_input_that_no_hook_sees(api, rank):
    model = Hidden()
    for part in (model.first, model.inner):
        api.fully_shard(part)
    return loop(api, api.fully_shard(model), square(rank), rank)


# ------------------------------------------------------------------------- peft


def _llama():
    import peft
    import transformers

    torch.manual_seed(9)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(model, peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))


def _llama_loss(rank):
    def loss(model, step):
        draw = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(0, 64, (2, 9), generator=draw)
        return model(input_ids=ids, labels=ids).loss

    return loss


def _peft(api, rank, checkpoints=False, **options):
    model = _llama()
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    for layer in model.base_model.model.model.layers:
        api.fully_shard(layer, **options)
    return loop(api, api.fully_shard(model, **options), _llama_loss(rank), rank)


@case
def a_llama_of_peft(api, rank):
    return _peft(api, rank)


@case
def a_llama_of_peft_in_bf16(api, rank):
    return _peft(api, rank, mp_policy=BF16)


@case
def a_llama_of_peft_with_checkpoints(api, rank):
    return _peft(api, rank, True)


# ------------------------------------------------------------------------ running


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
