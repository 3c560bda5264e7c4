#!/usr/bin/env python3
"""shardd.torch.fully_shard against torch.distributed.fsdp.fully_shard over gloo.

The same loop runs with both; after every step losses and all parameters are compared, on two
ranks bit for bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import contextlib
import functools
import sys
import warnings

import fsdp
import golden
import test_direct
import torch
import transformer
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardd

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
ADAMW = dict(lr=0.02, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.05)
STEPS = 4
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def numbers(rank, step, *shape):
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + 7)
    return torch.randn(*shape, generator=draw)


def loop(api, model, loss, rank, kind="AdamW", steps=STEPS, micro=None, each=None, params=None,
         **options):
    """@each(model, optimizer, step): after backward. Return: a dictionary a step."""
    options = options or (ADAMW if kind == "AdamW" else {"lr": 0.05})
    optimizer = api.optimizer(kind, params(model) if params else model.parameters(), **options)
    states = []
    for step in range(steps):
        if micro:
            value = micro(model, step)
        else:
            value = loss(model, step)
            value.backward()
        extra = each(model, optimizer, step) if each else {}
        api.step(optimizer)
        optimizer.zero_grad()
        states.append({**api.whole(model), "loss": value.detach(), **(extra or {})})
    return states


# ------------------------------------------------------------------------ models


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 3))


def shard_mlp(api, model, **options):
    for layer in (model[0], model[2]):
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def square(rank, width=7):
    return lambda model, step: model(numbers(rank, step, 5, width)).float().pow(2).mean()


def gpt(api, **options):
    model = transformer.make()
    for block in model.blocks:
        api.fully_shard(block, **options)
    return api.fully_shard(model, **options)


def gpt_loss(rank):
    return lambda model, step: transformer.loss(model, rank, step)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 5, 3)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.b(F.relu(self.norm(self.a(x)))).mean((2, 3)))


class Branches(nn.Module):
    """@used: which of the branches a forward takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.branches = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.used = [0]

    def forward(self, x):
        x = self.first(x)
        for i in self.used:
            x = x + torch.tanh(self.branches[i](x))
        return self.last(x)


def shard_branches(api, model):
    for branch in model.branches:
        api.fully_shard(branch)
    return api.fully_shard(model)


# ------------------------------------------------------------------------- cases


@case
def an_mlp(api, rank):
    return loop(api, shard_mlp(api, mlp()), square(rank), rank)


@case
def a_gpt_with_tied_embeddings_and_a_frozen_layer(api, rank):
    return loop(api, gpt(api), gpt_loss(rank), rank)


@case
def a_convolutional_net_with_batch_norm(api, rank):
    torch.manual_seed(2)
    model = Conv()
    api.fully_shard(model.b)
    api.fully_shard(model)
    states = loop(api, model, lambda m, s: m(numbers(rank, s, 2, 3, 8, 8)).pow(2).mean(), rank)
    model.eval()
    with torch.no_grad():
        out = model(numbers(rank, 99, 2, 3, 8, 8))
    return [*states, {"mean": model.norm.running_mean.clone(), "eval": out.clone()}]


@case
def a_branch_that_no_rank_uses_is_left_alone(api, rank):
    return loop(api, shard_branches(api, Branches()), square(rank, 6), rank)


def _branches_in_one_unit(api, rank, used, kind="AdamW", each=None, **options):
    """@used: the branches, by step and rank. All of the model is one unit."""
    model = api.fully_shard(Branches())

    def loss(model, step):
        model.used = used(step, rank)
        return model(numbers(rank, step, 5, 6)).pow(2).mean()

    return loop(api, model, loss, rank, kind, steps=6, each=each, **options)


def by_turns(step, rank):
    """The same on all ranks; the last branch comes late, and one is used by none at times."""
    return [[0], [0, 1], [1], [2], [0, 1, 2], [0, 2]][step]


@case
def a_branch_within_a_unit_that_no_rank_uses(api, rank):
    def each(model, optimizer, step):
        for i, branch in enumerate(model.branches):
            has = branch.weight.grad is not None
            assert has == (i in model.used), f"step {step}: branch {i}"

    return _branches_in_one_unit(api, rank, by_turns, each=each)


@case
def the_same_with_momentum(api, rank):
    return _branches_in_one_unit(api, rank, by_turns, "SGD", lr=0.1, momentum=0.9,
                                 weight_decay=0.1, dampening=0.3)


@case
def the_same_with_adam_and_amsgrad(api, rank):
    return _branches_in_one_unit(api, rank, by_turns, "Adam", lr=0.05, amsgrad=True,
                                 weight_decay=0.1)


