"""What the rounds with readers publish, and what the readers must see."""

import contextlib
import hashlib
import json
import subprocess

PARTS = 2  # ranks of the engine of the exact trainer
SETTINGS = {"type": "bf16", "every_steps": 1, "buffers": 12, "delta_percent": 100}
TAKEN = {"dim": 0}  # the slice of the engine's rank
# The model (exact_model.c) makes the same by hand: a change here is one there.
RULES = [
    {
        "name": "layers.{i}.qkv",
        "sources": [{"tensor": f"layers.{{i}}.{n}", "slice": TAKEN} for n in "qkv"],
    },
    {
        "name": "layers.{i}.qkv_bias",
        "sources": [{"tensor": f"layers.{{i}}.{n}_bias", "slice": TAKEN} for n in "qkv"],
    },
    {"name": "layers.{i}.eight", "type": "e4m3", "sources": ["layers.{i}.o"]},
    {
        "name": "stacked",
        "stack": "i",
        "sources": [{"tensor": "layers.{i}.o", "slice": {"dim": 1}}],
    },
    {
        "name": "embed",
        "sources": ["embed"],
        "pad_dim": 0,
        "pad_multiple": 64,
        "also": ["lm_head"],
    },
    {
        "name": "c_attn",
        "type": "fp16",
        "sources": [{"tensor": "c_attn", "transpose": True, "slice": TAKEN}],
    },
    {
        "name": "columns",
        "type": "fp32",
        "join_dim": 1,
        "sources": [
            {"tensor": "c_attn", "slice": {"dim": 1, "parts": 3, "part": part}} for part in (2, 0)
        ],
    },
    {
        "name": "tiles",
        "type": "e4m3",
        "scale_block": [16, 32],
        "scale_name": "tiles.scale_inv",
        "sources": [{"tensor": "tiles", "transpose": True}],
    },
]


# Of the GPT (gpt.py), which makes the same by PyTorch.
def gpt_rules(rank):
    third, part = 16, 16 // PARTS  # rows of q, k and v
    return [
        {
            "name": "blocks.{i}.qkv.weight",
            "sources": [
                {
                    "tensor": "blocks.{i}.qkv.weight",
                    "slice": {"dim": 0, "first": n * third + rank * part, "count": part},
                }
                for n in range(3)
            ],
        },
        {
            "name": "blocks.{i}.up.weight",
            "type": "fp16",
            "sources": [{"tensor": "blocks.{i}.up.weight", "transpose": True, "slice": TAKEN}],
        },
        {
            "name": "blocks.{i}.down.weight",
            "type": "e4m3",
            "scale_block": [6, 40],
            "sources": ["blocks.{i}.down.weight"],
        },
        {
            "name": "stacked",
            "stack": "i",
            "sources": [{"tensor": "blocks.{i}.out.weight", "slice": {"dim": 1}}],
        },
        {
            "name": "embed",
            "sources": ["tokens.weight", "places.weight"],
            "pad_dim": 0,
            "pad_multiple": 60,
            "also": ["head"],
        },
        {"name": "norm.{w}", "type": "fp32", "sources": ["norm.{w}"]},
    ]


ALSO = {str(rule["name"]): rule["also"] for rule in RULES if "also" in rule}
# By the trainer; reader i reads publication i, and the readers after the last one again from the
# first one on.
EXACT = [
    {"name": f"engine-{rank}", "tp_size": PARTS, "tp_rank": rank, "rules": RULES, **SETTINGS}
    for rank in range(PARTS)
]
GPT = [
    {
        "name": f"engine-{rank}",
        "tp_size": PARTS,
        "tp_rank": rank,
        "rules_only": True,
        "rules": gpt_rules(rank),
        **SETTINGS,
    }
    for rank in range(PARTS)
]


def digest(dtype, shape, data):
    """Of a published tensor."""
    what = f"{dtype} [{','.join(str(n) for n in shape)}]"
    return hashlib.blake2b(what.encode() + b"\0" + data, digest_size=16).hexdigest()


def lines(path):
    """The objects of a file, one a line. Those that were cut off by a death are left out."""
    with open(path, errors="replace") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                yield json.loads(line)


class Model:
    """Digests of what the exact trainer publishes, which chaos-exact computes without a daemon."""

    def __init__(self, program):
        self.program, self.known = program, {}

    def at(self, rank, steps):
        """Return: by step, the digests by name, of the publication of @rank."""
        known = self.known.setdefault(rank, {})
        if missing := sorted(set(steps) - known.keys()):
            known |= {step: {} for step in missing}
            self.learn(rank, missing, known)
        return known

    def learn(self, rank, steps, into):
        command = [self.program, "--publish", str(rank), *(str(step) for step in steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as p:
            assert p.stdout
            for line in p.stdout:
                step, name, dtype, shape, size = line.decode().split()
                dims = [int(n) for n in shape[1:-1].split(",") if n]
                found = digest(dtype, dims, p.stdout.read(int(size)))
                for each in (name, *ALSO.get(name, ())):
                    into[int(step)][each] = found
        if p.returncode:
            raise ValueError(f"{' '.join(command)} ended with {p.returncode}")
