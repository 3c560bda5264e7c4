#!/usr/bin/env python3
"""Clients without libshardd, with gRPC for Python from PyPI: examples/grpc_trainer.py computes what
the package computes, and what docs/languages.md says of channels, errors and reflection is so."""

import array
import ast
import json
import os
import subprocess
import tempfile
import unittest
import zlib

import support

import shardd

STEPS, SEED = 8, 3
EXAMPLE = support.ROOT / "client" / "python" / "examples" / "grpc_trainer.py"
GRPC = os.environ.get("SHARDD_GRPC_VENV", "/none") + "/bin/python"


def documented_lines():
    """The commands of docs/languages.md that make the stubs, which the example has, too."""
    page = (support.ROOT / "docs" / "languages.md").read_text(encoding="utf-8")
    section = page.split("\n## Stubs\n")[1].split("\n## ")[0]
    lines = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    example = ast.get_docstring(ast.parse(EXAMPLE.read_text(encoding="utf-8")))
    missing = [line for line in lines if f"    {line}\n" not in example]
    if not lines or missing:
        raise AssertionError(f"{EXAMPLE} has other lines: {missing}")
    return "\n".join(lines)


def package_rank(rank, world, socket):
    """examples/grpc_trainer.py with the package: the line of each step."""
    lines = []
    with shardd.connect(socket) as client:
        client.join("package", world, rank)
        uniform = (shardd.Init.UNIFORM, -1.0, 1.0)
        [unit] = client.register([shardd.UnitSpec("block", [
            shardd.TensorSpec("w", (32, 7), *uniform), shardd.TensorSpec("b", (7,), *uniform)],
            optimizer=shardd.OptimizerSpec(
                shardd.OptimizerKind.ADAMW, lr=0.05, weight_decay=0.01))])
        unit.init_seed(SEED)
        for number in range(1, STEPS + 1):
            parameters = array.array("f", unit.gather().view())
            unit.release()
            unit.gradient().view()[:] = array.array(
                "f", (p * (rank + 1) + i / 1024 for i, p in enumerate(parameters)))
            unit.reduce()
            client.step()
            client.commit(number)
            lines.append(f"step {number} crc32 {zlib.crc32(parameters):08x}")
        client.leave()
    return lines


@unittest.skipUnless(os.access(GRPC, os.X_OK),
                     f"no grpcio: there is no {GRPC}, which tests/run makes (SHARDD_GRPC_VENV)")
class Languages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.stubs = os.path.join(cls.folder.name, "stubs")
        cls.daemon = support.daemon()
        cls.socket = cls.daemon.__enter__()
        # the lines of the page, in a folder that has of the source tree what they need
        os.symlink(support.ROOT / "proto", os.path.join(cls.folder.name, "proto"))
        subprocess.run(
            ["bash", "-ec", documented_lines()], check=True, timeout=60, cwd=cls.folder.name,
            env={**os.environ, "PATH": f"{os.path.dirname(GRPC)}:{os.environ['PATH']}"})

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)
        cls.folder.cleanup()

    def start(self, *arguments):
        return subprocess.Popen([GRPC, *map(str, arguments)], stdin=subprocess.DEVNULL, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env={**os.environ, "PYTHONPATH": self.stubs})

    def end(self, process):
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (0, ""))
        return out

    def test_the_example_computes_what_the_package_computes(self):
        ranks = [self.start(EXAMPLE, self.socket, rank, 2, "--steps", STEPS, "--seed", SEED)
                 for rank in range(2)]
        lines = [self.end(rank).splitlines() for rank in ranks]
        self.assertEqual(len(set(lines[0])), STEPS)
        self.assertEqual(lines, support.ranks(package_rank, 2, self.socket))

    def test_the_example_says_why_it_is_refused(self):
        rank = self.start(EXAMPLE, self.socket, 2, 2)
        out, err = rank.communicate(timeout=60)
        self.assertEqual((out, rank.returncode), ("", 1))
        self.assertRegex(err, r"^INVALID_ARGUMENT: .*rank 2 ")

    def publish(self):
        """A job with a publication of one generation, which stays until the test ends. Return: its
        tensors: name, shape, CRC-32."""
        client = self.enterContext(shardd.connect(self.socket))
        client.join("streamed", 1, 0)
        self.addCleanup(client.leave)
        shapes = {"a": (100, 1000), "b": (7,), "c": (3, 5)}
        [unit] = client.register([shardd.UnitSpec("root", [
            shardd.TensorSpec(name, shape, shardd.Init.UNIFORM, -1.0, 1.0)
            for name, shape in shapes.items()])])
        unit.init_seed(SEED)
        client.commit(3)
        shardd.declare_publication({"name": "engine", "type": "bf16"}, "streamed", client)
        shardd.publish("engine", "streamed", client, timeout=30)
        with shardd.Live("streamed", "engine", self.socket) as live:
            found = live.acquire(wait=30)
            return [[name, list(shape), zlib.crc32(found[name].tobytes())]
                    for name, shape in shapes.items()]

    def check_stream(self, said, tensors):
        gone, behind, no_delta = (said.pop(key) for key in ("gone", "behind", "no_delta"))
        self.assertGreater(said["whole"], said["part"])
        self.assertGreater(said.pop("part"), 0)
        self.assertGreaterEqual(said.pop("whole"), 2 * (100 * 1000 + 7 + 15))
        self.assertEqual(said, {"step": 3, "none": [], "checksum": True, "tensors": tensors,
                                "listed": [["engine", True, True]]})
        self.assertEqual(gone["code"], "NOT_FOUND")
        self.assertRegex(gone["text"], r"generation \d+ .*is not there: the newest is \d+$")
        self.assertEqual((behind["code"], behind["info"]["field"]), ("INVALID_ARGUMENT", "offset"))
        self.assertEqual((no_delta["code"], no_delta["info"]["field"]),
                         ("INVALID_ARGUMENT", "delta_offset"))

    def test_what_the_page_says(self):
        tensors = self.publish()
        said = json.loads(self.end(self.start(
            support.ROOT / "tests" / "python" / "grpc_client.py", self.socket,
            self.stubs)))
        second = said["channels"]["second"]
        self.assertEqual(second["code"], "FAILED_PRECONDITION")
        self.assertIn("grpc.use_local_subchannel_pool=1", second["text"])
        self.assertIs(said["channels"]["own"], True)
        self.assertEqual(said["idle"], {"without": True, "with": False})
        self.check_reflection(said["reflection"])
        self.check_stream(said["stream"], tensors)
        self.assertEqual(said["errors"], {
            "code": "INVALID_ARGUMENT", "n": 1, "text": said["errors"]["text"],
            "info": {"code": "INVALID_ARGUMENT", "domain": "shardd", "field": "job.name",
                     "text": said["errors"]["text"]}})

    def check_reflection(self, said):
        names = sorted([*("shardd.v1." + name + "Service" for name in (
            "Session", "Job", "Unit", "Training", "Ddp", "Publication", "Status",
            "Admin")),
            "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection"])
        self.assertEqual(said["services"], names)
        self.assertEqual(said["health"], dict.fromkeys(["", *names], 1))
        self.assertEqual(said["version"], shardd.__version__)
        self.assertEqual(said["missing"], [True, True, True])
        self.assertEqual(said["extensions"], [])


if __name__ == "__main__":
    support.main()
