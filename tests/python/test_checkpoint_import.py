#!/usr/bin/env python3
"""`shardctl checkpoint import`: a safetensors file with a checkpoint's keys becomes a checkpoint,
which the daemon loads; what is no such file is refused, and leaves nothing."""

import array
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import support

import shardd

WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1}


def tensor(dtype, shape, data):
    return dtype, shape, data


def floats(shape, value):
    elements = 1
    for extent in shape:
        elements *= extent
    return tensor("F32", shape, array.array("f", [value] * elements).tobytes())


def encoded(tensors, metadata=None, order=None):
    """The bytes of a safetensors file. @order: of the data; that of a checkpoint if None."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for key in order or sorted(tensors, key=lambda k: (-WIDTH[tensors[k][0]], k)):
        dtype, shape, raw = tensors[key]
        header[key] = {"dtype": dtype, "shape": shape,
                       "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def adam(unit, name, shape, value=2.0):
    return {f"param/{unit}/{name}": floats(shape, value),
            f"exp_avg/{unit}/{name}": floats(shape, 0.5),
            f"exp_avg_sq/{unit}/{name}": floats(shape, 0.25)}


class Import(unittest.TestCase):
    def setUp(self):
        self.root = self.enterContext(tempfile.TemporaryDirectory())
        self.folder = Path(self.root, "job")
        self.folder.mkdir()

    def ctl(self, *words, **options):
        return subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "--json", "checkpoint",
                               *map(str, words)], capture_output=True, check=False, **options)

    def file(self, content):
        path = Path(self.root, "file.safetensors")
        path.write_bytes(content)
        return path

    def bring(self, content, *options):
        return self.ctl("import", self.file(content), self.folder, "--step", 7, *options)

    def check_refused(self, done, words):
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(words, done.stderr.decode())
        self.assertEqual(list(self.folder.iterdir()), [])

    def index(self):
        done = self.ctl("inspect", self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["checkpoint"]

    def test_the_daemon_loads_it(self):
        tensors = {**adam("block", "w", [3, 4]), "blob/0": tensor("U8", [3], b"abc")}
        done = self.bring(encoded(tensors, {"steps/block/w": "5"}))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.ctl("verify", self.folder).returncode, 0)
        with (support.daemon("--set", f"checkpoint_roots={self.root}") as socket,
              shardd.connect(socket) as client):
            client.join("job", 1, 0)
            spec = shardd.UnitSpec("block", [shardd.TensorSpec("w", (3, 4))],
                                   optimizer=shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, 0.1))
            client.register([spec])
            self.assertEqual(client.load_checkpoint(self.folder), 7)
            found = client.rejoin()
            self.assertEqual((found.step, found.blob), (7, b"abc"))
            [unit] = client.register([spec])
            status = subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket,
                                     "--json", "units", "job"], capture_output=True, check=True)
            [said] = json.loads(status.stdout)["units"]
            self.assertEqual(int(said["optimizer_steps"]), 5)
            self.assertEqual(unit.gather().view().tolist()[:12], [2.0] * 12)
            unit.release()
            client.leave()

    def test_what_the_index_says(self):
        tensors = {**adam("a%2Fb", "w/x", [2]), "param/half/f": tensor("BF16", [2], b"\0\x40" * 2),
                   "buffer/1/half/n": tensor("I64", [], bytes(8))}
        content = encoded(tensors, {"steps/a%2Fb/w/x": "9", "format": "pt"})
        done = self.bring(content, "--job", "other", "--world-size", 4)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["pieces"], 5)
        index = self.index()
        self.assertEqual((index["job"], index["step"], index["world_size"]), ("other", 7, 4))
        pieces = {p["key"]: p for p in index["pieces"]}
        self.assertEqual(sorted(pieces), sorted(tensors))
        self.assertEqual([pieces["param/a%2Fb/w/x"][k] for k in ("unit", "tensor", "steps")],
                         ["a/b", "w/x", 9])
        self.assertEqual((pieces["param/half/f"]["dtype"], pieces["param/half/f"]["steps"]),
                         ("BF16", 0))

    def test_a_folder_is_no_file(self):
        self.check_refused(self.ctl("import", self.root, self.folder, "--step", 7), "is a folder")

    def test_a_pipe_has_the_order_of_a_checkpoint(self):
        tensors = {"param/a/w": floats([4000, 1000], 1.0), "param/b/w": floats([3], 2.0)}
        words = ("import", "-", self.folder, "--step", 7)
        wrong = encoded(tensors, order=["param/b/w", "param/a/w"])
        self.check_refused(self.ctl(*words, input=wrong), "is not at the place")
        right = encoded(tensors)
        self.check_refused(self.ctl(*words, input=right[:-1]), "ended in the middle")
        self.check_refused(self.ctl(*words, input=right[:100]), "shorter than its header")
        self.check_refused(self.ctl(*words, input=right + b"x"), "goes on behind")
        done = self.ctl(*words, input=right)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.ctl("verify", self.folder).returncode, 0)
        shard = Path(self.folder, "step-000000000007", "shard-00000.safetensors").read_bytes()
        data = tensors["param/a/w"][2] + tensors["param/b/w"][2]
        self.assertEqual(shard[-len(data):], data)
        again = self.ctl(*words, input=right)
        self.assertIn("step-000000000007' already", again.stderr.decode())

    def test_a_file_may_have_any_order(self):
        tensors = {"param/a/w": floats([4], 1.0), "param/b/w": floats([3], 2.0)}
        done = self.bring(encoded(tensors, order=["param/b/w", "param/a/w"]))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.ctl("verify", self.folder).returncode, 0)

    def test_what_a_checkpoint_cannot_have(self):
        steps = {"steps/u/w": "3"}
        state = adam("u", "w", [2])
        for tensors, metadata, words in (
                ({}, None, "has no tensors"),
                ({"weight": floats([2], 1.0)}, None, "'weight'"),
                ({"param/u": floats([2], 1.0)}, None, "no key of a checkpoint"),
                ({"param//w": floats([2], 1.0)}, None, "no key of a checkpoint"),
                ({"gradient/u/w": floats([2], 1.0)}, None, "no key of a checkpoint"),
                ({"param/u@/w": floats([2], 1.0)}, None, "in another way"),
                ({"param/u/w@2": floats([2], 1.0)}, None, "in another way"),
                ({"param/u%zz/w": floats([2], 1.0)}, None, "in another way"),
                ({"param/u%": floats([2], 1.0)}, None, "no key of a checkpoint"),
                ({"param/u/w": tensor("I64", [1], bytes(8))}, None, "F32, BF16 or F16"),
                ({**state, "exp_avg/u/w": tensor("BF16", [2], bytes(4))}, steps, "must be F32"),
                ({**state, "exp_avg/u/w": floats([3], 1.0)}, steps, "another shape"),
                ({**state, "exp_avg/u/v": floats([2], 1.0)}, steps, "'exp_avg/u/v'"),
                (state, None, "how often it was stepped"),
                (state, {"steps/u/w": "three"}, "no number of steps"),
                (state, {"steps/u/w": "-3"}, "no number of steps"),
                ({"blob/0": floats([2], 1.0)}, None, "must be U8"),
                ({"buffer/u/w": floats([2], 1.0)}, None, "no key of a checkpoint"),
                ({"buffer/0/u": floats([2], 1.0)}, None, "no key of a checkpoint"),
                ({"blob/x": tensor("U8", [1], b"x")}, None, "no key of a checkpoint"),
                ({"blob/00": tensor("U8", [1], b"x")}, None, "in another way")):
            with self.subTest(words, tensors=list(tensors)):
                self.check_refused(self.bring(encoded(tensors, metadata)), words)

    def test_wrong_arguments(self):
        for words, said in (((), "takes a safetensors file"), (("a", "b"), "needs --step"),
                            (("a", "b", "--step", "x"), "not a whole number"),
                            (("a", "b", "--step", "1", "--world-size", "0"), "--world-size"),
                            (("a", "b", "--step", "1", "--job", ""), "--job is empty")):
            done = self.ctl("import", *words)
            self.assertEqual(done.returncode, 2)
            self.assertIn(said, done.stderr.decode())
        done = self.ctl("import", Path(self.root, "none"), self.folder, "--step", 1)
        self.check_refused(done, "NOT_FOUND: opening")
        done = self.ctl("import", self.file(b""), Path(self.root, "none"), "--step", 1)
        self.check_refused(done, "NOT_FOUND: opening")


class Convert(unittest.TestCase):
    """What does not need PyTorch."""

    def convert(self, *words, **environment):
        return subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "checkpoint", "convert",
                               *map(str, words)], capture_output=True, text=True, check=False,
                              env={**os.environ, **environment})

    def test_wrong_arguments(self):
        for words, said in (((), "takes the folder"), (("a", "b"), "needs --to"),
                            (("a", "b", "--to", "x"), "neither dcp nor shardd"),
                            (("a", "b", "--to", "dcp", "--step", "x"), "not a whole number"),
                            (("a", "b", "--to", "dcp", "--python", ""), "--python is empty")):
            done = self.convert(*words)
            self.assertEqual(done.returncode, 2)
            self.assertIn(said, done.stderr)

    def test_what_is_missing_is_said(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.convert("a", "b", "--to", "dcp", "--python", folder + "/none")
            self.assertEqual(done.returncode, 1)
            self.assertIn("install both", done.stderr)
            Path(folder, "torch.py").write_text("raise ImportError('it is broken')")
            done = self.convert("a", "b", "--to", "dcp", "--python", "python3", PYTHONPATH=folder)
            self.assertEqual(done.returncode, 1)
            self.assertIn("it is broken): install it", done.stderr)
            module = Path(folder, "torch.distributed.checkpoint".replace(".", "/"))
            Path(folder, "torch.py").unlink()
            module.mkdir(parents=True)
            done = self.convert("a", "b", "--to", "dcp", "--python", "python3", PYTHONPATH=folder)
            self.assertEqual(done.returncode, 1)
            self.assertIn("has no package shardd", done.stderr)


if __name__ == "__main__":
    support.main()
