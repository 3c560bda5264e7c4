#!/usr/bin/env python3
"""What PyTorch's own tests of FSDP2 check and no other test here does (docs/parity.md), against
FSDP2 over gloo: losses, parameters and gradients bit for bit. What is of types, values and
states is in test_parity_values.py.

Prints one line of TAP a case; arguments choose by a part of the name.
"""

import contextlib
import gc
import operator
import sys
import unittest.mock
import warnings

import fsdp
import golden
import test_fully_shard as cases
import torch
import torch.distributed as dist
import transformer
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardd.torch._unit import ShardedUnit

BF16, FP32 = torch.bfloat16, torch.float32
CASES = {}  # name: (ranks, function)
# FSDP2 reduces what was added up at another time, so a sum is rounded in another order.
BOUNDS = {"chunks_without_synchronisation": 2e-5}
numbers = cases.numbers


def case(function, ranks=2):
    """@function(api, rank) gives the same with FSDP2 and here."""
    CASES[function.__name__] = (ranks, function)
    return function


def on_four(function):
    return case(function, 4)


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def parameters(model):
    with torch.no_grad():
        return {name: whole(p) for name, p in model.named_parameters()}


def gradients(model):
    return {"grad " + name: torch.zeros(()) if p.grad is None else whole(p.grad)
            for name, p in model.named_parameters()}


def backward(model, loss):
    loss.backward()
    return gradients(model)


def train(api, model, loss, optimizer=None, steps=3, none=lambda step: True):
    """@none(step): of zero_grad(). @loss(model, step): calls backward itself, if its value has no
    graph."""
    optimizer = optimizer or api.optimizer("Adam", model.parameters(), lr=0.02)
    states = []
    for step in range(steps):
        value = loss(model, step)
        if value.requires_grad:
            value.backward()
        seen = gradients(model)
        api.step(optimizer)
        optimizer.zero_grad(set_to_none=none(step))
        states.append({**parameters(model), **seen, "loss": value.detach()})
    return states


def sgd(model):
    """Without square roots: PyTorch's own for what is not sharded."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def seeded(*layers, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(layer() for layer in layers))


def linear(*sizes, **options):
    return seeded(lambda: nn.Linear(*sizes, **options))[0]


def linears(number, width=8):
    return seeded(*[lambda: nn.Linear(width, width)] * number)


def shard(api, *modules, **options):
    for module in modules:
        api.fully_shard(module, **options)
    return modules[-1]


def tokens(rank, step):
    return torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


# ------------------------------------------------------------------- forward and backward


@case
def a_model_without_parameters(api, rank):
    class Sum(nn.Module):
        def forward(self, x, others):
            return x + others[0] + others[1]

    model = api.fully_shard(Sum(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    out = model(torch.ones(3), (torch.ones(3), torch.ones(3)))
    return [{"out": out, "bf16": torch.tensor(float(out.dtype == BF16))}]


@case
def a_forward_without_inputs(api, rank):
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self):
            return self.weight @ self.weight

    return train(api, api.fully_shard(Square()), lambda model, step: model().sum())


def _released(api, rank, after):
    """@after(model, loss, states): after a forward."""
    states = []
    for reshard in (True, False, 2, None):
        model = cases.shard_mlp(api, cases.mlp(), reshard_after_forward=reshard)
        loss = cases.square(rank)(model, 0)
        after(model, loss, states)
    return states


@case
def parameters_after_forward(api, rank):
    def after(model, loss, states):
        states.append(parameters(model))
        model.reshard()
        states.append(parameters(model))

    return _released(api, rank, after)


@case
def parameters_after_backward(api, rank):
    return _released(api, rank, lambda model, loss, states: states.append(
        {**backward(model, loss), **parameters(model)}))


@case
def sizes_that_ranks_do_not_divide(api, rank):
    states = []
    for a, b, c in ((16, 15, 8), (7, 15, 3), (16, 17, 8)):
        model = nn.Sequential(linear(a, b), nn.ReLU(), linear(b, c))
        states += train(api, api.fully_shard(model), cases.square(rank, a))
    return states


@case
def a_part_of_the_model_alone(api, rank):
    """Forward and backward of the model, then of one of its units."""
    model = linears(3)
    shard(api, *model, model)
    return train(api, model, lambda model, step: (model[0] if step % 2 else model)(
        numbers(rank, step, 4, 8)).tanh().sum(), steps=4)


@case
def a_module_used_twice_side_by_side(api, rank):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x):
            return self.outer(self.inner(x) + self.inner(x))

    states = []
    for reshard in (True, False):
        model = Twice()
        shard(api, model.inner, model, reshard_after_forward=reshard)
        states += train(api, model, cases.square(rank, 4))
    return states


@case
def prefetches_that_are_set(api, rank):
    """Also one of a unit that backward needs no more."""
    model = cases.gpt(api)
    blocks = model.blocks
    for before, after in zip(blocks, blocks[1:]):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    blocks[0].set_modules_to_backward_prefetch([blocks[-1]])
    model._set_unshard_async_op(True)
    return cases.loop(api, model, cases.gpt_loss(rank), rank)


@case
def checkpoints_of_three_kinds(api, rank):
    """PyTorch's composable one; that of a function is in test_fully_shard, the wrapper in
    test_wrapping."""
    states = []
    for reshard in (True, False):
        model = transformer.make()
        for block in model.blocks:
            composable(block)
            api.fully_shard(block, reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        states += cases.loop(api, model, cases.gpt_loss(rank), rank)
    return states


@case
def an_embedding_that_backward_does_not_gather(api, rank):
    model = seeded(lambda: nn.Embedding(24, 8), lambda: nn.Linear(8, 4))
    shard(api, *model, model)
    model[0].set_unshard_in_backward(False)
    return train(api, model, lambda model, step: model(tokens(rank, step)).pow(2).sum())


class Tied(nn.Module):
    """Embedding and head share a weight of @rows rows."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.body = nn.Embedding(rows, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text):
        return self.head(self.norm(self.body(self.embed(text % self.head.out_features))))


