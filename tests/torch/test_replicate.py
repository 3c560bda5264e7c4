#!/usr/bin/env python3
"""shardd.torch.replicate against torch's DistributedDataParallel over gloo.

The same loop runs with both; after every step losses, parameters and buffers are compared, on two
ranks bit for bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import copy
import sys

import fsdp
import test_fully_shard as cases
import torch
import transformer
from fsdp import Fsdp2, Shardd, differences
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import shardd

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Ddp(Fsdp2):
    name = "DDP"

    def replicate(self, module, **options):
        return DistributedDataParallel(module, **options)

    def hook(self, model, hook):
        def named_otherwise(state, bucket):  # by its name it asks for NCCL
            return hook(state, bucket)

        named_otherwise.__annotations__ = hook.__annotations__
        model.register_comm_hook(None, named_otherwise)

    def whole(self, model):
        return {name.removeprefix("module."): value.detach().clone()
                for name, value in model.state_dict().items()}


class Alone:
    """As a process group of one rank."""

    def size(self):
        return 1


class Replicated(Shardd):
    def replicate(self, module, **options):
        return shardd.torch.replicate(module, **options)

    def hook(self, model, hook):
        model.register_comm_hook(None, hook)

    def whole(self, model):
        return {name: value.clone() for name, value in model.state_dict().items()}


@case
def an_mlp_in_small_buckets(api, rank):
    model = api.replicate(cases.mlp(), bucket_cap_mb=0.0001)
    return cases.loop(api, model, cases.square(rank), rank)


@case
def a_gpt_with_tied_embeddings_and_a_frozen_layer(api, rank):
    return cases.loop(api, api.replicate(transformer.make()), cases.gpt_loss(rank), rank)


@case
def batch_norm_with_buffers_of_rank_0(api, rank):
    torch.manual_seed(2)
    model = api.replicate(cases.Conv(), broadcast_buffers=True)
    return cases.loop(
        api, model, lambda m, s: m(cases.numbers(rank, s, 2, 3, 8, 8)).pow(2).mean(), rank)


@case
def batch_norm_with_buffers_of_their_own(api, rank):
    torch.manual_seed(2)
    model = api.replicate(cases.Conv(), broadcast_buffers=False)
    return cases.loop(
        api, model, lambda m, s: m(cases.numbers(rank, s, 2, 3, 8, 8)).pow(2).mean(), rank)


def _norms(rank):
    """Batch norm whose buffers differ between the ranks from the beginning."""
    torch.manual_seed(2)
    model = cases.Conv()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(rank + 1)
    return model


def _every_order(api, rank, **options):
    """The buffers after construction, and around each of the forwards, which come in every order
    that matters: a forward's buffers are synchronised if the one before it was to be reduced."""
    model = api.replicate(_norms(rank), **options)
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)
    states = []

    def buffers(**more):
        states.append({name.removeprefix("module."): value.clone()
                       for name, value in model.named_buffers()} | more)

    def forward(number):
        return model(cases.numbers(rank, number, 2, 3, 8, 8)).pow(2).mean()

    def evaluate(number):
        model.eval()
        with torch.no_grad():
            loss = forward(number)
        model.train()
        return loss

    def unseen(number):
        with torch.no_grad():
            return forward(number)

    def reduced(number):
        loss = forward(number)
        loss.backward()
        api.step(optimizer)
        optimizer.zero_grad()
        return loss

    def kept(number):
        with model.no_sync():
            loss = forward(number)
            loss.backward()
        return loss

    buffers()
    kinds = {"r": reduced, "k": kept, "e": evaluate, "u": unseen}
    for number, kind in enumerate("errekrkkreuurukre"):
        buffers(loss=kinds[kind](number).detach())
    return states


@case
def buffers_in_every_order(api, rank):
    return _every_order(api, rank)


@case
def buffers_that_are_never_synchronised(api, rank):
    return _every_order(api, rank, broadcast_buffers=False)


