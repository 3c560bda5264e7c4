#!/usr/bin/env python3
"""Converting checkpoints to and from PyTorch's, in one process without a process group: what is in
them stays as it is, and what does not fit, or is damaged, is refused by name and leaves nothing."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import fsdp  # noqa: F401  finds the package
import support
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint import state_dict as dsd

import shardd
from shardd.torch import checkpoint
from shardd.torch._saved import Array, New, make

SHARDCTL = os.path.join(support.BIN_DIR, "shardctl")
OUTSIDE = {"shardctl": SHARDCTL}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 5)])
        self.out = nn.Linear(5, 3, bias=False)
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.out(x) + self.frozen


def trained(kind=torch.optim.AdamW, steps=2, **options):
    torch.manual_seed(4)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).pow(2).mean().backward()
        optimizer.step()
    return {"model": dsd.get_model_state_dict(model),
            "optim": dsd.get_optimizer_state_dict(model, optimizer)}


def nested(value, path=()):
    """The leaves of dictionaries and lists of them, by path."""
    if isinstance(value, dict):
        return {k: v for n, inner in value.items() for k, v in nested(inner, (*path, n)).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return nested(dict(enumerate(value)), path)
    return {path: value}


def others(left_out):
    """But for the settings of the optimizer."""
    return [what for what in left_out if "param_groups" not in what]


class Case(unittest.TestCase):
    def setUp(self):
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.source, self.folder = self.root / "dcp", self.root / "job"
        self.folder.mkdir()

    def save(self, state, name="dcp"):
        dcp.save(state, checkpoint_id=self.root / name, no_dist=True)
        return self.root / name

    def bring(self, *arguments, **options):
        options.setdefault("units", ["blocks.*"])
        return checkpoint.from_dcp(self.source, self.folder, *arguments, **options, **OUTSIDE)

    def send(self, name, **options):
        return checkpoint.to_dcp(self.folder, self.root / name, **options, **OUTSIDE)

    def read(self, name):
        out = self.root / f"{name}.pt"
        format_utils.dcp_to_torch_save(self.root / name, out)
        return nested(torch.load(out, weights_only=False))

    def check_same(self, a, b):
        self.assertEqual(a.keys(), b.keys())
        for path, value in a.items():
            if isinstance(value, torch.Tensor):
                self.assertEqual(value.dtype, b[path].dtype, path)
                self.assertTrue(torch.equal(value, b[path]), path)
            else:
                self.assertEqual(value, b[path], path)

    def check_nothing(self):
        self.assertEqual(list(self.folder.iterdir()), [])

    def pieces(self):
        done = subprocess.run([SHARDCTL, "--json", "checkpoint", "inspect", self.folder],
                              capture_output=True, check=True)
        return {p["key"]: p for p in json.loads(done.stdout)["checkpoint"]["pieces"]}


class Contents(Case):
    def test_there_and_back(self):
        for kind, options, step in ((torch.optim.AdamW, {}, None),
                                    (torch.optim.Adam, {"amsgrad": True}, None),
                                    (torch.optim.SGD, {"momentum": 0.9}, 2),
                                    (torch.optim.SGD, {}, 2)):
            with self.subTest(kind.__name__, **options):
                state = trained(kind, **options)
                self.save(state)
                done = self.bring(step)
                self.assertEqual((done.step, done.parameters, others(done.left_out)), (2, 6, []))
                back = self.send("back", optimizer=state["optim"], piece_bytes=48, file_bytes=100)
                self.assertEqual((back.step, back.parameters, back.left_out), (2, 6, ()))
                self.assertGreater(len(list(Path(back.path).glob("*.distcp"))), 4)
                self.check_same(self.read("back"), self.read("dcp"))
                for folder in "dcp", "back", "job/step-000000000002":
                    shutil.rmtree(self.root / folder)

    def test_units_and_steps(self):
        self.save(trained())
        self.bring()
        found = {key: piece["steps"] for key, piece in self.pieces().items()
                 if piece["array"] == "param"}
        self.assertEqual(found, {
            "param/blocks.0/weight": 2, "param/blocks.0/bias": 2, "param/blocks.1/weight": 2,
            "param/blocks.1/bias": 2, "param/root/out.weight": 2, "param/root/frozen": 0})
        self.assertNotIn("exp_avg/root/frozen", self.pieces())

    def test_settings_from_files(self):
        state = trained()
        self.save(state)
        self.bring()
        [group] = state["optim"]["param_groups"]
        torch.save(state["optim"], self.root / "groups.pt")
        (self.root / "groups.json").write_text(json.dumps([group]))
        for i, given in enumerate((self.source, self.root / "groups.pt", self.root / "groups.json",
                                   [{k: v for k, v in group.items() if k != "params"}])):
            self.send(f"back{i}", optimizer=given)
            got, want = self.read(f"back{i}"), self.read("dcp")
            names = got[("optim", "param_groups", 0, "params")]
            self.assertEqual(sorted(names), sorted(want[("optim", "param_groups", 0, "params")]))
            for one in got, want:
                one.pop(("optim", "param_groups", 0, "params"))
            self.check_same(got, want)

    def test_other_places_in_the_state(self):
        state = trained()
        self.save({"app": state, "lr_scheduler": {"last_epoch": 3}})
        options = dict(model_key="app.model", optim_key="app.optim")
        with self.assertRaisesRegex(shardd.FailedPrecondition, r"'lr_scheduler.last_epoch'"):
            self.bring(**options)
        done = self.bring(leave_out=["lr_scheduler.*"], **options)
        self.assertEqual(others(done.left_out), ["lr_scheduler.last_epoch: as was asked for"])
        self.assertIn("app.optim.param_groups.0.lr: a setting is the program's", done.left_out)
        self.send("back", optimizer=state["optim"], **options)
        want = {p: v for p, v in self.read("dcp").items() if p[0] == "app"}
        self.check_same(self.read("back"), want)

    def test_the_model_alone(self):
        state = trained()
        self.save(state["model"])
        done = self.bring(7, model_key="")
        self.assertIn("the state of an optimizer", done.lacks)
        self.send("back", model_key="")
        self.check_same(self.read("back"), self.read("dcp"))

    def test_without_the_optimizer(self):
        self.save(trained())
        done = self.bring(7, without_optimizer=True)
        self.assertIn("optim.state.out.weight.exp_avg: without the optimizer", done.left_out)
        self.assertEqual({p["array"] for p in self.pieces().values()}, {"param"})
        shutil.rmtree(done.path)
        self.bring()
        self.send("back", without_optimizer=True)
        self.assertEqual({path[0] for path in self.read("back")}, {"model"})

    def test_a_flattened_optimizer(self):
        torch.manual_seed(4)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        options = dsd.StateDictOptions(flatten_optimizer_state_dict=True)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
        self.save({"model": dsd.get_model_state_dict(model),
                   "optim": dsd.get_optimizer_state_dict(model, optimizer, options=options)})
        self.assertEqual(self.bring().step, 1)
        self.assertEqual(self.pieces()["param/blocks.0/bias"]["steps"], 1)

    def test_tied_parameters(self):
        state = trained()
        state["model"]["head.weight"] = state["model"]["out.weight"]
        self.save(state)
        done = self.bring(aliases={"head.weight": "out.weight"})
        self.assertEqual(others(done.left_out), ["model.head.weight: the same as 'out.weight'"])
        self.send("back", optimizer=state["optim"], aliases={"head.weight": "out.weight"})
        self.check_same(self.read("back"), self.read("dcp"))

    def test_blobs(self):
        state = trained()
        self.save({**state, "shardd": {"blob": {"0": b"\x00at 3\xff", "2": b""}}})
        done = self.bring()
        self.assertNotIn("blobs", "".join(done.lacks))
        self.assertEqual({k: p["elements"] for k, p in self.pieces().items() if "blob" in k},
                         {"blob/0": 6, "blob/2": 0})
        self.send("back", optimizer=state["optim"])
        self.check_same(self.read("back"), self.read("dcp"))

    def test_buffers(self):
        """Each rank has its own; a distributed checkpoint has one."""
        def buffer(rank, name, value):
            return New(Array("buffer", "root", name, torch.float32, (2,), 0, rank),
                       lambda: torch.full((2,), value))

        make(self.folder, 4, "job", [
            New(Array("param", "root", "w", torch.float32, (3,), 0, 0), lambda: torch.ones(3)),
            buffer(0, "mean", 5.0), buffer(1, "mean", 6.0), buffer(1, "shardd:own", 7.0)],
            SHARDCTL)
        done = self.send("dcp")
        self.assertEqual(done.left_out, ("buffer/1/root/mean: there is rank 0's",
                                         "buffer/1/root/shardd:own: of the client library"))
        found = self.read("dcp")
        self.assertEqual(found.keys(), {("model", "w"), ("model", "mean")})
        self.assertTrue(torch.equal(found["model", "mean"], torch.full((2,), 5.0)))
        like = self.folder.rename(self.root / "like")
        self.folder.mkdir()
        self.bring(4, like=like, units=())
        self.send("back")
        self.check_same(self.read("back"), found)
        self.assertEqual(sorted(self.pieces()), ["buffer/0/root/mean", "buffer/1/root/mean",
                                                 "param/root/w"])

    def test_like_another_checkpoint(self):
        self.save(trained())
        self.bring()
        other = self.root / "other"
        other.mkdir()
        checkpoint.from_dcp(self.source, other, like=self.folder, **OUTSIDE)
        files = [f / "step-000000000002" / "shard-00000.safetensors" for f in (self.folder, other)]
        self.assertEqual(files[0].read_bytes(), files[1].read_bytes())

    def test_parameters_that_were_never_stepped(self):
        state = trained()
        self.save(state)
        self.bring()
        like = self.folder.rename(self.root / "like")
        self.folder.mkdir()
        state["optim"]["state"].pop("out.weight")
        shutil.rmtree(self.source)
        self.save(state)
        with self.assertRaisesRegex(shardd.FailedPrecondition,
                                    "no optimizer state of 'out.weight'.*--allow-unstepped"):
            self.bring(like=like, units=())
        self.check_nothing()
        done = self.bring(like=like, units=(), allow_unstepped=True)
        self.assertIn("optimizer state of 'out.weight': zeros, never stepped", done.lacks)
        pieces = self.pieces()
        self.assertEqual(pieces["param/root/out.weight"]["steps"], 0)
        self.assertIn("exp_avg_sq/root/out.weight", pieces)


class Refused(Case):
    def setUp(self):
        super().setUp()
        self.state = trained()

    def check_refused(self, kind, words, *arguments, **options):
        with self.assertRaisesRegex(kind, words):
            self.bring(*arguments, **options)
        self.check_nothing()

    def test_damage(self):
        self.save(self.state)
        [data] = self.source.glob("*.distcp")
        whole, metadata = data.read_bytes(), (self.source / ".metadata").read_bytes()
        data.write_bytes(whole[:-200])
        self.check_refused(shardd.DataLoss, r"'(model|optim)\..*' in '.*' cannot be read")
        data.write_bytes(whole[:len(whole) // 2])
        self.check_refused(shardd.DataLoss, "cannot be read")
        data.unlink()
        self.check_refused(shardd.DataLoss, f"has no file '{data.name}'")
        data.write_bytes(whole)
        (self.source / ".metadata").write_bytes(metadata[:-100])
        self.check_refused(shardd.DataLoss, r"\.metadata' is damaged")
        (self.source / ".metadata").unlink()
        self.check_refused(shardd.NotFound, "has no file .metadata")

    def test_a_metadata_that_runs_something(self):
        self.save(self.state)
        done = self.root / "done"

        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {done}",)

        (self.source / ".metadata").write_bytes(pickle.dumps(Evil()))
        self.check_refused(shardd.DataLoss, r"refers to (posix|os)\.system")
        self.assertFalse(done.exists())

    def test_files_outside_of_the_folder(self):
        self.save(self.state)
        path = self.source / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = "../dcp/" + info.relative_path
        path.write_bytes(pickle.dumps(metadata))
        self.check_refused(shardd.DataLoss, "outside of the folder")

    def test_pieces_that_are_not_all_of_a_tensor(self):
        self.save(self.state)
        path = self.source / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.state_dict_metadata["model.out.weight"].chunks.clear()
        path.write_bytes(pickle.dumps(metadata))
        self.check_refused(shardd.DataLoss, "pieces of 'model.out.weight'")

    def test_what_has_no_place(self):
        for change, words in (
                (lambda s: s["model"].update(counter=torch.tensor(3)), "'counter' is int64"),
                (lambda s: s["optim"]["state"]["frozen"].update(prev=torch.ones(3)),
                 "'optim.state.frozen.prev'"),
                (lambda s: s.update(extra=torch.ones(2)), "'extra'"),
                (lambda s: s["optim"]["state"].update(gone=s["optim"]["state"]["out.weight"]),
                 "state of 'gone'")):
            with self.subTest(words):
                state = trained()
                state["optim"]["state"]["frozen"] = {}
                change(state)
                self.save(state)
                self.check_refused(shardd.FailedPrecondition, words)
                shutil.rmtree(self.source)

    def test_an_incomplete_or_odd_state(self):
        for change, words in (
                (lambda s: s.pop("exp_avg_sq"), "no exp_avg_sq of 'out.weight'"),
                (lambda s: s.pop("step"), "no step of 'out.weight'"),
                (lambda s: s.update(step=torch.tensor(1.5)), "no number of steps"),
                (lambda s: s.update(exp_avg=s["exp_avg"].half()),
                 "'optim.state.out.weight.exp_avg' is float16"),
                (lambda s: s.update(exp_avg=s["exp_avg"][:2]), r"float32 \[2, 5\]")):
            with self.subTest(words):
                state = trained()
                change(state["optim"]["state"]["out.weight"])
                self.save(state)
                self.check_refused(shardd.FailedPrecondition, words)
                shutil.rmtree(self.source)

    def test_what_is_not_like_the_other_one(self):
        self.save(self.state)
        self.bring()
        like = self.folder.rename(self.root / "like")
        self.folder.mkdir()
        for change, words in (
                (lambda m: m.pop("out.weight"), "has no 'out.weight'"),
                (lambda m: m.update(more=torch.ones(2)), "it has 'more'"),
                (lambda m: m.update({"out.weight": torch.ones(3, 6)}),
                 r"'out.weight' is float32 \[3, 6\].*float32 \[3, 5\]"),
                (lambda m: m.update({"out.weight": torch.ones(3, 5).half()}),
                 r"'out.weight' is float16")):
            with self.subTest(words):
                shutil.rmtree(self.source)
                state = trained()
                change(state["model"])
                self.save(state)
                self.check_refused(shardd.FailedPrecondition, words, like=like, units=())
        shutil.rmtree(self.source)
        self.save(trained(torch.optim.Adam, amsgrad=True))
        self.check_refused(shardd.FailedPrecondition, "max_exp_avg_sq of '.*' for which|"
                           "max_exp_avg_sq of '.*', for which", like=like, units=())

    def test_an_optimizer_by_numbers(self):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        self.save({"model": model.state_dict(), "optim": optimizer.state_dict()})
        self.check_refused(shardd.FailedPrecondition, "by number: save the optimizer as")

    def test_names_that_are_not_tied(self):
        self.state["model"]["head.weight"] = self.state["model"]["out.weight"] + 1
        self.save(self.state)
        self.check_refused(shardd.FailedPrecondition, "differ: they are not tied",
                           aliases={"head.weight": "out.weight"})
        self.check_refused(shardd.NotFound, "no 'none'", aliases={"none": "out.weight"})

    def test_arguments(self):
        self.save(self.state)
        self.check_refused(shardd.NotFound, "no module of the checkpoint is 'layers.*'",
                           units=["layers.*"])
        self.check_refused(shardd.NotFound, "left out by 'model.none'", leave_out=["model.none"])
        self.check_refused(shardd.InvalidArgument, "give one of", like="a", like_job="b", units=())
        self.check_refused(shardd.NotFound, "no tensors of a model at 'net'", model_key="net",
                           leave_out=["model.*"])
        shutil.rmtree(self.source)
        self.save(trained(torch.optim.SGD, momentum=0.9))
        self.check_refused(shardd.InvalidArgument, "how many steps.*--step")
        self.bring(5)
        with self.assertRaisesRegex(shardd.FailedPrecondition, "step-000000000005' already"):
            self.bring(5)

    def test_settings_that_are_not_there_or_of_another_optimizer(self):
        self.save(self.state)
        self.bring()
        [group] = self.state["optim"]["param_groups"]
        for optimizer, words in (
                (None, "not its settings.*--optimizer-from"),
                ({}, "not a list of parameter groups"),
                ([{"betas": (0.9, 0.99)}], "groups that have lr"),
                ([{**group, "params": [0, 1]}], "which is no name"),
                ([{**group, "params": [*group["params"], "none"]}], "no parameters 'none'"),
                ([{**group, "params": ["frozen"]}], "in no group"),
                ([{**group, "amsgrad": True}], "max_exp_avg_sq"),
                ([group, {"lr": 0.1}], "has no params"),
                ([group, group], "in two parameter groups"),
                ([{"lr": 0.1, "momentum": 0.9}], "momentum_buffer")):
            with self.subTest(words), self.assertRaisesRegex(shardd.InvalidArgument, words):
                self.send("back", optimizer=optimizer)
        self.assertEqual(sorted(p.name for p in self.root.iterdir()), ["dcp", "job"])

    def test_a_damaged_checkpoint_and_an_existing_folder(self):
        self.save(self.state)
        self.bring()
        (self.root / "back").mkdir()
        with self.assertRaisesRegex(shardd.AlreadyExists, "back' already"):
            self.send("back", without_optimizer=True)
        with self.assertRaisesRegex(shardd.NotFound, "no folder"):
            self.send("none/back", without_optimizer=True)
        shard = self.folder / "step-000000000002" / "shard-00000.safetensors"
        raw = bytearray(shard.read_bytes())
        raw[-5] ^= 1
        shard.write_bytes(raw)
        with self.assertRaisesRegex(shardd.DataLoss, "is damaged: its checksum"):
            self.send("other", without_optimizer=True)
        self.assertEqual(sorted(p.name for p in self.root.iterdir()), ["back", "dcp", "job"])


KILLED = """
import os, sys
import torch
from shardd.torch import checkpoint, _dcp, _from_dcp
count = 0

