#!/usr/bin/env python3
"""Several optimizers of one model, and optimizers that are built later. shardd.torch.fully_shard
against torch.distributed.fsdp.fully_shard over gloo, on two ranks bit for bit, with torch.optim's
classes on both sides. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import copy
import sys

import fsdp
import test_fully_shard as shared
import test_training
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import shardd
import shardd.torch as st

CASES, ALONE = {}, {}
ADAMW = {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1, "foreach": False}
SGD = {"lr": 0.05, "momentum": 0.9, "foreach": False}


def case(function):
    CASES[function.__name__] = function
    return function


def alone(function):
    ALONE[function.__name__] = function
    return function


class Ours(Shardd):
    def optimizer(self, kind, params, **options):
        return getattr(torch.optim, kind)(params, foreach=False, **options)


def loss_of(model, rank, step):
    return model(shared.numbers(rank, step, 5, 7).to(next(model.parameters()).dtype)) \
        .float().pow(2).mean()


def backward(model, rank, step):
    loss = loss_of(model, rank, step)
    loss.backward()
    return loss.detach()


def seen(api, model, loss):
    return {**api.whole(model), "loss": loss}


def adamw(params, **options):
    return torch.optim.AdamW(params, **{**ADAMW, **options})


def sgd(params, **options):
    return torch.optim.SGD(params, **{**SGD, **options})


def of(*modules):
    return [p for module in modules for p in module.parameters()]


def model_of(api, dtype=torch.float32):
    return shared.shard_mlp(api, shared.mlp().to(dtype))


def trained(api, model, optimizers, rank, steps=3, first=0, between=None):
    states = []
    for step in range(first, first + steps):
        loss = backward(model, rank, step)
        if between:
            between(model, step)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        states.append(seen(api, model, loss))
    return states


# ------------------------------------------------------------------- beside each other


@case
def of_different_units(api, rank):
    model = model_of(api)
    return trained(api, model, [adamw(of(model[0])), sgd(of(model[2], model[4]))], rank)


@case
def of_one_unit(api, rank):
    model = api.fully_shard(shared.mlp())
    weights = [p for n, p in model.named_parameters() if "weight" in n]
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    return trained(api, model, [adamw(weights), torch.optim.Adagrad(biases, lr=0.05)], rank)


@case
def in_bf16(api, rank):
    model = model_of(api, torch.bfloat16)
    return trained(api, model, [adamw(of(model[0])), sgd(of(model[2], model[4]))], rank)


@case
def one_of_some_parameters(api, rank):
    """The others have gradients that nobody uses, until the model's zero_grad()."""
    model, states = model_of(api), []
    optimizer = sgd(of(model[2]))
    for step in range(3):
        loss = backward(model, rank, step)
        optimizer.step()
        model.zero_grad()
        states.append(seen(api, model, loss))
    return states


@case
def gradients_of_the_others_stay(api, rank):
    """Each optimizer drops its own gradients; those of the other add up for two backwards."""
    model, states = model_of(api), []
    often, seldom = adamw(of(model[0], model[4])), sgd(of(model[2]))
    for step in range(4):
        loss = backward(model, rank, step)
        often.step()
        often.zero_grad()
        if step % 2:
            seldom.step()
            seldom.zero_grad()
        states.append(seen(api, model, loss))
    return states


@case
def without_zero_grad(api, rank):
    """Gradients stay after a step, and the next backward adds to them."""
    model, states = model_of(api), []
    optimizers = [sgd(of(model[0])), sgd(of(model[2], model[4]))]
    for step in range(3):
        loss = backward(model, rank, step)
        for optimizer in optimizers:
            optimizer.step()
        states.append(seen(api, model, loss))
    return states


@case
def in_turns(api, rank):
    """As a generator and a discriminator: one steps, then a forward, then the other one."""
    model, states = model_of(api), []
    first, second = adamw(of(model[0])), adamw(of(model[2], model[4]), lr=0.01)
    for step in range(3):
        backward(model, rank, 2 * step)
        first.step()
        model.zero_grad()
        loss = backward(model, rank, 2 * step + 1)
        second.step()
        model.zero_grad()
        states.append(seen(api, model, loss))
    return states