@case
def buffers_that_are_synchronised_at_the_beginning_only(api, rank):
    return _every_order(api, rank, forward_sync_buffers=False)


@case
def buffers_by_the_newer_name(api, rank):
    return _every_order(api, rank, forward_sync_buffers=True)


@case
def an_eval_forward_between_forward_and_backward(api, rank):
    """What backward needs of buffers stays valid when they are written."""
    model = api.replicate(_norms(rank).eval())
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)
    states = []
    for step in range(3):
        loss = sum(model(cases.numbers(rank, step, 2, 3, 8, 8) + i).pow(2).mean() for i in range(2))
        loss.backward()
        api.step(optimizer)
        optimizer.zero_grad()
        states.append({**api.whole(model), "loss": loss.detach()})
    return states


@case
def without_sync(api, rank):
    def micro(model, step):
        with model.no_sync():
            transformer.loss(model, rank, step, 0).backward()
        value = transformer.loss(model, rank, step, 1)
        value.backward()
        return value

    return cases.loop(api, api.replicate(transformer.make()), None, rank, micro=micro)


@case
def two_backwards_before_a_step(api, rank):
    def micro(model, step):
        for i in range(2):
            value = transformer.loss(model, rank, step, i)
            value.backward()
        return value

    return cases.loop(api, api.replicate(transformer.make()), None, rank, micro=micro)


@case
def branches_that_some_ranks_use_and_one_that_none_does(api, rank):
    model = cases.Branches()

    def loss(wrapped, step):
        model.used = [(step + rank) % 2]
        return wrapped(cases.numbers(rank, step, 5, 6)).pow(2).mean()

    return cases.loop(api, api.replicate(model, find_unused_parameters=True), loss, rank)


@case
def a_scheduler_and_sgd(api, rank):
    return cases.loop(api, api.replicate(cases.mlp(), gradient_as_bucket_view=True),
                      cases.square(rank), rank, "SGD", lr=0.1, momentum=0.9, weight_decay=0.1)


@case
def fused_adamw(api, rank):
    api.exact = False  # no square root of MKL's in it
    return cases.loop(api, api.replicate(transformer.make()), cases.gpt_loss(rank), rank,
                      fused=True, **cases.ADAMW)


@case
def fused_sgd_with_momentum(api, rank):
    return cases.loop(api, api.replicate(cases.mlp()), cases.square(rank), rank, "SGD", lr=0.1,
                      momentum=0.9, weight_decay=0.1, nesterov=True, fused=True)


# ------------------------------------------------------------------- uneven inputs


def uneven(api, model, loss, rank, inputs, kind="AdamW", **options):
    """Rank r has inputs[r] of them. Losses, and the model that comes of it: outside of join whole
    states can be had, and a step of all ranks."""
    optimizer = api.optimizer(kind, model.parameters(), lr=0.02)
    states = []

    def train(step):
        value = loss(model, step)
        value.backward()
        api.step(optimizer)
        optimizer.zero_grad()
        states.append({"loss": value.detach()})

    with model.join(**options):
        for step in range(inputs[rank]):
            train(step)
    states.append(api.whole(model))
    if kind == "SGD":  # there the state of others is that of their last step
        train(9)
        states.append(api.whole(model))
    return states


def images(rank):
    return lambda model, step: model(cases.numbers(rank, step, 2, 3, 8, 8)).pow(2).mean()


@case
def uneven_inputs_of_an_mlp(api, rank):
    model = api.replicate(cases.mlp(), bucket_cap_mb=0.0001)
    return uneven(api, model, cases.square(rank), rank, (2, 5))


@case
def uneven_inputs_divided_by_those_who_have_them(api, rank):
    return uneven(api, api.replicate(cases.mlp()), cases.square(rank), rank, (4, 1), "SGD",
                  divide_by_initial_world_size=False)


