#!/usr/bin/env python3
"""Five models against PyTorch: shardd.torch.fully_shard against FSDP2 and replicate against
DistributedDataParallel, over gloo, in fp32 and with bf16.

2 ranks: losses, parameters and buffers after every step of AdamW, bit for bit; 4 ranks: the same,
where PyTorch's collectives add in the order of the ranks. 4 ranks in gloo's own order: every step
of SGD begins with the same parameters on both sides, so that losses and buffers are equal bit for
bit, and how far parameters come apart is known from the number of additions (see `bound`).

FSDP2 waits for ever for ranks that take different branches, so there the mixture of experts is
compared with one process that computes the gradients of all ranks and adds them in their order.

Prints one line of TAP a cell; arguments choose by a part of the name.
"""

import contextlib
import copy
import sys

import fsdp
import golden
import test_fully_shard as cases
import test_training
import torch
import transformer
from fsdp import Fsdp2, Shardd, differences
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardd

BF16, FP32 = torch.bfloat16, torch.float32

# ------------------------------------------------------------------------- models


class Experts(nn.Module):
    """A mixture whose ranks take different branches, and one that none takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x, expert):
        return self.last(torch.tanh(self.experts[expert](self.first(x))))


class Model:
    """How one is made, which of its modules are units, and the loss of a rank and a step."""

    unused = False  # is a parameter without a gradient at times?

    def units(self, model):
        return []

    def exact(self, model):
        """The units that compute in fp32, whatever the others do."""
        return []


class Mlp(Model):
    make = staticmethod(cases.mlp)

    def units(self, model):
        return [model[0], model[2]]

    def loss(self, model, rank, step):
        return cases.square(rank)(model, step)


class Gpt(Model):
    make = staticmethod(transformer.make)
    loss = staticmethod(transformer.loss)

    def units(self, model):
        return model.blocks


class Conv(Model):
    def make(self):
        torch.manual_seed(2)
        return cases.Conv()

    def units(self, model):
        return [model.b]

    def exact(self, model):  # PyTorch has no batch norm with bf16 weights and fp32 buffers
        return [model.norm]

    def loss(self, model, rank, step):
        return model(cases.numbers(rank, step, 2, 3, 8, 8)).float().pow(2).mean()


class Unused(Model):
    """One branch is taken by all ranks in turns, one by none."""

    make, unused = cases.Branches, True

    def units(self, model):
        return model.branches

    def loss(self, model, rank, step):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.used = [step % 2]
        return cases.square(rank, 6)(model, step)


class Mixture(Model):
    make, unused = Experts, True

    def units(self, model):
        return model.experts

    def loss(self, model, rank, step):
        out = model(cases.numbers(rank, step, 5, 6), (step + rank) % 5)
        return out.float().pow(2).mean()


MODELS = {"an MLP": Mlp(), "a GPT with tied embeddings": Gpt(),
          "convolutions with batch norm": Conv(), "an unused branch": Unused(),
          "a mixture of experts": Mixture()}

# ----------------------------------------------------------------- what is compared


def plain(value):
    """A whole tensor of this process's own."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def named(model):
    """Parameters, those that are tied under each of their names."""
    return model.named_parameters(remove_duplicate=False)


class Side:
    """A wrapped model. @compute: the type of forward."""

    def __init__(self, api, subject, how, compute, **options):
        self.api, self.subject, self.how, self.compute = api, subject, how, compute
        self.model = self.wrap(subject.make(), **options)

    def wrap(self, model, **options):
        if self.how == "replicate":
            return self.api.replicate(
                model, find_unused_parameters=self.subject.unused, **options)
        policies = {dtype: fsdp.fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
                    for dtype in (FP32, BF16)}
        if self.compute == BF16:
            for unit in self.subject.exact(model):
                self.api.fully_shard(unit, mp_policy=policies[FP32], **options)
        for unit in self.subject.units(model):
            self.api.fully_shard(unit, mp_policy=policies[self.compute], **options)
        return self.api.fully_shard(model, mp_policy=policies[self.compute], **options)

    def backward(self, rank, step):
        """Return: the loss. DDP's own mixed precision is for GPUs: with it goes autocast."""
        casts = self.how == "replicate" and self.compute == BF16
        with torch.autocast("cpu", BF16, enabled=casts):
            loss = self.subject.loss(self.model, rank, step)
        loss.backward()
        return loss.detach()

    def state(self):
        return {name.removeprefix("module."): plain(value)
                for name, value in self.model.state_dict().items()}


class OneProcess(Side):
    """The gradients of all ranks, added in their order, then divided by their number."""

    def wrap(self, model):
        return model

    def backward(self, rank, step):
        losses, sums = [], [None for _ in self.model.parameters()]
        for other in range(dist.get_world_size()):
            low = copy.deepcopy(self.model).to(self.compute)
            value = low(cases.numbers(other, step, 5, 6).to(self.compute), (step + other) % 5)
            losses.append(value.float().pow(2).mean())
            losses[-1].backward()
            gradients = [None if p.grad is None else p.grad.float() for p in low.parameters()]
            sums = [g if s is None else s if g is None else s + g for s, g in zip(sums, gradients)]
        for p, total in zip(self.model.parameters(), sums):
            p.grad = None if total is None else total / dist.get_world_size()
        return losses[rank].detach()


class Theirs(Fsdp2):
    def replicate(self, module, **options):
        return DistributedDataParallel(module, **options)


