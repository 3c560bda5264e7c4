#!/usr/bin/env python3
"""Parameters that are frozen when the model is wrapped and trained later. shardd.torch.fully_shard
against torch.distributed.fsdp.fully_shard over gloo, on two ranks bit for bit. Prints one line of
TAP a case; arguments choose by a part of the name.
"""

import sys

import fsdp
import test_fully_shard as shared
import test_training
import torch
from fsdp import Fsdp2, Shardd, differences
from torch.distributed.tensor import DTensor

import shardd
import shardd.torch as st

CASES, ALONE = {}, {}
# PyTorch adds the squares of a norm up in another order.
BOUNDS = {"with_momentum_and_clipping": 1e-7}
ADAMW = {"lr": 0.05, "betas": (0.9, 0.99), "weight_decay": 0.1}


def case(function):
    CASES[function.__name__] = function
    return function


def alone(function):
    ALONE[function.__name__] = function
    return function


def head_only(dtype=torch.float32):
    """All but its last layer is frozen."""
    model = shared.mlp().to(dtype).requires_grad_(False)
    model[4].requires_grad_(True)
    return model


def of(*modules):
    return [p for module in modules for p in module.parameters()]


def loss_of(model, rank, step):
    x = shared.numbers(rank, step, 5, 7).to(next(model.parameters()).dtype)
    return model(x).float().pow(2).mean()


def trained(api, model, optimizers, rank, first, steps, norm=None):
    """States after @steps steps, of numbers from @first on."""
    states = []
    for step in range(first, first + steps):
        loss = loss_of(model, rank, step)
        loss.backward()
        seen = {"loss": loss.detach()}
        if norm is not None:
            seen["norm"] = api.clip(model, norm)
        for optimizer in optimizers:
            api.step(optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        states.append({**seen, **api.whole(model)})
    return states


def layer_by_layer(api, rank, model, optimizer, **options):
    states = trained(api, model, [optimizer], rank, 0, 2, **options)
    model[2].requires_grad_(True)
    states += trained(api, model, [optimizer], rank, 2, 2, **options)
    model[0].requires_grad_(True)
    return states + trained(api, model, [optimizer], rank, 4, 3, **options)


# ------------------------------------------------------- an optimizer that has all parameters


@case
def units_one_after_the_other(api, rank):
    """The units of the first layers have no optimizer when they are registered."""
    model = shared.shard_mlp(api, head_only())
    return layer_by_layer(api, rank, model, api.optimizer("AdamW", model.parameters(), **ADAMW))


@case
def kept_from_forward_to_backward(api, rank):
    model = shared.shard_mlp(api, head_only(), reshard_after_forward=False)
    return layer_by_layer(api, rank, model, api.optimizer("AdamW", model.parameters(), **ADAMW))


@case
def with_momentum_and_clipping(api, rank):
    model = shared.shard_mlp(api, head_only())
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05, momentum=0.9)
    return layer_by_layer(api, rank, model, optimizer, norm=0.05)


@case
def layers_of_one_unit(api, rank):
    """Places in the unit change; what was trained keeps its state."""
    model = api.fully_shard(head_only())
    return layer_by_layer(api, rank, model, api.optimizer("AdamW", model.parameters(), **ADAMW))


@case
def biases_first(api, rank):
    model = shared.mlp()
    for name, p in model.named_parameters():
        p.requires_grad_("bias" in name)
    model = shared.shard_mlp(api, model)
    optimizer = api.optimizer("AdamW", model.parameters(), **ADAMW)
    states = trained(api, model, [optimizer], rank, 0, 2)
    for p in model.parameters():
        p.requires_grad_(True)
    return states + trained(api, model, [optimizer], rank, 2, 3)


@case
def groups_with_settings_of_their_own(api, rank):
    model = shared.shard_mlp(api, head_only())
    optimizer = api.optimizer("AdamW", [
        {"params": of(model[0]), "lr": 0.01}, {"params": of(model[2]), "weight_decay": 0.0},
        {"params": of(model[4])}], **ADAMW)
    return layer_by_layer(api, rank, model, optimizer)


@case
def frozen_again(api, rank):
    model = shared.shard_mlp(api, head_only())
    optimizer = api.optimizer("AdamW", model.parameters(), **ADAMW)
    states = []
    for step in range(7):
        model[2].requires_grad_(step not in (0, 3, 4))
        states += trained(api, model, [optimizer], rank, step, 1)
    return states