@case
def uneven_inputs_and_a_rank_without_any(api, rank):
    return uneven(api, api.replicate(transformer.make()), cases.gpt_loss(rank), rank, (0, 3), "SGD")


@case
def even_inputs_inside_join(api, rank):
    return uneven(api, api.replicate(cases.mlp()), cases.square(rank), rank, (2, 2), "SGD")


@case
def uneven_inputs_and_batch_norm(api, rank):
    torch.manual_seed(2)
    return uneven(api, api.replicate(cases.Conv()), images(rank), rank, (2, 4), "SGD")


@case
def uneven_inputs_and_batch_norm_of_rank_0(api, rank):
    torch.manual_seed(2)
    return uneven(api, api.replicate(cases.Conv()), images(rank), rank, (4, 2), "SGD")


@case
def uneven_inputs_and_unused_parameters(api, rank):
    model = cases.Branches()

    def loss(wrapped, step):
        model.used = [(step + rank) % 2]
        return wrapped(cases.numbers(rank, step, 5, 6)).pow(2).mean()

    return uneven(api, api.replicate(model, find_unused_parameters=True), loss, rank, (1, 3), "SGD")


@case
def join_that_is_not_enabled(api, rank):
    return uneven(api, api.replicate(cases.mlp()), cases.square(rank), rank, (2, 2), "SGD",
                  enable=False)


@case
def an_early_end_is_an_error_of_all(api, rank):
    model = api.replicate(cases.mlp())
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.02)
    done = 0
    try:
        with model.join(throw_on_early_termination=True):
            for step in range((2, 4)[rank]):
                cases.square(rank)(model, step).backward()
                api.step(optimizer)
                optimizer.zero_grad()
                done += 1
    except RuntimeError:
        return [{"done": torch.tensor(done), **api.whole(model)}]
    return [{"done": torch.tensor(-1)}]


# ------------------------------------------------------------------ mixed precision


def by_hand(api, model, loss, reduce):
    """DDP's mixed precision, which it has on GPUs only: its hook's order of cast, sum, division."""
    optimizer = api.optimizer("AdamW", model.parameters(), **cases.ADAMW)
    states = []
    for step in range(cases.STEPS):
        low = copy.deepcopy(model).bfloat16()
        value = loss(low, step)
        value.backward()
        for p, q in zip(model.parameters(), low.parameters()):
            gradient = q.grad.to(reduce)
            torch.distributed.all_reduce(gradient)
            p.grad = gradient.div_(2).float()
        api.step(optimizer)
        states.append({**api.whole(model), "loss": value.detach()})
    return states


def mixed(api, rank, reduce):
    def loss(model, step):
        x = cases.numbers(rank, step, 5, 7)
        return model(x if api.name == "shardd" else x.bfloat16()).float().pow(2).mean()

    if api.name != "shardd":
        return by_hand(api, cases.mlp(), loss, reduce)
    policy = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = api.replicate(cases.mlp(), mixed_precision=policy)
    return cases.loop(api, model, loss, rank)


@case
def mixed_precision_with_sums_in_bf16(api, rank):
    return mixed(api, rank, torch.bfloat16)


@case
def mixed_precision_with_sums_in_fp32(api, rank):
    return mixed(api, rank, torch.float32)


# ---------------------------------------------------------------------------- hooks


@case
def the_hook_that_changes_nothing(api, rank):
    model = api.replicate(cases.mlp())
    api.hook(model, default_hooks.allreduce_hook)
    return cases.loop(api, model, cases.square(rank), rank)


@case
def gradients_compressed_to_fp16(api, rank):
    model = api.replicate(transformer.make())
    api.hook(model, default_hooks.fp16_compress_hook)
    return cases.loop(api, model, cases.gpt_loss(rank), rank)


@case
def gradients_compressed_to_bf16(api, rank):
    model = api.replicate(transformer.make())
    api.hook(model, default_hooks.bf16_compress_hook)
    return cases.loop(api, model, cases.gpt_loss(rank), rank)


