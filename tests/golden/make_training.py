#!/usr/bin/env python3
"""Whole training in FSDP2 and DDP; see golden.py for what to install.

    venv/bin/python make_training.py

writes training.safetensors: the transformer of tests/torch, made smaller, on two ranks and on
four, ten steps of AdamW (foreach=False), each rank with tokens of its own.

  "in/NAME"      a parameter before the first step
  "CASE/g/NAME"  [step, rank, ...] its gradient on each rank, as its reduction got it:
                 not averaged; of a tied parameter the sum of its uses. Frozen ones have none
  "CASE/p/NAME"  [step, ...] the parameter after each step, in fp32. Frozen ones, which do not
                 change (asserted), have none

The metadata of "unit/NAME" lists the parameters that fully_shard wraps together; A=B is
another name A of B. That of a case says how it was made:

  system    fsdp2, ddp
  world     ranks
  comm      gloo: it adds the gradients itself; on two ranks there is one order. rank: the
            systems' own code with a sum in rank order in place of the collective (golden.py)
  compute   type of parameters and gradients in forward and backward; reduce: of the sum

The square root is correctly rounded as in make_optim.py.
"""

import contextlib
import os
import sys
import warnings

import golden
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "torch"))

import test_training as training
import transformer

# Few enough parameters to store all of them after each step; rows that mostly do not divide.
transformer.VOCABULARY, transformer.WIDTH, transformer.LENGTH = 23, 9, 7
STEPS = 10
FSDP2 = dict(system="fsdp2", compute="fp32", reduce="fp32")
BF16 = dict(FSDP2, compute="bf16")
DDP = dict(FSDP2, system="ddp")
CASES = {"%(system)s/%(compute)s/w%(world)d/%(comm)s" % case: case for case in (
    *(dict(c, world=2, comm="gloo") for c in (FSDP2, BF16, DDP)),
    *(dict(c, world=4, comm="rank") for c in (FSDP2, BF16, DDP)),
    dict(FSDP2, world=4, comm="gloo"))}


@contextlib.contextmanager
def seen_by_fsdp2(gradients):
    """What reduce-scatter is about to be given goes into @gradients, by name."""
    reduce = param_group.foreach_reduce

    def watched(fsdp_params, unsharded_grads, *args, **kwargs):
        for p, g in zip(fsdp_params, unsharded_grads, strict=True):
            assert p._param_fqn not in gradients, p
            gradients[p._param_fqn] = g.clone()
        return reduce(fsdp_params, unsharded_grads, *args, **kwargs)

    param_group.foreach_reduce = watched
    try:
        yield
    finally:
        param_group.foreach_reduce = reduce


@contextlib.contextmanager
def seen_by_ddp(model, gradients):
    """What comes to a parameter, before DDP's own hook copies it to a bucket."""
    def watch(name):
        def hook(g):
            assert name not in gradients, name
            gradients[name] = g.clone()
        return hook

    hooks = [p.register_hook(watch(name.removeprefix("module.")))
             for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def train(case):
    def run(rank, world):
        in_order = golden.folded() if case["comm"] == "rank" else contextlib.nullcontext()
        with in_order:
            return steps(rank)

    def steps(rank):
        model = training.wrap(transformer.make(), case["system"], case["compute"], case["comm"])
        optimizer = training.adamw(model.parameters())
        rows = []
        for step in range(STEPS):
            gradients = {}
            seen = seen_by_ddp(model, gradients) if case["system"] == "ddp" \
                else seen_by_fsdp2(gradients)
            with seen:
                transformer.loss(model, rank, step).backward()
            with training.correctly_rounded():
                optimizer.step()
            optimizer.zero_grad()
            rows.append((gradients, training.whole(model)))
        return rows

    return run


def add(tensors, name, case, ranks, initial):
    trained = {n for n, p in initial.items() if p.requires_grad}
    for rows in ranks:
        for gradients, values in rows:
            assert gradients.keys() == trained, gradients.keys() ^ trained
            assert all(g.dtype == golden.DTYPES[case["compute"]] for g in gradients.values())
            assert all(v.dtype == torch.float32 for v in values.values())
    for step in range(STEPS):
        for n, p in initial.items():
            values = [rows[step][1][n] for rows in ranks]
            assert all(golden.same(values[0], v) for v in values), (n, step)
            assert n in trained or golden.same(values[0], p.detach()), n
    for n in trained:
        tensors["%s/g/%s" % (name, n)] = torch.stack(
            [torch.stack([rows[step][0][n] for rows in ranks]) for step in range(STEPS)])
        tensors["%s/p/%s" % (name, n)] = torch.stack(
            [ranks[0][step][1][n] for step in range(STEPS)])


def main():
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model = transformer.make()
    initial = dict(model.named_parameters())
    tensors = {"in/" + n: p for n, p in initial.items()}
    about = {"unit/" + unit: " ".join(names + ["head.weight=tokens.weight"] * (unit == "root"))
             for unit, names in training.groups(model).items()}
    for name, case in CASES.items():
        add(tensors, name, case, golden.run(train(case), case["world"]), initial)
        beta1, beta2 = training.ADAMW["betas"]
        about[name] = golden.settings(
            optimizer="adamw", lr=training.ADAMW["lr"], beta1=beta1, beta2=beta2,
            eps=training.ADAMW["eps"], weight_decay=training.ADAMW["weight_decay"],
            steps=STEPS, **case)
    golden.save("training.safetensors", tensors, about)


if __name__ == "__main__":
    main()
