#!/usr/bin/env python3
"""Make the vectors that tests/unit/test_golden.c checks the kernels against.

    python3 -m venv venv && venv/bin/pip install torch==2.13.0 numpy
    venv/bin/python make_golden.py

writes adamw.txt, adam.txt, sgd.txt, cast.txt and clip.txt next to this script, or into
$GOLDEN_OUT. They were made with torch 2.13.0 (CPU) on x86-64 with AVX-512; AVX2 gives the same
bits, a processor without FMA does not (torch then rounds twice where kernels.h says fma).

Every number is the bits of an fp32 (bf16, fp16) in hexadecimal; settings are decimal.
"""

import os

import numpy as np
import torch

HERE = os.environ.get("GOLDEN_OUT") or os.path.dirname(os.path.abspath(__file__))
N = 37  # odd: vector bodies and tails
STEPS = 5

ADAMW = [  # lr, beta1, beta2, eps, weight decay; of Adam too
    (1e-3, 0.9, 0.999, 1e-8, 0.01),
    (3e-4, 0.9, 0.95, 1e-8, 0.1),
    (1e-2, 0.95, 0.99, 1e-6, 0.0),
    (2e-3, 0.3, 0.9, 1e-8, 0.05),
    (1e-1, 0.0, 0.5, 1e-3, 0.5),
]
SGD = [  # lr, momentum, weight decay, nesterov
    (0.1, 0.0, 0.0, 0),
    (0.1, 0.0, 0.01, 0),
    (0.03, 0.9, 0.0, 0),
    (0.03, 0.9, 0.1, 0),
    (0.03, 0.95, 0.1, 1),
    (0.03, 0.9, 0.0, 1),
]
CLIP = [  # ranks, elements of each rank's gradients, norm type, max norm, scale
    (1, (401,), 2.0, 1.0, 1.0),
    (4, (97, 33), 2.0, 1.0, 0.1),
    (4, (97, 33), 2.0, 1e3, 0.1),
    (3, (101, 64, 5), float("inf"), 0.5, 3.0),
    (2, (128,), 2.0, 1.0, 1e-3),
]


def words(tensor):
    return " ".join("%x" % w for w in tensor.detach().contiguous().numpy().view(np.uint32))


def numbers(rng, n=N):
    """Normals of several sizes, with zeros and what underflows when squared."""
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 2, n)).astype(np.float32)
    x[::11] = 0.0
    x[3::17] *= np.float32(1e-21)
    return torch.from_numpy(x)


def sqrt_rounded(tensor):
    """MKL's sqrt, which torch uses on x86, is off by one unit for one number in six."""
    return torch.from_numpy(np.sqrt(tensor.detach().numpy()))


def adam_run(kind, settings, seed, exact):
    lr, b1, b2, eps, wd = settings
    rng = np.random.default_rng(seed)
    p = torch.nn.Parameter(numbers(rng))
    first = words(p)
    opt = kind([p], lr=lr, betas=(b1, b2), eps=eps, weight_decay=wd, foreach=False)
    rows = []
    original = torch.Tensor.sqrt
    if exact:
        torch.Tensor.sqrt = sqrt_rounded
    try:
        for _ in range(STEPS):
            p.grad = numbers(rng)
            grad = words(p.grad)
            opt.step()
            state = opt.state[p]
            rows.append((grad, words(state["exp_avg"]), words(state["exp_avg_sq"]), words(p)))
    finally:
        torch.Tensor.sqrt = original
    return first, rows


def adam_cases(out, kind):
    out.write("%d %d %d\n" % (len(ADAMW), N, STEPS))
    for seed, settings in enumerate(ADAMW):
        first, rows = adam_run(kind, settings, seed, exact=True)
        _, native = adam_run(kind, settings, seed, exact=False)
        out.write("%r %r %r %r %r\n%s\n" % (*settings, first))
        for (grad, m, v, p), (_, m2, v2, p2) in zip(rows, native):
            # with decay in the gradient, what MKL rounds otherwise comes back
            assert kind is torch.optim.Adam or (m == m2 and v == v2)
            out.write("\n".join((grad, m, v, p, p2)) + "\n")


def adamw(out):
    adam_cases(out, torch.optim.AdamW)


def adam(out):
    adam_cases(out, torch.optim.Adam)


