#!/usr/bin/env python3
"""Communication hooks of the program's own, against DistributedDataParallel and FSDP1 over gloo, on
two ranks bit for bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import sys

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import shardd
import shardd.torch as st

CASES, ALONE = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def alone(function):
    ALONE[function.__name__] = function
    return function


class Theirs(Fsdp2):
    def replicate(self, module, **options):
        return DistributedDataParallel(module, **options)

    def shard(self, module):
        return FullyShardedDataParallel(module, use_orig_params=True,
                                        device_id=torch.device("cpu"))

    def whole(self, model):
        if not isinstance(model, FullyShardedDataParallel):
            return {name.removeprefix("module."): value.detach().clone()
                    for name, value in model.state_dict().items()}
        with FullyShardedDataParallel.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                    for name, p in model.named_parameters()}


class Ours(Shardd):
    def replicate(self, module, **options):
        return st.replicate(module, **options)

    def shard(self, module):
        for layer in (module[0], module[2]):
            st.fully_shard(layer)
        return st.fully_shard(module)

    def whole(self, model):
        return {name: value.clone() for name, value in model.state_dict().items()}


# ---------------------------------------------------------------- functions of a bucket


def summed(group, bucket):
    """Divide, then add up, in place and while backward goes on."""
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), group=group,
                           async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def in_bf16(group, bucket):
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())

    def back(future):
        return bucket.buffer().copy_(future.value()[0])

    return dist.all_reduce(half, group=group, async_op=True).get_future().then(back)


def clipped(group, bucket):
    """Changes the local gradients by parameter, then hands another buffer on."""
    for gradient in bucket.gradients():
        gradient.clamp_(-0.01, 0.01)
    bucket.set_buffer(bucket.buffer() * 0.5)
    return summed(group, bucket)


def at_once(group, bucket):
    future = torch.futures.Future()
    dist.all_reduce(bucket.buffer(), group=group)
    future.set_result(bucket.buffer())
    return future


def with_hook(api, hook, rank, micro=None, **options):
    model = api.replicate(shared.mlp(), **options)
    model.register_comm_hook(None, hook)
    return shared.loop(api, model, shared.square(rank), rank, micro=micro)


@case
def of_a_sum(api, rank):
    return with_hook(api, summed, rank)


@case
def of_a_sum_in_small_buckets(api, rank):
    return with_hook(api, summed, rank, bucket_cap_mb=0.0001)


@case
def of_a_sum_in_bf16(api, rank):
    return with_hook(api, in_bf16, rank)


@case
def of_clipped_gradients(api, rank):
    return with_hook(api, clipped, rank, bucket_cap_mb=0.0001)


@case
def whose_future_is_over(api, rank):
    return with_hook(api, at_once, rank)


@case
def with_backwards_that_add_up(api, rank):
    def micro(model, step):
        with model.no_sync():
            shared.square(rank)(model, 10 * step).backward()
        value = shared.square(rank)(model, 10 * step + 1)
        value.backward()
        return value

    return with_hook(api, summed, rank, micro=micro, bucket_cap_mb=0.0001)


class Branches(nn.Module):
    """Rank 0 uses the first branch, the other one the second; the third one nobody."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(7, 3) for _ in range(3))
        self.last, self.rank = nn.Linear(3, 2), rank

    def forward(self, x):
        return self.last(self.branches[self.rank](x))


@case
def with_parameters_that_a_rank_has_not_used(api, rank):
    model = api.replicate(Branches(rank), find_unused_parameters=True)
    model.register_comm_hook(None, summed)
    return shared.loop(api, model, shared.square(rank), rank)


@case
def power_sgd(api, rank):
    """PyTorch's compression, with its state of earlier steps."""
    torch.manual_seed(5)
    model = api.replicate(nn.Sequential(nn.Linear(64, 48, bias=False), nn.Tanh(),
                                        nn.Linear(48, 3, bias=False)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2,
                                        min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return shared.loop(api, model, shared.square(rank, 64), rank)


# ------------------------------------------------------- functions of a flat gradient


def scattered(factor, gradient, output):
    dist.reduce_scatter_tensor(output, gradient.div_(factor))


def scattered_in_bf16(factor, gradient, output):
    half = torch.empty_like(output, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(half, gradient.to(torch.bfloat16).div_(factor))
    output.copy_(half)


def with_flat(api, hook, rank, micros=1):
    def micro(model, step):
        for i in range(micros):
            value = shared.square(rank)(model, 10 * step + i)
            value.backward()
        return value

    model = api.shard(shared.mlp())
    model.register_comm_hook(float(dist.get_world_size()), hook)
    return shared.loop(api, model, None, rank, micro=micro)


@case
def of_a_flat_gradient(api, rank):
    return with_flat(api, scattered, rank)


@case
def of_a_flat_gradient_in_bf16(api, rank):
    return with_flat(api, scattered_in_bf16, rank)


@case
def of_a_flat_gradient_two_backwards(api, rank):
    return with_flat(api, scattered, rank, 2)


# ------------------------------------------------------------------------------- alone


@alone
def in_backward(rank):
    """An optimizer that steps in backward gets what the hook has made."""

    def states(job, **options):
        st.init(job=job)
        try:
            api = Ours.__new__(Ours)
            model = api.replicate(shared.mlp(), bucket_cap_mb=0.0001)
            model.register_comm_hook(None, clipped)
            optimizer = st.AdamW(model.parameters(), lr=0.05, **options)
            seen = []
            for step in range(3):
                shared.square(rank)(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(api.whole(model))
            return seen
        finally:
            st.shutdown()

    return differences(states("within", in_backward=True), states("afterwards"))


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"said: {error}"]
    return [f"not refused: {words}"]


@alone
def what_cannot_be_is_refused(rank):
    st.init(job="refused")
    said = []
    try:
        for hook, words in ((None, "hook is None"), (lambda state: None, "does not take 2")):
            said += refused(shardd.InvalidArgument, words, lambda hook=hook: st.replicate(
                shared.mlp()).register_comm_hook(None, hook))
        said += refused(shardd.InvalidArgument, "does not take 3",
                        lambda: st.fully_shard(shared.mlp()).register_comm_hook(None, summed))
        for hook, words in ((lambda state, bucket: None, "returned NoneType"),
                            (lambda state, bucket: _future(torch.ones(3)), "holds a tensor of 3"),
                            (lambda state, bucket: _future("sum"), "holds str")):
            model = st.replicate(shared.mlp())
            model.register_comm_hook(None, hook)
            said += refused(shardd.InvalidArgument, words,
                            lambda model=model: shared.square(rank)(model, 0).backward())
        model = st.replicate(shared.mlp())
        model.register_comm_hook(None, summed)
        said += refused(shardd.FailedPrecondition, "only one hook is allowed",
                        lambda: model.register_comm_hook(None, summed))
        said += refused(shardd.Unimplemented, "join() does not support", lambda: _joined(model))
    finally:
        st.shutdown()
    return said


def _joined(model):
    with model.join():
        pass


def _future(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def both(name, rank):
    if name in ALONE:
        return ALONE[name](rank)
    theirs = CASES[name](Theirs(), rank)
    api = Ours(name)
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    return differences(ours, theirs)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted([*CASES, *ALONE]), both)))