@case
def a_forward_and_an_evaluation_between(api, rank):
    """Nothing is trained by them; the next backward is of what is trained then."""
    model = shared.shard_mlp(api, head_only())
    optimizer = api.optimizer("AdamW", model.parameters(), **ADAMW)
    states = trained(api, model, [optimizer], rank, 0, 2)
    model[2].requires_grad_(True)
    with torch.no_grad():
        states.append({"loss": loss_of(model, rank, 9)})
    states.append({"loss": loss_of(model, rank, 10).detach()})
    return states + trained(api, model, [optimizer], rank, 2, 2)


@case
def without_zero_grad_before_the_forward(api, rank):
    """The gradients of the last step are still there."""
    model, states = shared.shard_mlp(api, head_only()), []
    optimizer = api.optimizer("AdamW", model.parameters(), **ADAMW)
    for step in range(4):
        if step == 2:
            model[2].requires_grad_(True)
        loss = loss_of(model, rank, step)
        optimizer.zero_grad()
        loss.backward()
        api.step(optimizer)
        states.append({"loss": loss.detach(), **api.whole(model)})
    return states


# -------------------------------------------- torch.optim's own, of what is trained at first


def adamw(params, **options):
    return torch.optim.AdamW(params, foreach=False, **{**ADAMW, **options})


@case
def a_group_is_added(api, rank):
    model = shared.shard_mlp(api, head_only())
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    states = trained(api, model, [optimizer], rank, 0, 2)
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": of(model[2]), "lr": 0.01})
    return states + trained(api, model, [optimizer], rank, 2, 3)


@case
def another_optimizer_is_built(api, rank):
    model = shared.shard_mlp(api, head_only())
    states = trained(api, model, [adamw(of(model[4]))], rank, 0, 2)
    model[2].requires_grad_(True)
    new = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.05,
                              foreach=False)
    return states + trained(api, model, [new], rank, 2, 3)


@case
def beside_each_other(api, rank):
    model = shared.mlp()
    model[0].requires_grad_(False)
    model = shared.shard_mlp(api, model)
    first = torch.optim.SGD(of(model[4]), lr=0.05, momentum=0.9, foreach=False)
    second = adamw(of(model[0], model[2]))
    states = trained(api, model, [first, second], rank, 0, 2)
    model[0].requires_grad_(True)
    return states + trained(api, model, [first, second], rank, 2, 3)


@case
def stored_in_bf16(api, rank):
    model = shared.mlp().to(torch.bfloat16)
    model[0].requires_grad_(False)
    model = shared.shard_mlp(api, model)
    optimizers = [adamw(of(model[4])), adamw(of(model[0], model[2]))]
    states = trained(api, model, optimizers, rank, 0, 2)
    model.requires_grad_(True)
    return states + trained(api, model, optimizers, rank, 2, 3)


# ------------------------------------------------------------------------------ alone


@alone
def in_backward(rank):
    """The optimizer that steps in backward computes what the one does that steps afterwards."""

    def states(job, **options):
        st.init(job=job)
        try:
            model = shared.shard_mlp(Shardd.__new__(Shardd), head_only())
            optimizer = st.AdamW(model.parameters(), **ADAMW, **options)
            return layer_by_layer(Shardd.__new__(Shardd), rank, model, optimizer)
        finally:
            st.shutdown()

    return differences(states("afterwards"), states("within", in_backward=True))


def plain(state):
    return {f"{p}.{k}": v.full_tensor() if isinstance(v, DTensor) else torch.as_tensor(v)
            for p, entry in state["state"].items() for k, v in entry.items()}


@alone
def the_state_of_the_optimizer(rank):
    """By names, as one has it that was trained from the start for as many steps."""
    st.init(job="state")
    try:
        model = shared.shard_mlp(Shardd.__new__(Shardd), head_only())
        optimizer = st.AdamW(model.parameters(), **ADAMW)
        api = Shardd.__new__(Shardd)
        trained(api, model, [optimizer], rank, 0, 2)
        model[2].requires_grad_(True)
        trained(api, model, [optimizer], rank, 2, 1)
        state = st.optimizer_state_dict(optimizer)
        steps = {p: int(e["step"]) for p, e in state["state"].items()}
        said = [] if steps == {"2.weight": 1, "2.bias": 1, "4.weight": 3, "4.bias": 3} else [
            f"steps are {steps}"]
        before = plain(state)
        optimizer.load_state_dict(state)
        return said + differences([plain(st.optimizer_state_dict(optimizer))], [before])
    finally:
        st.shutdown()


