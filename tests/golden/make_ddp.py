#!/usr/bin/env python3
"""What DistributedDataParallel does with uneven inputs, unused parameters, a parameter that a
pass uses twice and sparse gradients; see golden.py for what to install.

    venv/bin/python make_ddp.py

writes ddp.safetensors. The metadata of a case is its settings:

  kind     join: inside join(), ranks have different numbers of inputs (inputs=1,3), and
           take a step of SGD after each (fp32). unused: find_unused_parameters. static: a
           static graph with a parameter in two reentrant checkpoints, so that it gets its
           gradient twice, and one that nobody uses
  grad     type of parameters and gradients, and so of the reduction: DDP's buckets have the
           gradients'. Its mixed_precision, which adds in another, does not run without an
           accelerator
  initial  join: divide_by_initial_world_size
  clear    is the gradient set to None after each pass?
  throws   join: throw_on_early_termination. errors: the exception of each rank, "exhausted"
           or "detected" or "none"; after how many passes: passes. Nothing else is stored

and its tensors, all widened to fp32, N elements being those of the parameters one after
another:

  g        [pass, rank, use, N]: gradients that the ranks' backwards gave
  used     [pass, rank, parameter]: how often it is used; 0 in all of a rank's pass: no input
  out      [pass, N]: gradients after the pass; the ranks that had an input agree
  has      [pass, parameter]: is there one? Else it is None, and out is 0
  p        [N]: parameters at the end, on every rank; join in fp32 only, since the daemon's
           parameters are fp32 whatever the gradients are

Two ranks add in one order; with three the group adds in rank order (golden.py).

kind=sparse is an embedding with sparse gradients beside a tensor that has dense ones, of which
only rank 0's are not zero. gloo itself adds sparse gradients, in rank order. Each pass begins
without gradients:

  rows     [pass, rank, entry]: of the table, -1 where the rank has no more. rows=once: a rank
           has each at most once; twice: some more often
  g        [pass, rank, entry, WIDTH]: their gradients; dense: [pass, rank, OTHER]
  out      [pass, OTHER + ROWS * WIDTH]: gradients after the pass
"""

import warnings

import golden
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

SHAPES = [(5, 3), (7,), (1,), (2, 2, 3), (29,)]
SIZES = [int(torch.tensor(s).prod()) for s in SHAPES]
N = sum(SIZES)
TWICE, NEVER = 1, 3  # of a static graph
LR = 0.1
INPUTS = {2: (1, 3), 3: (2, 1, 4), 4: (2, 1, 4, 3)}
# by pass, by rank: the parameters that are used
UNUSED = {2: (((0, 1, 4), (0, 4)), ((0, 2), (0, 2, 3)), ((0, 1), (0, 1, 2, 4))),
          3: (((0, 1), (0, 4), (0,)), ((0, 2), (0, 2), (3,)), ((1,), (0,), (0, 1, 2, 4))),
          4: (((0, 1), (4,), (0,), (0, 1)), ((2,), (0, 2), (3,), (2, 3)),
              ((1,), (0,), (0, 1, 2, 4), (0,)))}
GRADS = ("fp32", "bf16")


class Group(golden.FoldGroup):
    """For join() too, which asks for the greatest of the ranks' numbers."""

    def allreduce(self, tensors, opts=None):
        if opts is not None and opts.reduceOp == dist.ReduceOp.MAX:
            return self.inner.allreduce(tensors, opts)
        return super().allreduce(tensors, opts)


def group_for(world):
    if world <= 2:
        return None
    group = Group(dist.group.WORLD)
    dist.distributed_c10d._world.pg_group_ranks[group] = {r: r for r in range(world)}
    return group


class Model(golden.Given):
    def forward(self, gradients, used):
        x = torch.zeros((), requires_grad=True)
        total = x * 1
        for i, p in enumerate(self.parts):
            for use in range(used[i]):
                g = gradients.parts[use][i]
                if used[i] > 1:  # the parameter's hook runs once for each
                    total = total + checkpoint(lambda t, p=p, g=g: t + golden._Give.apply(p, g),
                                               x, use_reentrant=True)
                else:
                    total = total + golden._Give.apply(p, g)
        return total


def gradients(seed, grad, *shape):
    rng = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-4, 3, (N,), generator=rng)
    return (torch.randn(*shape, N, generator=rng) * scale).to(golden.DTYPES[grad])


