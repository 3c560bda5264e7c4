#!/usr/bin/env python3
"""Publications: what PyTorch makes of masters; see golden.py for what to install.

    venv/bin/python make_published.py

writes published.safetensors. "in/NAME" are masters in fp32, under their names in the model;
"out/NAME" is the published tensor of that name, e4m3 as bytes. The metadata has the declaration as
JSON. The masters have values that round up, down and to even, large and small ones, subnormal ones,
infinities and NaN.
"""

import json

import golden
import torch

RANK, SIZE = 1, 2
EDGES = torch.tensor([
    0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, -1 - 2**-11, 65504.0, 65519.9, 65520.0,
    3.4e38, 1e-5, 6e-8, 2.9e-8, 1e-40, -1e-45, float("inf"), -float("inf"), float("nan"), 448.0,
    2**-9, 2**-10])

DECLARATION = {
    "name": "golden", "type": "bf16", "tp_size": SIZE, "tp_rank": RANK, "every_steps": 1,
    "rules": [
        {"name": "layers.{i}.qkv.{w}", "sources": [
            {"tensor": "layers.{i}.q.{w}", "slice": {"dim": 0}},
            {"tensor": "layers.{i}.k.{w}", "slice": {"dim": 0, "parts_at_most": 1}},
            {"tensor": "layers.{i}.v.{w}", "slice": {"dim": 0, "first": 1, "count": 2}}]},
        {"name": "layers.{i}.experts.w13", "stack": "e", "sources": [
            {"tensor": "layers.{i}.experts.{e}.w1", "slice": {"dim": 0}},
            {"tensor": "layers.{i}.experts.{e}.w3", "slice": {"dim": 0}}]},
        {"name": "layers.{i}.experts.w2", "stack": "e", "sources": [
            {"tensor": "layers.{i}.experts.{e}.w2", "slice": {"dim": 1}}]},
        {"name": "embed", "sources": ["embed"], "pad_dim": 0, "pad_multiple": 16,
         "also": ["lm_head"]},
        {"name": "c_attn", "sources": [{"tensor": "c_attn", "transpose": True}], "type": "fp16"},
        {"name": "columns", "join_dim": 1, "type": "fp32", "sources": [
            {"tensor": "c_attn", "slice": {"dim": 1, "parts": 3, "part": 2}},
            {"tensor": "c_attn", "slice": {"dim": 1, "parts": 3, "part": 0}}]},
        {"name": "edges.fp16", "sources": ["edges"], "type": "fp16"},
        {"name": "edges.fp32", "sources": ["edges"], "type": "fp32"},
        {"name": "tiles", "sources": ["tiles"], "type": "e4m3", "scale_block": [16, 32],
         "scale_name": "tiles.scale_inv"},
        {"name": "whole", "sources": ["tiles"], "type": "e4m3"},
        {"name": "", "sources": ["dropped"]},
    ],
}


def masters():
    made = torch.Generator().manual_seed(20)
    random = {"embed": (10, 12), "norm": (12,), "c_attn": (12, 36), "tiles": (41, 70),
              "dropped": (3,), "large": (90, 801)}
    for i in range(2):
        at = f"layers.{i}."
        for n, rows in (("q", 8), ("k", 4), ("v", 4)):
            random |= {f"{at}{n}.weight": (rows, 12), f"{at}{n}.bias": (rows,)}
        for e in range(3):
            random |= {f"{at}experts.{e}.w1": (6, 12), f"{at}experts.{e}.w3": (6, 12),
                       f"{at}experts.{e}.w2": (12, 6)}
    made = {name: torch.randn(shape, generator=made) for name, shape in random.items()}
    return made | {"edges": EDGES.repeat(9)}


def part(x, dim):
    return x.chunk(SIZE, dim)[RANK]


def e4m3(x, rows, columns):
    """The codes, and the scales of the tiles."""
    down, across = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scale = torch.empty(down, across)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for i in range(down):
        for k in range(across):
            at = slice(i * rows, (i + 1) * rows), slice(k * columns, (k + 1) * columns)
            scale[i, k] = x[at].abs().max() / 448
            codes[at] = (x[at] / scale[i, k]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def published(m):
    out = {"norm": m["norm"], "edges": m["edges"], "large": m["large"]}
    for i in range(2):
        at = f"layers.{i}."
        for w in ("weight", "bias"):
            out[f"{at}qkv.{w}"] = torch.cat([
                part(m[f"{at}q.{w}"], 0), m[f"{at}k.{w}"], m[f"{at}v.{w}"][1:3]])
        experts = [{w: m[f"{at}experts.{e}.{w}"] for w in ("w1", "w2", "w3")} for e in range(3)]
        out[f"{at}experts.w13"] = torch.stack([
            torch.cat([part(e["w1"], 0), part(e["w3"], 0)]) for e in experts])
        out[f"{at}experts.w2"] = torch.stack([part(e["w2"], 1) for e in experts])
    out["embed"] = out["lm_head"] = torch.cat([m["embed"], torch.zeros(6, 12)])
    out = {name: x.to(torch.bfloat16) for name, x in out.items()}
    thirds = m["c_attn"].chunk(3, 1)
    out |= {"c_attn": m["c_attn"].t().to(torch.float16),
            "columns": torch.cat([thirds[2], thirds[0]], 1),
            "edges.fp16": m["edges"].to(torch.float16), "edges.fp32": m["edges"]}
    out["tiles"], out["tiles.scale_inv"] = e4m3(m["tiles"], 16, 32)
    out["whole"], scale = e4m3(m["tiles"], *m["tiles"].shape)
    out["whole_scale"] = scale.reshape(())
    del out["edges"]
    return out


if __name__ == "__main__":
    values = masters()
    tensors = {f"in/{name}": x for name, x in values.items()}
    tensors |= {f"out/{name}": x for name, x in published(values).items()}
    golden.save("published.safetensors", tensors,
                {"declaration": json.dumps(DECLARATION, sort_keys=True)})
