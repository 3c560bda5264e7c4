"""Train a GPT on the GPU with one of three engines, and print what came of it as a JSON line.

    train.py --engine single|fsdp2|shardd [OPTIONS]

single: PyTorch alone; fsdp2: fully_shard over one rank; shardd: shardd.torch.fully_shard, as a rank
of `shardctl run`. The data are the same for any number of ranks together.
"""

import argparse
import ctypes as C
import json
import os
import time

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LLAMA_VOCABULARY = 256, 32000
WARM_UP = 5  # steps that are not timed


def give_swap():
    """For a PyTorch older than 2.13; $STORAGES is the library of storages.cpp."""
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        return
    lib = C.CDLL(os.environ["STORAGES"])
    lib.storages_swap.argtypes = [C.c_void_p, C.c_void_p]

    def swap(self, other):
        if lib.storages_swap(self._cdata, other._cdata):
            raise RuntimeError(f"storages of {self.nbytes()} and {other.nbytes()} bytes")

    torch.UntypedStorage._swap_data_ptr_ = swap


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, width // 64, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, layers, width, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text):
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", required=True, choices=["single", "fsdp2", "shardd"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="samples of all ranks together")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--llama", action="store_true",
                        help="transformers' LlamaForCausalLM, from a config, in place of the GPT")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def llama(options):
    import transformers

    width = options.width
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=LLAMA_VOCABULARY, hidden_size=width,
        intermediate_size=width * 8 // 3 // 256 * 256, num_hidden_layers=options.layers,
        num_attention_heads=width // 128, num_key_value_heads=width // 128,
        max_position_embeddings=options.length, attn_implementation="sdpa",
        tie_word_embeddings=False))


def wrapped(options, model):
    """Return: model, torch.optim or what takes its place, clip_grad_norm_, rank, ranks."""
    if options.engine == "single":
        return model, torch.optim, nn.utils.clip_grad_norm_, 0, 1
    from torch.distributed import fsdp

    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if options.bf16 \
        else fsdp.MixedPrecisionPolicy()
    if options.engine == "fsdp2":
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        torch.distributed.init_process_group("nccl")
        engine, place = fsdp, (torch.optim, nn.utils.clip_grad_norm_, 0, 1)
    else:
        import shardd.torch as engine

        place = engine, engine.clip_grad_norm_, engine.rank(), engine.world_size()
    for block in model.model.layers if options.llama else model.blocks:
        engine.fully_shard(block, mp_policy=policy)
    return engine.fully_shard(model, mp_policy=policy), *place


def batch(options, step, rank, ranks):
    draw = torch.Generator().manual_seed(1000003 + step)
    vocabulary = LLAMA_VOCABULARY if options.llama else VOCABULARY
    text = torch.randint(vocabulary, (options.batch, options.length + 1), generator=draw)
    text[:, 1::2] = text[:, 0:-1:2]  # half of it can be learned
    part = options.batch // ranks
    text = text[rank * part:(rank + 1) * part].cuda()
    return text[:, :-1], text[:, 1:]


def train(options, model, optimizer, clip, rank, ranks):
    """Return: the losses, milliseconds a step."""
    losses, began = [], 0.0
    for step in range(options.steps):
        given, wanted = batch(options, step, rank, ranks)
        answer = model(given)
        logits = answer.logits if options.llama else answer
        loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
        loss.backward()
        if options.clip:
            clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step + 1 == WARM_UP:
            torch.cuda.synchronize()
            began = time.monotonic()
    torch.cuda.synchronize()
    ms = 1000 * (time.monotonic() - began) / (options.steps - WARM_UP)
    return torch.stack(losses).double().cpu().tolist(), ms


def main():
    options = arguments()
    give_swap()
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(0)
    model = llama(options) if options.llama else Gpt(options.layers, options.width, options.length)
    model = model.cuda()
    model, optimizers, clip, rank, ranks = wrapped(options, model)
    optimizer = optimizers.AdamW(model.parameters(), lr=options.lr, fused=True)
    losses, ms = train(options, model, optimizer, clip, rank, ranks)
    print(json.dumps({"engine": options.engine, "rank": rank, "ranks": ranks, "losses": losses,
                      "ms": ms, "bf16": options.bf16, "clip": options.clip,
                      "parameters": sum(p.numel() for p in model.parameters()),
                      "peak_mib": torch.cuda.max_memory_allocated() / 2**20}), flush=True)
    if options.engine == "shardd":
        optimizers.shutdown()
    os._exit(0)  # NCCL's threads are not waited for


if __name__ == "__main__":
    main()
