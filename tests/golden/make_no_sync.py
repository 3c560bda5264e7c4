#!/usr/bin/env python3
"""What DistributedDataParallel with find_unused_parameters makes of passes under no_sync and
of passes that reduce, in turn; see golden.py for what to install.

    venv/bin/python make_no_sync.py

writes no_sync.safetensors. The metadata of a case is its settings: world, and skip, which is
skip_all_reduce_unused_params. Passes are drawn by lot; with skip the ranks use the same
parameters, which it asks for. Its tensors, N elements being those of the parameters one after
another:

  g      [pass, rank, N]: gradients that the ranks' backwards gave
  used   [pass, rank, parameter]: does the pass use it?
  kind   [pass, 2]: does it reduce; is the gradient set to None after it?
  out    [pass, rank, N]: gradients after the pass
  has    [pass, rank, parameter]: is there one? Else it is None, and out is 0

Two ranks add in one order; with three the group adds in rank order (golden.py).
"""

import contextlib
import warnings

import golden
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SHAPES = [(5, 3), (7,), (1,), (2, 2, 3), (29,)]
SIZES = [int(torch.tensor(s).prod()) for s in SHAPES]
N = sum(SIZES)
PASSES = 16
WORLDS = (1, 2, 3)


class Model(golden.Given):
    def forward(self, gradients, used):
        total = torch.zeros((), requires_grad=True) * 1
        for p, g, is_used in zip(self.parts, gradients.parts, used):
            if is_used:
                total = total + golden._Give.apply(p, g)
        return total


def group_for(world):
    if world <= 2:
        return None
    group = golden.FoldGroup(dist.group.WORLD)
    dist.distributed_c10d._world.pg_group_ranks[group] = {r: r for r in range(world)}
    return group


def draw(world, skip):
    rng = torch.Generator().manual_seed(2 * world + skip)
    g = torch.randn(PASSES, world, N, generator=rng)
    used = torch.rand(PASSES, world, len(SHAPES), generator=rng) < 0.4
    used[..., 0] |= ~used.any(-1)  # a backward that meets no parameter does not reduce
    if skip:
        used = used[:, :1].expand_as(used).contiguous()
    reduces = torch.rand(PASSES, generator=rng) < 0.5
    # A gradient that is dropped between a pass under no_sync and the next that reduces is an
    # error of DDP's own.
    clears = reduces & (torch.rand(PASSES, generator=rng) < 0.4)
    return g, used.float(), torch.stack([reduces, clears], 1).float()


def child(rank, world):
    warnings.simplefilter("ignore")
    return [case(rank, world, skip) for skip in (0, 1)]


def case(rank, world, skip):
    g, used, kind = draw(world, skip)
    model = DistributedDataParallel(Model(SHAPES, torch.float32), process_group=group_for(world),
                                    bucket_cap_mb=100 / 2**20, find_unused_parameters=True,
                                    skip_all_reduce_unused_params=bool(skip))
    outs, there = [], []
    for i, (reduces, clears) in enumerate(kind.tolist()):
        with contextlib.nullcontext() if reduces else model.no_sync():
            gradients = golden.Gradients(golden.split(g[i, rank], SHAPES))
            model(gradients, used[i, rank].tolist()).backward()
        grads = [p.grad for p in model.module.parts]
        outs.append(torch.cat([torch.zeros(n) if x is None else x.flatten()
                               for x, n in zip(grads, SIZES)]))
        there.append(torch.tensor([float(x is not None) for x in grads]))
        if clears:
            model.zero_grad()
    return g, used, kind, torch.stack(outs), torch.stack(there)


def main():
    tensors, about = {}, {}
    for world in WORLDS:
        ranks = golden.run(child, world)
        for skip in (0, 1):
            name = "%s/w%d" % ("skip" if skip else "all", world)
            g, used, kind, _, _ = ranks[0][skip]
            tensors[name + "/g"], tensors[name + "/used"] = g, used
            tensors[name + "/kind"] = kind
            tensors[name + "/out"] = torch.stack([cases[skip][3] for cases in ranks], 1)
            tensors[name + "/has"] = torch.stack([cases[skip][4] for cases in ranks], 1)
            about[name] = golden.settings(world=world, skip=skip)
    golden.save("no_sync.safetensors", tensors, about)


if __name__ == "__main__":
    main()
