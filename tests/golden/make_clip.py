#!/usr/bin/env python3
"""Gradient clipping in the real systems; see golden.py for what to install.

    venv/bin/python make_clip.py

writes clip.safetensors. "in/KIND/TYPE" is [element]: the gradients of the tensors of
make_clip.SHAPES, one after another. "CASE/total" [1] is the norm that a system returned,
"CASE/g" [element] the gradients afterwards; the metadata of CASE says how:

  system   torch (clip_grad_norm_ on plain tensors), fsdp2 (the same on DTensors), fsdp1,
           fairscale (their methods), xla (its documented order, evaluated with tensors),
           value (clip_grad_value_)
  ranks    that share the gradients; p: of the norm; max: the limit; grad: type
  error    torch only: 1 if error_if_nonfinite made it an error

The sums of a norm are added in an order of the processor's vectors by torch, and rounded per
tensor and per rank, so totals other than maxima are close to ours but not equal. Gradients are
fp32: where the systems clip them they are shards, which mixed precision has in fp32.
fairscale runs with torch.cuda's streams and .cuda() replaced by nothing.
"""

import itertools
import warnings

import golden
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

SHAPES = [(5, 3), (7,), (1,), (2, 2, 3), (43, 5)]  # 250 elements: a multiple of 1 and 2 only
N = sum(int(np.prod(s)) for s in SHAPES)
INF = float("inf")
NORMS = (2.0, 1.0, 3.0, 0.5, INF)
KINDS = ("normal", "small", "zeros", "denormal", "inf", "minus_inf", "nan", "inf_nan", "huge")


def numbers(kind, dtype):
    rng = np.random.default_rng(3000 + KINDS.index(kind))
    x = rng.standard_normal(N) * 10.0 ** rng.integers(-3, 2, N)
    x[3::13] = 0.0
    x[4::13] = -0.0
    if kind == "small":
        x *= 1e-6
    elif kind == "zeros":
        x[:] = 0.0
    elif kind == "denormal":
        x *= 1e-40
    elif kind == "huge":  # finite, but not the sum of squares
        x *= 1e30
    if kind in ("inf", "inf_nan"):
        x[17] = np.inf
    if kind == "minus_inf":
        x[40] = -np.inf
    if kind in ("nan", "inf_nan"):
        x[30] = np.nan
    return torch.from_numpy(x.astype(np.float32)).to(golden.DTYPES[dtype])


def add(out, total, grads, **about):
    name = "/".join(str(v) for v in about.values())
    out[name] = (about, total.reshape(1).float().clone(), [g.detach().clone() for g in grads])


# ---------------------------------------------------------------- one process


def parameters(kind, dtype):
    parts = [torch.nn.Parameter(torch.zeros(shape, dtype=golden.DTYPES[dtype]))
             for shape in SHAPES]
    for p, g in zip(parts, golden.split(numbers(kind, dtype), SHAPES)):
        p.grad = g.clone()
    return parts


def torch_clip(p, kind, dtype, limit):
    parts = parameters(kind, dtype)
    total = torch.nn.utils.clip_grad_norm_(parts, limit, p, foreach=False)
    others = parameters(kind, dtype)
    again = torch.nn.utils.clip_grad_norm_(others, limit, p, foreach=True)
    assert golden.same(total, again)
    assert all(golden.same(a.grad, b.grad) for a, b in zip(parts, others))
    error = 0
    others = parameters(kind, dtype)
    try:
        torch.nn.utils.clip_grad_norm_(others, limit, p, error_if_nonfinite=True)
    except RuntimeError:
        error = 1  # and nothing is changed
        assert all(golden.same(a.grad, b)
                   for a, b in zip(others, golden.split(numbers(kind, dtype), SHAPES)))
    return total, [q.grad.flatten() for q in parts], error


def one_process(out):
    assert torch.nn.utils.clip_grad_norm_([], 1.0) == 0
    for p, kind, dtype in itertools.product(NORMS, KINDS, ("fp32",)):
        total, grads, error = torch_clip(p, kind, dtype, 1.5)
        add(out, total, grads, system="torch", kind=kind, grad=dtype, p=p, max=1.5, ranks=1,
            error=error)
    for kind, dtype, limit in itertools.product(KINDS, ("fp32",), (0.1, 1.0)):
        parts = parameters(kind, dtype)
        torch.nn.utils.clip_grad_value_(parts, limit)
        add(out, torch.zeros(1), [q.grad.flatten() for q in parts], system="value", kind=kind,
            grad=dtype, p=0.0, max=limit, ranks=1, error=0)


