#!/usr/bin/env python3
"""shardd.torch.Live: plain modules bound to generations; live_eval.py beside train_gpt.py."""

import contextlib
import copy
import gc
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from concurrent import futures
from unittest import mock

import fsdp  # noqa: F401  finds the package
import support
import torch
import transformers
from torch import nn

import shardd
import shardd.torch

EXAMPLES = support.ROOT / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import live_eval  # noqa: E402

STEPS = 25
SAMPLES = 500  # an evaluation takes longer than a step: steps would mix in it
MODEL = ["--layers", "2", "--width", "32", "--heads", "2", "--length", "16", "--data",
         str(support.ROOT / "README.md")]
ENGINE = {"name": "engine", "type": "bf16", "every_steps": 1}


def environment(socket):
    return dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python"),
                SHARDD_SOCKET=socket, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")


class LiveEval(unittest.TestCase):
    def test_each_loss_is_that_of_the_parameters_of_its_step(self):
        with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
            trainer = subprocess.Popen(
                [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "run", "-n", "2",
                 "--job", "gpt", "--", sys.executable,
                 str(pathlib.Path(__file__).with_name("gpt_states.py")), *MODEL, "--batch", "4",
                 "--steps", str(STEPS), "--resilient", folder],
                env=environment(socket), text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)
            looker = subprocess.Popen(
                [sys.executable, str(EXAMPLES / "live_eval.py"), *MODEL, "--samples",
                 str(SAMPLES), "--job", "gpt", "--json"], env=environment(socket), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            said, _ = trainer.communicate(timeout=240)
            self.assertEqual(trainer.returncode, 0, said)
            out, err = looker.communicate(timeout=60)
            self.assertEqual((looker.returncode, err), (0, ""))
            seen = [json.loads(line) for line in out.splitlines()]
            self.compare(seen, pathlib.Path(folder))

    def compare(self, seen, folder):
        steps = [one["step"] for one in seen]
        self.assertEqual(steps, sorted(set(steps)))
        options = types.SimpleNamespace(samples=SAMPLES, length=16, data=support.ROOT / "README.md")
        given, wanted = live_eval.samples(options)
        model = live_eval.Gpt(2, 32, 2, 16).eval()
        losses = set()
        for one in seen:
            model.load_state_dict(torch.load(folder / f"{one['step']}.pt"))
            self.assertEqual(one["loss"], live_eval.loss_of(model, given, wanted), one["step"])
            losses.add(one["loss"])
        self.assertEqual(len(losses), len(seen))  # they are no constant
        self.assertGreater(len(steps), 2, steps)


def trainer_live(model, trainer):
    return shardd.torch.Live(model, "shows", socket=trainer.socket)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.c.weight = self.a.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(self.norm(self.a(x)))))


def shard(model):
    shardd.torch.fully_shard(model.b)
    shardd.torch.fully_shard(model)


