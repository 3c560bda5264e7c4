#!/usr/bin/env python3
"""What shardctl says of a job whose name has had other jobs, or has none."""

import json
import os
import subprocess
import unittest

import support

CTL = os.path.join(support.BIN_DIR, "shardctl")


def ctl(at, *arguments):
    return subprocess.run([CTL, "--socket", at, *arguments], text=True, capture_output=True,
                          timeout=60, stdin=subprocess.DEVNULL)


def barriers(rank, world, at, job, unit, n):
    import shardd

    with shardd.connect(at) as client:
        client.join(job, world, rank, lifetime=shardd.Lifetime.KEEP)
        [one] = client.register([shardd.UnitSpec(unit, [
            shardd.TensorSpec("w", (8,), shardd.Init.CONSTANT, 1.0)])])
        one.init_seed(1)
        for _ in range(n):
            client.barrier()


class Again(unittest.TestCase):
    """A job that is deleted and made again used to have the recorded ops of the one before."""

    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.at = cls.context.__enter__()
        support.ranks(barriers, 2, cls.at, "j", "former", 40)
        assert ctl(cls.at, "job", "delete", "j").returncode == 0
        support.ranks(barriers, 2, cls.at, "j", "present", 3)

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def ops(self, *arguments):
        return support.shardctl(self.at, "ops", "-n", "0", *arguments)["ops"]

    def test_ops_of_a_job_are_its_own(self):
        units = {op["unit"] for op in self.ops("j")}
        self.assertIn("present", units)
        self.assertNotIn("former", units)
        units = {op["unit"] for op in self.ops()}
        self.assertTrue({"former", "present"} <= units)

    def test_ops_of_all_say_whose_they_are(self):
        [job] = support.shardctl(self.at, "status", "j")["jobs"]
        numbers = {"former": set(), "present": set()}
        for op in self.ops():
            if op["unit"]:
                numbers[op["unit"]].add(op["job_number"])
        self.assertEqual({job["number"]}, numbers["present"])
        self.assertEqual(1, len(numbers["former"] - numbers["present"]))

    def test_collectives_of_the_former_job_are_not_compared(self):
        told = support.shardctl(self.at, "slow", "j")
        self.assertGreaterEqual(told["collectives"], 3)  # the barriers
        self.assertLess(told["collectives"], 10)
        self.assertEqual(0, told["incomplete"])

    def test_a_trace_of_a_job_has_it_alone(self):
        said = json.loads(ctl(self.at, "trace", "j", "-o", "-").stdout)
        names = {event["name"] for event in said["traceEvents"]}
        self.assertTrue(any("present" in name for name in names), names)
        self.assertFalse(any("former" in name for name in names), names)


class NoSuchJob(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.at = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_history_and_events_say_so(self):
        for verb in ("history", "events"):
            for arguments in ([verb, "nobody"], ["--json", verb, "nobody"], [verb, "7/nobody"]):
                said = ctl(self.at, *arguments)
                self.assertEqual((1, ""), (said.returncode, said.stdout), arguments)
                self.assertRegex(said.stderr,
                                 r'^shardctl: NOT_FOUND: you (have|see) no job "nobody"')

    def test_a_job_without_history_is_no_error(self):
        self.assertEqual(0, ctl(self.at, "job", "create", "new", "--world-size", "1").returncode)
        said = ctl(self.at, "history", "new")
        self.assertEqual((0, "none\n", ""), (said.returncode, said.stdout, said.stderr))
        self.assertEqual(0, ctl(self.at, "events", "new").returncode)
        ctl(self.at, "job", "delete", "new")
        for verb in ("history", "events"):
            said = ctl(self.at, verb, "new")
            self.assertEqual(0, said.returncode)
            self.assertIn("new", said.stdout)


if __name__ == "__main__":
    support.main()
