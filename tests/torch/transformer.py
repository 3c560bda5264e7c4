"""A small transformer with all that makes sharding hard: a token embedding that is the
output head too, biases, layer norms, a frozen layer, and sizes that divide by nothing."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 31, 18, 3, 11, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-1, -2) * (width // HEADS) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = weights.masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text):
        x = self.tokens(text) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make():
    """The same on every rank."""
    torch.manual_seed(5)
    model = Transformer()
    nn.init.normal_(model.tokens.weight, std=0.2)
    model.head.weight = model.tokens.weight
    for parameter in model.blocks[0].up.parameters():
        parameter.requires_grad_(False)
    return model


def loss(model, rank, step, micro=0):
    """On the tokens of this rank, step and micro-batch."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
    logits = model(text[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
