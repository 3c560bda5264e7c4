#!/usr/bin/env python3
"""LoRA adapters on a shared base: shardd.torch.attach_base and load_base."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import warnings

import fsdp  # noqa: F401  finds the package
import peft
import support
import test_training
import torch
import transformers
from safetensors.torch import save_file

import shardd
import shardd.torch

warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
torch.set_num_threads(1)  # before a fork
STEPS, JOBS, RANK = 5, 16, 4
TARGETS = ["q_proj", "v_proj", "down_proj"]


def config(width=32, layers=2, vocabulary=64, tied=False):
    return transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied)


def llama(seed=9, dtype=torch.bfloat16, **of):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config(**of)).to(dtype)


def adapted(model, seed=3):
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=TARGETS))


def empty(**of):
    """A model whose parameters have no memory; its buffers have values."""
    import accelerate

    with accelerate.init_empty_weights():
        return transformers.LlamaForCausalLM(config(**of)).to(torch.bfloat16)


def loss_of(model, step, seed=0):
    draw = torch.Generator().manual_seed(100 * step + seed)
    ids = torch.randint(0, 64, (2, 9), generator=draw)
    return model(input_ids=ids, labels=ids).loss


def trained(model, optimizer, seed=0, steps=STEPS):
    """The losses."""
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, seed)
        loss.backward()
        with test_training.correctly_rounded():
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adapter(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def plain(seed=3, steps=STEPS, data=0):
    """What peft and torch.optim alone compute."""
    model = adapted(llama(), seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02,
                                  foreach=False)
    return trained(model, optimizer, data, steps), adapter(model)


def ctl(socket, *arguments):
    return subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket,
                           *arguments], text=True, capture_output=True, timeout=60)


def job_of(socket, name):
    said = json.loads(ctl(socket, "--json", "status").stdout)
    return next(job for job in said["jobs"] if job["name"] == name)


def in_memory(pids):
    """Bytes of the daemon's memory that these processes have mapped and touched, all together: the
    kernel counts a page that n processes have mapped as an n-th for each (PSS)."""
    return sum(sum(_pss(pid)) for pid in pids)


def _pss(pid):
    maps = pathlib.Path(f"/proc/{pid}/smaps").read_text()
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", maps):
        if "memfd:shardd" in entry.partition("\n")[0]:
            yield 1024 * int(re.search(r"(?m)^Pss:\s+(\d+) kB", entry).group(1))


@contextlib.contextmanager
def daemon_with_job(job):
    """A daemon, and this process is the rank of that job: at the end of the block it leaves."""
    with support.daemon() as socket:
        os.environ.update(SHARDD_SOCKET=socket, SHARDD_JOB=job)
        try:
            yield socket
        finally:
            with contextlib.suppress(shardd.SharddError):
                shardd.torch.shutdown()
            del os.environ["SHARDD_SOCKET"], os.environ["SHARDD_JOB"]


def load(socket, name, *files, expect=0):
    """By the command, in a process that ends. Return: what it says."""
    made = subprocess.run(
        [sys.executable, "-m", "shardd.load", name, *files, "--socket", socket], text=True,
        capture_output=True, timeout=120,
        env=dict(os.environ, PYTHONPATH=str(support.ROOT / "client" / "python")))
    if made.returncode != expect:
        raise AssertionError(f"shardd.load ended with {made.returncode}: {made.stderr}")
    return made.stdout + made.stderr


# ------------------------------------------------------------- a trainer's process


def train(socket, job, base, meta, seed, conn, of):
    """A process with one job. Says "ready", then waits for a word."""
    os.environ.update(SHARDD_SOCKET=socket, SHARDD_JOB=job, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    model = empty(**of) if meta else llama(seed=1, **of)
    attached = shardd.torch.attach_base(model, base, socket)
    model = adapted(model, seed)
    shardd.torch.fully_shard(model)
    optimizer = shardd.torch.AdamW(model.parameters(), lr=0.02)
    losses = trained(model, optimizer, seed=0)
    shardd.torch.commit(STEPS)
    conn.send((losses, attached.nbytes))
    while conn.recv() == "loss":
        with torch.no_grad():
            conn.send(loss_of(model, 77).item())
    os._exit(0)  # as one that is killed


class Trainer:
    """A fork, so that 16 of them import PyTorch once. This process must have no session then."""

    def __init__(self, socket, job, base="llama", meta=True, seed=3, **of):
        forks = multiprocessing.get_context("fork")
        self.conn, other = forks.Pipe()
        self.process = forks.Process(
            target=train, args=(socket, job, base, meta, seed, other, of))
        self.process.start()
        other.close()

    def said(self, seconds=120):
        if not self.conn.poll(seconds):
            raise TimeoutError("a trainer says nothing")
        return self.conn.recv()

    def asked(self):
        """The loss, as it is now."""
        self.conn.send("loss")
        return self.said()

    def end(self):
        if self.process.is_alive():
            self.conn.send("end")
        self.process.join(60)


class Adapters(unittest.TestCase):
    def test_training_is_that_of_peft_alone_bit_for_bit(self):
        losses, values = plain()
        for meta in (True, False):
            with self.subTest(meta=meta), daemon_with_job(f"a{meta}") as socket:
                shardd.torch.load_base("llama", llama(), socket)
                model = empty() if meta else llama(seed=1)
                if meta:
                    shardd.torch.attach_base(model, "llama")
                    model = adapted(model)
                else:  # peft first
                    model = adapted(model)
                    base = shardd.torch.attach_base(model, "llama")
                    self.assertIn("model.layers.1.self_attn.q_proj.weight", base.tensors)
                shardd.torch.fully_shard(model)
                optimizer = shardd.torch.AdamW(model.parameters(), lr=0.02)
                self.assertEqual(trained(model, optimizer), losses)
                with shardd.torch.summon_full_params(model):
                    mine = adapter(model)
                self.assertEqual(mine.keys(), values.keys())
                for name, value in values.items():
                    self.assertTrue(torch.equal(mine[name], value), name)
                units = job_of(socket, f"a{meta}")["units"]
                self.assertEqual(sum(u["elements"] for u in units),
                                 sum(v.numel() for v in values.values()))

    def test_16_jobs_use_the_memory_of_one_base(self):
        of = {"width": 256, "layers": 4, "vocabulary": 4096}
        with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
            model = llama(**of)
            values = dict(model.named_parameters())
            whole = sum(p.nbytes for p in values.values())
            save_file(values, folder + "/model.safetensors")
            load(socket, "llama", folder)
            alone = job_of(socket, "llama")["used_bytes"]
            self.assertLess(alone, whole + 65536)
            trainers = [Trainer(socket, f"job{i}", seed=i, **of) for i in range(JOBS)]
            try:
                told = [one.said() for one in trainers]
                for losses, nbytes in told:
                    self.assertEqual((len(losses), nbytes), (STEPS, whole))
                self.assertEqual(len({losses[-1] for losses, _ in told}), JOBS)
                said = json.loads(ctl(socket, "--json", "status").stdout)
                jobs = {job["name"]: job for job in said["jobs"]}
                self.assertEqual(len(jobs), JOBS + 1)
                self.assertEqual({r["pid"] for r in jobs["llama"]["readers"]},
                                 {one.process.pid for one in trainers})
                self.assertEqual(jobs["llama"]["used_bytes"], alone)
                own = [jobs[f"job{i}"]["used_bytes"] for i in range(JOBS)]
                self.assertLess(max(own), whole / 4)
                all_of_it = in_memory([said["pid"], *(one.process.pid for one in trainers)])
                print(f"# base: {whole} bytes in its file, {alone} charged; {JOBS} jobs: "
                      f"{sum(own)} charged; mapped by all processes together: {all_of_it}")
                # each session has a ring, and each job its own memory
                self.assertLess(all_of_it, whole + sum(own) + (8 << 20))
                self.assertGreater(all_of_it, whole)
                self.dropped_while_in_use(socket, trainers)
            finally:
                for one in trainers:
                    one.end()

    def dropped_while_in_use(self, socket, trainers):
        refused = ctl(socket, "job", "delete", "llama")
        self.assertEqual(refused.returncode, 1)
        self.assertIn(f"base 'llama' is used by {JOBS} readers, such as pid ", refused.stderr)
        before = [one.asked() for one in trainers]
        gone = ctl(socket, "job", "delete", "--force", "llama")
        self.assertEqual(gone.returncode, 0, gone.stderr)
        time.sleep(1.5)  # the daemon empties each second what it could
        self.assertEqual([one.asked() for one in trainers], before)
        said = job_of(socket, "llama")
        self.assertEqual(said["state"], "DELETED")
        self.assertGreater(said["used_bytes"], 0)
        for one in trainers:
            one.end()
        until = time.monotonic() + 30
        while any(j["name"] == "llama" for j in json.loads(
                ctl(socket, "--json", "status").stdout)["jobs"]):
            self.assertLess(time.monotonic(), until, "the last reader has ended")
            time.sleep(0.1)

    def test_a_base_that_does_not_fit_changes_nothing(self):
        with support.daemon() as socket:
            shardd.torch.load_base("llama", llama(), socket)
            for of, error, text in (
                    ({"width": 64}, shardd.InvalidArgument,
                     "'model.embed_tokens.weight' has shape [64, 64] in the module but [64, 32]"),
                    ({"layers": 3}, shardd.NotFound,
                     "no tensor 'model.layers.2.self_attn.q_proj.weight'")):
                model = empty(**of)
                with self.assertRaisesRegex(error, re.escape(text)):
                    shardd.torch.attach_base(model, "llama", socket)
                self.assertTrue(all(p.is_meta for p in model.parameters()))
            with self.assertRaisesRegex(shardd.InvalidArgument, "torch.float32.*torch.bfloat16"):
                shardd.torch.attach_base(llama(dtype=torch.float32), "llama", socket)
            with self.assertRaisesRegex(shardd.NotFound, "no job 'other'"):
                shardd.torch.attach_base(llama(), "other", socket)
            # frozen, and of another model: not kept as a copy of this process's own
            model = adapted(llama(layers=3))
            with self.assertRaisesRegex(shardd.NotFound, "model.layers.2"):
                shardd.torch.attach_base(model, "llama", socket)
            with shardd.Client(socket) as client:
                client.join("job", 1, 0)
                with self.assertRaisesRegex(shardd.FailedPrecondition, "job 'job' is no base"):
                    shardd.torch.attach_base(llama(), "job", socket)
            # init_empty_weights() unties what the model had tied
            shardd.torch.load_base("tied", llama(tied=True), socket)
            model = empty(tied=True)
            with self.assertRaisesRegex(shardd.NotFound, r"lm_head.weight.*call tie_weights\(\)"):
                shardd.torch.attach_base(model, "tied", socket)
            model.tie_weights()
            shardd.torch.attach_base(model, "tied", socket)
            self.assertIs(model.lm_head.weight, model.model.embed_tokens.weight)
            self.assertTrue(torch.equal(model.lm_head.weight, llama(tied=True).lm_head.weight))
            with self.assertRaisesRegex(shardd.InvalidArgument, "is on the meta device"):
                shardd.torch.load_base("other", empty(), socket)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "a base, which was loaded"):
                shardd.torch.load_base("llama", llama(), socket)

    def test_nothing_writes_a_base(self):
        with support.daemon() as socket:
            shardd.torch.load_base("llama", llama(), socket)
            model = empty()
            base = shardd.torch.attach_base(model, "llama", socket)
            with self.assertRaisesRegex(shardd.InvalidArgument, "of base 'llama', which is read"):
                model.load_state_dict(llama(seed=1).state_dict())
            self.assertTrue(torch.equal(model.lm_head.weight, llama().lm_head.weight))
            self.assertFalse(any(p.requires_grad for p in model.parameters()))
            with self.assertRaises(shardd.InUse):
                base.close()
            with shardd.Client(socket) as client, self.assertRaisesRegex(
                    shardd.FailedPrecondition, "no rank may join"):
                client.join("llama", 1, 0)
            with shardd.Client(socket) as client:
                client.join("slow", 1, 0, shardd.Lifetime.BASE)
                [unit] = client.register([shardd.UnitSpec(
                    "root", [shardd.TensorSpec("w", (4,), frozen=True)])])
                unit.init_seed(1)
                client.commit(1)
                for what in (lambda: unit.init_seed(2), lambda: client.commit(2)):
                    with self.assertRaisesRegex(shardd.FailedPrecondition, "nothing may write it"):
                        what()

    def test_a_published_adapter_is_what_peft_saves(self):
        with daemon_with_job("lora") as socket, tempfile.TemporaryDirectory() as folder:
            shardd.torch.load_base("llama", llama(), socket)
            model = empty()
            shardd.torch.attach_base(model, "llama")
            model = shardd.torch.fully_shard(adapted(model))
            optimizer = shardd.torch.AdamW(model.parameters(), lr=0.02)
            trained(model, optimizer, steps=2)
            shardd.torch.commit(2)
            with shardd.Client(socket) as client:
                nbytes = shardd.declare_publication(
                    shardd.adapter_publication("adapter", every_steps=1), "lora", client)
                shardd.publish("adapter", "lora", client)
            model.save_pretrained(folder)
            from safetensors.torch import load_file

            saved = load_file(folder + "/adapter_model.safetensors")
            with shardd.Live("lora", "adapter", socket) as live, live.generation(10) as weights:
                self.assertEqual(set(weights), set(saved))
                for name, value in saved.items():
                    mine = torch.from_dlpack(weights[name]).clone()
                    self.assertTrue(torch.equal(mine, value), name)
            self.assertGreaterEqual(nbytes, sum(v.nbytes for v in saved.values()))


if __name__ == "__main__":
    support.main()
