"""What tests/bench/run and tests/bench/compare have in common."""
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"


def fail(text):
    sys.exit(f"{sys.argv[0]}: {text}")


def must(*words):
    if subprocess.run(words, stdout=sys.stderr).returncode != 0:
        fail(f"{' '.join(map(str, words))} failed")


def build(folder):
    """Return: shardd-bench in the build folder, which is made if it is not there."""
    folder = pathlib.Path(folder)
    if not (folder / "CMakeCache.txt").exists():
        must("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja")
    must("cmake", "--build", folder, "--target", "shardd", "shardctl", "shardd-bench")
    return folder / "bin" / "shardd-bench"


def lines_of(words):
    """Run a program that prints an object a line. Return: them, or None if it failed."""
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{sys.argv[0]}: {' '.join(map(str, words))} ended with {done.returncode}",
              file=sys.stderr)
        return None
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def size(n):
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n % (1 << shift) == 0:
            return f"{n >> shift} {unit}"
    return f"{n} B"


def first(path, prefix):
    for line in pathlib.Path(path).read_text().splitlines():
        if line.startswith(prefix):
            return line.split(":", 1)[1].strip()
    return "unknown"


def machine():
    processor = first("/proc/cpuinfo", "model name")
    memory = int(first("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20)
    pages = pathlib.Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    huge = pages.read_text().split("[")[1].split("]")[0] if pages.exists() else "none"
    flags = first("/proc/cpuinfo", "flags").split()
    kind = "a virtual machine" if "hypervisor" in flags else "a real machine"
    return (
        f"Date: {datetime.date.today()}. Machine: {processor}, {os.cpu_count()} cores, "
        f"{memory:.1f} GiB of memory, {kind}; {platform.system()} {platform.release()}; "
        f"huge pages for shared memory: {huge}.\n"
    )


def update(begin, end, text):
    """Put @text between two marks of docs/performance.md."""
    page = PAGE.read_text()
    before, rest = page.split(begin, 1)
    after = rest.split(end, 1)[1]
    PAGE.write_text(before + begin + "\n\n" + text + "\n" + end + after)
