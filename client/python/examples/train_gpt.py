#!/usr/bin/env python3
"""Train a small GPT on the bytes of any file, with one of four engines.

    torchrun --nproc-per-node 2 train_gpt.py --data FILE --engine shardd
    torchrun --nproc-per-node 2 train_gpt.py --data FILE --engine fsdp2
    shardctl run --standalone -n 2 -- python3 train_gpt.py --data FILE --resilient

Engines: shardd (shardd.torch.fully_shard), fsdp2 (torch.distributed.fsdp.fully_shard over gloo),
ddp (DistributedDataParallel over gloo), single (one process, none of these). Rank 0 prints one
line per step with the mean loss of all ranks' batches. At the end it prints tokens per second and
memory: rank 0's peak, and the sum of the peaks of all processes and the daemon. The sum counts a
process's private memory and its share of shared memory (sampled ten times a second).
"""

import argparse
import contextlib
import json
import os
import pathlib
import resource
import sys
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Over bytes; the embedding is the output layer too."""

    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def number(least):
    """The type of an option: a whole number, at least @least."""
    def parse(text):
        if not (text.isascii() and text.isdigit() and least <= int(text) < 2**31):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def file(text):
    if not os.access(text, os.R_OK) or not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"cannot read a file {text!r}")
    return pathlib.Path(text)


def model_arguments(parser):
    """Add the options of the model and of its data."""
    parser.add_argument("--data", required=True, type=file, help="any file: its bytes are the text")
    parser.add_argument("--layers", type=number(1), default=4)
    parser.add_argument("--width", type=number(1), default=128)
    parser.add_argument("--heads", type=number(1), default=4)
    parser.add_argument("--length", type=number(1), default=64, help="bytes per sample")


def parsed(parser):
    options = parser.parse_args()
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    model_arguments(parser)
    parser.add_argument("--engine", default="shardd", choices=["shardd", "fsdp2", "ddp", "single"])
    parser.add_argument("--steps", type=number(0), default=20)
    parser.add_argument("--batch", type=number(1), default=8,
                        help="samples per step over all ranks")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--fused", action="store_true", help="use the fused AdamW: the losses of "
                        "shardd and fsdp2 are then bitwise equal")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true", help="forward in bf16 (shardd, fsdp2)")
    parser.add_argument("--seed", type=number(0), default=1)
    parser.add_argument("--threads", type=number(1), default=1, help="PyTorch threads per rank")
    parser.add_argument("--resilient", action="store_true",
                        help="survive the death of ranks (shardd)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parsed(parser)
    if options.data.stat().st_size < options.length + 2:
        parser.error(f"--data must have at least {options.length + 2} bytes for --length "
                     f"{options.length}")
    if options.resilient and options.engine != "shardd":
        parser.error("--resilient needs --engine shardd")
    if options.bf16 and options.engine not in ("shardd", "fsdp2"):
        parser.error("--bf16 needs --engine shardd or fsdp2")
    if options.fused and options.optimizer == "sgd":
        parser.error("--fused needs --optimizer adamw: FSDP2 has no fused SGD")
    if options.engine in ("fsdp2", "ddp") and "RANK" not in os.environ:
        parser.error(f"RANK is not set: start --engine {options.engine} with torchrun, as the "
                     "first lines of this program show")
    return options


def in_sentences(kind, error, trace):
    """sys.excepthook: print an error that the user can act on as one sentence. The exception is
    not caught, so the other ranks learn that this one died."""
    shardd = sys.modules.get("shardd")
    if issubclass(kind, (OSError, ImportError, *([shardd.SharddError] if shardd else []))):
        print(f"{pathlib.Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# ------------------------------------------------------------------------- engines


class Single:
    """One process. The other engines override what they do differently."""

    rank, world = 0, 1

    def __init__(self, options):
        self.options = options

    def wrap(self, model):
        return model

    def optimizer(self, model):
        if self.options.optimizer == "sgd":
            return self.optimizers.SGD(model.parameters(), lr=self.options.lr, momentum=0.9)
        return self.optimizers.AdamW(model.parameters(), lr=self.options.lr,
                                     fused=self.options.fused or None)

    optimizers = torch.optim

    def total(self, values):
        """The sums over all ranks."""
        return values

    def daemon(self):
        """Its process, or None."""
        return None

    def close(self):
        pass


class Fsdp2(Single):
    def __init__(self, options):
        super().__init__(options)
        torch.distributed.init_process_group("gloo")
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def policy(self):
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not self.options.bf16:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(self, model):
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mp_policy=self.policy())
        return fully_shard(model, mp_policy=self.policy())

    def total(self, values):
        values = torch.tensor(values)
        torch.distributed.all_reduce(values)
        return values.tolist()

    def close(self):
        torch.distributed.destroy_process_group()
        # Gloo's threads may still release the last tensors. A thread that does so while the
        # interpreter shuts down aborts the process: exit without the shutdown.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Ddp(Fsdp2):
    def wrap(self, model):
        return nn.parallel.DistributedDataParallel(model)


class Shardd(Fsdp2):
    def __init__(self, options):
        import shardd.torch

        self.options, self.optimizers, self.st = options, shardd.torch, shardd.torch
        self.rank, self.world = shardd.torch.rank(), shardd.torch.world_size()

    def policy(self):
        return super().policy() if self.options.bf16 else None

    def wrap(self, model):  # the two lines
        for block in model.blocks:
            self.st.fully_shard(block, mp_policy=self.policy())
        return self.st.fully_shard(model, mp_policy=self.policy())

    def total(self, values):
        client = self.st.session()
        with client.alloc((len(values),)) as buffer:
            for i, value in enumerate(values):
                buffer.memory.view()[i] = value
            client.all_reduce(buffer)
            return buffer.memory.view().tolist()

    def daemon(self):
        return self.st.session().status()["pid"]

    def close(self):
        self.st.shutdown()


ENGINES = {"shardd": Shardd, "fsdp2": Fsdp2, "ddp": Ddp, "single": Single}

# ------------------------------------------------------------------------ training


def batch(text, options, engine, step):
    """This rank's part of the step's samples: the same for any number of ranks together."""
    draw = torch.Generator().manual_seed(options.seed * 1000003 + step)
    at = torch.randint(len(text) - options.length - 1, (options.batch,), generator=draw)
    part = options.batch // engine.world
    mine = at[engine.rank * part:(engine.rank + 1) * part]
    samples = torch.stack([text[i:i + options.length + 1] for i in mine.tolist()]).long()
    return samples[:, :-1], samples[:, 1:]


def mib_of(pid):
    """A process's memory with its share of shared memory; None: not readable."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    except OSError:
        return None


