#!/usr/bin/env python3
"""What it saves that weight gradients are computed in the daemon's buffer (shardd.torch._direct).

One transformer per way on the same ranks, stepped in turns: first with all gradients copied, then
with those of Linear and Embedding in place; the order changes from round to round. Prints the bytes
of gradients that were copied in a step, and the times of a step, of its backward, and what backward
took of a processor, which other programs change least: medians, the least, and the median of the
rounds' differences. Needs PyTorch; the daemon is SHARDD_BIN_DIR's.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import support
import torch
from torch import nn

import shardd.torch as st
from shardd.torch import _direct
from shardd.torch._unit import ShardedUnit

WAYS = ("copied", "direct")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width, layers, words):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, text):
        x = self.tokens(text)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trained:
    """A model, its optimizer, and what its steps took."""

    def __init__(self, way, options):
        torch.manual_seed(1)
        self.direct = way == "direct"
        self.model = Model(options.width, options.layers, options.words)
        for block in self.model.blocks:
            st.fully_shard(block)
        st.fully_shard(self.model)
        self.optimizer = st.AdamW(self.model.parameters(), lr=1e-3)
        self.steps, self.backwards, self.processor = [], [], []

    def step(self, text):
        _direct.enabled = self.direct
        begin = time.perf_counter()
        logits = self.model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        middle, busy = time.perf_counter(), time.process_time()
        loss.backward()
        self.processor.append(time.process_time() - busy)
        after = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(time.perf_counter() - begin)
        self.backwards.append(after - middle)
        return loss.item()


def count(counts):
    """Note in @counts how many bytes of gradients arrive, and how many of them are copied."""
    inner = ShardedUnit.add_gradient

    def counted(unit, index, gradient):
        there = gradient.data_ptr() == unit._gradient_views()[index].data_ptr()
        counts[0] += gradient.nbytes
        counts[1] += 0 if there else gradient.nbytes
        return inner(unit, index, gradient)

    ShardedUnit.add_gradient = counted
    return inner


def trainer(rank, world, socket, options):
    os.environ["SHARDD_SOCKET"] = socket
    torch.set_num_threads(options.threads)
    st.init(job="direct", rank=rank, world_size=world)
    trained = {way: Trained(way, options) for way in WAYS}
    text = torch.randint(options.words, (options.batch, options.length + 1))
    bytes_of = {}
    for way in WAYS:  # the first step is not timed: memory is taken for the first time
        counts = [0, 0]
        inner = count(counts)
        trained[way].step(text)
        ShardedUnit.add_gradient = inner
        bytes_of[way] = counts
        trained[way].steps.clear()
        trained[way].backwards.clear()
        trained[way].processor.clear()
    for turn in range(options.rounds):
        losses = [trained[way].step(text) for way in (WAYS if turn % 2 else WAYS[::-1])]
        assert losses[0] == losses[1], "the ways train differently"
    st.shutdown()
    return {way: (bytes_of[way], t.steps, t.backwards, t.processor) for way, t in trained.items()}


def row(name, values):
    low, middle = 1000 * min(values), 1000 * statistics.median(values)
    return f"{name:24} {middle:9.1f} {low:9.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("ranks", 2), ("width", 512), ("layers", 6), ("words", 8192),
                        ("length", 32), ("batch", 4), ("rounds", 20), ("threads", 1)):
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()
    with support.daemon() as socket:
        [first, *_] = support.ranks(trainer, options.ranks, socket, options, seconds=1200)
    for way in WAYS:
        arrived, copied = first[way][0]
        print(f"{way}: {copied / 2**20:.1f} of {arrived / 2**20:.1f} MiB of gradients copied in a "
              "step")
    print(f"{'ms, rank 0':24} {'median':>9} {'least':>9}")
    for what, index in (("step", 1), ("backward", 2), ("busy in backward", 3)):
        for way in WAYS:
            print(row(f"{what}, {way}", first[way][index]))
        differences = [a - b for a, b in zip(first["copied"][index], first["direct"][index])]
        print(f"{what}: direct is {1000 * statistics.median(differences):.1f} ms less, median of "
              f"{len(differences)} rounds")


if __name__ == "__main__":
    main()
