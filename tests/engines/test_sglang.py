#!/usr/bin/env python3
"""SGLang itself, on the processor: it loads what a job publishes, and generates with it.

It needs SGLang's package and what that imports; see absent.py for what is left out.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from importlib.util import find_spec

if find_spec("sglang") is None:
    print("there is no SGLang in this environment: tests/run --nightly installs it")
    sys.exit(77)

import absent  # noqa: F401  before SGLang; its processes import this file too
import llama
import support
import torch

import shardd
from shardd.engines import sglang as ours

OPTIONS = {"skip_tokenizer_init": True, "device": "cpu", "attention_backend": "torch_native",
           "dtype": "float32", "disable_cuda_graph": True, "max_total_tokens": 512,
           "mem_fraction_static": 0.1, "custom_weight_loader": [ours.LOADER],
           "disable_radix_cache": True, "log_level": "error"}
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def serve(arguments):
    """The server of this file's second form: with the options that follow."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(arguments))


class Sglang(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        engine, stack = contextlib.ExitStack(), contextlib.ExitStack()
        cls.addClassCleanup(engine.close)  # the last one: SGLang kills all children of this process
        cls.addClassCleanup(stack.close)
        os.environ["PYTHONPATH"] = os.pathsep.join(  # SGLang's processes import the loader
            [str(support.ROOT / "client" / "python"), os.environ.get("PYTHONPATH", "")])
        cls.folder = stack.enter_context(tempfile.TemporaryDirectory())
        llama.build(7).save_pretrained(cls.folder)
        cls.socket = stack.enter_context(support.daemon())
        cls.job = llama.Job(cls.socket, cls.__name__.lower())
        stack.callback(cls.job.close)
        cls.job.declare(keep=2)
        cls.start(engine)

    def publish(self, name="engine"):
        return shardd.publish(name, self.job.name, self.job.client)

    def expect(self, weights):
        self.assertEqual(self.says(), llama.says(weights))

    def leases(self):
        shown = support.shardctl(self.socket, "publications", self.job.name)["publications"]
        return [lease for one in shown for generation in one["generations"]
                for lease in generation["leases"]]


class InProcess(Sglang):
    @classmethod
    def start(cls, stack):
        import sglang

        cls.engine = sglang.Engine(model_path=cls.folder, **OPTIONS)
        stack.callback(cls.engine.shutdown)

    def says(self):
        return self.engine.generate(input_ids=llama.PROMPT, sampling_params=SAMPLING)["output_ids"]

    def load(self, **options):
        ours.update(self.engine, self.job.name, socket=self.socket, **options)

    def test_each_step_is_loaded(self):
        said = [self.says()]
        for _ in range(3):
            self.job.train()
            self.load(number=self.publish())
            self.expect(self.job.expected())
            said.append(self.says())
        self.assertEqual(len({tuple(one) for one in said}), 4, "each step says something else")
        self.assertEqual(self.leases(), [])

    def test_the_models_own_names_are_copied(self):
        """As SGLang joins them: q, k, v and gate, up."""
        layer = "model.layers.{i}."
        self.job.declare("own", type="fp32", rules=[
            {"name": layer + "self_attn.qkv_proj.weight",
             "sources": [layer + f"self_attn.{x}_proj.weight" for x in "qkv"]},
            {"name": layer + "mlp.gate_up_proj.weight",
             "sources": [layer + f"mlp.{x}_proj.weight" for x in ("gate", "up")]}])
        self.job.train()
        self.load(publication="own", names="parameters", number=self.publish("own"))
        self.assertEqual(self.says(), llama.says(self.whole()))

    def whole(self):
        with shardd.torch.summon_full_params(self.job.model, writeback=False):
            return {name: value.detach().clone()
                    for name, value in self.job.model.named_parameters()}

    def test_a_copy_is_loaded_as_well(self):
        self.job.train()
        self.load(number=self.publish(), copy=True)
        self.expect(self.job.expected())

    def test_only_what_has_changed_is_written(self):
        """Of tensors that SGLang does not join; those are loaded as they were."""
        self.job.declare("deltas", delta_percent=100)
        before = None
        for _ in range(4):
            self.job.train()
            self.load(publication="deltas", patches=True, number=self.publish("deltas"))
            self.expect(self.job.expected())
            self.assertNotEqual(self.says(), before)
            before = self.says()
        for _ in range(2):  # one is missed
            self.job.train()
            number = self.publish("deltas")
        self.load(publication="deltas", patches=True, number=number)
        self.expect(self.job.expected())
        self.assertEqual(self.leases(), [])

    def test_without_a_session_sglang_refuses(self):
        with self.assertRaisesRegex(RuntimeError, "must run between begin_weight_update"):
            ours._answer(self.engine.update_weights_from_tensor(
                ours.named_tensors(self.job.name), load_format=ours.LOADER), "update")

    def test_wrong_options_are_said_to_the_caller(self):
        for options, text in (({"colour": 1}, "colour"), ({"wait": "x"}, "wait"),
                              ({"names": "x"}, "must be one of"), ({"number": -1}, "negative")):
            with self.subTest(options), self.assertRaisesRegex(shardd.InvalidArgument, text):
                self.load(**options)
        for given in ([("a", None)], [], [("shardd:{", None)], [("shardd:[]", None)],
                      [("shardd:{\"job\": \"a\"}", None)] * 2):
            with self.subTest(given), self.assertRaises(shardd.InvalidArgument):
                ours._wanted(given)


class TwoRanks(Sglang):
    @classmethod
    def start(cls, stack):
        import sglang

        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
        cls.engine = sglang.Engine(model_path=cls.folder, tp_size=2, **OPTIONS)
        stack.callback(cls.engine.shutdown)
        stack.callback(os.environ.pop, "SGLANG_CPU_OMP_THREADS_BIND")

    says, load, whole = InProcess.says, InProcess.load, InProcess.whole

    def test_each_step_is_loaded(self):
        for _ in range(2):
            self.job.train()
            self.load(number=self.publish())
            self.expect(self.job.expected())

    def test_each_has_its_own_publication(self):
        """Cut by the daemon."""
        for rank in range(2):
            self.job.declare(f"engine-{rank}", tp_size=2, tp_rank=rank, type="fp32",
                             rules=llama.cut())
        step = self.job.train()
        for rank in range(2):
            self.publish(f"engine-{rank}")
        self.load(publication="engine-{tp_rank}", names="parameters", step=step)
        self.assertEqual(self.says(), llama.says(self.whole()))


class OverHttp(Sglang):
    @classmethod
    def start(cls, stack):
        [port] = support.free_ports(1)
        cls.url = f"http://127.0.0.1:{port}"
        with open(os.path.join(cls.folder, "log"), "w", encoding="utf-8") as log:
            server = subprocess.Popen(
                [sys.executable, __file__, "--serve", "--model-path", cls.folder, "--port",
                 str(port), "--skip-tokenizer-init", "--device", "cpu", "--attention-backend",
                 "torch_native", "--dtype", "float32", "--disable-cuda-graph",
                 "--max-total-tokens", "512", "--mem-fraction-static", "0.1",
                 "--disable-radix-cache", "--custom-weight-loader", ours.LOADER],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        stack.callback(cls.end, server)
        until = time.monotonic() + 120
        while not cls.is_up():
            if server.poll() is not None or time.monotonic() > until:
                with open(os.path.join(cls.folder, "log"), encoding="utf-8") as log:
                    raise AssertionError("SGLang's server did not start:\n" + log.read()[-4000:])
            time.sleep(0.5)

    @staticmethod
    def end(server):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    @classmethod
    def is_up(cls):
        try:
            with urllib.request.urlopen(cls.url + "/health", timeout=20) as answer:
                return answer.status == 200
        except OSError:
            return False

    def post(self, path, body=None):
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body or {}).encode(),
            {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def says(self):
        return self.post("generate", {"input_ids": llama.PROMPT,
                                      "sampling_params": SAMPLING})["output_ids"]

    def test_each_step_is_loaded(self):
        for _ in range(2):
            self.job.train()
            number = self.publish()
            self.post("begin_weight_update")
            answer = self.post("update_weights_from_tensor", {
                **ours.http_request(self.job.name, socket=self.socket, number=number),
                "weight_version": str(number)})
            self.assertTrue(answer["success"], answer)
            self.post("end_weight_update")
            self.expect(self.job.expected())


del Sglang  # its heirs are tests, it is none

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        support.main()