@case
def the_same_in_backward(api, rank):
    options = {"in_backward": True} if api.name == "shardd" else {}
    return _branches_in_one_unit(api, rank, by_turns, **ADAMW, **options)


@case
def the_same_on_the_shard(api, rank):
    api.exact, api.own = False, True
    return _branches_in_one_unit(api, rank, by_turns, "Adagrad", lr=0.1, weight_decay=0.1)


@case
def branches_within_a_unit_that_some_ranks_use(api, rank):
    def used(step, rank):  # together all of them: FSDP2 has no unused parameters here
        return [(step + rank) % 3, (step + rank + 1) % 3] if rank else [(step + 2) % 3, step % 3]

    if api.name == "FSDP2":  # else its ranks wait for each other, or add what does not fit
        original = api.fully_shard

        def fully_shard(module, **options):
            module = original(module, **options)
            module.set_reduce_scatter_unused_params(True)
            return module

        api.fully_shard = fully_shard
    return _branches_in_one_unit(api, rank, used)


def _with_zeros(api, rank, kind="AdamW", units=False, frozen=False, twice=False, **options):
    """Branches that no rank uses get gradients of zeros, once their unit was in a forward."""
    model = shard_branches(api, Branches()) if units else api.fully_shard(Branches())
    model.set_reduce_scatter_unused_params(True)

    def micro(model, step):
        model.set_reduce_scatter_unused_params(step != 4)
        if frozen:
            model.branches[0].weight.requires_grad_(step != 3)
        for part in range(2 if twice else 1):
            model.used = by_turns((step + part) % 6, rank)
            value = model(numbers(rank, step + 50 * part, 5, 6)).pow(2).mean()
            value.backward()
        return value

    def each(model, optimizer, step):
        return {f"{i} has one": torch.tensor(float(branch.weight.grad is not None))
                for i, branch in enumerate(model.branches)}

    return loop(api, model, None, rank, kind, steps=6, micro=micro, each=each, **options)


@case
def zeros_for_what_no_rank_uses(api, rank):
    return _with_zeros(api, rank)


@case
def zeros_for_units_that_no_rank_uses(api, rank):
    return _with_zeros(api, rank, units=True)


@case
def zeros_with_momentum(api, rank):
    return _with_zeros(api, rank, "SGD", units=True, lr=0.1, momentum=0.9, weight_decay=0.1)


@case
def zeros_and_a_layer_that_is_frozen_for_a_step(api, rank):
    return _with_zeros(api, rank, frozen=True)


@case
def zeros_of_two_backwards(api, rank):
    return _with_zeros(api, rank, twice=True)


@case
def zeros_on_the_shard(api, rank):
    api.exact, api.own = False, True
    return _with_zeros(api, rank, "Adagrad", units=True, lr=0.1, weight_decay=0.1)


@case
def zeros_in_backward(api, rank):
    options = {"in_backward": True} if api.name == "shardd" else {}
    return _with_zeros(api, rank, **ADAMW, **options)


@case
def bf16_forward_and_fp32_sums(api, rank):
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return loop(api, gpt(api, mp_policy=policy), gpt_loss(rank), rank)


@case
def bf16_forward_and_sums(api, rank):
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    rounded = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                             output_dtype=torch.float32)
    model = mlp()
    api.fully_shard(model[0], mp_policy=policy)
    api.fully_shard(model, mp_policy=rounded)
    return loop(api, model, square(rank), rank)


@case
def nothing_is_released_after_forward(api, rank):
    return loop(api, gpt(api, reshard_after_forward=False), gpt_loss(rank), rank)


@case
def a_divide_factor_that_changes(api, rank):
    model = shard_mlp(api, mlp())
    units = (model, model[0], model[2])

    def divide_by(factor):
        for unit in units:
            unit.set_gradient_divide_factor(factor)

    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)  # gloo has nothing for factors else
    divide_by(3.0)

    def loss(model, step):
        if step == 2:
            divide_by(0.7)
        return square(rank)(model, step)

    return loop(api, model, loss, rank, "SGD", lr=0.1)


class Energy(nn.Module):
    """@nested: its other method calls forward, and goes on with a parameter."""

    def __init__(self, nested):
        super().__init__()
        self.body, self.nested, self.gain = mlp(), nested, nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        return self.body(x) * self.gain

    def energy(self, x, *, scale):
        out = self(x) if self.nested else self.body(x)
        return scale * (out * self.gain).float().pow(2).mean()


