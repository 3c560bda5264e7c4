#!/usr/bin/env python3
"""Schedules, and parameter groups that differ, of the optimizers that run in the daemon: against
torch.optim's on FSDP2 (or DDP) over gloo, two ranks, bit for bit after every step.

Prints one line of TAP a case; arguments choose by a part of the name.
"""

import copy
import functools
import sys
import warnings

import fsdp
import torch
from fsdp import Fsdp2, Shardd, differences
from test_fully_shard import ADAMW, mlp, shard_mlp, square
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import shardd.torch

STEPS = 7
MOMENTUM = dict(lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.01)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def one(model):
    return model.parameters()


def by_dimension(**other):
    """Weights and biases, of one unit both; @other: of the biases."""
    def groups(model):
        every = list(model.parameters())
        return [{"params": [p for p in every if p.dim() > 1]},
                {"params": [p for p in every if p.dim() == 1], **other}]

    return groups


def by_layer(*settings):
    """A group for each layer: a unit's own, one that is the root's."""
    return lambda model: [{"params": list(model[i].parameters()), **own}
                          for i, own in zip((0, 2, 4), settings)]


def train(api, rank, kind, schedule=None, groups=one, between=None, shard=shard_mlp, **options):
    """@schedule(optimizer): one of torch's. @between(optimizer, step): before the step."""
    model = shard(api, mlp())
    optimizer = api.optimizer(kind, groups(model), **options)
    scheduler = schedule(optimizer) if schedule else None
    loss, states = square(rank), []
    for step in range(STEPS):
        value = loss(model, step)
        value.backward()
        if between:
            between(optimizer, step)
        api.step(optimizer)
        optimizer.zero_grad()
        if scheduler is not None:
            flat = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if flat else []))
        rates = {f"lr {i}": torch.as_tensor(g["lr"]).clone()
                 for i, g in enumerate(optimizer.param_groups)}
        states.append({**api.whole(model), **rates, "loss": value.detach()})
    return states


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.3 / (i + 1) for i, _ in
                                                      enumerate(optimizer.param_groups)],
                                   total_steps=STEPS + 2, pct_start=0.4)


def lambdas(optimizer):
    """Each group's own, none in proportion to another's, one 0 at first."""
    own = [lambda step: 1 / (step + 1), lambda step: step / 3, lambda step: 0.9 ** step]
    return lr_scheduler.LambdaLR(optimizer, own[:len(optimizer.param_groups)])


# ------------------------------------------------------------------------------ schedules


@case
def one_cycle_of_adamw_with_its_betas(api, rank):
    return train(api, rank, "AdamW", one_cycle, **ADAMW)


@case
def one_cycle_of_sgd_with_its_momentum(api, rank):
    return train(api, rank, "SGD", one_cycle, **MOMENTUM)


@case
def one_cycle_of_groups_of_adam(api, rank):
    return train(api, rank, "Adam", one_cycle, by_dimension(weight_decay=0.3), **ADAMW)


@case
def a_lambda_for_each_group(api, rank):
    return train(api, rank, "AdamW", lambdas, by_layer({}, {"lr": 0.07}, {"lr": 0.011}), **ADAMW)


@case
def a_lambda_for_each_group_of_one_unit(api, rank):
    return train(api, rank, "SGD", lambdas, by_dimension(lr=0.03, weight_decay=0.2), **MOMENTUM)


@case
def cyclic_rates_and_momentum(api, rank):
    return train(api, rank, "SGD", lambda o: lr_scheduler.CyclicLR(
        o, [0.01, 0.02], [0.3, 0.1], step_size_up=2, mode="exp_range", gamma=0.9),
        by_dimension(nesterov=False), **MOMENTUM)


@case
def a_plateau_with_bounds_of_each_group(api, rank):
    return train(api, rank, "AdamW", lambda o: lr_scheduler.ReduceLROnPlateau(
        o, factor=0.3, patience=0, min_lr=[1e-3, 5e-3]), by_dimension(lr=0.05), **ADAMW)


