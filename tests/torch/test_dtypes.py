#!/usr/bin/env python3
"""Parameters that are not float32: as they are, with torch.optim's optimizers, and behind a float32
master. shardd.torch.fully_shard against torch.distributed.fsdp.fully_shard over gloo, on two ranks
bit for bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import os
import sys
import warnings

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.distributed.tensor import DTensor

import shardd
import shardd.torch as st

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REDUCED = fsdp.fsdp.MixedPrecisionPolicy(reduce_dtype=FP32)
COMPUTED = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=BF16)
CASES, ALONE = {}, {}
BY_THE_DAEMON = {"lora_in_fp32_on_a_llama_in_bf16"}  # whose square roots are correctly rounded


def case(function):
    CASES[function.__name__] = function
    return function


def alone(function):
    ALONE[function.__name__] = function
    return function


class Torch(Fsdp2):
    """With PyTorch's square roots, as shardd has them on the shard."""

    exact = False


class Ours(Shardd):
    def optimizer(self, kind, params, **options):
        return getattr(torch.optim, kind)(params, foreach=False, **options)


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


# ------------------------------------------------------------------------- models


def mlp(dtype):
    return shared.mlp().to(dtype)


def batch(rank, step, dtype):
    return shared.numbers(rank, step, 5, 7).to(dtype)


def trained(api, rank, dtype, kind="AdamW", policy=None, each=None, micro=None, **options):
    model = shared.shard_mlp(api, mlp(dtype), **({"mp_policy": policy} if policy else {}))
    compute = getattr(policy, "param_dtype", None) or dtype
    return shared.loop(
        api, model, lambda model, step: model(batch(rank, step, compute)).float().pow(2).mean(),
        rank, kind, micro=(lambda model, step: micro(api, model, rank, step)) if micro else None,
        each=(lambda model, optimizer, step: each(api, model)) if each else None, **options)


SGD = {"lr": 0.05, "momentum": 0.9}
for _dtype, _name, _kind, _options in (
        (BF16, "bf16", "AdamW", {}), (BF16, "bf16", "SGD", SGD),
        (BF16, "bf16", "Adagrad", {"lr": 0.01}), (BF16, "bf16", "RMSprop", {"lr": 0.01}),
        (FP16, "fp16", "AdamW", {"lr": 0.01, "eps": 1e-4}), (FP16, "fp16", "SGD", SGD)):
    CASES[f"{_kind}_in_{_name}"] = (
        lambda api, rank, d=_dtype, k=_kind, o=_options: trained(api, rank, d, k, **o))


@case
def sums_in_fp32(api, rank):
    return trained(api, rank, BF16, policy=REDUCED)


@case
def fp32_computed_in_bf16_by_the_shard(api, rank):
    return trained(api, rank, FP32, "Adagrad", policy=COMPUTED, lr=0.01)


@case
def clipped(api, rank):
    return trained(api, rank, BF16, each=lambda api, model: {
        "norm": whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05))})


@case
def gradients_are_read_and_changed(api, rank):
    def each(api, model):
        seen = {}
        for name, p in model.named_parameters():
            seen["grad " + name] = whole(p.grad)
            if whole(p.grad).dtype != BF16:
                raise AssertionError(f"the gradient of {name} is {p.grad.dtype}")
            p.grad.mul_(0.5)
        return seen

    return trained(api, rank, BF16, each=each)


def _accumulated(api, model, rank, step):
    total = 0.0
    for part in range(3):
        api.sync(model, part == 2)
        loss = model(batch(rank, 10 * step + part, BF16)).float().pow(2).mean()
        loss.backward()
        total = total + loss.detach()
    return total


@case
def accumulated(api, rank):
    return trained(api, rank, BF16, micro=_accumulated)


@case
def accumulated_with_sums_in_fp32(api, rank):
    return trained(api, rank, BF16, policy=REDUCED, micro=_accumulated)


@case
def parameters_are_changed_outside_of_forward(api, rank):
    def each(api, model):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.75)
        return {}

    return trained(api, rank, BF16, "SGD", lr=0.05, each=each)