def _a_method(api, rank, nested, **options):
    register = (shardd.torch if api.name == "shardd" else fsdp.fsdp).register_fsdp_forward_method
    model = Energy(nested)
    register(model, "energy")  # not wrapped: nothing happens
    for layer in (model.body[0], model.body[2]):
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
    register(model, "energy")

    def loss(model, step):
        x = numbers(rank, step, 5, 7)
        return model(x).float().pow(2).mean() if step == 2 else model.energy(x, scale=0.5)

    return loop(api, model, loss, rank)


@case
def a_method_that_is_a_forward_too(api, rank):
    return _a_method(api, rank, False)


@case
def a_method_that_calls_forward_in_bf16(api, rank):
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _a_method(api, rank, True, mp_policy=policy)


@case
def the_root_is_released_too(api, rank):
    return loop(api, gpt(api, reshard_after_forward=True), gpt_loss(rank), rank)


@case
def gradients_added_up_without_the_others(api, rank):
    def micro(model, step):
        for i in range(3):
            api.sync(model, i == 2)
            value = transformer.loss(model, rank, step, i)
            value.backward()
        return value

    return loop(api, gpt(api), None, rank, micro=micro)


@case
def gradients_reduced_twice_before_a_step(api, rank):
    def micro(model, step):
        for i in range(2):
            value = transformer.loss(model, rank, step, i)
            value.backward()
        return value

    return loop(api, gpt(api), None, rank, micro=micro)


@case
def two_forwards_before_a_backward(api, rank):
    def loss(model, step):
        return transformer.loss(model, rank, step) + transformer.loss(model, rank, step, 1)

    return loop(api, gpt(api), loss, rank)


@case
def two_forwards_before_a_backward_in_bf16(api, rank):
    def loss(model, step):
        return transformer.loss(model, rank, step) + transformer.loss(model, rank, step, 1)

    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return loop(api, gpt(api, mp_policy=policy), loss, rank)


@case
def a_module_used_twice(api, rank):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = nn.Linear(7, 7), nn.Linear(7, 2)

        def forward(self, x):
            return self.last(self.inner(torch.tanh(self.inner(x))))

    torch.manual_seed(6)
    model = Twice()
    api.fully_shard(model.inner)
    return loop(api, api.fully_shard(model), square(rank), rank)


def _checkpointed(api, rank, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            x = torch.tanh(self.body[0](x))
            for layer in self.body[1:]:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(8)
    body = nn.ModuleList([nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(4)])
    for layer in body:
        api.fully_shard(layer)
    model = api.fully_shard(Checkpointed(body))
    return loop(api, model, square(rank), rank)


@case
def activation_checkpointing(api, rank):
    return _checkpointed(api, rank, False)


@case
def activation_checkpointing_reentrant(api, rank):
    return _checkpointed(api, rank, True)


def _checkpoints_within_a_unit(api, rank, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            def part(x):
                return self.down(torch.tanh(self.up(x)))

            return x + checkpoint(part, checkpoint(part, x, use_reentrant=reentrant),
                                  use_reentrant=reentrant)

    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(7, 16), Checkpointed(), nn.Linear(16, 3))
    api.fully_shard(model[1])
    return loop(api, api.fully_shard(model), square(rank), rank)


@case
def checkpoints_within_a_unit(api, rank):
    return _checkpoints_within_a_unit(api, rank, False)


@case
def checkpoints_within_a_unit_reentrant(api, rank):
    return _checkpoints_within_a_unit(api, rank, True)


@case
def autocast(api, rank):
    def loss(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(numbers(rank, step, 5, 7))
        return out.float().pow(2).mean()

    return loop(api, shard_mlp(api, mlp()), loss, rank)


@case
def sgd_with_momentum(api, rank):
    return loop(api, shard_mlp(api, mlp()), square(rank), rank, "SGD", lr=0.1, momentum=0.9,
                weight_decay=0.01, nesterov=True)


@case
def adam_with_amsgrad(api, rank):
    return loop(api, shard_mlp(api, mlp()), square(rank), rank, "Adam", lr=0.01, amsgrad=True,
                weight_decay=0.1)


@case
def fused_adamw(api, rank):
    api.exact = False  # no square root of MKL's in it
    return loop(api, gpt(api), gpt_loss(rank), rank, fused=True, **ADAMW)


@case
def fused_adam_with_amsgrad(api, rank):
    api.exact = False
    return loop(api, shard_mlp(api, mlp()), square(rank), rank, "Adam", lr=0.01, amsgrad=True,
                weight_decay=0.1, fused=True)


@case
def a_scheduler_and_groups_with_their_own_decay(api, rank):
    schedulers = []

    def params(model):
        every = list(model.parameters())
        return [{"params": [p for p in every if p.ndim > 1]},
                {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0}]

    def each(model, optimizer, step):
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7))
        elif step:
            schedulers[0].step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loop(api, shard_mlp(api, mlp()), square(rank), rank, params=params, each=each,
                    **ADAMW)