# ---------------------------------------------------------------- shards


def fsdp2_clip(p, kind, limit, mesh):
    model = golden.Given(SHAPES)
    fully_shard(model, mesh=mesh)
    for q, g in zip(model.parameters(), golden.split(numbers(kind, "fp32"), SHAPES)):
        q.grad = distribute_tensor(g.clone(), mesh, q.placements, src_data_rank=None)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, p)
    assert isinstance(total, DTensor)
    return total.full_tensor(), [q.grad.full_tensor().flatten() for q in model.parameters()]


def flat_shard(kind):
    flat = numbers(kind, "fp32")
    world = dist.get_world_size()
    flat = torch.nn.functional.pad(flat, [0, -N % world])
    return flat.chunk(world)[dist.get_rank()].clone()


def flat_clip(model, p, kind, limit):
    (q,) = model.parameters()
    q.grad = flat_shard(kind).view_as(q)
    total = model.clip_grad_norm_(limit, p)
    parts = [torch.empty_like(q.grad.flatten()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, q.grad.flatten())
    return total, [torch.cat(parts)[:N]]


def fsdp1_clip(p, kind, limit):
    model = FullyShardedDataParallel(golden.Given(SHAPES), device_id=torch.device("cpu"))
    model(golden.Gradients(golden.split(numbers("zeros", "fp32"), SHAPES))).backward()
    return flat_clip(model, p, kind, limit)


def fairscale_clip(p, kind, limit):
    from fairscale.nn.data_parallel import FullyShardedDataParallel as Fairscale
    return flat_clip(Fairscale(golden.Given(SHAPES), compute_device=torch.device("cpu")), p, kind,
                     limit)


def xla_clip(p, kind, limit):
    """A norm of each rank's shard in its own type, summed as powers; always multiplied."""
    shard = flat_shard(kind)
    local = torch.norm(torch.stack([torch.norm(shard, p)]), p)
    if p == INF:
        dist.all_reduce(local, op=dist.ReduceOp.MAX)
        total = local
    else:
        total = local**p
        dist.all_reduce(total)
        total = total ** (1.0 / p)
    coef = torch.clamp(limit / (total + 1e-6), 0.0, 1.0)
    shard *= coef
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard)
    return total, [torch.cat(parts)[:N]]


def child(rank, world):
    warnings.simplefilter("ignore")
    from make_reduce import without_cuda
    mesh = dist.init_device_mesh("cpu", (world,))
    out = {}
    systems = {"fsdp2": lambda *a: fsdp2_clip(*a, mesh), "fsdp1": fsdp1_clip, "xla": xla_clip,
               "fairscale": fairscale_clip}
    for system, clip in systems.items():
        if system == "fairscale":
            without_cuda()  # last: it changes torch
            torch.Tensor.cuda = lambda t: t
        for p, kind in itertools.product(NORMS, KINDS):
            if system == "fsdp2" and p == INF and world > 1:
                continue  # an error: a rank that owns nothing of a tensor has no maximum
            for limit in (1.5, 2000.0) if kind == "normal" else (1.5,):
                total, grads = clip(p, kind, limit)
                add(out, total, grads, system=system, kind=kind, grad="fp32", p=p, max=limit,
                    ranks=world, error=0)
    return out


def main():
    tensors, about, out = {}, {}, {}
    for kind, dtype in itertools.product(KINDS, ("fp32",)):
        tensors["in/%s/%s" % (kind, dtype)] = numbers(kind, dtype)
    one_process(out)
    for world in golden.WORLDS:
        ranks = golden.run(child, world)
        for name, (_, total, grads) in ranks[0].items():
            for rank in ranks[1:]:
                assert golden.same(rank[name][1], total), name
                assert all(golden.same(a, b) for a, b in zip(rank[name][2], grads)), name
        out.update(ranks[0])
    for name, (settings, total, grads) in out.items():
        tensors[name + "/total"] = total
        tensors[name + "/g"] = torch.cat(grads)
        assert len(tensors[name + "/g"]) == N
        about[name] = golden.settings(**settings)
    golden.save("clip.safetensors", tensors, about)


if __name__ == "__main__":
    main()
