"""Declarations of publications with the names and layout of vLLM, which joins and cuts weights.

::

    from shardd.maps import publication_map

    declaration = publication_map(model.config, "engine", tp_size=2, tp_rank=0)
    shardd.declare_publication(declaration, "train", client)

or, as a file for other languages::

    python -m shardd.maps config.json --name engine --tp-size 2 --tp-rank 0 > engine.json

Sources have the names of transformers' models. Names and layout are those that vLLM 0.33 gives the
parameters of its own models without quantisation, before an engine's kernels rearrange them:
qkv_proj, gate_up_proj, experts.w13_weight and w2_weight. The matrices of GPT-2 are transposed. The
vocabulary is padded to a multiple of 64 and cut. If there are more ranks than key and value heads,
several ranks get the same head.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Callable

from .errors import InvalidArgument

VOCABULARY = 64  # the vocabulary is padded to a multiple of this
_Rules = list[dict[str, Any]]
_LAYER = "model.layers.{i}."


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


class _Shape:
    """The properties of a model that a map needs, and the rank that the map is for."""

    def __init__(self, config: Any, size: int, rank: int) -> None:
        self._config, self.size, self.rank = config, size, rank
        if size < 1 or not 0 <= rank < size:
            raise InvalidArgument(f"tp_rank {rank} of tp_size {size} is out of range", "tp_rank")
        heads = self.number("num_attention_heads")
        if heads % size:
            raise InvalidArgument(f"{heads} attention heads are not divisible by tp_size {size}",
                                  "tp_size")
        self.kv_heads = int(self.get("num_key_value_heads") or heads)
        if self.kv_heads % size and size % self.kv_heads:
            raise InvalidArgument(f"{self.kv_heads} heads of keys and values and tp_size {size}: "
                                  "neither divides the other", "tp_size")
        tied = self.get("tie_word_embeddings")
        # configurations of GPT-2 omit it: the default is true there
        self.tied = self.get("model_type") == "gpt2" if tied is None else bool(tied)

    def get(self, key: str) -> Any:
        return _get(self._config, key)

    def number(self, key: str) -> int:
        found = self.get(key)
        if found is None and key == "num_attention_heads":
            found = self.get("n_head")  # GPT-2's config.json
        if not isinstance(found, int) or found < 1:
            raise InvalidArgument(f"the model's configuration has {key} {found!r}, must be a "
                                  "number above 0", "config")
        return found

    def cut(self, tensor: str, dim: int, **more: Any) -> Any:
        """This rank's part of a source."""
        if self.size == 1:
            return {"tensor": tensor, **more} if more else tensor
        return {"tensor": tensor, **more, "slice": {"dim": dim}}

    def part(self, tensor: str, dim: int, which: int, of: int, **more: Any) -> Any:
        """This rank's part of part number @which of @of equal parts of a source."""
        return {"tensor": tensor, **more, "slice": {
            "dim": dim, "parts": of * self.size, "part": which * self.size + self.rank}}

    def key_value(self, tensor: str) -> Any:
        """Rows of key or value heads. There may be fewer heads than ranks."""
        found = self.cut(tensor, 0)
        if self.size > self.kv_heads:
            found["slice"]["parts_at_most"] = self.kv_heads
        return found

    def vocabulary(self, name: str, also: list[str]) -> dict[str, Any]:
        """Rows of the padded vocabulary."""
        rows = self.number("vocab_size")
        padded = -(-rows // VOCABULARY) * VOCABULARY
        each = padded // self.size
        first = each * self.rank
        if padded % self.size or first >= rows:
            raise InvalidArgument(
                f"a vocabulary of {rows}, padded to {padded}, cannot be cut for tp_size "
                f"{self.size}: each rank needs as many rows, and one that is not padding",
                "tp_size")
        source: Any = name
        if self.size > 1:
            source = {"tensor": name, "slice": {"dim": 0, "first": first,
                                                "count": min(each, rows - first)}}
        return {"name": name, "sources": [source], "pad_dim": 0, "pad_multiple": each,
                **({"also": also} if also else {})}

    def vocabularies(self, embedding: str, head: str = "lm_head.weight") -> _Rules:
        if not self.tied:
            return [self.vocabulary(embedding, []), self.vocabulary(head, [])]
        return [self.vocabulary(embedding, [head]),
                {"name": "", "sources": [head], "optional": True}]


def _joined(shape: _Shape, name: str, sources: list[Any]) -> dict[str, Any]:
    return {"name": _LAYER + name, "sources": sources}


def _attention(shape: _Shape) -> _Rules:
    own = _LAYER + "self_attn."
    rules = [_joined(shape, "self_attn.qkv_proj.{w}", [
        shape.cut(own + "q_proj.{w}", 0), shape.key_value(own + "k_proj.{w}"),
        shape.key_value(own + "v_proj.{w}")])]
    if shape.size > 1:
        rules.append(_joined(shape, "self_attn.o_proj.weight",
                             [shape.cut(own + "o_proj.weight", 1)]))
    return rules


def _dense(shape: _Shape) -> _Rules:
    own = _LAYER + "mlp."
    # optional: a model may have experts instead in some layers, or in all
    rules = [{**_joined(shape, "mlp.gate_up_proj.{w}", [
        shape.cut(own + "gate_proj.{w}", 0), shape.cut(own + "up_proj.{w}", 0)]),
        "optional": True}]
    if shape.size > 1:
        rules.append({**_joined(shape, "mlp.down_proj.weight",
                                [shape.cut(own + "down_proj.weight", 1)]), "optional": True})
    return rules


def _both_names(place: str, name: str) -> dict[str, Any]:
    """The name in vLLM before 0.30, and the name since then."""
    return {"name": f"{_LAYER}{place}.experts.{name}",
            "also": [f"{_LAYER}{place}.experts.routed_experts.{name}"], "optional": True}


def _experts(shape: _Shape, place: str, gate: str, up: str, down: str) -> _Rules:
    """As in transformers: one tensor for all experts, or (before 5.0) one for each."""
    fused = _LAYER + "mlp.experts."
    own = f"{_LAYER}{place}.experts.{{e}}."
    return [
        {**_both_names(place, "w13_weight"), "join_dim": 1,
         "sources": [shape.part(fused + "gate_up_proj", 1, 0, 2),
                     shape.part(fused + "gate_up_proj", 1, 1, 2)]},
        {**_both_names(place, "w2_weight"), "sources": [shape.cut(fused + "down_proj", 2)]},
        {**_both_names(place, "w13_weight"), "stack": "e",
         "sources": [shape.cut(own + gate, 0), shape.cut(own + up, 0)]},
        {**_both_names(place, "w2_weight"), "stack": "e", "sources": [shape.cut(own + down, 1)]},
    ]


def _llama(shape: _Shape) -> _Rules:
    return [*_attention(shape), *_dense(shape),
            *shape.vocabularies("model.embed_tokens.weight")]


def _mixtral(shape: _Shape) -> _Rules:
    return [*_attention(shape),
            {"name": _LAYER + "block_sparse_moe.gate.weight",
             "sources": [_LAYER + "mlp.gate.weight"], "optional": True},
            *_experts(shape, "block_sparse_moe", "w1.weight", "w3.weight", "w2.weight"),
            *shape.vocabularies("model.embed_tokens.weight")]


def _qwen3_moe(shape: _Shape) -> _Rules:
    return [*_attention(shape), *_dense(shape),
            *_experts(shape, "mlp", "gate_proj.weight", "up_proj.weight", "down_proj.weight"),
            *shape.vocabularies("model.embed_tokens.weight")]


def _gpt2(shape: _Shape) -> _Rules:
    """The matrices are those of Conv1D: they are transposed, and q, k and v are one matrix."""
    layer = "transformer.h.{i}."

    def qkv(tensor: str, **more: Any) -> list[Any]:
        if shape.size == 1:
            return [shape.cut(tensor, 0, **more)]
        return [shape.part(tensor, 0, which, 3, **more) for which in range(3)]

    rules: _Rules = [
        {"name": layer + "attn.c_attn.weight",
         "sources": qkv(layer + "attn.c_attn.weight", transpose=True)},
        {"name": layer + "{m}.c_proj.weight",
         "sources": [shape.cut(layer + "{m}.c_proj.weight", 1, transpose=True)]},
        {"name": layer + "mlp.c_fc.weight",
         "sources": [shape.cut(layer + "mlp.c_fc.weight", 0, transpose=True)]},
    ]
    if shape.size > 1:
        rules += [
            {"name": layer + "attn.c_attn.bias", "sources": qkv(layer + "attn.c_attn.bias")},
            {"name": layer + "mlp.c_fc.bias",
             "sources": [shape.cut(layer + "mlp.c_fc.bias", 0)]},
        ]
    return [*rules, *shape.vocabularies("transformer.wte.weight")]


MODELS: dict[str, Callable[[_Shape], _Rules]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "mixtral": _mixtral, "qwen2": _llama,
    "qwen3": _llama, "qwen3_moe": _qwen3_moe,
}


def _loaded(config: Any) -> Any:
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            return json.load(file)
    return config


def publication_map(config: Any, name: str = "engine", *, tp_size: int = 1, tp_rank: int = 0,
                    type: str = "bf16", **settings: Any) -> dict[str, Any]:
    """Return a declaration (docs/publish.md) of a model's weights in vLLM's layout.

    @config: the model's configuration from transformers, a mapping, or the path of a config.json.
    It must have model_type, vocab_size and the numbers of heads; tie_word_embeddings is used, too.
    @tp_size, @tp_rank: the rank of the engine's tensor parallelism. @settings: further keys of the
    declaration, for example every_steps. InvalidArgument: there is no map for the model, or the
    model cannot be cut for tp_size.
    """
    config = _loaded(config)
    model = _get(config, "model_type")
    if not isinstance(model, str) or model not in MODELS:
        raise InvalidArgument(f"there is no map for model_type {model!r}; there are some for "
                              f"{', '.join(MODELS)}", "config")
    shape = _Shape(config, tp_size, tp_rank)
    declaration: dict[str, Any] = {"name": name, "type": type, "rules": MODELS[model](shape),
                                   **settings}
    if tp_size > 1:
        declaration.update(tp_size=tp_size, tp_rank=tp_rank)
    return declaration


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shardd.maps",
                                     description="Print a declaration for an engine as JSON.")
    parser.add_argument("config", help="the model's config.json")
    parser.add_argument("--name", default="engine", help="of the publication")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--type", default="bf16", help="of the tensors: bf16, fp16, fp32")
    parser.add_argument("--every-steps", type=int, default=0, help="0: on request only")
    given = parser.parse_args()
    settings = {"every_steps": given.every_steps} if given.every_steps else {}
    try:
        made = publication_map(given.config, given.name, tp_size=given.tp_size,
                               tp_rank=given.tp_rank, type=given.type, **settings)
    except (InvalidArgument, OSError, ValueError) as error:
        sys.exit(f"shardd.maps: {error}")
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    _main()

__all__ = ["MODELS", "publication_map"]
