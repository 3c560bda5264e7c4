#!/usr/bin/env python3
"""Communication hooks of FSDP1 on shardd.torch.fully_shard, against FSDP1 itself over gloo.

The same loop on two ranks with each of PyTorch's hooks, without one, and with several backwards
before a step: losses and parameters bit for bit. Prints one line of TAP a case; arguments choose by
a part of the name.
"""

import sys

import fsdp
import test_fully_shard as cases
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel

import shardd

torch.Tensor.record_stream = lambda *_: None  # what the hooks call has no form for CPUs
HOOKS = ("reduce_scatter_hook", "fp16_compress_hook", "bf16_compress_hook")


class Fsdp1(Fsdp2):
    def wrap(self, model, hook):
        wrapped = FullyShardedDataParallel(model, use_orig_params=True,
                                           device_id=torch.device("cpu"))
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        wrapped.register_comm_hook(state, getattr(default_hooks, hook))
        return wrapped

    def whole(self, model):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                    for name, p in model.named_parameters()}


class Hooked(Shardd):
    def wrap(self, model, hook):
        for layer in (model[0], model[2]):
            shardd.torch.fully_shard(layer)
        shardd.torch.fully_shard(model)
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        model.register_comm_hook(state, getattr(default_hooks, hook))
        return model


def train(api, rank, hook, micros):
    def micro(model, step):
        for i in range(micros):
            value = cases.square(rank)(model, 10 * step + i)
            value.backward()
        return value

    return cases.loop(api, api.wrap(cases.mlp(), hook), None, rank, micro=micro)


def compare(rank, hook, micros):
    theirs = train(Fsdp1(), rank, hook, micros)
    api = Hooked(f"{hook}-{micros}")
    try:
        return differences(train(api, rank, hook, micros), theirs)
    finally:
        api.close()


def refusals(rank):
    """Sentences about what should have been refused and was not."""
    said = []
    model = cases.mlp()
    shardd.torch.fully_shard(model[0])
    shardd.torch.fully_shard(model)
    for hook in (None, default_hooks.allreduce_hook.__name__, len):
        try:
            model.register_comm_hook(None, hook)
            said.append(f"{hook} was not refused")
        except shardd.InvalidArgument as error:
            if "(state, gradient, output) -> None" not in str(error):
                said.append(f"what is known is not in {error}")
    api = Hooked("edited")
    for changed, word in ((dict(gradient_predivide_factor=1.0), "gradient_predivide_factor is 1.0"),
                          (dict(gradient_postdivide_factor=2.5), "gradient_postdivide_factor is"),
                          (dict(parameter_type=torch.float16), "parameter_type is torch.float16")):
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        if "gradient_predivide_factor" in changed and state.gradient_predivide_factor == 1.0:
            changed = dict(gradient_predivide_factor=2.0)
            word = "gradient_predivide_factor is 2.0"
        for name, value in changed.items():
            setattr(state, name, value)
        said += _refused(lambda s=state: model.register_comm_hook(
            s, default_hooks.bf16_compress_hook), word)
    model = cases.mlp()
    shardd.torch.fully_shard(model)
    state = default_hooks.LowPrecisionState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.bf16_compress_hook)
    shardd.torch.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    state.gradient_postdivide_factor = 7.0
    said += _refused(lambda: model(torch.ones(2, 7)), "gradient_postdivide_factor is 7.0")
    api.close()
    return said


def _refused(function, word):
    try:
        function()
    except shardd.Unimplemented as error:
        return [] if word in str(error) else [f"{word} is not in {error}"]
    return [f"{word}: it was not refused"]


def trial(name, rank):
    hook, _, micros = name.partition(", ")
    return compare(rank, hook, 1 + bool(micros)) if hook in HOOKS else refusals(rank)


def main():
    names = [*HOOKS, *(f"{hook}, two backwards" for hook in HOOKS), "bad_input"]
    return fsdp.report(fsdp.Plan(2, fsdp.wanted(names), trial))


if __name__ == "__main__":
    sys.exit(main())
