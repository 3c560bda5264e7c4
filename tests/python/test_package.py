#!/usr/bin/env python3
"""The package as others get it: its wheel, its source archive, installed where nothing else is.

All is made of a copy of client/python, without a network, by a Python that has pip, setuptools and
wheel: this one, or Debian's.
"""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import support

import shardd

SOURCE = support.ROOT / "client" / "python"
CAN_BUILD = """from importlib.util import find_spec
there = find_spec("pip") and find_spec("setuptools") and (
    find_spec("wheel") or find_spec("setuptools.command.bdist_wheel"))
raise SystemExit(not there)"""
LOOK = """import importlib.metadata, json, os, sys, shardd
others = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy"})
try:
    import shardd.torch
    said = "it was imported"
except ImportError as error:
    said = str(error)
folder = os.path.dirname(shardd.__file__)
print(json.dumps({"folder": folder, "typed": os.path.exists(os.path.join(folder, "py.typed")),
                  "version": shardd.__version__, "others": others, "torch": said,
                  "installed": importlib.metadata.version("shardd")}))"""


def run(*command, **options):
    """What it prints; an error with all it said if it fails."""
    done = subprocess.run(command, text=True, capture_output=True, timeout=120, **options)
    if done.returncode:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@functools.lru_cache
def builder():
    """A Python that can build."""
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and not subprocess.run(
                [python, "-c", CAN_BUILD], capture_output=True).returncode:
            return python
    raise AssertionError("no Python with pip, setuptools and wheel: deploy/install-deps --test")


def environment():
    """Without a network, without the caller's set-up, writing nothing into its home."""
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith(("PIP_", "PYTHON", "SHARDD_")) or k == "SHARDD_LIBRARY"}
    return dict(kept, PIP_NO_INDEX="1", PIP_NO_CACHE_DIR="1", PIP_CONFIG_FILE=os.devnull,
                PIP_DISABLE_PIP_VERSION_CHECK="1", PYTHONDONTWRITEBYTECODE="1")


def pip(*arguments, **options):
    return run(builder(), "-m", "pip", *arguments, env=environment(), **options)


def make_wheel(source, folder):
    """Its path."""
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    [made] = pathlib.Path(folder).glob("*.whl")
    return made


def make_sdist(source, folder):
    hook = "import sys; from setuptools.build_meta import *; print(build_sdist(sys.argv[1]))"
    said = run(builder(), "-c", hook, str(folder), cwd=source, env=environment())
    return pathlib.Path(folder) / said.split()[-1]


def contents(wheel):
    """Of every file that is not about the archive itself."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()
                if not name.endswith("/RECORD")}


def tree(folder):
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*")
            if "__pycache__" not in p.parts}


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.before = tree(SOURCE)
        cls.context = tempfile.TemporaryDirectory()
        cls.work = pathlib.Path(cls.context.__enter__())
        cls.wheel = make_wheel(cls.copy("first"), cls.work / "wheel")

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def tearDown(self):
        self.assertEqual(tree(SOURCE), self.before, "the source tree was written to")

    @classmethod
    def copy(cls, name):
        """client/python as it is checked out."""
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".*_cache")
        return shutil.copytree(SOURCE, cls.work / name, ignore=ignored)

    def fresh(self, name, *options, of=sys.executable):
        """A Python of its own, without packages. Return: its path."""
        folder = self.work / name
        run(of, "-m", "venv", "--without-pip", *options, str(folder), env=environment())
        return str(folder / "bin" / "python")

    def see(self, python):
        """What a program finds there. -I: not what lies in the current folder."""
        return json.loads(run(python, "-I", "-c", LOOK, env=environment(), cwd=self.work))

    def test_the_wheel_has_the_package_and_nothing_else(self):
        expected = {str(p.relative_to(SOURCE)) for p in (SOURCE / "shardd").rglob("*.py")}
        found = contents(self.wheel)
        about = f"shardd-{shardd.__version__}.dist-info/"
        self.assertEqual({n for n in found if not n.startswith(about)},
                         expected | {"shardd/py.typed"})
        said = found[about + "METADATA"].decode()
        self.assertIn("\nRequires-Python: >=3.9\n", said)
        needed = re.findall(r"^Requires-Dist: (.*)$", said, re.M)
        self.assertEqual([n for n in needed if "extra ==" not in n], [])
        self.assertIn("Root-Is-Purelib: true", found[about + "WHEEL"].decode())

    def test_the_source_archive_makes_the_same_wheel(self):
        archive = make_sdist(self.copy("second"), self.work / "sdist")
        shutil.unpack_archive(archive, self.work / "unpacked")
        [source] = (self.work / "unpacked").iterdir()
        again = make_wheel(source, self.work / "again")
        self.assertEqual(again.name, self.wheel.name)
        self.assertEqual(contents(again), contents(self.wheel))

    def test_it_is_installed_and_works_where_nothing_else_is(self):
        python = self.fresh("fresh")
        pip("--python", python, "install", "--quiet", str(self.wheel))
        seen = self.see(python)
        self.assertTrue(seen["folder"].startswith(str(self.work / "fresh")), seen)
        self.assertTrue(seen["typed"])
        self.assertEqual((seen["version"], seen["installed"]), (shardd.__version__,) * 2)
        self.assertEqual(seen["others"], [])
        self.assertIn("pip install", seen["torch"])
        with support.daemon() as socket:
            said = run(python, "-I", "-m", "shardd", socket, env=environment(), cwd=self.work)
            self.assertIn(f"package {shardd.__version__}, library {shardd.__version__}", said)
            self.assertRegex(said, rf"(?s)daemon .* at {socket}, up .*\nno jobs\n$")
            manual = (support.ROOT / "docs" / "python.md").read_text()
            by_hand = re.search(r"## A step by hand\n\n```python\n(.*?)```", manual, re.S)
            run(python, "-I", "-c", by_hand[1], cwd=self.work,
                env=dict(environment(), SHARDD_SOCKET=socket, SHARDD_JOB="by-hand", RANK="0",
                         WORLD_SIZE="1"))

    def test_the_folder_is_installed_as_the_manual_says(self):
        python = self.fresh("folder", "--system-site-packages", of=builder())  # for setuptools
        run(python, "-m", "pip", "install", "--quiet", "--no-build-isolation",
            str(self.copy("third")), env=environment())
        seen = self.see(python)
        self.assertTrue(seen["folder"].startswith(str(self.work / "folder")), seen)
        self.assertEqual(seen["installed"], shardd.__version__)


if __name__ == "__main__":
    support.main()
