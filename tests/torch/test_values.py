#!/usr/bin/env python3
"""Parameters outside of forward and backward, against FSDP2 over gloo: a shard to compute with.

What a program reads, and what becomes of what it writes, is compared bit for bit on two ranks. A
write that cannot reach the daemon must be an error. Prints one line of TAP a case; arguments choose
by a part of the name.
"""

import sys
import warnings

import fsdp
import test_fully_shard as cases
import torch
from fsdp import Shardd
from test_gradients import local, refused, whole
from torch import nn
from torch.distributed.tensor import DTensor

import shardd
import shardd.torch as st

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
warnings.filterwarnings("ignore", message="DTensor random operators")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def train(api, rank, between, before=None, model=None, kind="AdamW", **options):
    """@between(model, step): after the step, in no_grad; @before(model): before the optimizer is
    built. What they return is compared, too."""
    model = cases.shard_mlp(api, cases.mlp()) if model is None else model
    states = []
    if before is not None:
        with torch.no_grad():
            states.append(before(model) or {})
        states.append(api.whole(model))
    options = options or (cases.ADAMW if kind == "AdamW" else {"lr": 0.05})
    optimizer = api.optimizer(kind, model.parameters(), **options)
    for step in range(4):
        value = cases.square(rank)(model, step)
        value.backward()
        api.step(optimizer)
        optimizer.zero_grad()
        with torch.no_grad():
            seen = between(model, step) or {}
        states.append({**seen, **api.whole(model), "loss": value.detach()})
    return states


# ------------------------------------------------------------------------- reading


@case
def what_is_read(api, rank):
    def between(model, step):
        seen = {}
        for name, p in model.named_parameters():
            copy = p.detach().clone()
            assert isinstance(copy, DTensor), type(copy)
            seen[f"{name} here"] = local(copy)
            seen[f"{name} norm"] = whole(p.norm())
            seen[f"{name} mean"] = whole(p.mean())
            seen[f"{name} largest"] = whole(p.abs().max())
            seen[f"{name} rows"] = p.to_local().clone()
            seen[f"{name} whole"] = p.full_tensor().clone()
            if p.ndim == 1:
                seen[f"{name} flat"] = local(p.data.view(-1)[:1].clone())
        return {key: whole(value) for key, value in seen.items()}

    return train(api, rank, between)


@case
def what_one_rank_alone_reads(api, rank):
    def between(model, step):
        return {name: p.to_local().clone() for name, p in model.named_parameters()} if rank else {}

    return train(api, rank, between)


@case
def norms_of_all_parameters(api, rank):
    def between(model, step):
        return {"norm": whole(nn.utils.get_total_norm([p.detach() for p in model.parameters()]))}

    return train(api, rank, between)


# ------------------------------------------------------------------------- writing


@case
def scaled(api, rank):
    def between(model, step):
        for p in model.parameters():
            p.mul_(0.5)

    return train(api, rank, between)


@case
def scaled_as_data(api, rank):
    def between(model, step):
        for p in model.parameters():
            p.data.mul_(0.5)
            p.detach().add_(0.125)

    return train(api, rank, between, kind="SGD", lr=0.1, momentum=0.9)


@case
def an_average(api, rank):
    """Of the parameters, which in the end replaces them."""
    kept = {}

    def between(model, step):
        for name, p in model.named_parameters():
            if name not in kept:
                kept[name] = p.detach().clone()
            elif step == 1:
                kept[name].lerp_(p, 0.25)
            else:
                kept[name].mul_(0.75).add_(p.detach(), alpha=0.25)
        if step == 2:
            for name, p in model.named_parameters():
                p.copy_(kept[name])
        return {f"average of {name}": local(value) for name, value in kept.items()}

    return train(api, rank, between)


@case
def several_at_once(api, rank):
    def between(model, step):
        parameters = list(model.parameters())
        torch._foreach_mul_(parameters, 0.75)
        torch._foreach_lerp_(parameters, [p.detach() * 2 for p in parameters], 0.5)

    return train(api, rank, between)


@case
def swapped_and_swapped_back(api, rank):
    """As an evaluation with averaged parameters does."""
    model = cases.shard_mlp(api, cases.mlp())
    average: dict[str, torch.Tensor] = {}

    def between(model, step):
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            average.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
            p.copy_(average[name])
        out = model(cases.numbers(rank, 77, 5, 7)).clone()
        model.reshard()  # FSDP2's root has other parameters until then
        for name, p in model.named_parameters():
            p.copy_(kept[name])
        return {"out": out}

    return train(api, rank, between, model=model)


@case
def a_step_by_hand(api, rank):
    model = cases.shard_mlp(api, cases.mlp())
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.1)
    states = []
    for step in range(3):
        cases.square(rank)(model, step).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.25)
                p.data.clamp_(-0.4, 0.4)
        optimizer.zero_grad()
        states.append(api.whole(model))
    return states


@case
def rows_written(api, rank):
    def between(model, step):
        for p in model.parameters():
            p.to_local().mul_(0.5)
            p.to_local()[0] = step + 0.5

    return train(api, rank, between)


@case
def by_one_init_function(api, rank):
    """apply() after some steps, and before the first."""
    def init(module):
        if isinstance(module, nn.Linear):
            module.weight.fill_(0.0625)
            nn.init.constant_(module.bias, 0.25)
            module.weight.add_(0.03125)

    def before(model):
        model.apply(init)

    def between(model, step):
        if step == 2:
            model.apply(init)

    return train(api, rank, between, before)


@case
def drawn_before_the_first_step(api, rank):
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
            nn.init.uniform_(module.bias, -0.1, 0.1)

    def before(model):
        torch.manual_seed(5 + rank)
        model.apply(init)
        return {name: local(p.detach().clone()) for name, p in model.named_parameters()}

    def between(model, step):
        if step == 1:
            torch.manual_seed(9 + rank)
            model.apply(init)

    return train(api, rank, between, before)