@case
def a_compressing_wrapper(api, rank):
    model = api.replicate(cases.mlp())
    api.hook(model, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    return cases.loop(api, model, cases.square(rank), rank)


def refusals(rank):
    """Sentences about what should have been refused and was not."""
    said = []

    def expect(kind, text, function):
        try:
            function()
            said.append(f"nothing was raised instead of {text}")
        except kind as error:
            if text not in str(error):
                said.append(f"{text!r} is not in {error}")

    replicate = shardd.torch.replicate
    expect(shardd.Unimplemented, "delay_all_reduce_named_params",
           lambda: replicate(cases.mlp(), delay_all_reduce_named_params=1))
    expect(shardd.InvalidArgument, "mixed_precision", lambda: replicate(
        cases.mlp(), mixed_precision=_MixedPrecision(param_dtype=torch.float64)))
    expect(shardd.InvalidArgument, "mixed_precision is 1",
           lambda: replicate(cases.mlp(), mixed_precision=1))
    norm = replicate(cases.Conv(), mixed_precision=_MixedPrecision(buffer_dtype=torch.float16))
    if norm.norm.running_mean.dtype != torch.float16:
        said.append("buffers are not of buffer_dtype")
    expect(shardd.Unimplemented, "mixed_precision brings",
           lambda: norm.register_comm_hook(None, default_hooks.allreduce_hook))
    expect(TypeError, "nonsense", lambda: replicate(cases.mlp(), nonsense=1))
    expect(shardd.InvalidArgument, "bucket_cap_mb",
           lambda: replicate(cases.mlp(), bucket_cap_mb=-1))
    expect(shardd.Unimplemented, "process_group has 1 ranks",
           lambda: replicate(cases.mlp(), process_group=Alone()))
    expect(shardd.InvalidArgument, "device_mesh is 'cpu'",
           lambda: replicate(cases.mlp(), device_mesh="cpu"))
    replicate(cases.mlp(), process_group=torch.distributed.group.WORLD)
    model = replicate(cases.Branches())
    expect(shardd.FailedPrecondition, "already called", lambda: replicate(model))
    for hook in (None, 5, len):
        expect(shardd.InvalidArgument, "(state, bucket) -> Future",
               lambda hook=hook: model.register_comm_hook(None, hook))
    expect(shardd.InvalidArgument, "process group",
           lambda: model.register_comm_hook("x", default_hooks.allreduce_hook))
    alone = torch.distributed.new_group([0])
    expect(shardd.Unimplemented, "all 2 ranks of the job", lambda: model.register_comm_hook(
        alone if rank == 0 else Alone(), default_hooks.allreduce_hook))
    model.register_comm_hook(torch.distributed.group.WORLD, default_hooks.allreduce_hook)
    expect(shardd.FailedPrecondition, "already called",
           lambda: model.register_comm_hook(None, default_hooks.allreduce_hook))
    model(cases.numbers(rank, 0, 5, 6)).sum().backward()
    expect(shardd.FailedPrecondition, "find_unused_parameters=True",
           lambda: model(cases.numbers(rank, 0, 5, 6)))
    expect(shardd.FailedPrecondition, "right after wrapping",
           lambda: model.register_comm_hook(None, default_hooks.allreduce_hook))
    return said


def both(name, rank):
    theirs = CASES[name](Ddp(), rank)
    api = Replicated(f"{name}"[:60])
    try:
        return differences(CASES[name](api, rank), theirs)
    finally:
        api.close()


def refused(name, rank):
    api = Replicated(name)
    try:
        return refusals(rank)
    finally:
        api.close()


def trial(name, rank):
    return (both if name in CASES else refused)(name, rank)


def main():
    return fsdp.report(fsdp.Plan(2, fsdp.wanted([*CASES, "bad_input"]), trial))


if __name__ == "__main__":
    sys.exit(main())
