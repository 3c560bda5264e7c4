#!/usr/bin/env python3
"""Communication hooks of FSDP1 on shardd.torch.fully_shard, against FSDP1 itself over gloo.

The same loop on two ranks with each of PyTorch's hooks, without one, and with several backwards
before a step: losses and parameters bit for bit. Prints one line of TAP a case; arguments choose by
a part of the name.
"""

import sys
import tempfile
import traceback

import fsdp
import support
import test_fully_shard as cases
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel

import shardd

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
    for hook in (None, default_hooks.allreduce_hook, lambda *_: None):
        try:
            model.register_comm_hook(None, hook)
            said.append(f"{hook} was not refused")
        except shardd.Unimplemented as error:
            if "reduce_scatter_hook, fp16_compress_hook" not in str(error):
                said.append(f"what is known is not in {error}")
    return said


def on_rank(rank, world, names, socket, folder):
    fsdp.start(rank, world, socket, folder)
    torch.Tensor.record_stream = lambda *_: None  # what the hooks call has no form for CPUs
    results = {}
    for name in names:
        hook, _, micros = name.partition(", ")
        try:
            results[name] = compare(rank, hook, 1 + bool(micros)) if hook in HOOKS \
                else refusals(rank)
        except Exception:
            results[name] = [traceback.format_exc()]
    dist.destroy_process_group()
    return results


def main():
    wanted = sys.argv[1:]
    every = [*HOOKS, *(f"{hook}, two backwards" for hook in HOOKS), "bad_input"]
    names = [n for n in every if not wanted or any(w in n for w in wanted)]
    print(f"1..{len(names)}")
    failed = 0
    with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
        results = support.ranks(on_rank, 2, names, socket, folder, seconds=600)
    for name in names:
        said = [f"rank {r}: {s}" for r, got in enumerate(results) for s in got[name]]
        for line in "\n".join(said[:12]).splitlines():
            print("# " + line)
        failed += bool(said)
        print(f"{'not ok' if said else 'ok'} - {name}, 2 ranks", flush=True)
    return failed > 0 or not names


if __name__ == "__main__":
    sys.exit(main())