@case
def clipped_by_optimizer(api, rank):
    def clip(model, step):
        nn.utils.clip_grad_norm_(of(model[0]), 0.02)
        nn.utils.clip_grad_norm_(of(model[2], model[4]), 0.01)

    model = model_of(api)
    return trained(api, model, [adamw(of(model[0])), sgd(of(model[2], model[4]))], rank,
                   between=clip)


@case
def with_schedulers(api, rank):
    model, states = model_of(api), []
    optimizers = [adamw(of(model[0])), sgd(of(model[2], model[4]))]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5),
                  torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.1, total_steps=5)]
    for step in range(4):
        states += trained(api, model, optimizers, rank, 1, step)
        for scheduler in schedulers:
            scheduler.step()
    return states


# ---------------------------------------------------------------------------- later


@case
def a_group_is_added_later(api, rank):
    model = model_of(api)
    optimizer = adamw(of(model[0]))
    states = trained(api, model, [optimizer], rank, 2)
    optimizer.add_param_group({"params": of(model[2]), "lr": 0.01})
    return states + trained(api, model, [optimizer], rank, 2, 2)


@case
def another_one_of_the_same_kind(api, rank):
    """It begins with a state of its own."""
    model = model_of(api)
    states = trained(api, model, [adamw(model.parameters())], rank, 2)
    return states + trained(api, model, [adamw(model.parameters(), lr=0.01)], rank, 2, 2)


@case
def another_one_of_another_kind(api, rank):
    model = model_of(api)
    states = trained(api, model, [sgd(model.parameters())], rank, 2)
    states += trained(api, model, [torch.optim.Adagrad(model.parameters(), lr=0.05)], rank, 2, 2)
    return states + trained(api, model, [adamw(of(model[0])), sgd(of(model[2]))], rank, 2, 4)


# ----------------------------------------------------------------------- state dicts


def whole_of(value):
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def plain(state):
    return {key: {k: whole_of(v).clone()
                  for k, v in s.items()} for key, s in state["state"].items()}


@case
def state_dicts_by_name(api, rank):
    """Of both at once, as torch.distributed.checkpoint has them."""
    model = model_of(api)
    optimizers = [adamw(of(model[0])), sgd(of(model[2], model[4]))]
    trained(api, model, optimizers, rank, 2)
    found = {}
    for full in (True, False):
        state = get_optimizer_state_dict(model, optimizers,
                                         options=StateDictOptions(full_state_dict=full))
        if not full or rank == 0 or api.name == "shardd":
            found.update({f"{name}.{key} {full}": value for name, s in plain(state).items()
                          for key, value in s.items()
                          if not full or rank == 0})
    return [found]


@case
def state_goes_to_other_optimizers(api, rank):
    model = model_of(api)
    optimizers = [adamw(of(model[0])), sgd(of(model[2], model[4]))]
    trained(api, model, optimizers, rank, 2)
    state = get_optimizer_state_dict(model, optimizers)
    optimizers = [adamw(of(model[0])), sgd(of(model[2], model[4]))]
    set_optimizer_state_dict(model, optimizers, state)
    return trained(api, model, optimizers, rank, 2, 2)


def loaded(api, rank, kind, **options):
    """The state of a trained optimizer, by PyTorch's functions into that of a new model."""
    model = model_of(api)
    optimizer = api.optimizer(kind, model.parameters(), **options)
    trained(api, model, [optimizer], rank, 2)
    saved = copy.deepcopy(get_state_dict(model, optimizer))
    if api.name == "shardd":
        st.shutdown()
        st.init(job="another")
    model = model_of(api)
    optimizer = api.optimizer(kind, model.parameters(), **options)
    fresh = get_state_dict(model, optimizer)  # as a program has it to load into
    assert fresh[1]["state"].keys() == saved[1]["state"].keys(), fresh[1]["state"].keys()
    for name, state in fresh[1]["state"].items():
        assert state.keys() == saved[1]["state"][name].keys(), state.keys()
    set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    return trained(api, model, [optimizer], rank, 2, 2)