def tied(api, rank, rows, checkpoints=False):
    states = []
    for reshard in (True, False):
        model = Tied(rows)
        if checkpoints:
            composable(model.body)
        api.fully_shard(model.body, reshard_after_forward=reshard)
        api.fully_shard([model.embed, model.norm, model.head], reshard_after_forward=reshard)
        states += train(api, api.fully_shard(model, reshard_after_forward=reshard),
                        lambda m, step: m(tokens(rank, step)).pow(2).sum())
    return states


@case
def tied_modules_in_one_call(api, rank):
    return tied(api, rank, 24, checkpoints=True)


@case
def tied_rows_that_ranks_do_not_divide(api, rank):
    return tied(api, rank, 7)


class Chunked(nn.Module):
    """Its head may be left out, to be called for one part after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.body = nn.Embedding(24, 8), nn.Linear(8, 8, bias=False)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 24, bias=False)

    def forward(self, text, headless=False):
        x = self.norm(self.body(self.embed(text)))
        return x if headless else self.head(x)


def chunked(api, listed=True, **options):
    model = Chunked()
    shard(api, model.embed, model.body, **options)
    shard(api, *([[model.norm, model.head]] if listed else [model.norm, model.head]), **options)
    return api.fully_shard(model, **options)


def in_chunks(model, rank, step):
    x = model(tokens(rank, step), headless=True)
    found, total = [], 0.0
    for part in torch.chunk(x.detach().float(), 4, dim=1):
        part = part.contiguous().requires_grad_()
        loss = model.head(part).float().pow(2).sum()
        loss.backward()
        found.append(part.grad)
        total += loss.detach()
    x.backward(torch.cat(found, dim=1).to(x.dtype))
    return total


@case
def a_head_called_by_itself_in_chunks(api, rank):
    narrow = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
    states = []
    for options in ({}, {"reshard_after_forward": False}, {"listed": False}, {"mp_policy": narrow}):
        states += train(api, chunked(api, **options), lambda m, step: in_chunks(m, rank, step))
    return states


@case
def chunks_without_synchronisation(api, rank):
    def loss(model, step):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_is_last_backward(part == 2)
            value = in_chunks(model, rank, 10 * step + part)
        return value

    return train(api, chunked(api), loss, steps=1)


@case
def resharding_is_off_during_the_chunks(api, rank):
    def loss(model, step):
        head = model.head
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        value = in_chunks(model, rank, step)
        if api.name == "shardd":
            assert head._unit().held, "released after backward"
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.reshard()
        if api.name == "shardd":
            assert not head._unit().held, "not released"
        return value

    return train(api, chunked(api), loss)


@case
def two_forwards_without_the_head(api, rank):
    model = Chunked()
    shard(api, [model.norm, model.head], model)
    return train(api, model, lambda model, step: model(tokens(rank, step), headless=True).sum() +
                 model(tokens(rank, step + 30), headless=True).sum())


@case
def two_forwards_with_checkpoints_in_nested_units(api, rank):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    class Net(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    states = []
    for reshard in (True, False):
        torch.manual_seed(0)
        model = Net(Block(), Block())
        for block in model:
            shard(api, block.up, block.down, block, reshard_after_forward=reshard)
        api.fully_shard(model, reshard_after_forward=reshard)
        states += train(api, model, lambda model, step: (
            model(numbers(rank, step, 2, 8)).sum() -
            model(numbers(rank, step + 50, 2, 8)).sum()).pow(2))
    return states


@case
def layers_made_and_wrapped_one_by_one(api, rank):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList()

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = Stack()
    for seed in range(8):
        block = seeded(lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 8, bias=False), seed=seed)
        model.blocks.append(api.fully_shard(block))
        gc.collect()
    return train(api, api.fully_shard(model), cases.square(rank, 8))


@case
def modules_of_a_list_that_are_not_used(api, rank):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = nn.Linear(1, 1), nn.Linear(8, 8)

        def forward(self, x):
            return F.relu(self.used(x))

    model = seeded(Half, Half, lambda: nn.Linear(8, 8))
    for half in model[:2]:
        api.fully_shard([half.unused, half.used], reshard_after_forward=True)
    return train(api, api.fully_shard(model), cases.square(rank, 8))


@case
def released_by_hand_before_backward(api, rank):
    model = cases.gpt(api, reshard_after_forward=False)

    def loss(model, step):
        value = transformer.loss(model, rank, step)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return value

    return train(api, model, loss)


@case
def gathered_by_hand(api, rank):
    model, empty = linears(1), linears(2)
    api.fully_shard(model).unshard()
    states = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    shard(api, *empty, empty).unshard(async_op=True).wait()
    return states


def _gathers(api, run):
    """How many units were gathered by @run."""
    if api.name == "FSDP2":
        with CommDebugMode() as mode:
            run()
        return mode.get_comm_counts()[torch.ops.c10d._allgather_base_]
    count, original = [0], ShardedUnit.gather

    def gather(unit):
        before = unit.held
        original(unit)
        count[0] += unit.held and not before

    with unittest.mock.patch.object(ShardedUnit, "gather", gather):
        run()
    return count[0]


def _gathered(api, rank, change=lambda model: None, **options):
    model = cases.shard_mlp(api, cases.mlp(), **options)
    change(model)
    made = []
    counts = [_gathers(api, lambda: made.append(cases.square(rank)(model, 0))),
              _gathers(api, lambda: made[0].backward())]
    return {"gathers": torch.tensor(counts, dtype=FP32), **gradients(model)}


@case
def how_often_units_are_gathered(api, rank):
    return [_gathered(api, rank, reshard_after_forward=reshard)
            for reshard in (True, False, 2, None)]


@case
def how_often_after_set_reshard_after_forward(api, rank):
    return [_gathered(api, rank, operator.methodcaller("set_reshard_after_forward", after, recurse),
                      reshard_after_forward=not after)
            for after in (True, False) for recurse in (True, False)]


# ------------------------------------------------------------------------- synchronisation


def _accumulated(api, rank, before, model=None, **options):
    """@before(model, last): of each of three backwards before a step."""
    def loss(model, step):
        for part in range(3):
            before(model, part == 2)
            value = cases.square(rank)(model, 10 * step + part)
            value.backward()
        return value.detach()

    return train(api, model or cases.shard_mlp(api, cases.mlp(), **options), loss)


@case
def some_units_are_not_synchronised(api, rank):
    def before(model, last):
        model[2].set_requires_gradient_sync(last)
        if not last and api.name == "shardd":
            assert model[0]._unit().sync and not model[2]._unit().sync

    return _accumulated(api, rank, before)


@case
def the_root_is_not_synchronised(api, rank):
    return _accumulated(
        api, rank, lambda model, last: model.set_requires_gradient_sync(last, recurse=False))


@case
def kept_from_backward_to_forward(api, rank):
    """All are gathered by hand; one backward in three reduces."""
    def before(model, last):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)

    return _accumulated(api, rank, before, reshard_after_forward=False)


@case
def kept_after_the_step(api, rank):
    """Never released by backward: the step does it. FSDP2 would compute with what was before."""
    def before(model, last):
        model.set_reshard_after_backward(api.name == "FSDP2")

    return _accumulated(api, rank, before, reshard_after_forward=False)


@case
def sums_in_fp32_of_several_backwards_in_bf16(api, rank):
    def before(model, last):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    return _accumulated(api, rank, before, mp_policy=MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32))


@case
def one_of_two_outputs_at_a_time(api, rank):
    """Two backwards through what they have in common."""
    model = nn.Sequential(linears(1), Branched(True))
    shard(api, model[0], model[1].first, model[1].second, model)

    def loss(model, step):
        first, second = model(numbers(rank, step, 4, 8))
        model.set_is_last_backward(False)
        second.sum().backward(retain_graph=True)
        model.set_is_last_backward(True)
        first.sum().backward()
        return first.detach().sum()

    return train(api, model, loss)


# ------------------------------------------------------------------------------- autograd


class Branched(nn.Module):
    def __init__(self, both):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.both = nn.Linear(8, 8), nn.Linear(8, 8), both

    def forward(self, x):
        first = torch.relu(self.first(x))
        return (first, torch.relu(self.second(x))) if self.both else first


@case
def an_output_that_the_loss_does_not_use(api, rank):
    def loss(model, step):
        first, second = model(numbers(rank, step, 2, 8))
        return (first * second).sum() if step < 3 else first.sum()

    states = []
    for reshard in (True, False):
        model = Branched(True)
        shard(api, model.first, model, reshard_after_forward=reshard)
        states += train(api, model, loss, steps=6)
    return states


def _zeroed(api, rank, none, optimizer=lambda api, model: None):
    """What the loss uses no more is stepped with zeros, so that its momentum moves it."""
    def loss(model, step):
        first, second = model(numbers(rank, step, 2, 8))
        return (first * second).sum() if step < 3 else first.sum()

    model = Branched(True)
    shard(api, model.first, model)
    states = train(api, model, loss, optimizer(api, model), 7, none)
    # What its gradient is between zero_grad() and the step differs: None here, zeros there.
    return [{name: value for name, value in state.items() if not name.startswith("grad second")}
            for state in states]


@case
def gradients_set_to_zeros(api, rank):
    return _zeroed(api, rank, lambda step: False)


@case
def gradients_set_to_zeros_at_times(api, rank):
    return _zeroed(api, rank, lambda step: step % 2 == 1)


@case
def gradients_set_to_zeros_on_the_shard(api, rank):
    api.exact = False  # square roots
    return _zeroed(api, rank, lambda step: step != 5, lambda api, model: torch.optim.RMSprop(
        model.parameters(), lr=0.01, momentum=0.9, foreach=False))


@case
def a_module_that_forward_does_not_use(api, rank):
    states = []
    for reshard in (True, False):
        model = Branched(False)
        shard(api, model.first, model.second, model, reshard_after_forward=reshard)
        states += train(api, model, cases.square(rank, 8))
    return states


@case
def a_frozen_module_used_several_times(api, rank):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.enter, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = self.enter(x)
            for _ in range(3):
                x = self.frozen(F.relu(self.trained(x)))
                with torch.no_grad():
                    x += F.relu(self.trained(x))
            return x

    states = []
    for reshard in (True, False):
        model = Loop()
        shard(api, *model.children(), model, reshard_after_forward=reshard)
        states += train(api, model, lambda model, step: model(numbers(rank, step, 8, 5)).sum())
    return states


# ----------------------------------------------------------------- several models, replicas


@case
def layers_without_a_model_around_them(api, rank):
    """Each is a model of its own; one optimizer has all."""
    model = linears(3)
    shard(api, *model)
    return train(api, model, cases.square(rank, 8), sgd(model))


@case
def sharded_beside_plain_parameters(api, rank):
    model = linears(2)
    api.fully_shard(model[1])
    with implicit_replication():
        return train(api, model, cases.square(rank, 8), sgd(model))


@case
def shards_within_distributed_data_parallel(api, rank):
    model = linears(3)
    api.fully_shard(model[1])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["1.weight", "1.bias"])
    ddp = DistributedDataParallel(model)
    optimizer = sgd(ddp)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss(model, step):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
        return cases.square(rank, 8)(model, step)

    with implicit_replication():
        return train(api, ddp, loss, optimizer)


@case
def a_module_of_pytorchs_replicate_inside(api, rank):
    model = linears(3)
    replicate(model[0])
    shard(api, model[2], model)
    with implicit_replication():
        return train(api, model, cases.square(rank, 8), sgd(model))


def _hsdp(api, rank, before, mesh):
    model = seeded(lambda: nn.LayerNorm(7, bias=False), cases.mlp, lambda: nn.Linear(3, 5))
    for layer in model:
        composable(layer)
    shard(api, *model, model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return _accumulated(api, rank, before, model)


@on_four
def replicas_of_shards_with_checkpoints(api, rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return _hsdp(api, rank, lambda model, last: None, mesh) + _hsdp(
        api, rank, lambda model, last: model.set_requires_gradient_sync(last), mesh)


@on_four
def replicas_that_are_reduced_by_the_last_backward(api, rank):
    """set_requires_all_reduce(False) in those before it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return _hsdp(api, rank, lambda model, last: model.set_requires_all_reduce(last), mesh)


