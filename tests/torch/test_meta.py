#!/usr/bin/env python3
"""Models of Hugging Face's transformers that were made on the meta device."""

import os

import fsdp
import support
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)

import shardd
import shardd.torch as st

os.environ["HF_HUB_OFFLINE"] = "1"


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        **more))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0))


class Scaled(nn.Module):
    """Computes a buffer in its constructor and has nothing that does so again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.scale


class Own(nn.Module):
    """A parameter, and nothing that gives it a value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


class Meta(fsdp.OneRank):
    def on_meta(self, make):
        with torch.device("meta"):
            return make()

    @staticmethod
    def shard(model):
        for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
            st.fully_shard(layer)
        return st.fully_shard(model)

    def losses(self, model):
        optimizer = st.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            tokens = torch.arange(8).view(1, 8) + step + 1
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def values_of_the_state_dict(self, make):
        torch.manual_seed(5)
        there = make()
        state = {name: value.clone() for name, value in there.state_dict().items()}
        expected = self.losses(self.shard(there))
        model = self.shard(self.on_meta(make))
        model.load_state_dict(state)
        self.assertEqual(self.losses(model), expected)

    def test_values_of_a_state_dict(self):
        for make in (llama, gpt2, lambda: llama(tie_word_embeddings=True)):
            with self.subTest(make=make):
                self.values_of_the_state_dict(make)

    def test_values_of_the_models_own_initialisation(self):
        model = self.shard(self.on_meta(llama))
        losses = self.losses(model)
        self.assertTrue(3 < losses[0] < 6, losses)  # ln 64 is 4.2
        for name, buffer in model.named_buffers():
            self.assertTrue(torch.equal(buffer, dict(llama().named_buffers())[name]), name)

    def test_a_buffer_that_nothing_computes_again_is_named(self):
        model = st.fully_shard(self.on_meta(Scaled))
        with self.assertRaisesRegex(shardd.InvalidArgument, "buffer 'scale' of FSDPScaled"):
            st.AdamW(model.parameters())

    def test_a_parameter_that_the_state_dict_does_not_have_is_named(self):
        model = st.fully_shard(nn.Sequential(self.on_meta(Own), nn.Linear(3, 3)))
        state = {"1.weight": torch.ones(3, 3), "1.bias": torch.ones(3)}
        with self.assertRaisesRegex(shardd.InvalidArgument, "parameter 'weight' of Own .*meta"):
            model.load_state_dict(state, strict=False)

    def test_one_that_it_has_needs_no_initialisation(self):
        model = st.fully_shard(nn.Sequential(self.on_meta(Own), nn.Linear(3, 3)))
        state = {"0.weight": torch.full((3,), 2.0), "1.weight": torch.eye(3),
                 "1.bias": torch.zeros(3)}
        model.load_state_dict(state)
        st.AdamW(model.parameters())
        self.assertTrue(torch.equal(model(torch.ones(1, 3)), torch.full((1, 3), 2.0)))


class CheckpointWrappers(fsdp.OneRank):
    """PyTorch's wrappers take themselves out of the names in a state dict: around a unit, around
    what a unit contains, and of a model on the meta device that is loaded."""

    @staticmethod
    def plain(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))

    def wrapped(self, model):
        for n in range(3):
            model[n] = checkpoint_wrapper(model[n])
        st.fully_shard(model[0])
        st.fully_shard(model[1]._checkpoint_wrapped_module)
        return st.fully_shard(model)

    def test_names_and_values(self):
        expected = self.plain(1).state_dict()
        model = self.wrapped(self.plain(1))
        optimizer = st.AdamW(model.parameters(), lr=0.1)
        found = model.state_dict()
        self.assertEqual(list(found), list(expected))
        self.assertTrue(all(torch.equal(found[n], expected[n]) for n in expected))
        other = self.plain(2).state_dict()
        model.load_state_dict(other)
        found = model.state_dict()
        self.assertTrue(all(torch.equal(found[n], other[n]) for n in expected))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state = st.optimizer_state_dict(optimizer)
        self.assertCountEqual(state["state"], expected)
        optimizer.load_state_dict(state)

    def test_a_model_on_the_meta_device(self):
        with torch.device("meta"):
            model = self.plain(1)
        other = self.plain(2).state_dict()
        self.wrapped(model).load_state_dict(other)
        before = torch.random.get_rng_state()
        st.AdamW(model.parameters(), lr=0.1)
        found = model.state_dict()
        self.assertEqual(list(found), list(other))
        self.assertTrue(all(torch.equal(found[n], other[n]) for n in other))
        self.assertTrue(torch.equal(before, torch.random.get_rng_state()))


class Replicated(fsdp.OneRank):
    def test_values_of_a_state_dict(self):
        torch.manual_seed(5)
        there = llama()
        state = {name: value.clone() for name, value in there.state_dict().items()}
        with torch.device("meta"):
            model = llama()
        st.replicate(model)
        model.load_state_dict(state)
        st.AdamW(model.parameters())
        tokens = torch.arange(8).view(1, 8)
        self.assertTrue(torch.equal(model(tokens).logits, there(tokens).logits))


if __name__ == "__main__":
    support.main()
