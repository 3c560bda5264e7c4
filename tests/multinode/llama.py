#!/usr/bin/python3
"""One rank that trains a small Llama of the package transformers, made from a config.

usage: llama.py STEPS [SHARDS]

SHARDS: so many ranks share the parameters, and the others are replicas of them (HSDP). Else all do.

Rank 0 prints a line of JSON for each step: its number and the mean loss of all ranks' samples.
"""
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
import torch
import transformers

import shardd.torch as st

SAMPLES, LENGTH, VOCABULARY = 12, 10, 64


def make_mesh(shards):
    """Consecutive ranks share the parameters: those of one node."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    return tuple(tuple(ranks[first:first + shards]) for first in ranks[::shards])


def make_model(mesh):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        tie_word_embeddings=True, use_cache=False)
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        st.fully_shard(layer, mesh=mesh)
    return st.fully_shard(model, mesh=mesh)


def mean(value):
    """Of all ranks."""
    client = st.session()
    with client.alloc((1,)) as buffer:
        buffer.memory.view()[0] = value
        client.all_reduce(buffer)
        return buffer.memory.view()[0] / st.world_size()


def main():
    torch.set_num_threads(1)
    model = make_model(make_mesh(int(sys.argv[2])) if len(sys.argv) > 2 else None)
    optimizer = st.AdamW(model.parameters(), lr=0.01)
    part = SAMPLES // st.world_size()
    for step in range(int(sys.argv[1])):
        draw = torch.Generator().manual_seed(step)
        samples = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=draw)
        mine = samples[st.rank() * part:(st.rank() + 1) * part]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = mean(loss.item())
        if st.rank() == 0:
            print(json.dumps({"step": step, "loss": total}), flush=True)
    st.shutdown()


if __name__ == "__main__":
    main()