@alone
def continued_after_a_restart(rank):
    """A program that has unfrozen something, and starts again, builds the model as it is now."""
    def run(job, first, steps, fresh, resume):
        st.init(job=job, resume=resume, lifetime=shardd.Lifetime.KEEP)
        api = Shardd.__new__(Shardd)
        model = head_only()
        if resume:
            model[2].requires_grad_(True)
        model = shared.shard_mlp(api, model)
        optimizer = st.AdamW(model.parameters(), **ADAMW)
        states = trained(api, model, [optimizer], rank, first, steps)
        if fresh:
            model[2].requires_grad_(True)
            states += trained(api, model, [optimizer], rank, first + steps, 2)
        st.commit(first + steps)
        return states

    run("broken", 0, 2, True, False)
    st.shutdown()
    again = run("broken", 4, 2, False, True)
    st.shutdown()
    st.init(job="whole")
    api = Shardd.__new__(Shardd)
    model = shared.shard_mlp(api, head_only())
    optimizer = st.AdamW(model.parameters(), **ADAMW)
    trained(api, model, [optimizer], rank, 0, 2)
    model[2].requires_grad_(True)
    whole = trained(api, model, [optimizer], rank, 2, 4)
    st.shutdown()
    return differences(again, whole[2:])


# -------------------------------------------------------------------------- refusals


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"said: {error}"]
    return [f"not refused: {words}"]


@alone
def what_cannot_be_is_refused(rank):
    api, said = Shardd.__new__(Shardd), []

    def model_of(job, optimizer):
        st.init(job=job)
        model = shared.shard_mlp(api, head_only())
        made = optimizer(model)
        trained(api, model, [made], rank, 0, 1)
        model[2].requires_grad_(True)
        return model

    def check(words, model):
        nonlocal said
        said += refused(shardd.FailedPrecondition, words, lambda: loss_of(model, rank, 1))
        model[2].requires_grad_(False)  # all goes on
        loss_of(model, rank, 2).backward()
        st.shutdown()

    check("call optimizer.add_param_group before",
          model_of("outside", lambda m: adamw(of(m[4]))))
    check("build the optimizer again",
          model_of("shards", lambda m: st.Sharded(torch.optim.Adagrad, m.parameters(), lr=0.1)))
    check("no unit was trained before", model_of("memory", lambda m: st.AdamW(
        [{"params": of(m[0], m[4])}, {"params": of(m[2]), "amsgrad": True}])))

    model = model_of("summed", lambda m: st.AdamW(m.parameters(), **ADAMW))
    model[2].requires_grad_(False)
    with model.no_sync():
        loss_of(model, rank, 1).backward()
    model[4].weight.requires_grad_(True)
    model[2].requires_grad_(True)
    loss_of(model, rank, 2)  # of another unit
    st.shutdown()

    st.init(job="same-unit")
    model = st.fully_shard(head_only())
    st.AdamW([{"params": of(model[0], model[4]), **ADAMW},
              {"params": of(model[2]), "amsgrad": True}])
    model[2].requires_grad_(True)
    said += refused(shardd.Unimplemented, "a setting that decides the daemon's memory",
                    lambda: loss_of(model, rank, 2))
    model[2].requires_grad_(False)
    with model.no_sync():
        loss_of(model, rank, 1).backward()
    model[0].requires_grad_(True)
    said += refused(shardd.FailedPrecondition, "change it after the step",
                    lambda: loss_of(model, rank, 2))
    st.shutdown()

    st.init(job="replicas")
    model = st.replicate(head_only())
    loss_of(model, rank, 0).backward()
    model[2].requires_grad_(True)
    said += refused(shardd.FailedPrecondition, "as with DistributedDataParallel",
                    lambda: loss_of(model, rank, 1))
    st.shutdown()
    return said


def both(name, rank):
    if name in ALONE:
        return ALONE[name](rank)
    with test_training.correctly_rounded():  # as the daemon's are, if an optimizer runs there
        theirs = CASES[name](Fsdp2(), rank)
        api = Shardd(name)
        try:
            ours = CASES[name](api, rank)
        finally:
            api.close()
    return differences(ours, theirs, BOUNDS.get(name, 0.0))


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted([*CASES, *ALONE]), both)))