@case
def pytorchs_functions_on_the_shard(api, rank):
    return loaded(api, rank, "RMSprop", lr=0.01)


@case
def pytorchs_functions_on_the_shard_with_numbers(api, rank):
    return loaded(api, rank, "NAdam", lr=0.01)


@alone
def a_look_at_a_fresh_state_changes_nothing(rank):
    """PyTorch makes it by a step of zeros, and the first step counts as the second one."""
    def steps(job, looks):
        st.init(job=job)
        try:
            model = model_of(Shardd.__new__(Shardd))
            optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
            if looks:
                state = get_optimizer_state_dict(model, optimizer)["state"]
                assert len(state) == 6, state.keys()
                assert not any(whole_of(s["exp_avg"]).any() or s["step"] for s in state.values())
            for step in range(2):
                backward(model, rank, step)
                optimizer.step()
                optimizer.zero_grad()
            return {name: value.clone() for name, value in model.state_dict().items()}
        finally:
            st.shutdown()

    return differences([steps("looks", True)], [steps("plain", False)])


@alone
def own_state_dicts(rank):
    """Each one's state_dict() by number, into other optimizers of another job."""
    def steps(job, first, n, saved=None):
        st.init(job=job)
        try:
            model = model_of(Shardd.__new__(Shardd))
            optimizers = [adamw(of(model[0])), sgd(of(model[2], model[4]))]
            if saved:
                model.load_state_dict(saved[0])
                for optimizer, state in zip(optimizers, saved[1]):
                    optimizer.load_state_dict(state)
            for step in range(first, first + n):
                backward(model, rank, step)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            return ({name: value.clone() for name, value in model.state_dict().items()},
                    [optimizer.state_dict() for optimizer in optimizers])
        finally:
            st.shutdown()

    saved = steps("first", 0, 2)
    return differences([steps("second", 2, 2, saved)[0]], [steps("whole", 0, 4)[0]])


# -------------------------------------------------------------------------- refusals


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"said: {error}"]
    return [f"not refused: {words}"]


class Normed(torch.optim.Optimizer):
    """Needs the norm of whole tensors."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


@alone
def what_cannot_be_is_refused(rank):
    st.init(job="refused")
    try:
        model = model_of(Shardd.__new__(Shardd))
        old = adamw(model.parameters())
        backward(model, rank, 0)
        old.step()
        new = adamw(of(model[0]))
        said = refused(shardd.FailedPrecondition, "was replaced", old.step)
        said += refused(ValueError, "more than one parameter group",
                        lambda: new.add_param_group({"params": of(model[0])}))
        scaler = st.GradScaler()
        scaler.scale(loss_of(model, rank, 1)).backward()
        said += refused(shardd.Unimplemented, "some of its parameters",
                        lambda: scaler.unscale_(new))
        normed = Normed(of(model[2]), lr=0.1)
        said += refused(shardd.Unimplemented, "Normed", normed.step)
        other = st.fully_shard(shared.mlp())
        said += refused(shardd.InvalidArgument, "several models",
                        lambda: st.AdamW([*of(model[0]), *other.parameters()]))
        said += refused(shardd.InvalidArgument, "another model",
                        lambda: new.add_param_group({"params": list(other.parameters())}))
        shared_model = st.replicate(shared.mlp())
        said += refused(shardd.InvalidArgument, "it must have all trained parameters",
                        lambda: adamw(of(shared_model[0])))
    finally:
        st.shutdown()
    return said


def both(name, rank):
    if name in ALONE:
        return ALONE[name](rank)
    with test_training.correctly_rounded():  # as the daemon's are, if an optimizer runs there
        theirs = CASES[name](Fsdp2(), rank)
        api = Ours(name)
        try:
            ours = CASES[name](api, rank)
        finally:
            api.close()
    return differences(ours, theirs)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted([*CASES, *ALONE]), both)))
