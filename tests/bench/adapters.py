#!/usr/bin/env python3
"""How long a LoRA adapter takes from a commit to a reader: by hand, with a Python that has torch,
transformers, peft and accelerate (docs/performance.md)."""

import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import accelerate
import peft
import support
import torch
import transformers

import shardd
import shardd.torch

WARM, COUNTED = 3, 60
GOAL_MS = 5


def main(socket):
    os.environ.update(SHARDD_SOCKET=socket, SHARDD_JOB="lora")
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=4)
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    nbytes = shardd.torch.load_base("base", {  # the values do not matter
        name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()})
    began = time.perf_counter()
    shardd.torch.attach_base(model, "base")
    print(f"base: {nbytes} bytes, attached in {1e3 * (time.perf_counter() - began):.0f} ms")
    model = shardd.torch.fully_shard(peft.get_peft_model(model, peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])))
    optimizer = shardd.torch.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(8)[None]
    times = {"bf16": ([], []), "fp32": ([], [])}
    client = shardd.Client(socket)
    sizes = {kind: shardd.declare_publication(
        shardd.adapter_publication(kind, type=kind), "lora", client) for kind in times}
    lives = {kind: shardd.Live("lora", kind, socket) for kind in times}
    for step in range(1, WARM + COUNTED + 1):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shardd.torch.commit(step)
        for kind, (made, leased) in times.items():
            began = time.perf_counter()
            shardd.publish(kind, "lora", client)
            there = time.perf_counter()
            assert lives[kind].acquire().step == step
            made.append(1e3 * (there - began))
            leased.append(1e3 * (time.perf_counter() - there))
    for kind, (made, leased) in times.items():
        late = sum(ms > GOAL_MS for ms in made[WARM:])
        print(f"{kind}: {sizes[kind]} bytes, published in {statistics.median(made[WARM:]):.2f} ms "
              f"(p50), {max(made[WARM:]):.2f} ms (longest), {late} of {COUNTED} in more than "
              f"{GOAL_MS} ms, leased in {statistics.median(leased[WARM:]):.2f} ms (p50)")
    for live in lives.values():
        live.close()
    shardd.torch.shutdown()


if __name__ == "__main__":
    with support.daemon() as at:
        main(at)
