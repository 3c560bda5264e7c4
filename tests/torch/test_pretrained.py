#!/usr/bin/env python3
"""Models of Hugging Face's transformers, trained here, saved by their own save_pretrained and
loaded by their config without shardd."""

import json
import os
import pathlib
import pickle
import tempfile
import unittest

import fsdp
import support
import torch
import transformers
from torch import nn

import shardd.torch as st

os.environ["HF_HUB_OFFLINE"] = "1"


def llama(kind="LlamaForCausalLM", **more):
    torch.manual_seed(3)
    return getattr(transformers, kind)(transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        **more))


class Pretrained(fsdp.OneRank):
    def trained(self, model, wrap):
        wrap(model)
        optimizer = st.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            tokens = torch.arange(8).view(1, 8) + step + 1
            model(tokens).logits.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def saved(self, kind, wrap, auto, **more):
        """Saved and loaded again, its output is the same, by a class that its config names."""
        model = self.trained(llama(kind, **more), wrap)
        tokens = torch.arange(1, 9).view(1, 8)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = json.loads(pathlib.Path(folder, "config.json").read_text())
            self.assertEqual(config["architectures"], [kind])
            for load in (getattr(transformers, config["architectures"][0]), auto):
                plain = load.from_pretrained(folder)
                self.assertIs(type(plain), getattr(transformers, kind))
                self.assertTrue(torch.equal(plain(tokens).logits, model(tokens).logits))

    @staticmethod
    def shard(model):
        for layer in model.model.layers:
            st.fully_shard(layer)
        st.fully_shard(model)

    def test_fully_shard(self):
        self.saved("LlamaForCausalLM", self.shard, transformers.AutoModelForCausalLM)

    def test_tied_weights(self):
        self.saved("LlamaForCausalLM", self.shard, transformers.AutoModelForCausalLM,
                   tie_word_embeddings=True)

    def test_a_classifier(self):
        self.saved("LlamaForSequenceClassification", self.shard,
                   transformers.AutoModelForSequenceClassification)

    def test_replicate(self):
        self.saved("LlamaForCausalLM", st.replicate, transformers.AutoModelForCausalLM)


class Classes(unittest.TestCase):
    def test_a_wrapped_class_is_named_as_by_fsdp2(self):
        one, two = st.fully_shard(nn.Linear(2, 2)), st.fully_shard(nn.Linear(3, 3))
        self.assertIs(type(one), type(two))
        self.assertEqual(type(one).__name__, "FSDPLinear")
        self.assertEqual(type(one).__module__, nn.Linear.__module__)
        self.assertIsInstance(one, nn.Linear)

    def test_a_replicated_class_keeps_its_name(self):
        one = st.replicate(nn.Linear(2, 2))
        self.assertEqual(type(one).__name__, "Linear")
        self.assertIsInstance(one, st.ReplicatedModule)
        with self.assertRaisesRegex(Exception, "cannot be pickled"):
            pickle.dumps(one)


if __name__ == "__main__":
    support.main()