class Ours(Shardd):
    def replicate(self, module, **options):
        return shardd.torch.replicate(module, **options)


def reference(subject, how, compute, order):
    if how == "fully_shard" and isinstance(subject, Mixture):
        return OneProcess(Theirs(), subject, how, compute)
    group = {"process_group": test_training.in_rank_order()} \
        if how == "replicate" and order == "ranks" else {}
    return Side(Theirs(), subject, how, compute, **group)


# --------------------------------------------------------------------- bit for bit


def train(side, rank, steps=4):
    optimizer = side.api.optimizer("AdamW", side.model.parameters(), **cases.ADAMW)
    states = []
    for step in range(steps):
        loss = side.backward(rank, step)
        side.api.step(optimizer)
        optimizer.zero_grad()
        states.append({**side.state(), "loss": loss})
    return states


def equal(subject, how, compute, order, rank):
    with golden.folded() if order == "ranks" else contextlib.nullcontext():
        theirs = train(reference(subject, how, compute, order), rank)
    ours = train(Side(Ours("equal"), subject, how, compute), rank)
    shardd.torch.shutdown()
    return differences(ours, theirs)


# ------------------------------------------------------------- in gloo's own order

RATE, UNIT = 0.5, 2.0 ** -24  # learning rate; the most that one rounding to fp32 is off, relative


def gradients_of_this_rank(subject, how, compute, state, rank, step):
    """By name, where there are any, before they are added to those of others."""
    if how == "fully_shard" and not isinstance(subject, Mixture):
        alone = DeviceMesh.from_group(dist.new_subgroups(1)[0], "cpu")
        side = Side(Theirs(), subject, how, compute, mesh=alone)
        for name, p in side.model.named_parameters():
            p.data._local_tensor.copy_(state[name])
    else:
        side = Side(Unwrapped(), subject, how, compute)
        side.model.load_state_dict(state)
    side.backward(rank, step)
    return {name: plain(p.grad) for name, p in named(side.model) if p.grad is not None}


class Unwrapped:
    def replicate(self, module, **_):
        return module

    fully_shard = replicate


def bound(before, gradients):
    """How far two sides may come apart, by element, in one step from @before.

    n gradients added in any order: n - 1 roundings, each of a sum of at most sum |g|, so each side
    is at most (n - 1) * UNIT * sum |g| off. The division by n = 4 is exact. Each side then rounds
    rate * g, and p - rate * g. What is of second order fits into 1.01.
    """
    n, mean = len(gradients), sum(g.abs() for g in gradients) / len(gradients)
    one = (n - 1) * RATE * mean + RATE * mean + before.abs() + RATE * mean
    return 1.01 * 2 * UNIT * one


def gathered(gradients, like):
    """Those of all ranks; zeros where a rank has none."""
    mine = gradients if gradients is not None else torch.zeros_like(like)
    parts = [torch.empty_like(like) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return parts


def too_far(name, before, ours, theirs, gradient):
    """Sentences about one parameter after a step; also if the loss of a rank's gradient would not
    be seen: the bound is to say something."""
    every = gathered(gradient, before)
    limit, said = bound(before, every), []
    if ((ours - theirs).abs() > limit).any():
        said.append(f"{name} is up to {((ours - theirs).abs() / limit).max():g} bounds off")
    for rank, g in enumerate(every):
        if g.any() and not (RATE * g.abs() / len(every) > 2 * limit).any():
            said.append(f"{name}: that rank {rank}'s gradient is lost would not be seen")
    return said


def near(subject, how, compute, rank, steps=3):
    theirs = reference(subject, how, compute, "gloo")
    ours = Side(Ours("near"), subject, how, compute)
    both, said = (theirs, ours), []
    optimizers = [s.api.optimizer("SGD", s.model.parameters(), lr=RATE) for s in both]
    for step in range(steps):
        before = theirs.state()
        ours.model.load_state_dict(before)
        gradients = gradients_of_this_rank(subject, how, compute, before, rank, step)
        losses = [side.backward(rank, step) for side in both]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after = [side.state() for side in both]
        trained = {name for name, p in named(ours.model) if p.requires_grad}
        kept = [{"loss": loss, **{n: v for n, v in state.items() if n not in trained}}
                for loss, state in zip(losses, after)]
        said += differences([kept[1]], [kept[0]])
        for name in sorted(trained):
            said += too_far(name, before[name], after[1][name], after[0][name],
                            gradients.get(name))
    shardd.torch.shutdown()
    return said


# ------------------------------------------------------------------------- running

CELLS = {f"{how}, {name}, {kind}": (subject, how, compute)
         for how in ("fully_shard", "replicate") for name, subject in MODELS.items()
         for kind, compute in (("fp32", FP32), ("bf16", BF16))}


def trial(name, rank):
    """@name: a cell, and behind a colon how it is compared."""
    cell, _, order = name.partition(": ")
    if order == "in gloo's order":
        return near(*CELLS[cell], rank)
    return equal(*CELLS[cell], "ranks" if order else "gloo", rank)


def main():
    orders = [f"{cell}: {order}" for cell in CELLS
              for order in ("in the order of the ranks", "in gloo's order")]
    return fsdp.report(fsdp.Plan(2, fsdp.wanted(CELLS), trial),
                       fsdp.Plan(4, fsdp.wanted(orders), trial))


if __name__ == "__main__":
    sys.exit(main())
