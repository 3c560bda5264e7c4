"""What the scripts of this folder share: processes, collectives with a fixed order, files.

The vectors were made with torch 2.13.0, fairscale 0.4.13, numpy and safetensors from
PyPI, CPU builds, on x86-64 with AVX2:

    python3 -m venv venv
    venv/bin/pip install torch==2.13.0 numpy safetensors
    venv/bin/pip install --no-deps fairscale==0.4.13

Each script writes next to itself, or into $GOLDEN_OUT; the tests read from there if
$SHARDD_GOLDEN names it, so that what another version computes can be compared:

    GOLDEN_OUT=/tmp/golden venv/bin/python make_reduce.py
    SHARDD_GOLDEN=/tmp/golden build/tests/test_golden_reduce

A process per rank, joined by gloo. The order in which gloo adds differs from chunk to
chunk of a tensor, so with more than two ranks the systems run a second time with `folded`
around them: their own code, but each collective gathers what all ranks gave and adds it
in rank order, rounding to the type of the tensors after every addition.
"""

import contextlib
import json
import multiprocessing
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save as serialize
from torch._C._distributed_c10d import _create_work_from_future

# Where vectors end decides a bit here and there; with AVX-512 they would be longer.
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
assert torch.backends.cpu.get_cpu_capability() == "AVX2"

HERE = os.environ.get("GOLDEN_OUT") or os.path.dirname(os.path.abspath(__file__))
WORLDS = (1, 2, 3, 4, 6, 8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {t: name for name, t in DTYPES.items()}


# ---------------------------------------------------------------- processes


def _child(function, rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + os.path.join(folder, "store"),
                            rank=rank, world_size=world)
    torch.save(function(rank, world), os.path.join(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


def run(function, world):
    """What function(rank, world) returns, of every rank: a process each, in one gloo group."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=_child, args=(function, rank, world, folder))
                 for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank of %d failed" % world)
        return [torch.load(os.path.join(folder, str(rank))) for rank in range(world)]


# ---------------------------------------------------------------- collectives

_all_gather = dist.all_gather


def _gathered(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    _all_gather(parts, tensor.contiguous(), group=group)
    return parts


def fold(parts, op, nccl):
    """parts[0] + parts[1] + ..., in that order and in their type. The average is the sum
    divided by their number, as gloo has it; with nccl each part is first multiplied by the
    reciprocal, rounded to the type, as NCCL has it."""
    scale = None
    kind, factor = op.__getstate__() if type(op) is dist.ReduceOp else (op, None)
    average = kind == dist.ReduceOp.AVG
    if average and nccl:
        scale = 1.0 / len(parts)
    elif kind == dist.ReduceOp.PREMUL_SUM:
        assert nccl, "gloo has no PREMUL_SUM"
        scale = factor
    if scale is not None:
        scale = torch.tensor(scale, dtype=torch.float64).to(parts[0].dtype)
        parts = [part * scale for part in parts]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts)) if average and not nccl else total


@contextlib.contextmanager
def folded(nccl=False):
    """The collectives that the systems call from Python, in rank order."""

    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        tensor.copy_(fold(_gathered(tensor, group), op, nccl))
        return _finished(tensor) if async_op else None

    def reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        total = fold(_gathered(input, group), op, nccl)
        chunks = total.reshape(dist.get_world_size(group), -1)
        output.copy_(chunks[dist.get_rank(group)].view_as(output))
        return _finished(output) if async_op else None

    names = {"all_reduce": all_reduce}
    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"):
        names[name] = reduce_scatter
    before = {name: getattr(dist, name) for name in names}
    for name, function in names.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _finished(tensor):
    future = torch.futures.Future()
    future.set_result([tensor])
    return _create_work_from_future(future)


class FoldGroup(dist.ProcessGroup):
    """The same for DistributedDataParallel, which calls the group from C++."""

    def __init__(self, inner):
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self):
        return "fold"

    def allreduce(self, tensors, opts=None):
        for tensor in tensors:
            op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
            tensor.copy_(fold(_gathered(tensor, None), op, False))
        future = torch.futures.Future()
        future.set_result(tensors)
        return _create_work_from_future(future)

    def allgather(self, outputs, inputs, opts=None):
        return self.inner.allgather(outputs, inputs)

    def broadcast(self, tensors, opts=None):
        return self.inner.broadcast(tensors, opts)

    def barrier(self, opts=None):
        return self.inner.barrier(opts)


# ---------------------------------------------------------------- models


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, gradient):
        ctx.save_for_backward(gradient)
        return parameter.sum()

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors[0].clone(), None


class Given(torch.nn.Module):
    """Parameters of the shapes; forward takes the gradients that backward is to give."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        self.parts = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes])

    def forward(self, gradients):
        return sum(_Give.apply(p, g) for p, g in zip(self.parts, gradients.parts))


class Gradients:
    """For Given; an object, because these systems cast the tensors that they find in the
    arguments of forward (fairscale to fp16, whatever its compute type)."""

    def __init__(self, parts):
        self.parts = list(parts)


def split(flat, shapes):
    """Views of the shapes, one after another in flat."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes)]


# ---------------------------------------------------------------- files


def same(a, b):
    """Equal bits, or both NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    ints = {4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(ints) == b.contiguous().view(ints)
    return bool((equal | (a.isnan() & b.isnan())).all())


def settings(**pairs):
    return " ".join("%s=%s" % pair for pair in pairs.items())


def save(name, tensors, about):
    """tests/golden/NAME: tensors by name, and what each was made with. The metadata is put
    in order, so that the same vectors are the same bytes."""
    tensors = {key: t.detach().contiguous().clone() for key, t in sorted(tensors.items())}
    data = bytes(serialize(tensors, metadata=about))
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(about.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(HERE, name), "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text + data[end:])
