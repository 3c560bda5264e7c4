"""The vectors of tests/golden are what their scripts make: every make_*.py runs once more, into a
temporary folder, and what it writes has the bytes that are checked in. make_reduce.py, which takes
minutes, runs in the nightly form only.

The products of matrices in training.safetensors are MKL's on an Intel processor. On one of another
maker they differ in their last bits; there the test that reads the file passes with what this
processor makes.

Prints one line of TAP a script.
"""

import glob
import os
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "golden")
SLOW = ("make_reduce.py",)
OF_INTEL = {"make_training.py": "test_golden_training"}  # and the test that reads its file


def read(path):
    with open(path, "rb") as file:
        return file.read()


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and \
        torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def differing(ours, made):
    """The tensors that do, or are in one of both only."""
    ours, made = load(ours), load(made)
    names = sorted({name for name in ours.keys() & made.keys() if not same(ours[name], made[name])}
                   | (ours.keys() ^ made.keys()))
    return "%d tensors, the first is %s" % (len(names), names[0]) if names else "the metadata"


def compare(folder, name):
    ours, made = os.path.join(GOLDEN, name), os.path.join(folder, name)
    if not os.path.exists(ours):
        return [name + " is not checked in"]
    ours, made = read(ours), read(made)
    if ours == made:
        return []
    what = differing(ours, made) if name.endswith(".safetensors") else "the text"
    return ["%s is another now: %s" % (name, what)]


def is_intel():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return "GenuineIntel" in file.read()


def check(script, folder, names):
    reader = OF_INTEL.get(os.path.basename(script))
    if not reader or is_intel():
        return [p for name in names for p in compare(folder, name)]
    read_by = subprocess.run([os.path.join(os.environ["SHARDD_BUILD_DIR"], "tests", reader)],
                             check=False, capture_output=True, text=True,
                             env=dict(os.environ, SHARDD_GOLDEN=folder))
    return [] if read_by.returncode == 0 else [reader + " fails with what this processor makes: " +
                                               read_by.stderr[-2000:]]


def remake(script):
    """What is wrong with the files of @script, and their names."""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([sys.executable, script], check=False, capture_output=True,
                              text=True, env=dict(os.environ, GOLDEN_OUT=folder))
        names = sorted(os.listdir(folder))
        if made.returncode:
            return ["it ends with %d: %s" % (made.returncode, made.stderr[-2000:])], names
        problems = check(script, folder, names)
        return problems if names else ["it writes nothing"], names


def is_slow(script):
    return os.path.basename(script) in SLOW and os.environ.get("SHARDD_TEST_LONG") != "1"


def of_no_script(names):
    files = {n for n in os.listdir(GOLDEN) if n.endswith((".safetensors", ".json", ".txt"))}
    return sorted(files - names)


def main():
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        print("1..0 # SKIP the vectors were made with AVX2")
        return 0
    scripts = sorted(glob.glob(os.path.join(GOLDEN, "make_*.py")))
    failed, written = False, {"reduce.safetensors"}
    print("1..%d" % (len(scripts) + 1))
    for n, script in enumerate(scripts, 1):
        title = os.path.basename(script)
        if is_slow(script):
            print("ok %d - %s # SKIP in the nightly form" % (n, title))
            continue
        problems, names = remake(script)
        written.update(names)
        for problem in problems:
            print("\n".join("# " + line for line in problem.splitlines()))
        print("%s %d - %s" % ("not ok" if problems else "ok", n, title), flush=True)
        failed = failed or bool(problems)
    left = of_no_script(written)
    print("%s %d - every file has a script%s" % ("not ok" if left else "ok", len(scripts) + 1,
                                                 ": not " + ", ".join(left) if left else ""))
    return 1 if failed or left else 0


sys.exit(main())