class Peak(threading.Thread):
    """The peak memory of a process so far."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.mib = pid, mib_of(pid)
        self.start()

    def run(self):
        while self.mib is not None:
            time.sleep(0.1)
            self.mib = max(self.mib, mib_of(self.pid) or 0)


def say(options, engine, text, **values):
    if engine.rank == 0:
        print(json.dumps(values) if options.json else text, flush=True)


def one_step(model, optimizer, text, options, engine, step):
    """Return: the mean loss of all ranks."""
    given, wanted = batch(text, options, engine, step)
    loss = F.cross_entropy(model(given).float().flatten(0, 1), wanted.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine.total([loss.item()])[0] / engine.world


def report(options, engine, seconds, steps, peaks):
    tokens = options.batch * options.length * steps / seconds if seconds else 0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seen = all(peak.mib is not None for peak in peaks)
    node = engine.total([sum(peak.mib or 0 for peak in peaks)])[0] if seen else None
    say(options, engine, f"{tokens:.0f} tokens/s, {1000 * seconds / max(1, steps):.1f} ms a step, "
        f"peak of rank 0 {rss:.0f} MiB, of all processes "
        + (f"{node:.0f} MiB" if node is not None else "not readable"),
        tokens_per_s=tokens, ms_per_step=1000 * seconds / max(1, steps), peak_mib=rss,
        node_mib=node)


def main():
    options = arguments()
    if options.resilient:
        import shardd.torch

        shardd.torch.guard()  # what follows runs in a child, restarted after a signal
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    text = torch.frombuffer(bytearray(options.data.read_bytes()), dtype=torch.uint8)
    engine = ENGINES[options.engine](options)
    if options.batch % engine.world:
        raise SystemExit(f"train_gpt: --batch {options.batch} is not a multiple of the "
                         f"{engine.world} ranks")
    peaks = [Peak(pid) for pid in (
        ["self", engine.daemon()] if engine.rank == 0 and engine.daemon() else ["self"])]
    model = engine.wrap(Gpt(options.layers, options.width, options.heads, options.length))
    optimizer = engine.optimizer(model)
    run = engine.st.resilient(model) if options.resilient else None
    step, began, first = 0, time.monotonic(), 0
    while (run.step if run else step) < options.steps:
        loss = None
        with run or contextlib.nullcontext():
            step = run.step if run else step
            loss = one_step(model, optimizer, text, options, engine, step)
        if loss is None or (run and run.step != step + 1):
            say(options, engine, f"a rank died: continuing with step {run.step}", rejoined=run.step)
            continue
        say(options, engine, f"step {step}: loss {loss:.4f}", step=step, loss=loss)
        step += 1
        if step == 1:  # the first step is the warm-up
            began, first = time.monotonic(), 1
    report(options, engine, time.monotonic() - began, options.steps - first, peaks)
    engine.close()


if __name__ == "__main__":
    sys.excepthook = in_sentences
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
