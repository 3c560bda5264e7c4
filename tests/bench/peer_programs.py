"""The peers: which there are on this machine, building them, running them."""
import os
import pathlib
import shutil
import subprocess

import report

PEERS = pathlib.Path(__file__).resolve().parent / "peers"
INSTALL = "deploy/install-deps --bench installs it"


def usual_python():
    """The one of tests/run --with-torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    folder = os.environ.get("SHARDD_TORCH_VENV") or f"{cache}/shardd/torch-2.13.0"
    return f"{folder}/bin/python"


def compiles(header, compiler="c++", language="c++"):
    words = [compiler, "-E", "-x", language, "-"]
    if not shutil.which(compiler):
        return False
    done = subprocess.run(words, input=f"#include <{header}>\n", text=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return done.returncode == 0


def has_torch(python):
    try:
        done = subprocess.run([python, "-c", "import torch.distributed.fsdp"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


class Peers:
    """@without: those that are not wanted. skipped: name -> why."""

    def __init__(self, folder, python, without):
        self.folder, self.python = pathlib.Path(folder), python
        self.skipped = {name: "not asked for (--without)" for name in without}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.find("gloo", compiles("gloo/context.h"), f"no headers of Gloo's: {INSTALL}")
        # Debian has mpicc in the package that starts programs, and mpi.h in another one
        self.find("mpi", compiles("mpi.h", "mpicc", "c") and shutil.which("mpirun"),
                  f"no mpicc with mpi.h, or no mpirun: {INSTALL}")
        if "torch" not in self.skipped:
            self.find("torch", has_torch(python), f"no PyTorch with FSDP2 in {python}: --python")
        self.build()

    def find(self, name, there, why):
        if not there:
            self.skipped.setdefault(name, why)

    def build(self):
        """What is there has to compile."""
        flags = ["-O2", "-Wall", "-Wextra"]
        if "gloo" not in self.skipped:
            report.must("c++", "-std=c++17", *flags, "-o", self.folder / "gloo",
                        PEERS / "gloo.cc", "-lgloo", "-pthread")
        if "mpi" not in self.skipped:
            report.must("mpicc", *flags, "-o", self.folder / "mpi", PEERS / "mpi.c")

    def words(self, name, ranks):
        if name == "gloo":
            return [self.folder / "gloo", "--ranks", ranks]
        if name == "torch":
            return [self.python, "-B", PEERS / "torch_peers", "--ranks", ranks]
        mpirun = ["mpirun", "--oversubscribe", "-n", ranks]
        if os.geteuid() == 0:
            mpirun.insert(1, "--allow-run-as-root")
        return [*mpirun, self.folder / "mpi", "--ranks", ranks]

    def run(self, name, ranks, size, repeat, cases):
        """Return: its lines, None if it failed."""
        words = [*self.words(name, ranks), "--bytes", size, "--repeat", repeat, *cases]
        return report.lines_of(words)