class Gated(nn.Module):
    """fp32 norms and gates among matrices of bf16, as units of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(7, 12).to(BF16), nn.Linear(12, 3).to(BF16)
        self.norm, self.gate = nn.LayerNorm(12), nn.Linear(12, 12)

    def forward(self, x):
        x = self.norm(self.first(x.to(BF16)).float())
        return self.last((x * torch.sigmoid(self.gate(x))).to(BF16))


def mixed(api):
    model = Gated()
    for module in (model.norm, model.gate):
        api.fully_shard(module)
    return api.fully_shard(model)


@case
def units_of_different_types(api, rank):
    return shared.loop(api, mixed(api), shared.square(rank), rank)


@case
def frozen_bf16_under_trained_fp32(api, rank):
    """As peft has it: adapters in fp32 on a model in bf16, computed in bf16."""
    model = shared.mlp()
    model[2].to(BF16).requires_grad_(False)
    for p in model[2].parameters():
        p.requires_grad = False
    api.fully_shard(model, mp_policy=COMPUTED)
    return shared.loop(
        api, model, lambda model, step: model(batch(rank, step, BF16)).float().pow(2).mean(), rank,
        "SGD", params=trainable, **SGD)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def llama(dtype):
    import transformers

    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        pad_token_id=0)).to(dtype)


def llama_trained(api, rank, model, params=None, **options):
    for layer in [m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer"]:
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)

    def micro(model, step):
        torch.manual_seed(100 * step + rank)
        tokens = torch.randint(1, 64, (2, 8))
        model.eval()
        with torch.no_grad():
            model.seen = model(tokens).logits
        model.train()
        loss = model(tokens, labels=tokens).loss.float()
        loss.backward()
        return loss

    return shared.loop(api, model, None, rank, micro=micro, params=params, lr=0.01,
                       each=lambda model, optimizer, step: {"logits": model.seen})


@case
def a_llama_in_bf16(api, rank):
    return llama_trained(api, rank, llama(BF16))


def lora(dtype):
    """As peft makes them: adapters in fp32 on a model in @dtype."""
    import peft

    torch.manual_seed(6)
    model = peft.get_peft_model(llama(dtype), peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False))
    assert {p.dtype for p in trainable(model)} == {FP32}
    return model


@case
def lora_in_fp32_on_a_llama_in_bf16(api, rank):
    return llama_trained(api, rank, lora(BF16), trainable)


# ----------------------------------------------------------------------- replicate


def replicated(model, rank, **options):
    """Against DistributedDataParallel."""
    def trained(api, wrapped):
        api.whole = lambda model: {name.removeprefix("module."): value.detach().clone()
                                   for name, value in model.state_dict().items()}
        return shared.loop(api, wrapped, lambda model, step: model(
            batch(rank, step, BF16)).float().pow(2).mean(), rank, "SGD", **SGD)

    theirs = trained(Torch(), nn.parallel.DistributedDataParallel(model()))
    api = Ours("replicated")
    try:
        return differences(trained(api, st.replicate(model(), **options)), theirs)
    finally:
        api.close()


@alone
def replicate_in_bf16(rank):
    return replicated(lambda: mlp(BF16), rank)


@alone
def replicate_with_different_types(rank):
    return replicated(Gated, rank)


# ------------------------------------------------------------------------- masters


def with_a_master(dtype, rank):
    """@dtype with a master in fp32 is FSDP2's model in fp32 that computes in @dtype."""
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    theirs = llama_trained(Fsdp2(), rank, llama(dtype).float(), mp_policy=policy)
    api = Shardd(f"master-{dtype}".replace("torch.", ""))
    try:
        ours = llama_trained(api, rank, llama(dtype), master="fp32")
    finally:
        api.close()
    return differences(ours, theirs)


@alone
def a_master_behind_bf16(rank):
    return with_a_master(BF16, rank)


@alone
def a_master_behind_fp16(rank):
    return with_a_master(FP16, rank)


# ---------------------------------------------------------------------- state dicts


