#!/usr/bin/env python3
"""Gradients in the daemon's buffer: the bits of PyTorch's own, and nothing is copied.

Prints one line of TAP a test.
"""

import unittest
import unittest.mock

import fsdp
import support
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardd.torch as st
from shardd.torch import _direct
from shardd.torch._unit import ShardedUnit


def draw(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


class Buffer:
    """What a unit is to a module: a place for one gradient, aligned as its own are."""

    def __init__(self, like):
        shift = 3 * _direct.ALIGNMENT // like.element_size()
        self.flat = torch.full((like.numel() + shift,), float("nan"), dtype=like.dtype)
        self.view, self.asked = self.flat[shift:].view(like.shape), 0
        assert self.view.data_ptr() % _direct.ALIGNMENT == 0

    def direct_gradient(self, index, accumulator):
        self.asked += 1
        return self.view.detach() if _direct.arrives(accumulator) else None


def attached(module):
    buffer = Buffer(module.weight)
    _direct.attach(module, "weight", module.weight, buffer, 0)
    return buffer


# Rows and columns that divide by nothing, one of each, and enough for all of a kernel's loops.
SHAPES = [(1, 1, 1), (5, 7, 3), (1, 19, 5), (33, 1, 4), (8, 64, 1), (130, 257, 61), (64, 512, 256),
          (1000, 33, 65)]


def inputs(rows, columns, dtype):
    """The same numbers in all the forms in which a layer may get them."""
    plain = draw(rows + columns, rows, columns, dtype=dtype)
    yield "rows", plain
    yield "by columns", plain.t().contiguous().t()
    yield "every other", draw(3, rows, 2 * columns, dtype=dtype)[:, ::2]
    yield "three", draw(4, 3, rows, columns, dtype=dtype)
    yield "three, turned", draw(5, rows, 2, columns, dtype=dtype).transpose(0, 1)
    yield "four", draw(6, 2, 1, rows, columns, dtype=dtype)


def gradients(module, x, how):
    """Output, and the gradients of input, weight and bias."""
    x = x.detach().requires_grad_() if x.is_floating_point() else x
    out = module(x)
    if how == "spread":  # a gradient without memory of its own for each element
        out.sum().backward()
    elif how == "turned":
        (out.transpose(-1, -2).contiguous() * draw(9, *out.transpose(-1, -2).shape,
                                                   dtype=out.dtype)).sum().backward()
    else:
        (out * draw(8, *out.shape, dtype=out.dtype)).sum().backward()
    found = [out, getattr(x, "grad", None), *(p.grad for p in module.parameters())]
    module.zero_grad(set_to_none=True)
    return [f for f in found if f is not None]


class Functions(unittest.TestCase):
    def compare(self, plain, ours, buffer, x, what, known=True):
        """@known: is this use one whose gradient is computed in the buffer?"""
        asked = buffer.asked
        for how in ("random", "spread", "turned"):
            expected, found = gradients(plain, x, how), gradients(ours, x, how)
            self.assertEqual(len(expected), len(found))
            for a, b in zip(expected, found):
                self.assertTrue(same(a, b), (what, how, x.shape, (a - b).abs().max()))
            bias = getattr(plain, "bias", None) is not None
            self.assertEqual(buffer.asked, asked + known)
            self.assertTrue(not known or same(buffer.view, expected[-1 - bias]))
            asked = buffer.asked

    def test_linear(self):
        for rows, columns, width in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                for bias in (True, False):
                    plain = nn.Linear(columns, width, bias, dtype=dtype)
                    ours = nn.Linear(columns, width, bias, dtype=dtype)
                    ours.load_state_dict(plain.state_dict())
                    buffer = attached(ours)
                    for name, x in inputs(rows, columns, dtype):
                        self.compare(plain, ours, buffer, x, (name, dtype, bias),
                                     x.dim() == 2 or x.is_contiguous())

    def test_embedding(self):
        for n, width in ((1, 1), (31, 18), (500, 65)):
            for dtype in (torch.float32, torch.bfloat16):
                plain, ours = (nn.Embedding(n, width, dtype=dtype) for _ in range(2))
                ours.load_state_dict(plain.state_dict())
                buffer = attached(ours)
                for shape in ((1,), (7, 9), (3, 900)):
                    x = torch.randint(n, shape, generator=torch.Generator().manual_seed(n))
                    for indices in (x, x.int()):
                        self.compare(plain, ours, buffer, indices, (n, width, dtype),
                                     dtype == torch.float32)

    def test_autograd_takes_the_buffer_over(self):
        layer = nn.Linear(5, 4)
        buffer = attached(layer)
        layer(draw(1, 3, 5)).sum().backward()
        self.assertEqual(layer.weight.grad.data_ptr(), buffer.view.data_ptr())

    def test_backward_that_is_differentiated(self):
        plain, ours = nn.Linear(5, 4), nn.Linear(5, 4)
        ours.load_state_dict(plain.state_dict())
        buffer = attached(ours)
        for layer in (plain, ours):
            x = draw(1, 3, 5).requires_grad_()
            [g] = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
            g.pow(2).sum().backward()
        self.assertTrue(same(plain.weight.grad, ours.weight.grad))
        self.assertTrue(same(plain.bias.grad, ours.bias.grad))
        self.assertNotEqual(ours.weight.grad.data_ptr(), buffer.view.data_ptr())

    def test_gradients_that_are_asked_for(self):
        layer = nn.Linear(5, 4)
        buffer = attached(layer)
        [g] = torch.autograd.grad(layer(draw(1, 3, 5)).sum(), layer.weight)
        self.assertNotEqual(g.data_ptr(), buffer.view.data_ptr())
        x = draw(1, 3, 5).requires_grad_()
        torch.autograd.grad(layer(x).sum(), x)
        self.assertTrue(buffer.view.isnan().all())

    def test_what_is_not_pytorchs_own_is_left_alone(self):
        class Own(nn.Linear):
            def forward(self, x):
                return F.linear(x, 2 * self.weight)

        modules = [Own(3, 3), nn.Embedding(3, 3, padding_idx=0), nn.Embedding(3, 3, sparse=True),
                   nn.Embedding(3, 3, scale_grad_by_freq=True), nn.Embedding(3, 3, max_norm=1.0),
                   nn.Bilinear(2, 2, 2), nn.LayerNorm(3)]
        for module in modules:
            attached(module)
            self.assertNotIn("forward", module.__dict__)

    def test_wrong_inputs_say_what_pytorch_says(self):
        plain, ours = nn.Linear(5, 4), nn.Linear(5, 4)
        attached(ours)
        for x in (draw(1, 3, 6), draw(1, 3, 5).double(), draw(1, 6)):
            said = []
            for layer in (plain, ours):
                with self.assertRaises(RuntimeError) as caught:
                    layer(x)
                said.append(str(caught.exception))
            self.assertEqual(*said)

    def test_vmap_and_autocast_go_the_old_way(self):
        plain, ours = nn.Linear(5, 4), nn.Linear(5, 4)
        ours.load_state_dict(plain.state_dict())
        buffer = attached(ours)
        x = draw(1, 3, 2, 5)
        self.assertTrue(same(torch.vmap(plain)(x), torch.vmap(ours)(x)))
        with torch.autocast("cpu", torch.bfloat16):
            self.assertEqual(ours(x).dtype, torch.bfloat16)
        self.assertEqual(buffer.asked, 0)


class Counted:
    """Arrivals of gradients in units: in the buffer, and elsewhere."""

    def __init__(self):
        self.direct, self.copied, self.added = [], [], []

    def __enter__(self):
        inner = ShardedUnit.add_gradient

        def counted(unit, index, gradient):
            there = gradient.data_ptr() == unit._gradient_views()[index].data_ptr()
            name = unit.trained[index].name
            where = (self.direct if there else self.added if index in unit.written
                     else self.copied)
            where.append(name)
            return inner(unit, index, gradient)

        self.patch = unittest.mock.patch.object(ShardedUnit, "add_gradient", counted)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


class Net(nn.Module):
    """Each way in which a weight can be used. @uses: of body, before and behind what is
    checkpointed; @inside: there."""

    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(2)
        self.tokens, self.body = nn.Embedding(11, width), nn.Linear(width, width)
        self.head, self.tied = nn.Linear(width, 5, bias=False), nn.Linear(width, 5)
        self.tied.weight = self.head.weight

    def forward(self, x, uses=1, inside=0):
        x = self.tokens(x)
        for _ in range(uses):
            x = torch.tanh(self.body(x))
        for _ in range(inside):
            x = checkpoint(lambda y: torch.tanh(self.body(y)), x, use_reentrant=True)
        for _ in range(uses):
            x = torch.tanh(self.body(x))
        return self.head(x) + self.tied(x)


class OneRank(fsdp.OneRank):
    def both(self, loss, tolerance=None):
        """Train a step or three both ways. Return: the arrivals of the last step."""
        plain, net = Net(), st.fully_shard(Net())
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        ours = st.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            with Counted() as counted:
                loss(net, step)
            loss(plain, step)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        state = net.state_dict()
        for name, value in plain.state_dict().items():
            if tolerance is None:
                self.assertTrue(same(state[name], value), name)
            else:
                torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)
        return counted

    @staticmethod
    def text(step, micro=0):
        return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(7 * step + micro))

    def test_weights_are_not_copied(self):
        class Once(Net):
            def forward(self, x):
                return self.head(torch.tanh(self.body(self.tokens(x))))

        with unittest.mock.patch.dict(globals(), Net=Once):
            counted = self.both(lambda net, step: net(self.text(step)).pow(2).mean().backward())
        self.assertEqual(sorted(counted.direct), ["body.weight", "tokens.weight"])
        self.assertEqual(sorted(counted.copied), ["body.bias", "head.weight"])

    def test_two_uses_are_added_by_autograd(self):
        counted = self.both(lambda net, step: net(self.text(step)).pow(2).mean().backward())
        self.assertEqual(counted.direct, ["tokens.weight"])
        self.assertIn("body.weight", counted.copied)

    def test_several_backwards_before_a_step(self):
        def loss(net, step):
            for micro in range(3):
                if isinstance(net, st.ShardedModule):
                    net.set_requires_gradient_sync(micro == 2)
                net(self.text(step, micro)).pow(2).mean().backward()

        counted = self.both(loss)
        self.assertEqual(counted.direct, ["tokens.weight"])
        self.assertEqual(counted.added.count("tokens.weight"), 2)

    def test_reentrant_checkpoints_within_a_backward(self):
        self.both(lambda net, step: net(self.text(step), 1, 2).pow(2).mean().backward(), 1e-6)

    def test_a_gradient_within_forward(self):
        def loss(net, step):
            def penalised(module, args, out):
                [g] = torch.autograd.grad(out.pow(2).sum(), args[0], create_graph=True)
                return out + g.pow(2).sum()

            hook = net.body.register_forward_hook(penalised)
            net(self.text(step)).pow(2).mean().backward()
            hook.remove()

        self.both(loss, 1e-6)

    def test_places_that_are_not_aligned(self):
        class Narrow(Net):
            def __init__(self):
                super().__init__(6)

            def forward(self, x):
                return self.tied(torch.tanh(self.body(self.tokens(x))))

        with unittest.mock.patch.dict(globals(), Net=Narrow):
            counted = self.both(lambda net, step: net(self.text(step)).pow(2).mean().backward())
        self.assertEqual(counted.direct, ["tokens.weight"])  # the first of the unit
        self.assertIn("body.weight", counted.copied)

    def test_switched_off(self):
        with unittest.mock.patch.object(_direct, "enabled", False):
            counted = self.both(lambda net, step: net(self.text(step)).pow(2).mean().backward())
        self.assertEqual(counted.direct, [])


if __name__ == "__main__":
    support.main()
