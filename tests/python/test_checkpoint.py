#!/usr/bin/env python3
"""A checkpoint of the daemon becomes the state of another job, in Python."""

import array
import json
import subprocess
import tempfile
import unittest
import venv
from pathlib import Path

import support

import shardd


class Trainer:
    """One rank; SGD adds 1 to all parameters in a step."""

    def __init__(self, socket, job, size=12, buffers=(), **how):
        self.client = shardd.connect(socket)
        self.found = self.client.join(job, 1, 0, **how)
        self.size, self.buffers = size, buffers
        self.register()

    def register(self):
        sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0)
        [self.unit] = self.client.register([shardd.UnitSpec("block", [
            shardd.TensorSpec("w", (self.size,), shardd.Init.CONSTANT, 2.0)], optimizer=sgd,
            buffers=self.buffers)])

    def step(self, number):
        gradient = self.unit.gradient()
        gradient.view()[:] = array.array("f", [-1.0] * gradient.elements)
        self.unit.reduce()
        self.client.step()
        self.client.commit(number, b"at %d" % number)

    def values(self):
        values = self.unit.gather().view().tolist()[:self.size]
        self.unit.release()
        return values

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.leave()
        self.client.close()


class Checkpoints(unittest.TestCase):
    def setUp(self):
        self.root = self.enterContext(tempfile.TemporaryDirectory())
        self.folder = Path(self.root, "job")
        self.folder.mkdir()
        self.socket = self.enterContext(
            support.daemon("--set", f"checkpoint_roots={self.root}"))
        with Trainer(self.socket, "first") as first:
            first.unit.init_seed(1)
            first.step(1)
            self.save("first")
            first.step(2)
            self.save("first")
            first.step(3)

    def save(self, job):
        subprocess.run([support.BIN_DIR + "/shardctl", "--socket", self.socket, "checkpoint",
                        "save", job, self.folder], check=True, stdout=subprocess.DEVNULL)

    def test_the_newest_or_another_one(self):
        for name, step, wanted in (("newest", None, 2), ("other", 1, 1)):
            with self.subTest(name), Trainer(self.socket, name) as trainer:
                self.assertFalse(trainer.found.has_commit)
                self.assertEqual(trainer.client.load_checkpoint(self.folder, step), wanted)
                with self.assertRaisesRegex(shardd.Aborted, "a checkpoint of step"):
                    trainer.client.barrier()
                found = trainer.client.rejoin()
                self.assertEqual((found.has_commit, found.step, found.blob),
                                 (True, wanted, b"at %d" % wanted))
                trainer.register()
                self.assertEqual(trainer.values(), [2.0 + wanted] * 12)
                trainer.step(wanted + 1)
                self.assertEqual(trainer.values(), [3.0 + wanted] * 12)

    def consolidate(self, *arguments):
        return subprocess.run([support.BIN_DIR + "/shardctl", "checkpoint", "consolidate",
                               self.folder, *arguments], capture_output=True, text=True)

    def test_one_file_of_parameters(self):
        out = Path(self.root, "one.safetensors")
        for arguments, key in ((), "block.w"), (("--names", "tensor"), "w"), (
                ("--root", "block"), "w"):
            done = self.consolidate("--out", out, "--step", "1", *arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            raw = out.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8:8 + length])
            self.assertEqual(list(header), [key])
            self.assertEqual(array.array("f", raw[8 + length:]).tolist(), [3.0] * 12)
            again = self.consolidate("--out", out)
            self.assertEqual(again.returncode, 1)
            self.assertIn("already", again.stderr)
            self.assertEqual([p.name for p in Path(self.root).iterdir() if p != self.folder],
                             [out.name])
            out.unlink()

    def test_a_damaged_file_is_not_consolidated(self):
        [shard] = Path(self.folder, "step-000000000002").glob("*.safetensors")
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1  # of the blob
        raw[raw.rfind(array.array("f", [4.0] * 12).tobytes())] ^= 1
        shard.write_bytes(raw)
        out = Path(self.root, "damaged.safetensors")
        done = self.consolidate("--out", out)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is damaged", done.stderr)
        self.assertEqual(list(Path(self.root).iterdir()), [self.folder])

    def test_wrong_arguments_of_consolidate(self):
        for arguments, words in (((), "needs --out FILE"), (
                ("--out", "x", "--names", "y"), "neither tensor nor unit.tensor")):
            done = self.consolidate(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(words, done.stderr)
        for arguments, words in (
                (("--out", "x", "--root", "nobody"), "has no unit 'nobody'"),
                (("--out", self.root + "/none/x"), "none/x': there is no such folder"),
                (("--out", "x", "--step", "77"), f"NOT_FOUND: step 77 in '{self.folder}'")):
            done = self.consolidate(*arguments)
            self.assertEqual(done.returncode, 1)
            self.assertIn(words, done.stderr)

    def test_convert_runs_the_python_of_a_virtual_environment(self):
        venv.create(Path(self.root, "venv"), symlinks=True)
        python = Path(self.root, "venv", "bin", "python")
        done = subprocess.run([support.BIN_DIR + "/shardctl", "checkpoint", "convert", self.folder,
                               "x", "--to", "dcp", "--python", python],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(f"{python} has no PyTorch", done.stderr)

    def test_what_does_not_fit_is_refused(self):
        with (Trainer(self.socket, "smaller", 11) as trainer,
              self.assertRaisesRegex(shardd.FailedPrecondition, "has another shape")):
            trainer.client.load_checkpoint(self.folder)
        with (Trainer(self.socket, "none") as trainer,
              self.assertRaisesRegex(shardd.NotFound, "no checkpoint 'step-000000000007'")):
            trainer.client.load_checkpoint(self.folder, 7)

    def test_without_buffers_it_warns(self):
        mean = shardd.BufferSpec("mean", (3,))
        with (Trainer(self.socket, "normed", buffers=[mean]) as trainer,
              self.assertWarnsRegex(UserWarning, "has no buffers: 1 buffers of the job")):
            trainer.client.load_checkpoint(self.folder)

    def test_a_client_without_a_job(self):
        with (shardd.connect(self.socket) as client,
              self.assertRaisesRegex(shardd.FailedPrecondition, "call join")):
            client.load_checkpoint(self.folder)


class Policy(unittest.TestCase):
    def test_the_next_daemon_has_it(self):
        with (tempfile.TemporaryDirectory() as root,
              support.held_daemon("--set", f"checkpoint_roots={root}") as held):
            ctl = [support.BIN_DIR + "/shardctl", "--socket", held.socket, "--json"]
            subprocess.run([*ctl, "job", "create", "--world-size", "1", "regular"], check=True,
                           stdout=subprocess.DEVNULL)
            subprocess.run([*ctl, "checkpoint", "policy", "regular", root, "--every-steps", "5",
                            "--every-s", "60", "--keep", "3", "--rate", "1M"], check=True,
                           stdout=subprocess.DEVNULL)
            held.kill()
            with shardd.connect(held.socket, connect_timeout=30):
                status = subprocess.run([*ctl, "status"], check=True, capture_output=True,
                                        text=True)
            [job] = json.loads(status.stdout)["jobs"]
            policy = job["checkpoints"]
            self.assertEqual((policy["path"], int(policy["every_steps"]), int(policy["every_s"]),
                              int(policy["keep"]), int(policy["bytes_per_s"])),
                             (root, 5, 60, 3, 1 << 20))


class PolicyOfTheJob(unittest.TestCase):
    """What the trainers, or who creates the job, say of it."""

    def setUp(self):
        self.root = self.enterContext(tempfile.TemporaryDirectory())
        self.socket = self.enterContext(support.daemon("--set", f"checkpoint_roots={self.root}"))

    def ctl(self, *arguments):
        done = subprocess.run([support.BIN_DIR + "/shardctl", "--socket", self.socket, "--json",
                               *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def policy(self):
        [job] = json.loads(self.ctl("status")[1])["jobs"]
        p = job["checkpoints"]
        return (p["path"], *(int(p[k]) for k in ("every_steps", "every_s", "keep", "bytes_per_s")))

    def test_checkpoints_are_made(self):
        mine = shardd.Checkpoints(self.root, every_steps=2, keep=1)
        with Trainer(self.socket, "says", checkpoints=mine) as trainer:
            self.assertEqual(self.policy(), (self.root, 2, 0, 1, 0))
            trainer.unit.init_seed(1)
            for step in range(1, 4):
                trainer.step(step)
            support.wait_until(Path(self.root, "step-000000000002").exists)
            self.assertEqual(len(list(Path(self.root).glob("step-*"))), 1)
            # what the owner sets does not keep a trainer from coming back
            code, _, error = self.ctl("checkpoint", "policy", "says", self.root, "--every-s", "900")
            self.assertEqual(code, 0, error)
            trainer.client.rejoin()
            self.assertEqual(self.policy(), (self.root, 0, 900, 0, 0))

    def test_another_one_is_refused(self):
        mine = shardd.Checkpoints(self.root, every_steps=2)
        with Trainer(self.socket, "says", checkpoints=mine):
            for other in ({"every_steps": 3}, {"every_steps": 2, "keep": 1}):
                with (shardd.connect(self.socket) as client, self.assertRaisesRegex(
                        shardd.FailedPrecondition, "was created with checkpoints every 2 steps")):
                    client.join("says", 1, 0, checkpoints=shardd.Checkpoints(self.root, **other))
        with (Trainer(self.socket, "silent"), shardd.connect(self.socket) as client,
              self.assertRaisesRegex(shardd.FailedPrecondition, "without a policy")):
            client.join("silent", 1, 0, checkpoints=mine)

    def test_what_cannot_be_followed_is_refused(self):
        for given, words in (
                ({"path": self.root}, "every_steps and every_s are 0"),
                ({"path": "/etc", "every_s": 1}, "below none of the daemon's checkpoint_roots"),
                ({"path": self.root, "every_s": 1 << 32}, "checkpoints.every_s is"),
                ({"path": self.root, "every_s": 1, "keep": -1}, "checkpoints.keep is -1")):
            with (self.subTest(words), shardd.connect(self.socket) as client,
                  self.assertRaisesRegex(shardd.InvalidArgument, words)):
                client.join("never", 1, 0, checkpoints=shardd.Checkpoints(**given))
        self.assertEqual(json.loads(self.ctl("status")[1])["jobs"], [])

    def test_by_who_creates_it(self):
        words = ("--checkpoint-dir", self.root, "--checkpoint-every-steps", "5",
                 "--checkpoint-every-s", "60", "--checkpoint-keep", "3", "--checkpoint-rate", "1M")
        code, _, error = self.ctl("job", "create", "--world-size", "1", "made", *words)
        self.assertEqual(code, 0, error)
        self.assertEqual(self.policy(), (self.root, 5, 60, 3, 1 << 20))
        same = shardd.Checkpoints(self.root, 5, 60, 3, 1 << 20)
        with Trainer(self.socket, "made", checkpoints=same):
            pass
        for some, words in ((("--checkpoint-keep", "3"), "needs --checkpoint-dir"),
                            (("--checkpoint-dir", self.root), "needs --checkpoint-every-steps"),
                            (("--checkpoint-keep", "0"), "not a whole number from 1")):
            code, _, error = self.ctl("job", "create", "--world-size", "1", "bad", *some)
            self.assertEqual(code, 2)
            self.assertIn(words, error)


class ResumeFrom(unittest.TestCase):
    def setUp(self):
        self.socket = self.enterContext(support.daemon())

    def test_the_commit_is_there_again(self):
        with Trainer(self.socket, "committed", resume_from="committed") as trainer:
            trainer.unit.init_seed(1)
            trainer.step(7)
            gradient = trainer.unit.gradient()
            gradient.view()[:] = array.array("f", [-1.0] * gradient.elements)
            trainer.unit.reduce()
            trainer.client.step()
            self.assertEqual(trainer.values(), [4.0] * 12)
            found = trainer.client.rejoin()
            self.assertEqual((found.step, found.blob, found.torn), (7, b"at 7", False))
            trainer.register()
            self.assertEqual(trainer.values(), [3.0] * 12)

    def test_another_word_is_refused(self):
        words = "'applied', 'committed', 'no-copy' or"
        with (shardd.connect(self.socket) as client,
              self.assertRaisesRegex(shardd.InvalidArgument, words)):
            client.join("wrong", 1, 0, resume_from="torn")


class Elastic(unittest.TestCase):
    def setUp(self):
        self.socket = self.enterContext(support.daemon())

    def join(self, client, world, **options):
        return client.join("elastic", world, 0, shardd.Lifetime.KEEP, **options)

    def test_ranks_of_another_number_find_the_state(self):
        with shardd.connect(self.socket) as client:
            self.join(client, 1, elastic=(1, 4))
            [unit] = client.register([shardd.UnitSpec("u", [shardd.TensorSpec("weight", (3, 4))])])
            unit.init_seed(3)
            client.commit(5, b"at 5")
            client.leave()
        with shardd.connect(self.socket) as client:
            found = self.join(client, 3)
            self.assertEqual((found.world_size, found.step, found.blob, found.torn),
                             (3, 5, b"at 5", False))

    def test_other_ranges_are_refused(self):
        with shardd.connect(self.socket) as client:
            with self.assertRaisesRegex(shardd.InvalidArgument, "job.min_ranks 2"):
                self.join(client, 1, elastic=(2, 4))
            self.join(client, 1, elastic=(1, 4))
            client.leave()
            with self.assertRaisesRegex(shardd.FailedPrecondition, "from 1 to 4 ranks, not 1 to 5"):
                self.join(client, 1, elastic=(1, 5))
            with self.assertRaisesRegex(shardd.FailedPrecondition, "has world size 1, not 5"):
                self.join(client, 5)


if __name__ == "__main__":
    support.main()