@on_four
def replicas_of_shards_of_groups(api, rank):
    """A mesh that is made from process groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    made = DeviceMesh.from_group([mesh.get_group(0), mesh.get_group(1)], "cpu", mesh=mesh.mesh,
                                 mesh_dim_names=("replicas", "shards"))
    return _hsdp(api, rank, lambda model, last: None, made)


@case
def shards_of_a_group(api, rank):
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("shards",))
    return train(api, cases.shard_mlp(api, cases.mlp(), mesh=mesh), cases.square(rank))


def on_one(function):
    return case(function, 1)


@on_one
def one_rank(api, rank):
    return [state for a, b, c in ((16, 15, 8), (7, 15, 3)) for state in train(
        api, api.fully_shard(nn.Sequential(linear(a, b), linear(b, c))), cases.square(rank, a))]


@on_one
def one_rank_and_a_divide_factor(api, rank):
    states = []
    for factor in (None, 1.0, 2.0):
        model = api.fully_shard(linears(1), mesh=init_device_mesh("cpu", (1,)))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        states.append(backward(model, model(torch.ones(3, 8)).sum()))
    return states


# ------------------------------------------------------------------------ running


def both(name, rank, known=None):
    ranks, function = (known or CASES)[name]
    with golden.folded() if ranks > 2 else contextlib.nullcontext():
        theirs = function(Fsdp2(), rank)
    api = Shardd(name)
    try:
        ours = function(api, rank)
    finally:
        api.close()
    return differences(ours, theirs, BOUNDS.get(name, 0.0))


def plans(known, trial):
    """@trial(name, rank) of those in @known that are wanted, by their numbers of ranks."""
    names = fsdp.wanted(known)
    return [fsdp.Plan(ranks, [n for n in names if known[n][0] == ranks], trial)
            for ranks in (1, 2, 4)]


def main():
    return fsdp.report(*plans(CASES, both))


if __name__ == "__main__":
    sys.exit(main())