@case
def a_warm_up_and_a_cosine(api, rank):
    return train(api, rank, "AdamW", lambda o: lr_scheduler.SequentialLR(o, [
        lr_scheduler.LinearLR(o, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(o, 4, eta_min=1e-3)], [3]),
        by_dimension(lr=0.07), **ADAMW)


@case
def a_schedule_of_the_decay(api, rank):
    def decay(optimizer, step):
        for i, group in enumerate(optimizer.param_groups):
            group["weight_decay"] = 0.3 * (i + 1) / (step + 1)

    return train(api, rank, "AdamW", None, by_dimension(weight_decay=0.0), decay, **ADAMW)


@case
def every_setting_of_adam_changes(api, rank):
    def change(optimizer, step):
        first, second = optimizer.param_groups
        if step == 2:
            first.update(eps=1e-2, betas=(0.8, 0.95))
        if step == 3:
            second.update(maximize=True, weight_decay=0.4)
        if step == 5:  # all as it was
            first.update(eps=ADAMW["eps"], betas=ADAMW["betas"])
            second.update(maximize=False, weight_decay=ADAMW["weight_decay"])

    return train(api, rank, "Adam", None, by_dimension(), change, amsgrad=True, **ADAMW)


@case
def every_setting_of_sgd_changes(api, rank):
    def change(optimizer, step):
        first, second = optimizer.param_groups
        if step == 2:
            first.update(dampening=0.0, nesterov=True)
            second.update(momentum=0.0)
        if step == 4:
            second.update(momentum=0.5, maximize=True)

    return train(api, rank, "SGD", None, by_dimension(), change, **MOMENTUM)


# ---------------------------------------------------------------------------------- groups


@case
def groups_of_one_unit_that_differ_in_all(api, rank):
    return train(api, rank, "AdamW", None, by_dimension(
        lr=0.1 / 3, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.0, maximize=True), **ADAMW)


@case
def layers_of_their_own_momentum(api, rank):
    return train(api, rank, "SGD", functools.partial(
        lr_scheduler.MultiplicativeLR, lr_lambda=[lambda s: 0.9, lambda s: 1.1, lambda s: 0.5]),
        by_layer({"momentum": 0.0}, {"momentum": 0.8, "nesterov": True, "dampening": 0}, {}),
        **MOMENTUM)


# ------------------------------------------------------------------------- rates as tensors


@case
def a_tensor_of_float32(api, rank):
    return train(api, rank, "AdamW", functools.partial(lr_scheduler.StepLR, step_size=1, gamma=0.7),
                 **{**ADAMW, "lr": torch.tensor(0.0213)})


@case
def a_tensor_of_float64(api, rank):
    return train(api, rank, "Adam", functools.partial(lr_scheduler.ExponentialLR, gamma=0.7),
                 **{**ADAMW, "lr": torch.tensor([0.0213], dtype=torch.float64)})


@case
def a_tensor_for_sgd(api, rank):
    return train(api, rank, "SGD", functools.partial(lr_scheduler.StepLR, step_size=1, gamma=0.7),
                 **{**MOMENTUM, "lr": torch.tensor(0.0213)})


# --------------------------------------------------------------------------- in other ways


@case
def in_backward(api, rank):
    """There each step is the next pass's: what is set before it."""
    ours = {"in_backward": True} if isinstance(api, Shardd) else {}
    return train(api, rank, "AdamW", one_cycle, by_dimension(weight_decay=0.0), **ours, **ADAMW)


@case
def state_that_was_saved_on_the_way(api, rank):
    """By shardd alone: there it makes no difference to PyTorch, which does without."""
    def between(optimizer, step):
        if step != 3 or isinstance(api, Fsdp2):
            return
        saved = copy.deepcopy(optimizer.state_dict())
        for group in optimizer.param_groups:
            group.update(lr=99.0, betas=(0.1, 0.2), weight_decay=1.0)
        optimizer.load_state_dict(saved)

    return train(api, rank, "AdamW", one_cycle, by_dimension(weight_decay=0.0), between, **ADAMW)


@case
def replicas(api, rank):
    def shard(api, model):
        if isinstance(api, Shardd):
            return shardd.torch.replicate(model)
        model = DistributedDataParallel(model)
        model.__class__ = type("Indexed", (DistributedDataParallel,), {
            "__getitem__": lambda self, i: self.module[i]})
        return model

    groups = by_layer({}, {"eps": 1e-3}, {"betas": (0.5, 0.9)})
    states = train(api, rank, "AdamW", one_cycle, groups, shard=shard, **ADAMW)
    return [{name.removeprefix("module."): v for name, v in s.items()} for s in states]


# ------------------------------------------------------------------------------- running


def both(name, rank):
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    theirs = CASES[name](Fsdp2(), rank)
    api = Shardd(name)
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    return differences(ours, theirs)


def main():
    return fsdp.report(fsdp.Plan(2, fsdp.wanted(CASES), both))


if __name__ == "__main__":
    sys.exit(main())