def sgd(out):
    out.write("%d %d %d\n" % (len(SGD), N, STEPS))
    for seed, (lr, momentum, wd, nesterov) in enumerate(SGD):
        rng = np.random.default_rng(100 + seed)
        p = torch.nn.Parameter(numbers(rng))
        opt = torch.optim.SGD([p], lr=lr, momentum=momentum, weight_decay=wd,
                              nesterov=bool(nesterov), foreach=False)
        out.write("%r %r %r %d\n%s\n" % (lr, momentum, wd, nesterov, words(p)))
        for _ in range(STEPS):
            p.grad = numbers(rng)
            grad = words(p.grad)
            opt.step()
            buf = opt.state[p].get("momentum_buffer")
            out.write("\n".join((grad, words(p if buf is None else buf), words(p))) + "\n")


def cast_inputs():
    """Any bits, numbers around the ties of both types, and the special ones."""
    rng = np.random.default_rng(200)
    any_bits = rng.integers(0, 2**32, 600, dtype=np.uint64).astype(np.uint32)
    exps = rng.integers(96, 146, 600).astype(np.uint32) << 23
    tops = rng.integers(0, 1024, 600).astype(np.uint32) << 13
    near = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF], dtype=np.uint32)
    ties16 = exps | tops | near[rng.integers(0, 6, 600)]
    tops = rng.integers(0, 128, 300).astype(np.uint32) << 16
    near = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    ties = exps[:300] | tops | near[rng.integers(0, 6, 300)]
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x477FEFFF, 0x477FF000,
                        0x33000000, 0x33000001, 0x387FE000, 0x387FF000, 1, 0x8000, 0x8001],
                       dtype=np.uint32)
    bits = np.concatenate([special, any_bits, ties16, ties])
    return bits[~np.isnan(bits.view(np.float32))]


def cast(out):
    """fp32 to bf16 and fp16; then patterns of these to fp32."""
    bits = cast_inputs()
    x = torch.from_numpy(bits.view(np.float32).copy())
    bf16 = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    fp16 = x.to(torch.float16).view(torch.int16).numpy().view(np.uint16)
    out.write("%d\n" % len(bits))
    for row in zip(bits, bf16, fp16):
        out.write("%x %x %x\n" % row)
    patterns = np.arange(0, 65536, 41, dtype=np.uint16)
    h = torch.from_numpy(patterns.view(np.int16).copy())
    wide = [h.view(t).float().numpy().view(np.uint32) for t in (torch.bfloat16, torch.float16)]
    out.write("%d\n" % len(patterns))
    for row in zip(patterns, *wide):
        out.write("%x %x %x\n" % row)


def total_norm(ranks, norm_type):
    """fairscale's clip_grad_norm_: a norm per gradient, their norm, then all ranks."""
    local = [torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=torch.float32)
                          for g in grads]) for grads in ranks]
    local = [torch.linalg.vector_norm(n, norm_type, dtype=torch.float32) for n in local]
    if norm_type == float("inf"):
        return torch.stack(local).max()
    total = torch.stack([n**norm_type for n in local]).sum()
    return total ** (1.0 / norm_type)


def clip(out):
    out.write("%d\n" % len(CLIP))
    for seed, (n_ranks, sizes, norm_type, max_norm, scale) in enumerate(CLIP):
        rng = np.random.default_rng(300 + seed)
        ranks = [[torch.from_numpy((rng.standard_normal(n) * scale).astype(np.float32))
                  for n in sizes] for _ in range(n_ranks)]
        total = total_norm(ranks, norm_type)
        coef = torch.tensor(max_norm, dtype=torch.float32) / (total + 1e-6)
        grads = torch.cat([g for grads in ranks for g in grads])
        out.write("%d %d %r\n" % (len(grads), norm_type == float("inf"), max_norm))
        out.write("%s %s %d\n" % (words(total.reshape(1)), words(coef.reshape(1)), coef < 1))
        out.write(words(grads) + "\n")
        if coef < 1:
            for grad in ranks:
                for g in grad:
                    g.mul_(coef)
        out.write(words(torch.cat([g for grads in ranks for g in grads])) + "\n")


def main():
    torch.set_num_threads(1)
    for make in (adamw, adam, sgd, cast, clip):
        with open(os.path.join(HERE, make.__name__ + ".txt"), "w", encoding="ascii") as out:
            make(out)


if __name__ == "__main__":
    main()
