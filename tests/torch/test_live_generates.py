#!/usr/bin/env python3
"""A transformers model generates with shardd.torch.Live while another process trains and publishes:
each forward pass, of one token, computes with the parameters of one step."""

import contextlib
import copy
import pathlib
import tempfile
import unittest
from concurrent import futures

import fsdp  # noqa: F401  finds the package
import support
import torch
import transformers

import shardd
import shardd.torch

GPT2 = transformers.GPT2LMHeadModel, transformers.GPT2Config(
    n_embd=32, n_layer=2, n_head=4, vocab_size=200, n_positions=32, bos_token_id=0,
    eos_token_id=1)
LLAMA = transformers.LlamaForCausalLM, transformers.LlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=200, max_position_embeddings=32, bos_token_id=0,
    eos_token_id=1)
LAYERS = "DecoderLayer", "GPT2Block"
PROMPT = torch.arange(12).view(2, 6)
TOKENS = 10
BUFFERS = 3
ENGINE = {"name": "engine", "type": "bf16", "every_steps": 1, "buffers": BUFFERS}


def layers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith(LAYERS)]


def saved(folder, step):
    return folder / f"{step}.pt"


def train(socket, job, kind, config, folder):
    """Runs in a process of its own, until there is a file "ends" in @folder. Before each commit it
    saves there the parameters of the step, in fp32. Return: the last step."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    shardd.torch.init(socket, job, 0, 1)
    try:
        model = kind(config)
        for layer in layers_of(model):
            shardd.torch.fully_shard(layer)
        shardd.torch.fully_shard(model)
        optimizer = shardd.torch.SGD(model.parameters(), lr=0.1)
        step = 0
        while not (folder / "ends").exists():
            tokens = torch.randint(0, config.vocab_size, (2, 8))
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            torch.save(shardd.torch.state_dict(model), saved(folder, step))
            shardd.torch.commit(step)
            if step == 1:
                with shardd.Client(socket) as client:
                    shardd.declare_publication(ENGINE, job, client)
        del optimizer, model
        return step
    finally:
        shardd.torch.shutdown()


@contextlib.contextmanager
def trained(beside, kind, config):
    """The socket, a folder with the parameters of each step, and the trainer, which runs."""
    with support.daemon() as socket, tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        trainer = beside.submit(train, socket, "job", kind, config, folder)
        try:
            yield socket, folder, trainer
        finally:
            (folder / "ends").touch()
            trainer.result(60)


class Passes:
    """Each forward pass of a model that is bound to generations: what it was given, the step of its
    generation, and its logits. Before each pass the model takes the newest generation. Every other
    pass stands between its layers until so many newer generations have been made that the memory of
    its own would have been used again if nobody held it.

    @within: called there, with the binding."""

    def __init__(self, model, live, trainer, within=lambda live: None):
        self.live, self.trainer, self.within, self.seen = live, trainer, within, []
        self.hooks = [model.register_forward_pre_hook(self.begins, with_kwargs=True),
                      layers_of(model)[1].register_forward_pre_hook(self.stands),
                      model.register_forward_hook(self.ends)]

    def begins(self, _, arguments, given):
        assert not arguments
        self.live.swap()
        self.seen.append([self.live.step, self.live.number, copy.deepcopy(given), None])

    def stands(self, *_):
        if len(self.seen) % 2:
            support.wait_until(
                lambda: self.trainer.done() or self.live.newest > self.live.number + BUFFERS)
            assert not self.trainer.done(), self.trainer.exception()
            self.within(self.live)

    def ends(self, _, __, output):
        self.seen[-1][3] = output.logits.clone()

    def remove(self):
        for hook in self.hooks:
            hook.remove()


def generated(bound, live, trainer, cached, **hooks):
    """What generate() returns, and its passes."""
    passes = Passes(bound, live, trainer, **hooks)
    tokens = bound.generate(PROMPT, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                            pad_token_id=0, use_cache=cached)
    passes.remove()
    return tokens, passes.seen


class Generates(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.beside = futures.ProcessPoolExecutor(1, support.spawn)  # one process trains all models
        cls.addClassCleanup(cls.beside.shutdown)

    @contextlib.contextmanager
    def bound(self, model):
        """A model with generations and one with none, and what belongs to them."""
        kind, config = model
        with trained(self.beside, kind, config) as (socket, folder, trainer):
            bound, plain = kind(config).eval(), kind(config).bfloat16().eval()
            for own, other in zip(plain.buffers(), bound.buffers()):
                own.data = other.data.clone()  # which generations do not have
            with shardd.torch.Live(bound, "job", "engine", socket) as live:
                yield bound, live, trainer, plain, folder

    def expected(self, plain, folder, step, given):
        """The logits of a pass with PyTorch's own copy of the parameters of @step."""
        plain.load_state_dict(torch.load(saved(folder, step)))
        with torch.no_grad():
            return plain(**copy.deepcopy(given)).logits

    def check(self, model, cached):
        with self.bound(model) as (bound, live, trainer, plain, folder):
            tokens, passes = generated(bound, live, trainer, cached)
            self.assertFalse(trainer.done(), "training went on all the time")
            self.assertEqual(tokens.shape, (2, PROMPT.shape[1] + TOKENS))
            self.assertEqual(len(passes), TOKENS)
            for i, (step, _, given, logits) in enumerate(passes):
                self.assertEqual((given.get("past_key_values") is not None), cached)
                self.assertEqual(given["input_ids"].shape[1],
                                 1 if cached and i else PROMPT.shape[1] + i)
                wanted = self.expected(plain, folder, step, given)
                self.assertEqual(logits.dtype, torch.bfloat16)
                self.assertTrue(torch.equal(logits, wanted), (i, step))
                self.assertTrue(torch.equal(tokens[:, PROMPT.shape[1] + i],
                                            wanted[:, -1].argmax(-1)), (i, step))
            numbers = [number for _, number, _, _ in passes]
            self.assertEqual(numbers, sorted(numbers))
            self.assertGreater(len(set(numbers)), TOKENS // 2)

    def test_gpt2(self):
        self.check(GPT2, cached=False)

    def test_gpt2_with_a_cache(self):
        self.check(GPT2, cached=True)

    def test_llama(self):
        self.check(LLAMA, cached=False)

    def test_llama_with_a_cache(self):
        self.check(LLAMA, cached=True)

    def test_a_pass_of_two_generations_would_be_seen(self):
        """What the other tests compare differs when the generation changes between two layers."""
        with self.bound(LLAMA) as (bound, live, trainer, plain, folder):
            after = []

            def mixes(live):
                live.swap(wait=60)
                after.append(live.step)

            _, passes = generated(bound, live, trainer, False, within=mixes)
            self.assertEqual(len(after), TOKENS // 2)
            for (first, _, given, logits), second in zip(passes[::2], after):
                self.assertLess(first, second)
                for step in (first, second):
                    self.assertFalse(torch.equal(
                        logits, self.expected(plain, folder, step, given)), (first, second))


if __name__ == "__main__":
    support.main()