def one_pass(model, g, used):
    parts = [golden.split(use, SHAPES) for use in g]
    model(golden.Gradients(parts), used).backward()


def grads_of(model):
    """The gradients, and which there are."""
    grads = [p.grad for p in model.module.parts]
    flat = [torch.zeros(n) if g is None else g.flatten().float() for g, n in zip(grads, SIZES)]
    return torch.cat(flat), torch.tensor([float(g is not None) for g in grads])


def wrap(world, grad="fp32", **settings):
    return DistributedDataParallel(Model(SHAPES, golden.DTYPES[grad]),
                                   process_group=group_for(world), bucket_cap_mb=100 / 2**20,
                                   **settings)


# ---------------------------------------------------------------- cases, of one rank


def train(model, rank, g, used, clear, step):
    """Every pass for which the rank has an input."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, foreach=False)
    out = []
    for i in range(len(g)):
        if not sum(used[i][rank]):
            break
        one_pass(model, g[i, rank], used[i][rank])
        out.append(grads_of(model))
        if step:
            optimizer.step()
        if clear:
            optimizer.zero_grad()
    return out


def join_case(rank, world, grad, initial):
    inputs = INPUTS[world]
    g = gradients(world, grad, max(inputs), world, 1)
    used = [[[int(i < n)] * len(SHAPES) for n in inputs] for i in range(max(inputs))]
    model = wrap(world, grad)
    with model.join(divide_by_initial_world_size=bool(initial)):
        out = train(model, rank, g, used, True, grad == "fp32")
    p = None
    if grad == "fp32":
        p = torch.cat([p.detach().flatten() for p in model.module.parts])
    about = dict(kind="join", initial=initial, clear=1, lr=LR)
    return about, g, used, out, p


def unused_case(rank, world, grad, clear):
    passes = UNUSED[world]
    g = gradients(10 + world, grad, len(passes), world, 1)
    used = [[[int(i in which) for i in range(len(SHAPES))] for which in ranks]
            for ranks in passes]
    model = wrap(world, grad, find_unused_parameters=True)
    out = train(model, rank, g, used, bool(clear), False)
    return dict(kind="unused", clear=clear), g, used, out, None


def static_case(rank, world, grad):
    g = gradients(20 + world, grad, 3, world, 2)
    row = [1] * len(SHAPES)
    row[TWICE], row[NEVER] = 2, 0
    used = [[row] * world] * 3
    model = wrap(world, grad, static_graph=True)
    out = train(model, rank, g, used, True, False)
    return dict(kind="static", clear=1), g, used, out, None


# ---------------------------------------------------------------- sparse gradients

ROWS, WIDTH, OTHER, ENTRIES = 11, 3, 5, 8


class Embedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
        self.other = torch.nn.Parameter(torch.zeros(OTHER))

    def forward(self, rows, g, dense):
        return (self.table(rows) * g).sum() + (self.other * dense).sum()


def sparse_rows(world, twice):
    """[pass, rank, entry]; in the last pass the last rank has none."""
    rng = torch.Generator().manual_seed(30 + world)
    rows = torch.full((3, world, ENTRIES), -1)
    for i in range(3):
        for rank in range(world):
            n = 0 if (i, rank) == (2, world - 1) else ENTRIES - rank
            rows[i, rank, :n] = torch.randint(0, ROWS, (n,), generator=rng) if twice \
                else torch.randperm(ROWS, generator=rng)[:n]
    return rows


def sparse_case(rank, world, twice):
    rows = sparse_rows(world, twice)
    rng = torch.Generator().manual_seed(40 + world)
    g = torch.randn((3, world, ENTRIES, WIDTH), generator=rng)
    g *= 10.0 ** torch.randint(-4, 3, g.shape, generator=rng)
    dense = torch.randn((3, world, OTHER), generator=rng)
    dense[:, 1:] = 0
    model = DistributedDataParallel(Embedding())
    out = []
    for i in range(3):
        mine = rows[i, rank] >= 0
        model(rows[i, rank][mine], g[i, rank][mine], dense[i, rank]).backward()
        assert model.module.table.weight.grad.is_sparse
        table = model.module.table.weight.grad.to_dense().flatten()
        out.append(torch.cat([model.module.other.grad, table]))
        model.zero_grad()
    return rows, g, dense, torch.stack(out)


# ---------------------------------------------------------------- errors


def marked_twice(rank, world):
    """What a static graph is needed for."""
    model = wrap(world)
    try:
        one_pass(model, gradients(1, "fp32", 2), [1, 2, 1, 1, 1])
    except RuntimeError as e:
        assert "marked as ready twice" in str(e), e
        return
    raise AssertionError("no error")


def throwing_case(rank, world, inputs):
    g = gradients(world, "fp32", max(inputs), world, 1)
    used = [[[int(i < n)] * len(SHAPES) for n in inputs] for i in range(max(inputs))]
    model = wrap(world)
    done = []
    error = "none"
    try:
        with model.join(throw_on_early_termination=True):
            for i in range(inputs[rank]):
                one_pass(model, g[i, rank], used[i][rank])
                done.append(i)
    except RuntimeError as e:
        error = "exhausted" if "exhausted all inputs" in str(e) else "detected"
        assert error == "exhausted" or "rank that exhausted inputs" in str(e), e
    return error, len(done)


def child(rank, world):
    warnings.simplefilter("ignore")
    marked_twice(rank, world)
    cases = {}
    for grad in GRADS:
        for name, case in (("join/initial", join_case(rank, world, grad, 1)),
                           ("join/active", join_case(rank, world, grad, 0)),
                           ("unused/kept", unused_case(rank, world, grad, 0)),
                           ("unused/cleared", unused_case(rank, world, grad, 1)),
                           ("static", static_case(rank, world, grad))):
            case[0]["grad"] = grad
            cases[name if grad == "fp32" else "%s/%s" % (name, grad)] = case
    throws = {inputs: throwing_case(rank, world, inputs)
              for inputs in (INPUTS[world], (2,) * world, (2,) + (0,) * (world - 1))}
    sparse = {}
    if world <= 3:
        sparse = {twice: sparse_case(rank, world, twice == "twice") for twice in ("once", "twice")}
    return cases, throws, sparse


# ---------------------------------------------------------------- all of it


def agreed(outs, i):
    """What the ranks that had a pass @i got."""
    there = [out[i] for out in outs if len(out) > i]
    for out, has in there[1:]:
        assert golden.same(out, there[0][0]) and golden.same(has, there[0][1])
    return there[0]


def store(tensors, name, ranks):
    _, g, used, _, p = ranks[0]
    outs = [rank[3] for rank in ranks]
    results = [agreed(outs, i) for i in range(len(g))]
    tensors[name + "/g"] = g.float()
    tensors[name + "/used"] = torch.tensor(used, dtype=torch.float32)
    tensors[name + "/out"] = torch.stack([out for out, _ in results])
    tensors[name + "/has"] = torch.stack([has for _, has in results])
    if p is not None:
        assert all(golden.same(p, rank[4]) for rank in ranks)
        tensors[name + "/p"] = p


def store_sparse(tensors, name, ranks):
    rows, g, dense, out = ranks[0]
    assert all(golden.same(out, rank[3]) for rank in ranks)
    tensors.update({name + "/rows": rows.float(), name + "/g": g, name + "/dense": dense,
                    name + "/out": out})


def numbers(values):
    return ",".join(str(v) for v in values)


def main():
    tensors, about = {}, {}
    for world in INPUTS:
        ranks = golden.run(child, world)
        for case in ranks[0][0]:
            name = "%s/w%d" % (case, world)
            store(tensors, name, [cases[case] for cases, _, _ in ranks])
            about[name] = golden.settings(world=world, throws=0, **ranks[0][0][case][0])
        for inputs in ranks[0][1]:
            results = [throws[inputs] for _, throws, _ in ranks]
            name = "throws/%s/w%d" % (numbers(inputs), world)
            about[name] = golden.settings(kind="join", world=world, throws=1,
                                          inputs=numbers(inputs),
                                          errors=numbers(r[0] for r in results),
                                          passes=numbers(r[1] for r in results))
        for twice in ranks[0][2]:
            name = "sparse/%s/w%d" % (twice, world)
            store_sparse(tensors, name, [sparse[twice] for _, _, sparse in ranks])
            about[name] = golden.settings(kind="sparse", world=world, grad="fp32", rows=twice)
    golden.save("ddp.safetensors", tensors, about)


if __name__ == "__main__":
    main()
