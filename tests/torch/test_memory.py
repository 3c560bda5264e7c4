#!/usr/bin/env python3
"""Peak memory of a rank and of the machine, shardd's beside FSDP2's, on 1, 2 and 4 ranks."""

import subprocess
import sys
import unittest

import fsdp  # noqa: F401  finds the package
import support
from test_train_gpt import EXAMPLE, by_torchrun, environment, json

MODEL = ["--data", str(support.ROOT / "docs" / "protocol.md"), "--layers", "6", "--width", "512",
         "--heads", "8", "--length", "32", "--batch", "4", "--steps", "3", "--json"]


def peaks(socket, ranks, engine):
    """MiB: of rank 0, of all processes and the daemon."""
    done = subprocess.run(
        by_torchrun(ranks, str(EXAMPLE), *MODEL, "--engine", engine), text=True,
        capture_output=True, timeout=400,
        env=dict(environment(socket), SHARDD_JOB=f"memory-{engine}-{ranks}"))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    [last] = [line for line in lines if "node_mib" in line]
    return last["peak_mib"], last["node_mib"]


class Memory(unittest.TestCase):
    def test_fewer_bytes_than_fsdp2(self):
        with support.daemon() as socket:
            print("# ranks  shardd: rank, all  FSDP2: rank, all (MiB)")
            for ranks in (1, 2, 4):
                ours = peaks(socket, ranks, "shardd")
                theirs = peaks(socket, ranks, "fsdp2")
                print(f"# {ranks:5}  {ours[0]:10.0f} {ours[1]:6.0f}  {theirs[0]:10.0f} "
                      f"{theirs[1]:6.0f}", file=sys.stdout, flush=True)
                self.assertLess(ours[0], theirs[0])
                if ranks > 1:
                    self.assertLess(ours[1], theirs[1])


if __name__ == "__main__":
    support.main()