@case
def written_before_some_of_it_is_loaded(api, rank):
    def before(model):
        for p in model.parameters():
            p.mul_(3.0)
        if api.name == "shardd":
            model.load_state_dict({"0.bias": torch.full((13,), 0.5)}, strict=False)
        else:
            model[0].bias.fill_(0.5)

    return train(api, rank, lambda model, step: None, before)


@case
def a_frozen_layer(api, rank):
    model = cases.mlp()
    model[2].requires_grad_(False)

    def between(model, step):
        model[2].weight.mul_(0.5)
        model[2].bias.add_(1.0)

    return train(api, rank, between, model=cases.shard_mlp(api, model))


@case
def in_bf16(api, rank):
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def between(model, step):
        for p in model.parameters():
            p.mul_(0.75)
        return {name: local(p.detach().clone()) for name, p in model.named_parameters()}

    return train(api, rank, between, model=cases.shard_mlp(api, cases.mlp(), mp_policy=policy))


@case
def between_evaluations(api, rank):
    def between(model, step):
        out = model(cases.numbers(rank, 70 + step, 5, 7)).clone()
        model.reshard()
        for p in model.parameters():
            p.mul_(0.5)
        again = model(cases.numbers(rank, 70 + step, 5, 7)).clone()
        model.reshard()
        return {"out": out, "again": again}

    return train(api, rank, between)


@case
def after_an_evaluation_that_keeps_the_root(api, rank):
    """Also without reshard(), where FSDP2 writes to what it throws away."""
    def between(model, step):
        model(cases.numbers(rank, 70 + step, 5, 7))
        if api.name == "FSDP2":
            model.reshard()
        for p in model.parameters():
            p.mul_(0.5)

    return train(api, rank, between)


# ------------------------------------------------------------------------- refusals


def _model():
    return st.fully_shard(cases.mlp())


def autograd(rank):
    model, said = _model(), []
    for use in (lambda: model[0].weight.norm(), lambda: model[0].weight.view(-1),
                lambda: torch.ones(()) * model[0].bias):
        said += refused(shardd.FailedPrecondition, "torch.no_grad() or with p.detach()", use)
    try:
        model[0].weight.mul_(0.5)
        said.append("a leaf was changed under autograd")
    except RuntimeError as error:
        if "leaf" not in str(error):
            said.append(str(error))
    return said


def without_torch_distributed(rank):
    model, said = _model(), []
    for part in range(2):  # before the daemon has the parameters, and then
        with torch.no_grad():
            said += refused(shardd.FailedPrecondition, "init_process_group",
                            lambda: model[0].weight.mul_(0.5))
            said += refused(shardd.FailedPrecondition, "init_process_group",
                            lambda: model[0].weight.detach().clone())
        if part == 0:
            st.SGD(model.parameters(), lr=0.1)
    return said


REFUSALS = {f.__name__: f for f in (autograd, without_torch_distributed)}


@case
def what_is_refused_with_a_mesh(api, rank):
    if api.name != "shardd":
        return []
    model, said = cases.shard_mlp(api, cases.mlp()), []
    st.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight
    with torch.no_grad():
        said += refused(shardd.FailedPrecondition, "one tensor", lambda: weight.unbind())
        said += refused(shardd.FailedPrecondition, "'weight'", lambda: weight[0].fill_(1.0))
        said += refused(shardd.FailedPrecondition, "cannot be replaced",
                        lambda: setattr(weight, "data", torch.zeros(13, 7)))
        held = []
        handle = model[2].register_forward_hook(lambda *_: held.extend(
            refused(shardd.FailedPrecondition, "forward or backward is running",
                    lambda: weight.mul_(0.5))))
        model(cases.numbers(rank, 0, 5, 7))
        handle.remove()
        model.unshard()
        before = {n: v.clone() for n, v in api.whole(model).items()}
        weight.mul_(1.0)
    after = api.whole(model)
    said += held
    said += [f"{n} has changed" for n in before if not torch.equal(before[n], after[n])]
    if said:
        raise AssertionError(said)
    return []


@case
def a_write_of_one_rank_alone(api, rank):
    """FSDP2 changes this rank's shard; here it is refused, on all ranks."""
    if api.name != "shardd":
        return []
    model, said = cases.shard_mlp(api, cases.mlp()), []
    st.SGD(model.parameters(), lr=0.1)

    def use():
        if rank:
            with torch.no_grad():
                model[0].weight.mul_(0.5)
        cases.square(rank)(model, 0).backward()

    if rank:
        said += refused(shardd.FailedPrecondition, "Barrier", use)
    else:  # that, or the other one has gone already
        said += refused((shardd.FailedPrecondition, shardd.Aborted), "", use)
    if said:
        raise AssertionError(said)
    return []


def refusals(name, rank):
    """On two ranks without torch.distributed."""
    st.init(job=f"refusals-{name}", op_timeout=20)
    try:
        return REFUSALS[name](rank)
    finally:
        st.shutdown()


def against_fsdp2(name, rank):
    theirs = fsdp.Fsdp2()
    expected = CASES[name](theirs, rank)
    api = Shardd(f"values-{name}"[:60])
    try:
        got = CASES[name](api, rank)
    finally:
        api.close()
    return fsdp.differences(got, expected)


def main():
    return fsdp.report(fsdp.Plan(2, fsdp.wanted(CASES), against_fsdp2),
                       fsdp.Plan(2, fsdp.wanted(REFUSALS), refusals, gloo=False))


if __name__ == "__main__":
    sys.exit(main())