@case
def a_compiled_model(api, rank):
    torch._dynamo.reset()
    model = gpt(api)
    model.compile(backend="aot_eager")
    return loop(api, model, gpt_loss(rank), rank)


@case
def compiled_blocks(api, rank):
    torch._dynamo.reset()
    model = gpt(api)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return loop(api, model, gpt_loss(rank), rank)


@case
def lstm_and_exotic_outputs(api, rank):
    class Out:
        def __init__(self, value):
            self.value = value

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.last = nn.LSTM(7, 6), Wrapped()

        def forward(self, x):
            return self.last(self.lstm(x)[0]).value

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, x):
            return Out(self.inner(x))

    torch.manual_seed(9)
    model = Model()
    if api.name == "shardd":  # FSDP2 does not see into such an output
        api.fully_shard(model.last)
    api.fully_shard(model.lstm)
    return loop(api, api.fully_shard(model), square(rank), rank)


@case
def an_optimizer_in_backward(api, rank):
    schedulers = []

    def each(model, optimizer, step):
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        if api.name == "shardd" and step == 1:
            try:
                api.clip(model, 1.0)
            except shardd.FailedPrecondition:
                return
            raise AssertionError("clipping was not refused")

    def loss(model, step):
        if schedulers:
            schedulers[0].step()  # before backward, since that is when it steps
        return transformer.loss(model, rank, step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"in_backward": True} if api.name == "shardd" else {}
        return loop(api, gpt(api), loss, rank, each=each, **ADAMW, **options)


@case
def an_optimizer_of_torch_on_the_shard(api, rank):
    api.exact, api.own = False, True
    return loop(api, gpt(api), gpt_loss(rank), rank)


@case
def adagrad_on_the_shard(api, rank):
    api.exact, api.own = False, True
    return loop(api, shard_mlp(api, mlp()), square(rank), rank, "Adagrad", lr=0.1)


# What is not equal bit for bit, and by how much at most (a parameter after a step). Norms are
# added in fp64 here, in fp32 there: the clipped gradient is off by 2^-23 of it.
BOUNDS = {"clipping": 1e-6}


@case
def clipping(api, rank):
    def each(model, optimizer, step):
        return {"norm": api.clip(model, 0.01)}

    return loop(api, shard_mlp(api, mlp()), square(rank), rank, "SGD", lr=0.5, each=each)


class Round(nn.Module):
    """Sizes that are multiples of 32: every weight is where PyTorch's own tensors are, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.tokens, self.head = nn.Embedding(48, 32), nn.Linear(32, 48, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3)])

    def forward(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _computed_in_place(api, rank, expected, micro=None, **options):
    """@expected: how many gradients a step has that are not copied."""
    model = Round()
    for block in model.blocks:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)

    def loss(model, step, part=0):
        draw = torch.Generator().manual_seed(100 * step + 10 * rank + part)
        text = torch.randint(48, (5, 9), generator=draw)
        return F.cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())

    with test_direct.Counted() as counted:
        states = loop(api, model, loss, rank, micro=micro and (lambda m, s: micro(loss, m, s)))
    found = len(counted.direct)
    assert found == (STEPS * expected if api.name == "shardd" else 0), f"{found} in place"
    return states


@case
def weight_gradients_are_computed_in_place(api, rank):
    return _computed_in_place(api, rank, 8)


@case
def the_same_in_bf16(api, rank):  # an embedding is added up in fp32
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return _computed_in_place(api, rank, 7, mp_policy=policy)


@case
def the_same_with_fp32_sums(api, rank):
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _computed_in_place(api, rank, 0, mp_policy=policy)


@case
def the_same_of_the_first_of_several_backwards(api, rank):
    def micro(loss, model, step):
        for part in range(3):
            api.sync(model, part == 2)
            value = loss(model, step, part)
            value.backward()
        return value

    return _computed_in_place(api, rank, 8, micro)


# ------------------------------------------------------------------------ running


def both(name, rank, order):
    with golden.folded() if order == "rank" else contextlib.nullcontext():
        theirs = CASES[name](Fsdp2(), rank)
    api = Shardd(f"{name}-{order}")
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    return differences(ours, theirs, BOUNDS.get(name, 0.0))


def main():
    names = fsdp.wanted(CASES)
    four = [n for n in names if n in ("an_mlp", "a_gpt_with_tied_embeddings_and_a_frozen_layer")]
    return fsdp.report(fsdp.Plan(2, names, functools.partial(both, order="gloo")),
                       fsdp.Plan(4, four, functools.partial(both, order="rank")))


if __name__ == "__main__":
    sys.exit(main())
