"""The PyTorch trainer of the runner: a small GPT that fully_shard divides, under shardd.torch.guard
and shardd.torch.resilient. Rank 0 prints each committed step with its loss."""

import argparse
import json
import pathlib

import torch
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


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=pathlib.Path, required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--in-backward", action="store_true")
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
            x, y = batch(text, step, st.rank())
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.state["seen"] += BATCH
        if run.step == step + 1 and st.rank() == 0:
            print(json.dumps({"step": run.step, "loss": loss.item()}), flush=True)


main()