@alone
def state_dicts_are_of_the_type(rank):
    said = []
    st.init(job="types")
    try:
        model = shared.shard_mlp(Shardd.__new__(Shardd), mlp(BF16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            model(batch(rank, step, BF16)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        said += [f"{n} is {v.dtype}" for n, v in state.items() if v.dtype != BF16]
        model.load_state_dict({name: torch.zeros_like(v) for name, v in state.items()})
        model.load_state_dict(state)
        said += [f"{n} was not loaded" for n, v in model.state_dict().items()
                 if not torch.equal(v, state[n])]
        with st.summon_full_params(model):
            said += [f"{n} is {p.dtype}" for n, p in model.named_parameters() if p.dtype != BF16]
    finally:
        st.shutdown()
    return said


@alone
def optimizers_state_goes_and_comes(rank):
    """A training that is saved after a step and goes on elsewhere is the undisturbed one."""
    def steps(job, first, n, state=None):
        st.init(job=job)
        try:
            model = shared.shard_mlp(Shardd.__new__(Shardd), mlp(BF16))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            for step in range(first, first + n):
                model(batch(rank, step, BF16)).float().pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return ({name: value.clone() for name, value in model.state_dict().items()},
                    optimizer.state_dict())
        finally:
            st.shutdown()

    whole = steps("whole", 0, 3)
    state = steps("first", 0, 1)
    said = [f"state {key} is {value.dtype}" for s in state[1]["state"].values()
            for key, value in s.items() if key != "step" and value.dtype != BF16]
    return said + differences([steps("second", 1, 2, state)[0]], [whole[0]])


@alone
def a_model_from_the_meta_device(rank):
    import transformers

    values = llama(BF16).state_dict()
    st.init(job="meta")
    try:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(llama(BF16).config).to(BF16)
        for layer in model.model.layers:
            st.fully_shard(layer)
        st.fully_shard(model)
        model.load_state_dict(values)
        return [f"{name} differs" for name, value in model.state_dict().items()
                if value.dtype != BF16 or not torch.equal(value, values[name])]
    finally:
        st.shutdown()


@alone
def live_parameters(rank):
    """Another process, here the same one, computes with what is committed."""
    st.init(job="live")
    try:
        model = shared.shard_mlp(Shardd.__new__(Shardd), mlp(BF16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch(rank, 0, BF16)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.finish()
        st.commit(1)
        want = {name: value.clone() for name, value in model.state_dict().items()}
        seen = shared.mlp()
        with st.Live(seen, "live"):
            return [f"{name} differs" for name, p in seen.named_parameters()
                    if p.dtype != BF16 or not torch.equal(p, want[name])]
    finally:
        st.shutdown()


# -------------------------------------------------------------------------- refusals


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"said: {error}"]
    return [f"not refused: {words}"]


@alone
def what_cannot_be_is_refused(rank):
    st.init(job="refused")
    try:
        model = shared.shard_mlp(Shardd.__new__(Shardd), mlp(BF16))
        said = refused(shardd.Unimplemented, "master='fp32'",
                       lambda: st.AdamW(model.parameters()))
        said += refused(shardd.Unimplemented, "whole=True is for float32", lambda: st.Sharded(
            torch.optim.SGD, model.parameters(), lr=0.1, whole=True))
        half = shared.mlp()
        half[0].to(BF16)
        said += refused(shardd.InvalidArgument, "('0.weight') and torch.float32 ('2.weight')",
                        lambda: st.fully_shard(half))
        for p in half[0].parameters():
            p.requires_grad = False
        half = st.fully_shard(half)
        for p in half.parameters():
            p.requires_grad = True
        said += refused(shardd.FailedPrecondition, "is trained now",
                        lambda: torch.optim.SGD(half.parameters(), lr=0.1))
        said += refused(shardd.InvalidArgument, "master is 'bf16'",
                        lambda: st.fully_shard(mlp(BF16), master="bf16"))
        said += refused(shardd.InvalidArgument, "torch.float64",
                        lambda: st.fully_shard(mlp(torch.float64)))
    finally:
        st.shutdown()
    return said


def both(name, rank):
    if name in ALONE:
        return ALONE[name](rank)
    theirs = CASES[name](Fsdp2() if name in BY_THE_DAEMON else Torch(), rank)
    api = Ours(name)
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    return differences(ours, theirs)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted([*CASES, *ALONE]), both)))