class Trained:
    """A job of one rank in this process. ``states``: by step, the parameters as they were."""

    def __init__(self, socket, job, build=Tied, wrap=shard):
        self.socket, self.job, self.number, self.states = socket, job, 0, {}
        torch.manual_seed(3)
        self.model = build()
        shardd.torch.init(socket, job, 0, 1)
        wrap(self.model)
        self.optimizer = shardd.torch.SGD(self.model.parameters(), lr=0.5)

    def step(self):
        self.model(torch.randn(2, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        self.states[self.number] = {n: v.clone() for n, v in
                                    shardd.torch.state_dict(self.model).items()}
        shardd.torch.commit(self.number)

    def declare(self, declaration=ENGINE):
        with shardd.Client(self.socket) as client:
            shardd.declare_publication(declaration, self.job, client)

    def publish(self, name="engine"):
        with shardd.Client(self.socket) as client:
            return shardd.publish(name, self.job, client)


@contextlib.contextmanager
def trained(job, build=Tied, wrap=shard):
    with support.daemon() as socket:
        trainer = Trained(socket, job, build, wrap)
        try:
            yield trainer
        finally:
            trainer.optimizer = trainer.model = None
            shardd.torch.shutdown()


class Bound(unittest.TestCase):
    def same(self, model, state, kind):
        for name, value in model.named_parameters():
            self.assertEqual(value.dtype, kind)
            self.assertTrue(torch.equal(value, state[name].to(kind)), name)

    def check(self, wrap):
        with trained("live", Tied, wrap) as trainer:
            trainer.step()
            with torch.device("meta"):
                model = Tied()
            model.norm.running_mean = torch.zeros(3)
            model.norm.running_var = torch.ones(3)
            model.norm.num_batches_tracked = torch.tensor(0)
            own = dict(model.named_parameters())
            with shardd.torch.Live(model, "live", socket=trainer.socket) as live:
                self.assertEqual(live.step, 1)
                for step in range(1, 8):
                    with live.generation() as weights:
                        self.assertEqual((weights.step, live.step), (step, step))
                        self.same(model, trainer.states[step], torch.float32)
                        self.assertIs(model.c.weight, model.a.weight)
                        self.assertEqual(len(set(map(id, model.parameters()))), 7)
                        self.assertFalse(any(p.requires_grad for p in model.parameters()))
                        self.assertEqual(model.b.weight.data_ptr(), weights["b.weight"].address)
                        trainer.step()
                        with live.generation():  # the same one
                            self.same(model, trainer.states[step], torch.float32)
            self.assertEqual({n: id(p) for n, p in model.named_parameters()},
                             {n: id(p) for n, p in own.items()})

    def test_without_memory_at_its_addresses_it_is_not_called(self):
        """As on a GPU that can map neither the next generation nor the one that was there."""
        with trained("empty", Tied) as trainer:
            trainer.step()
            model = Tied()
            own = dict(model.named_parameters())
            with shardd.torch.Live(model, "empty", socket=trainer.socket) as live:
                lost = shardd.ResourceExhausted("no room; the reader has none now", "generation")
                with mock.patch.object(live._reader, "acquire", side_effect=lost), \
                        self.assertRaises(shardd.ResourceExhausted):
                    live.swap()
                with self.assertRaisesRegex(shardd.FailedPrecondition, "no generation now"):
                    model(torch.zeros(2, 3))
                self.assertEqual((live.number, dict(model.named_parameters())), (0, own))
                self.assertEqual(live.swap().step, 1)
                self.same(model, trainer.states[1], torch.float32)
                number = live.number
                with self.assertRaisesRegex(shardd.NotFound, f"is {number}, and none above 99"):
                    live.swap(newer_than=99)
                for wrong in -7, "x":
                    with self.assertRaisesRegex(shardd.InvalidArgument, "newer_than"):
                        live.swap(newer_than=wrong)
                self.assertEqual((live.number, live.swap(newer_than=number - 1).number),
                                 (number, number))

    def test_of_fully_shard(self):
        self.check(shard)

    def test_of_replicate(self):
        self.check(lambda model: shardd.torch.replicate(model, bucket_cap_mb=1e-5))

    def test_a_module_may_be_there_before_the_job(self):
        for publication in None, "engine":
            with support.daemon() as socket, futures.ThreadPoolExecutor(1) as beside:
                model = Tied()
                bound = beside.submit(shardd.torch.Live, model, "first", publication, socket,
                                      request=True)
                trainer = Trained(socket, "first")
                self.assertFalse(bound.done())
                trainer.step()
                if publication:
                    trainer.declare()
                with bound.result(60) as live:
                    self.assertEqual(live.step, 1)
                    self.same(model, trainer.states[1],
                              torch.bfloat16 if publication else torch.float32)
                trainer.optimizer = trainer.model = None
                shardd.torch.shutdown()

    def test_a_job_that_begins_again_is_waited_for(self):
        """Its publication is dropped, and declared again, before there was a generation."""
        with trained("again") as trainer, futures.ThreadPoolExecutor(1) as beside:
            trainer.declare()
            model = Tied()
            bound = beside.submit(shardd.torch.Live, model, "again", "engine", trainer.socket)
            with shardd.Client(trainer.socket) as client:
                def readers():
                    [one] = client.status("again")["jobs"][0]["publications"]
                    return int(one["readers"])

                support.wait_until(readers)
                shardd.drop_publication("engine", "again", client)
            self.assertFalse(bound.done())
            trainer.declare()
            trainer.step()
            with bound.result(60) as live:
                self.assertEqual(live.step, 1)

    def test_a_declared_one_in_its_type(self):
        with trained("typed") as trainer:
            trainer.declare()
            trainer.step()
            model = Tied()
            with shardd.torch.Live(model, "typed", "engine", trainer.socket) as live:
                seen = set()
                for step in range(1, 8):
                    self.assertEqual(live.step, step)
                    self.same(model, trainer.states[step], torch.bfloat16)
                    self.assertEqual(model.norm.running_mean.dtype, torch.float32)
                    seen.add(model.b.weight.data_ptr())
                    trainer.step()
                    self.assertEqual(select.select([live], [], [], 30)[0], [live])
                    before = [id(p) for p in model.parameters()]
                    live.swap(wait=30)
                    self.assertEqual([id(p) for p in model.parameters()], before)
                self.assertEqual(len(seen), 1)
                self.assertEqual(live.newest, live.number)
                with self.assertRaisesRegex(shardd.DeadlineExceeded, "timed out"):
                    live.swap(wait=0.05)
                self.same(model, trainer.states[8], torch.bfloat16)
                self.assertEqual(live.swap(wait=5, newer_than=live.number - 1).step, 8)
                live.release()
                self.assertEqual((live.number, live.step), (0, None))
                self.assertEqual(model.b.weight.dtype, torch.float32)
                with self.assertRaisesRegex(shardd.FailedPrecondition, "has no generation now"):
                    model(torch.zeros(2, 3))
                trainer.step()
                with live.generation(wait=30), \
                        self.assertRaisesRegex(shardd.FailedPrecondition, "in use by a block"):
                    live.swap()

    def check_generates(self, kind, config):
        """A plain model writes what one with a bf16 copy of the step's parameters writes."""
        def wrap(model):
            for module in model.modules():
                if type(module).__name__.endswith(("DecoderLayer", "GPT2Block")):
                    shardd.torch.fully_shard(module)
            shardd.torch.fully_shard(model)

        with trained(kind.__name__, lambda: kind(config), wrap) as trainer:
            shardd.torch.commit(1)
            trainer.declare()
            trainer.publish()
            state = {n: v.clone() for n, v in shardd.torch.state_dict(trainer.model).items()}
            copy, seen = kind(config).bfloat16().eval(), kind(config).eval()
            copy.load_state_dict(state)
            for plain, bound in zip(copy.buffers(), seen.buffers()):
                plain.data = bound.data.clone()  # which stay as they are
            prompt = torch.arange(12).view(2, 6)
            given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            with shardd.torch.Live(seen, kind.__name__, "engine", trainer.socket) as live, \
                    live.generation():
                self.assertEqual(seen.dtype, torch.bfloat16)
                self.assertEqual(seen.lm_head.weight is seen.get_input_embeddings().weight,
                                 bool(config.tie_word_embeddings))
                self.assertTrue(torch.equal(copy(prompt).logits, seen(prompt).logits))
                self.assertTrue(torch.equal(copy.generate(prompt, **given),
                                            seen.generate(prompt, **given)))

    def test_a_gpt2_of_transformers_generates(self):
        self.check_generates(transformers.GPT2LMHeadModel, transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=200, n_positions=32, bos_token_id=0,
            eos_token_id=1))

    def test_a_llama_of_transformers_generates(self):
        self.check_generates(transformers.LlamaForCausalLM, transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=200, max_position_embeddings=32, bos_token_id=0,
            eos_token_id=1))

    def test_one_generation_for_a_whole_block_beside_training(self):
        with trained("beside") as trainer:
            trainer.declare()
            trainer.step()
            model, ends, failed = Tied().eval(), threading.Event(), []

            def look():
                try:
                    with shardd.torch.Live(model, "beside", "engine", trainer.socket) as live, \
                            torch.no_grad():
                        while not ends.is_set():
                            with live.generation() as weights:
                                before = [p.clone() for p in model.parameters()]
                                for _ in range(20):
                                    now = list(model.parameters())
                                    assert all(map(torch.equal, before, now)), weights.number
                                seen.append(weights.step)
                        del now
                except BaseException as error:
                    failed.append(error)

            seen = []
            thread = threading.Thread(target=look)
            thread.start()
            for _ in range(40):
                trainer.step()
            ends.set()
            thread.join(60)
            self.assertEqual(failed, [])
            self.assertEqual(seen, sorted(seen))
            self.assertGreater(len(set(seen)), 3)

    def test_of_the_second_of_two_models(self):
        with support.daemon() as socket:
            shardd.torch.init(socket, "both", 0, 1)
            try:
                models = [nn.Linear(3, 2), nn.Linear(3, 2)]
                wanted = [m.weight.detach().clone() for m in models]
                for model in models:
                    shardd.torch.fully_shard(model)
                optimizers = [shardd.torch.SGD(m.parameters(), lr=0.0) for m in models]
                shardd.torch.session().commit(1)
                for number in (1, 2):
                    seen = nn.Linear(3, 2)
                    with shardd.torch.Live(seen, "both", socket=socket, model=number):
                        self.assertTrue(torch.equal(seen.weight, wanted[number - 1]))
                with self.assertRaisesRegex(shardd.InvalidArgument, "model number 3"):
                    shardd.torch.Live(nn.Linear(3, 2), "both", socket=socket, model=3, wait=0.05)
                del optimizers, models, model
            finally:
                shardd.torch.shutdown()

    def test_a_part_of_the_model(self):
        with trained("part") as trainer:
            trainer.step()
            part = nn.Linear(3, 3)
            with shardd.torch.Live(part, "part", socket=trainer.socket, prefix="b."):
                self.assertTrue(torch.equal(part.weight, trainer.states[1]["b.weight"]))
            wide = Tied()
            wide.extra = nn.Linear(2, 2)
            with shardd.torch.Live(wide, "part", socket=trainer.socket, strict=False) as live:
                self.same(wide.b, {"weight": trainer.states[1]["b.weight"],
                                   "bias": trainer.states[1]["b.bias"]}, torch.float32)
                self.assertTrue(wide.extra.weight.requires_grad)
                wide.extra.weight = nn.Parameter(torch.ones(2, 2))  # the module's own
                live.swap()

    def test_refusals_name_the_tensor(self):
        with trained("refused") as trainer:
            trainer.step()
            wide, untied, more, meta, empty = Tied(), Tied(), Tied(), Tied(), Tied()
            wide.b = nn.Linear(3, 4)
            untied.b.weight = untied.a.weight
            more.d = nn.Linear(2, 2)
            empty.d = nn.Linear(2, 2, device="meta")
            meta.norm.running_mean = torch.empty(3, device="meta")
            for model, kind, words in (
                    (nn.Linear(3, 4), shardd.NotFound, "no tensor 'weight'"),
                    (wide, shardd.InvalidArgument, r"'b.weight' has shape \[4, 3\]"),
                    (untied, shardd.InvalidArgument, "'a.weight' and 'b.weight' are one"),
                    (more, shardd.NotFound, "no tensor 'd.weight', a parameter of the module$"),
                    (empty, shardd.NotFound, r"'d.weight'.*another parameter, call tie_weights"),
                    (meta, shardd.InvalidArgument, "buffer 'norm.running_mean' is on meta")):
                before = [id(p) for p in model.parameters()]
                with self.assertRaisesRegex(kind, words):
                    shardd.torch.Live(model, "refused", socket=trainer.socket)
                self.assertEqual([id(p) for p in model.parameters()], before)
            short = Tied()
            del short.b.bias
            short.b.register_parameter("bias", None)
            with self.assertRaisesRegex(shardd.NotFound, "has no parameter 'b.bias'"):
                shardd.torch.Live(short, "refused", socket=trainer.socket)
            with self.assertRaisesRegex(shardd.NotFound, "nothing"):
                shardd.torch.Live(Tied(), "refused", "nothing", trainer.socket, wait=0.2)
            with self.assertRaisesRegex(shardd.NotFound, "nobody"):
                shardd.torch.Live(Tied(), "nobody", socket=trainer.socket, wait=0.2)

    def test_a_module_that_shows_nothing_is_refused(self):
        """It kept its own parameters, or those of one generation for ever, without a word."""
        def assign(model):
            model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()},
                                  assign=True)

        with trained("shows") as trainer:
            trainer.step()
            with self.assertRaisesRegex(shardd.NotFound, "has none of the tensors .*'a.bias'"):
                shardd.torch.Live(nn.Linear(3, 3), "shows", socket=trainer.socket, strict=False)
            with self.assertRaisesRegex(shardd.InvalidArgument, "module is a str"):
                shardd.torch.Live("shows", "live", socket=trainer.socket)
            for change in (nn.Module.float, nn.Module.half, nn.Module.double, assign):
                model = Tied()
                with trainer_live(model, trainer) as live, live.generation():
                    pass
                with trainer_live(model, trainer) as live:
                    if change is not nn.Module.float:  # they are fp32 already
                        change(model)
                        with self.assertRaisesRegex(shardd.FailedPrecondition, "another tensor"):
                            live.swap()
                    copied = copy.deepcopy(model)
                    copied(torch.zeros(2, 3, dtype=copied.b.weight.dtype))

    def test_another_form_under_the_same_name(self):
        with trained("form") as trainer:
            trainer.declare()
            trainer.step()
            model = Tied()
            own = [id(p) for p in model.parameters()]
            with shardd.torch.Live(model, "form", "engine", trainer.socket) as live:
                for declaration, kind in (({**ENGINE, "type": "fp16"}, torch.float16),
                                          (ENGINE, torch.bfloat16)):
                    with shardd.Client(trainer.socket) as client:
                        shardd.drop_publication("engine", "form", client)
                    trainer.declare(declaration)
                    trainer.step()
                    trainer.publish()
                    live.swap(wait=30)
                    self.same(model, trainer.states[trainer.number], kind)
                with shardd.Client(trainer.socket) as client:
                    shardd.drop_publication("engine", "form", client)
                trainer.declare({**ENGINE, "rules": [
                    {"name": "b.weight", "sources": [{"tensor": "b.weight",
                                                      "slice": {"dim": 0, "first": 1,
                                                                "count": 2}}]}]})
                trainer.step()
                trainer.publish()
                with self.assertRaisesRegex(shardd.InvalidArgument, r"shape \[3, 3\]"):
                    live.swap(wait=30)
                self.assertEqual([id(p) for p in model.parameters()], own)
                self.assertEqual(live.number, 0)

    def test_what_is_kept_is_told_and_not_lost(self):
        with trained("kept") as trainer:
            trainer.step()
            model = Tied()
            live = shardd.torch.Live(model, "kept", socket=trainer.socket)
            kept = model.b.weight.detach()
            with self.assertRaisesRegex(shardd.InUse, "memory of 'live'"):
                live.close()
            self.assertTrue(torch.equal(kept, trainer.states[1]["b.weight"]))
            del kept
            gc.collect()
            live.close()
            live.close()

    def test_the_next_daemon(self):
        with support.held_daemon() as held, contextlib.ExitStack() as stack:
            client = shardd.connect(held.socket)
            stack.callback(client.close)
            client.join("next", 1, 0)
            [unit] = client.register([shardd.UnitSpec("root", [
                shardd.TensorSpec(name, shape, shardd.Init.CONSTANT, 2.0)
                for name, shape in (("weight", (3, 2)), ("bias", (3,)))])])
            unit.init_seed(1)
            client.commit(1)
            model = nn.Linear(2, 3)
            with shardd.torch.Live(model, "next", socket=held.socket) as live:
                number = live.number
                held.kill()
                self.assertTrue(torch.equal(model.weight, torch.full((3, 2), 2.0)))
                self.assertEqual(live.swap().step, 1)
                self.assertGreater(live.number, number)
                self.assertTrue(torch.equal(model.weight, torch.full((3, 2), 2.0)))

    def test_callbacks(self):
        with trained("told") as trainer:
            trainer.declare()
            trainer.step()
            told = []
            with shardd.torch.Live(Tied(), "told", "engine", trainer.socket) as live:
                watch = live.on_new(lambda number, step: told.append((number, step)))
                for _ in range(3):
                    trainer.step()
                support.wait_until(lambda: told and told[-1][1] == 4)
                self.assertEqual(told, sorted(set(told)))
                self.assertGreater(told[0][0], live.number)
                watch.stop()
                trainer.step()
                trainer.publish()
                self.assertEqual(live.swap().step, 5)
                self.assertEqual(told[-1][1], 4)
                ends = live.on_new(lambda *_: ends.stop())
                trainer.step()
                support.wait_until(lambda: not ends._thread.is_alive())


if __name__ == "__main__":
    support.main()
