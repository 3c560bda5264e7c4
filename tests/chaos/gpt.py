"""The PyTorch trainer of the runner: a small GPT that fully_shard divides, under shardd.torch.guard
and shardd.torch.resilient. Rank 0 prints each committed step with its loss. With --published it
appends to that file what publications of each committed step must be (published.py): what PyTorch
makes of the gathered masters. Gathering them before the commit would make that step one that cannot
be undone."""

import argparse
import json
import pathlib

import published
import torch
from torch.nn import functional
from train_gpt import Gpt

import shardd.torch as st

LENGTH, BATCH = 8, 2
# So many deaths of one rank no round has.
st.guard(max_restarts=1_000_000)


def batch(text, step, rank):
    draw = torch.Generator().manual_seed(2 * step + rank)
    at = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draw).tolist()
    return (
        torch.stack([text[i : i + LENGTH] for i in at]),
        torch.stack([text[i + 1 : i + 1 + LENGTH] for i in at]),
    )


def quantised(x, rows, columns):
    """As e4m3; and the scales of the tiles."""
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns))
    for i in range(scales.shape[0]):
        for k in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(k * columns, (k + 1) * columns)
            amax = x[at].abs().max()
            scales[i, k] = amax / 448 if amax else 1
            codes[at] = (x[at] / scales[i, k]).to(torch.float8_e4m3fn)
    return codes, scales


def cast_and_cut(masters, rank):
    """What published.GPT declares for the engine's rank, by PyTorch."""

    def part(x, dim):
        return x.chunk(published.PARTS, dim)[rank]

    made, out = {}, []
    for i in range(2):
        block = f"blocks.{i}"
        thirds = masters[f"{block}.qkv.weight"].chunk(3)
        made[f"{block}.qkv.weight"] = torch.cat([part(x, 0) for x in thirds]).bfloat16()
        made[f"{block}.up.weight"] = part(masters[f"{block}.up.weight"].t(), 0).half()
        down = quantised(masters[f"{block}.down.weight"], 6, 40)
        made[f"{block}.down.weight"], made[f"{block}.down.weight_scale"] = down
        out.append(part(masters[f"{block}.out.weight"], 1))
    made["stacked"] = torch.stack(out).bfloat16()
    embed = torch.cat([masters["tokens.weight"], masters["places.weight"]])
    embed = functional.pad(embed, (0, 0, 0, -len(embed) % 60)).bfloat16()
    return (
        made
        | {"embed": embed, "head": embed}
        | {name: masters[name] for name in ("norm.weight", "norm.bias")}
    )


NAMES = {
    torch.float32: "FP32",
    torch.bfloat16: "BF16",
    torch.float16: "FP16",
    torch.float8_e4m3fn: "E4M3",
}


def digest(x):
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    return published.digest(NAMES[x.dtype], x.shape, data)


def write_published(model, step, path):
    """In a line of its own, also after one that a death has cut off."""
    with st.summon_full_params(model, writeback=False):
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    if st.rank() == 0:
        tensors = [
            {name: digest(x) for name, x in cast_and_cut(masters, rank).items()}
            for rank in range(published.PARTS)
        ]
        with path.open("a") as f:
            f.write("\n" + json.dumps({"step": step, "tensors": tensors}) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=pathlib.Path, required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--in-backward", action="store_true")
    p.add_argument("--published", type=pathlib.Path)
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    text = torch.tensor(list(args.data.read_bytes()))
    model = Gpt(layers=2, width=16, heads=2, length=LENGTH)
    for block in model.blocks:
        st.fully_shard(block)
    st.fully_shard(model)
    optimizer = st.AdamW(model.parameters(), lr=0.01, in_backward=args.in_backward)
    run = st.resilient(model, {"seen": 0}, wait=600)
    while run.step < args.steps:
        step = run.step
        with run:
            if args.published:
                write_published(model, step, args.published)
            x, y = batch(text, step, st.rank())
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.state["seen"] += BATCH
        if run.step == step + 1 and st.rank() == 0:
            print(json.dumps({"step": run.step, "loss": loss.item()}), flush=True)
    if args.published:
        write_published(model, run.step, args.published)


main()
