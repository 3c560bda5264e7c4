"""The same training by PyTorch's FSDP2 and by shardd.torch: what differs, behind one interface; and
running cases on several ranks."""

import multiprocessing.util
import os
import pathlib
import shutil
import sys
import tempfile
import traceback
import unittest
from typing import Callable, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "golden"), str(HERE.parent / "python")]

import support  # noqa: E402
import test_training  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import fsdp  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import shardd.torch  # noqa: E402


class Fsdp2:
    """PyTorch's, over gloo. Its optimizers take a square root that is correctly rounded: MKL's,
    which PyTorch has on x86, rounds one number in six to its neighbour."""

    name = "FSDP2"
    exact = True  # square roots

    def fully_shard(self, module, **options):
        return fsdp.fully_shard(module, **options)

    def forward_method(self, module, name):
        fsdp.register_fsdp_forward_method(module, name)

    def optimizer(self, kind, params, **options):
        return getattr(torch.optim, kind)(params, foreach=False, **options)

    def step(self, optimizer):
        if not self.exact:
            return optimizer.step()
        with test_training.correctly_rounded():
            return optimizer.step()

    def clip(self, model, norm):
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        return total.full_tensor() if isinstance(total, DTensor) else total

    def sync(self, model, sync):
        model.set_requires_gradient_sync(sync)

    def whole(self, model):
        return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for name, p in model.named_parameters()}

    def close(self):
        pass


class Shardd:
    """The daemon's optimizers; with @own torch.optim's on the shard."""

    name = "shardd"
    own = False

    def __init__(self, job):
        shardd.torch.init(job=job, op_timeout=60)

    def fully_shard(self, module, **options):
        return shardd.torch.fully_shard(module, **options)

    def forward_method(self, module, name):
        shardd.torch.register_fsdp_forward_method(module, name)

    def optimizer(self, kind, params, **options):
        if self.own:
            return shardd.torch.Sharded(getattr(torch.optim, kind), params, foreach=False,
                                        **options)
        return getattr(shardd.torch, kind)(params, **options)

    def step(self, optimizer):
        return optimizer.step()

    def clip(self, model, norm):
        return shardd.torch.clip_grad_norm_(model.parameters(), norm)

    def sync(self, model, sync):
        model.set_requires_gradient_sync(sync)

    def whole(self, model):
        names = {name for name, _ in model.named_parameters()}
        return {name: value for name, value in model.state_dict().items() if name in names}

    def close(self):
        shardd.torch.shutdown()


def start(rank, world, socket, folder):
    """What shardd finds its daemon by, and a gloo group, if there is a @folder for it."""
    os.environ.update(SHARDD_SOCKET=socket, RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    if folder is None:
        return
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def shared_folder(rank):
    """One for all ranks, which rank 0 makes, and removes at its end."""
    made = [tempfile.mkdtemp() if not rank else None]
    if not rank:  # processes of multiprocessing do not run atexit
        multiprocessing.util.Finalize(None, shutil.rmtree, (made[0], True), exitpriority=1)
    dist.broadcast_object_list(made)
    return made[0]


def differences(ours, theirs, bound=0.0):
    """Sentences; none: equal bit for bit, or with @bound that far apart at most."""
    said = []
    for step, (a, b) in enumerate(zip(ours, theirs)):
        if a.keys() != b.keys():
            said.append(f"step {step}: names differ: {a.keys() ^ b.keys()}")
            continue
        for name in a:
            x, y = torch.as_tensor(a[name]).float(), torch.as_tensor(b[name]).float()
            off = (x - y).abs().max().item() if x.numel() else 0.0
            same = torch.eq(*(t.reshape(-1).view(torch.int32) for t in (x, y)))
            different = x.numel() - same.sum().item()
            if (not bound and different) or not off <= bound:
                said.append(f"step {step}: {name}: {different} of {x.numel()} differ, by {off:g}")
    return said


class OneRank(unittest.TestCase):
    """With a daemon; each test with a job of its name, of which this process is all."""

    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        os.environ["SHARDD_SOCKET"] = cls.context.__enter__()
        torch.set_num_threads(1)

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def setUp(self):
        shardd.torch.init(job=self.id().split(".")[-1][:60], world_size=1, rank=0)

    def tearDown(self):
        shardd.torch.shutdown()


class Skipped(str):
    """Instead of sentences: why there is nothing to compare."""


class Plan(NamedTuple):
    """@trial(name, rank) returns sentences about what is wrong, on so many ranks; all @names run in
    one start of them. @gloo: with a process group."""

    world: int
    names: list[str]
    trial: Callable[[str, int], list[str]]
    gloo: bool = True


def _on_rank(rank, world, plan, socket, folder):
    start(rank, world, socket, folder if plan.gloo else None)
    results = {}
    for name in plan.names:
        try:
            results[name] = plan.trial(name, rank)
        except Exception:
            results[name] = [traceback.format_exc()]
            shardd.torch.shutdown()
    if plan.gloo:
        dist.destroy_process_group()
    return results


def wanted(names):
    """Those that have one of the program's arguments in them; all, if there are none."""
    return [n for n in names if not sys.argv[1:] or any(part in n for part in sys.argv[1:])]


def tell(names, results, world):
    """A line of TAP for each case. @results: by rank, of each case its sentences. Return: how many
    have failed."""
    failed = 0
    for name in names:
        why = [got[name] for got in results if isinstance(got[name], Skipped)]
        if why:
            print(f"ok - {name}, {world} ranks # SKIP {why[0]}", flush=True)
            continue
        said = [f"rank {r}: {s}" for r, got in enumerate(results) for s in got[name]]
        for line in "\n".join(said[:12]).splitlines():
            print("# " + line)
        failed += bool(said)
        print(f"{'not ok' if said else 'ok'} - {name}, {world} ranks", flush=True)
    return failed


def report(*plans):
    """Run them, each with a daemon of its own, and tell. Return: the exit status."""
    plans = [plan for plan in plans if plan.names]
    print(f"1..{sum(len(plan.names) for plan in plans)}")
    failed = 0
    for plan in plans:
        with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
            results = support.ranks(_on_rank, plan.world, plan, socket, folder, seconds=900)
        failed += tell(plan.names, results, plan.world)
    return int(failed > 0 or not plans)
