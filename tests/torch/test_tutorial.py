#!/usr/bin/env python3
"""The Python of docs/tutorial.md and docs/python.md, as it stands there."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import support


def blocks(page):
    text = (support.ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def environment(**more):
    path = str(support.ROOT / "client" / "python")
    return dict(os.environ, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1",
                **more)


class Pages(unittest.TestCase):
    def run_program(self, code, *command, **env):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "program.py")
            program.write_text(code)
            done = subprocess.run([*command, sys.executable, str(program)], text=True, timeout=300,
                                  env=environment(**env), stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_tutorial(self):
        parts = blocks("tutorial.md")
        self.assertGreater(len(parts), 5)
        shardctl = os.path.join(support.BIN_DIR, "shardctl")
        for restarts, guard in (("1", "0"), ("0", "1")):
            said = self.run_program("\n".join(parts), shardctl, "run", "--standalone", "-n", "2",
                                    "--max-restarts", restarts, "--", SHARDD_GUARD=guard)
            self.assertIn("[0] done", said)
            self.assertIn("summon_full_params", said)

    def test_the_blocks_of_the_manual(self):
        parts = blocks("python.md")
        self.assertEqual(len(parts), 4)
        with support.daemon() as socket, tempfile.TemporaryDirectory() as folder:
            # The last one goes on with the model of the one before, where it may write files.
            between = ("import os\n"
                       f"os.chdir({folder!r})\n"
                       "torch.distributed.init_process_group(\"gloo\", rank=0, world_size=1,\n"
                       "    store=torch.distributed.HashStore())\n")
            for number, part in enumerate((parts[0], parts[1], parts[2] + between + parts[3])):
                self.run_program(part, SHARDD_SOCKET=socket, SHARDD_JOB=f"page{number}", RANK="0",
                                 WORLD_SIZE="1")
            self.assertTrue(os.listdir(os.path.join(folder, "step-1000")))


if __name__ == "__main__":
    support.main()