def kill(*arguments, at=int(sys.argv[4])):
    global count
    count += 1
    if count == at:
        os._exit(9)
    return arguments

if sys.argv[1] == "to":
    wait = _dcp._Writer.write_data
    _dcp._Writer.write_data = lambda *a: (kill(), wait(*a))[1]
    rename = os.rename
    os.rename = lambda *a: (kill(), rename(*a))[1]
    checkpoint.to_dcp(sys.argv[2], sys.argv[3], without_optimizer=True, shardctl=sys.argv[5],
                      file_bytes=100)
else:
    tensor = _dcp.Source.tensor
    _dcp.Source.tensor = lambda *a: (kill(), tensor(*a))[1]
    checkpoint.from_dcp(sys.argv[2], sys.argv[3], shardctl=sys.argv[5])
os._exit(0)
"""


class Program(Case):
    """``shardctl checkpoint convert``, and a death in the middle of it."""

    def convert(self, *words):
        return subprocess.run(
            [SHARDCTL, "--json", "checkpoint", "convert", "--python", sys.executable,
             *map(str, words)], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def test_there_and_back(self):
        state = trained()
        state["model"]["head.weight"] = state["model"]["out.weight"]
        self.save(state)
        done = self.convert(self.source, self.folder, "--to", "shardd", "--unit", "blocks.*",
                            "--alias", "head.weight=out.weight", "--job", "mine")
        self.assertEqual(done.returncode, 0, done.stderr)
        said = json.loads(done.stdout)
        self.assertEqual((said["step"], said["parameters"]), (2, 6))
        self.assertIn("blobs of ranks (the state of shardd.torch.resilient)", said["lacks"])
        done = self.convert(self.folder, self.root / "back", "--to", "dcp", "--optimizer-from",
                            self.source, "--alias", "head.weight=out.weight")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_same(self.read("back"), self.read("dcp"))
        done = self.convert(self.folder, self.root / "back", "--to", "dcp")
        self.assertEqual(done.returncode, 1)
        self.assertIn("shardctl: ALREADY_EXISTS: there is", done.stderr)

    def test_options_of_the_other_direction(self):
        for words, said in ((("--to", "dcp", "--like", "x"), "--like is for --to shardd"),
                            (("--to", "shardd", "--optimizer-from", "x"),
                             "--optimizer-from is for --to dcp"),
                            (("--to", "dcp", "--alias", "x"), "'x' is not NEW=EXISTING")):
            done = self.convert("a", "b", *words)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(said, done.stderr)

    def killed(self, *words):
        return subprocess.run([sys.executable, "-c", KILLED, *map(str, words), SHARDCTL],
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                              check=False, timeout=120).returncode

    def test_a_death_leaves_nothing_that_looks_whole(self):
        self.save(trained())
        self.bring()
        steps = self.root / "steps"
        for at in 3, 1000:
            died = self.killed("to", self.folder, self.root / "back", at)
            self.assertEqual((died, (self.root / "back").exists()),
                             (9, False) if at < 1000 else (0, True))
            steps.mkdir(exist_ok=True)
            died = self.killed("from", self.source, steps, at)
            found = [p.name for p in steps.iterdir() if not p.name.startswith(".")]
            self.assertEqual((died, found), (9, []) if at < 1000 else (0, ["step-000000000002"]))


if __name__ == "__main__":
    support.main()
