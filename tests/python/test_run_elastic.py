#!/usr/bin/env python3
"""`shardctl run --min M --join-grace S`: a trainer of charlm is gone for good, and the others go on
in the same processes."""

import os
import re
import signal
import subprocess
import unittest

import support
from test_run_survives import CHARLM, Run, program

LAST, DIES = 24, 10
BATCH = ["--batch", "22"]  # 4 and 3 ranks do not divide it
GRACE = ["--min", "2", "--join-grace", "1"]


class RunElastic(unittest.TestCase):
    def setUp(self):
        self.socket = self.enterContext(support.daemon())

    def ctl(self, *arguments):
        subprocess.run([program("shardctl"), "--socket", self.socket, *arguments], check=True,
                       capture_output=True)

    def ends(self, run, code=0):
        self.assertEqual(run.end(), code, run.text)

    def dying(self, job, steps):
        return Run(["-n", "4", *GRACE, "--job", job],
                   [*CHARLM, *BATCH, "--steps", str(steps), "--kill-at", str(DIES),
                    "--kill-rank", "1"], self.socket)

    def test_three_of_four_go_on_as_three_that_start_there(self):
        run = self.dying("walks", LAST)
        self.ends(run)
        self.assertRegex(run.text, r"rank 1 \(pid \d+\) was killed by signal 9 \(Killed\); "
                                   "the others go on, 3 ranks")
        self.assertIn("rank 3 of 4 is rank 2 of 3 now", run.text)
        self.assertNotIn("starting all again", run.text)
        self.assertEqual(len(re.findall(r"rank \d of 4: memory", run.text)), 4, run.text)

        self.ctl("job", "create", "still", "--world-size", "4", "--min-ranks", "2", "--max-ranks",
                 "4")
        first = Run(["-n", "4", "--job", "still"], [*CHARLM, *BATCH, "--steps", str(DIES - 1)],
                    self.socket)
        self.ends(first)
        second = Run(["-n", "3", "--job", "still"], [*CHARLM, *BATCH, "--steps", str(LAST)],
                     self.socket)
        self.ends(second)
        self.assertEqual(run.losses(), {**first.losses(), **second.losses()})

    def test_one_comes_back(self):
        run = self.dying("grows", 10000000)
        run.until("rank 3 of 4 is rank 2 of 3 now")
        environ = dict(os.environ, SHARDD_SOCKET=self.socket, SHARDD_JOB="grows", RANK="1",
                       WORLD_SIZE="4", SHARDD_MIN_RANKS="2", SHARDD_MAX_RANKS="4",
                       SHARDD_JOIN_GRACE_MS="1000")
        back = subprocess.Popen([*CHARLM, *BATCH, "--steps", "10000000"], env=environ,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            run.until("rank 2 of 3 is rank 3 of 4 now")
            run.until('"step"')
            run.process.send_signal(signal.SIGTERM)
            self.ends(run, 3)
            back.send_signal(signal.SIGTERM)
            said = back.communicate(timeout=60)[0]
        finally:
            back.kill()
            back.wait()
        self.assertIn("rank 1 resumed at step", said)

    def test_too_few_end(self):
        run = Run(["-n", "3", *GRACE, "--job", "few"],
                  ["sh", "-c", 'if [ "$RANK" != 0 ]; then exit 7; fi; exec "$@"', "charlm",
                   *CHARLM], self.socket)
        self.ends(run, 7)
        self.assertRegex(run.text, "exited with code 7; the others go on, 2 ranks")
        self.assertRegex(run.text, "exited with code 7; ending the others")

    def test_wrong_arguments_are_refused(self):
        for arguments, words in ((["run", "-n", "2", "--join-grace", "1", "--", "true"],
                                  "--join-grace needs --min M"),
                                 (["run", "-n", "2", "--min", "1", "--join-grace", "0", "--",
                                   "true"], "is not a whole number from 1"),
                                 (["job", "create", "x", "--world-size", "2", "--join-grace", "1"],
                                  "--join-grace needs --min-ranks N and --max-ranks N")):
            ran = subprocess.run([program("shardctl"), "--socket", self.socket, *arguments],
                                 capture_output=True, text=True)
            self.assertEqual(ran.returncode, 2, ran.stderr)
            self.assertIn(words, ran.stderr)


if __name__ == "__main__":
    support.main()
