#!/usr/bin/env python3
"""Divide factors, shards and buckets as the real systems compute them; see golden.py for
what to install.

    venv/bin/python make_layout.py

writes factors.json, layout.json and buckets.json.

factors.json: "world": [W, pre, post] of FSDP1's and FSDP2's own functions, which agree;
"set": [W, factor, pre, post] of FSDP2 in fp16 with a factor that the user sets (null where it
does not divide).

layout.json: "flat": [elements, W, elements of a shard, [own elements of each rank]] of
fairscale and FSDP1, which agree; "xla": [elements, W, multiple, elements of a shard], its
documented rule; "dim0": [shape, W, rows of a shard, [own rows of each rank]] of FSDP2.

buckets.json: "assign": what torch.distributed._compute_bucket_assignment_by_size makes of
tensors of so many elements and dtypes ("map", where not empty, is the index of each; then
buckets that are left over when all tensors are in come in the order of a hash table), "ddp":
the bytes of the buckets that DistributedDataParallel used at first and after it rebuilt
them in the order ("ready") in which gradients arrived.
"""

import json
import os
import types

import golden
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common
from torch.nn.parallel import DistributedDataParallel

LARGEST = 4096


def group(n):
    return types.SimpleNamespace(size=lambda: n)


def fsdp2_factors(world, dtype, factor=None, force=False):
    return _fsdp_collectives._get_gradient_divide_factors(group(world), None, dtype, "cpu",
                                                          factor, force)


def factors():
    rows = []
    for world in range(1, LARGEST + 1):
        pre = DefaultState._get_gradient_predivide_factor(world)
        got = fsdp2_factors(world, torch.float16)
        assert got[:2] == (pre, world / pre)
        rows.append([world, pre, world / pre])
    by_user = [[w, f, *fsdp2_factors(w, torch.float16, f)[:2]]
               for w in golden.WORLDS for f in (0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 7.5, 8.0, 100.0)]
    return {"world": rows, "set": by_user}


def flat_shards():
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Fairscale
    rows = []
    for world in range(1, 10):
        for n in (*range(1, 41), 127, 128, 129, 1000, 1023):
            tensor = torch.arange(1.0, n + 1)
            own, size = [], set()
            for rank in range(world):
                self = types.SimpleNamespace(world_size=world, rank=rank)
                shard, padding = Fairscale._get_shard(self, tensor)
                other, padding2 = FlatParamHandle._get_shard(tensor, rank, world)
                assert shard.equal(other) and padding == padding2
                own.append(int((shard != 0).sum()))
                assert own[-1] == shard.numel() - padding
                size.add(shard.numel())
            (size,) = size
            rows.append([n, world, size, own])
    return rows


def xla_shards():
    return [[n, w, m, -(-n // (w * m)) * m] for m in (1, 16, 128)
            for w in (1, 2, 3, 4, 6, 8) for n in (1, 5, 127, 128, 129, 768, 1000, 1025)]


def dim0_shards():
    rows = []
    shapes = [(d,) for d in range(1, 20)] + [(d, 3) for d in range(1, 12)] + [(2, 2, 5), (6, 1, 4)]
    for world in (1, 2, 3, 4, 5, 6, 7, 8):
        for shape in shapes:
            tensor = torch.ones(shape)
            padded = _fsdp_common._get_dim0_padded_size(tensor.size(), world)[0] // world
            chunks = _fsdp_common._chunk_with_empty(tensor, world, dim=0)
            rows.append([shape, world, padded, [c.size(0) if c.numel() else 0 for c in chunks]])
    return rows


def assign_case(rng, mixed, mapped):
    n = int(rng.integers(1, 30))
    numels = (2.0 ** rng.uniform(0, 12, n)).astype(int)
    types_ = rng.integers(0, 3 if mixed else 1, n)
    kinds = list(golden.DTYPES)
    limits = [int(x) for x in 2.0 ** rng.uniform(4, 15, int(rng.integers(1, 5)))]
    sparse = [] if rng.integers(0, 2) else [bool(x) for x in rng.integers(0, 8, n) == 0]
    index = [int(i) for i in rng.permutation(n)] if mapped else []
    tensors = [torch.empty(int(k), dtype=golden.DTYPES[kinds[t]])
               for k, t in zip(numels, types_)]
    buckets, used = dist._compute_bucket_assignment_by_size(tensors, limits, sparse, index)
    return {"numel": [int(k) for k in numels], "dtype": [kinds[t] for t in types_],
            "limits": limits, "sparse": sparse, "map": index, "buckets": buckets,
            "bucket_limits": used}


def assign_cases():
    rng = np.random.default_rng(4000)
    return [assign_case(rng, i % 2 == 1, i % 4 >= 2) for i in range(200)]


DDP = [  # MiB of the elements of each parameter, in units of 1/8; bucket_cap_mb, or a list
    ([3, 9, 1, 1, 20, 8, 8, 2], None),
    ([3, 9, 1, 1, 20, 8, 8, 2], 1),
    ([3, 9, 1, 1, 20, 8, 8, 2], 2),
    ([120, 100, 80, 1], None),
    ([1, 1, 1, 1], None),
    ([3, 9, 1, 1, 20, 8, 8, 2], [1]),
    ([3, 9, 1, 1, 20, 8, 8, 2], [1, 2]),
    ([3, 9, 1, 1, 20, 8, 8, 2], [3, 1, 1, 2]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 1]),
    ([1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
]


def numbers(text):
    return [int(x) for x in text.replace(",", " ").split()]


def ddp_child(rank, world):
    out = []
    for sizes, cap in DDP:
        for unused in (False, True):
            numels = [s << 15 for s in sizes]
            caps = cap if isinstance(cap, list) else []
            limits = {"bucket_cap_mb_list": caps} if caps else {"bucket_cap_mb": cap}
            model = DistributedDataParallel(golden.Given([(n,) for n in numels]),
                                            find_unused_parameters=unused, **limits)
            for _ in range(2):
                model(golden.Gradients(torch.zeros(n) for n in numels)).backward()
            model(golden.Gradients(torch.zeros(n) for n in numels))
            data = model._get_ddp_logging_data()
            out.append({"numel": numels, "bucket_cap_mb": 0 if caps else cap or 0,
                        "bucket_cap_mb_list": caps, "find_unused": unused,
                        "first": numbers(data["bucket_sizes"]),
                        "rebuilt": numbers(data.get("rebuilt_bucket_sizes", "")),
                        "ready": numbers(data.get("prev_iteration_grad_ready_order_indices", ""))})
    return out


def write(name, value):
    rows = ",\n".join('"%s": [\n%s\n]' % (key, ",\n".join(
        json.dumps(row, separators=(",", ":")) for row in part)) for key, part in value.items())
    with open(os.path.join(golden.HERE, name), "w", encoding="ascii") as out:
        out.write("{\n%s\n}\n" % rows)


def main():
    write("factors.json", factors())
    write("layout.json", {"flat": flat_shards(), "xla": xla_shards(), "dim0": dim0_shards()})
    write("buckets.json", {"assign": assign_cases(), "ddp": golden.run(ddp_child, 2)[0]})


if __name__ == "__main__":
    main()
