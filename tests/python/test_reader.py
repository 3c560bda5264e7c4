#!/usr/bin/env python3
"""Readers: live parameters in a process that is no rank, without PyTorch."""

import array
import multiprocessing
import os
import threading
import unittest

import support

import shardd

try:
    import numpy
except ImportError:
    numpy = None


class Trainer:
    """One rank, whose steps add 1 to parameters that begin as 2 and 1."""

    def __init__(self, socket, job):
        self.client = shardd.connect(socket)
        self.client.join(job, 1, 0)
        sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0)
        [self.unit] = self.client.register([shardd.UnitSpec("block", [
            shardd.TensorSpec("w", (3, 5), shardd.Init.CONSTANT, 2.0),
            shardd.TensorSpec("b", (5,), shardd.Init.CONSTANT, 1.0, frozen=True),
            shardd.TensorSpec("t", (2, 3), shardd.Init.CONSTANT, 2.0, strides=(1, 2))],
            optimizer=sgd)])
        self.unit.init_seed(1)
        self.client.commit(0)

    def step(self, number):
        gradient = self.unit.gradient()
        gradient.view()[:] = array.array("f", [-1.0] * gradient.elements)
        self.unit.reduce()
        self.client.step()
        self.client.commit(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.leave()
        self.client.close()


def other_process(socket, job, results):
    with shardd.read(job, socket) as reader, reader.snapshot(timeout=20) as step:
        results.put((step, sorted(reader.tensors), reader["block.w"].view().tolist()))


class Readers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon("--set", "reader_hold_ms=10s")
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_another_process_sees_what_was_committed(self):
        context = multiprocessing.get_context("spawn")
        with Trainer(self.socket, "seen") as trainer:
            trainer.step(3)
            results = context.Queue()
            process = context.Process(target=other_process, args=(self.socket, "seen", results))
            process.start()
            step, names, values = results.get(timeout=60)
            process.join(20)
        self.assertEqual(process.exitcode, 0)
        self.assertEqual((step, names), (3, ["block.b", "block.t", "block.w"]))
        self.assertEqual(values, [[3.0] * 5] * 3)

    def test_it_is_the_memory_itself_and_gone_after_the_snapshot(self):
        with Trainer(self.socket, "memory") as trainer, shardd.read("memory", self.socket) as r:
            with r.snapshot() as step:
                self.assertEqual(step, 0)
                w, b = r["block.w"], r["block.b"]
                self.assertEqual((w.shape, b.shape), ((3, 5), (5,)))
                self.assertFalse(w.writable)
                self.assertTrue(w.view().readonly)
                self.assertIs(r["block.w"], w)
                flat = r["block.t"]
                self.assertEqual((flat.shape, r.tensors["block.t"].strides), ((6,), (1, 2)))
                address = w.address
                with self.assertRaises(shardd.NotFound):
                    r["block.x"]
                self.assertIn("holds step 0", repr(r))
            uses = [w.view, lambda: w.address, lambda: r["block.w"]]
            for use in uses + ([w.numpy] if numpy else []):
                with self.assertRaises(shardd.FailedPrecondition):
                    use()
            trainer.step(1)
            with r.snapshot() as step:
                self.assertEqual((step, r["block.w"].address), (1, address))
                self.assertEqual(r["block.w"].view().tolist(), [[3.0] * 5] * 3)

    def test_units_that_are_dropped_wait_for_readers(self):
        with Trainer(self.socket, "dropped") as trainer, \
                shardd.read("dropped", self.socket) as reader:
            [other] = trainer.client.register([shardd.UnitSpec("other", [
                shardd.TensorSpec("w", (4,), shardd.Init.CONSTANT, 5.0)])])
            other.init_seed(1)
            trainer.client.commit(1)
            with reader.snapshot():
                values = reader["block.w"].view().tolist()
                dropped = threading.Thread(target=trainer.client.drop_units,
                                           args=([trainer.unit.id],))
                dropped.start()
                dropped.join(1)
                self.assertTrue(dropped.is_alive(), "a reader holds the step")
                self.assertEqual(reader["block.w"].view().tolist(), values)
            dropped.join(20)
            self.assertFalse(dropped.is_alive())
            trainer.client.commit(2)
            with reader.snapshot() as step:
                self.assertEqual((step, sorted(reader.tensors)), (2, ["other.w"]))
                with self.assertRaises(shardd.NotFound):
                    reader["block.w"]
                self.assertEqual(reader["other.w"].view().tolist(), [5.0] * 4)

    def test_who_keeps_a_view_is_told_and_loses_nothing(self):
        with Trainer(self.socket, "kept") as trainer:
            reader = shardd.read("kept", self.socket)
            with self.assertRaises(shardd.InUse), reader.snapshot():
                kept = reader["block.w"].view()
            trainer.step(1)  # nothing is held
            self.assertEqual(kept[0, 0], 3.0)
            with self.assertRaises(shardd.InUse):
                reader.close()
            self.assertEqual(kept[0, 0], 3.0)
            del kept
            reader.close()
            reader.close()

    def test_overtaken(self):
        with Trainer(self.socket, "late") as trainer, shardd.read("late", self.socket) as reader:
            with self.assertRaises(shardd.Overtaken) as caught, reader.snapshot(hold=0.1) as step:
                self.assertEqual(step, 0)
                trainer.step(1)
            self.assertIsInstance(caught.exception, shardd.Aborted)
            self.assertIn("step 0 was overtaken", str(caught.exception))
            with reader.snapshot() as step:
                self.assertEqual(step, 1)
            with self.assertRaises(ZeroDivisionError), reader.snapshot(hold=0.1):
                trainer.step(2)
                raise ZeroDivisionError

    def test_the_trainer_waits_for_the_block(self):
        with Trainer(self.socket, "waits") as trainer, shardd.read("waits", self.socket) as reader:
            with reader.snapshot():
                thread = threading.Thread(target=trainer.step, args=(1,))
                thread.start()
                thread.join(0.3)
                self.assertTrue(thread.is_alive())
                [job] = trainer.client.status("waits")["jobs"]
                self.assertIn("which holds step 0", job["waits_for_reader"])
                self.assertEqual([(r["pid"], r["state"], r["step"]) for r in job["readers"]],
                                 [(os.getpid(), "HOLDS", 0)])
                self.assertEqual(reader["block.w"].view()[2, 4], 2.0)
            thread.join(20)
            self.assertFalse(thread.is_alive())

    def test_refusals(self):
        with self.assertRaises(shardd.NotFound):
            shardd.read("nobody", self.socket)
        with Trainer(self.socket, "asked") as trainer:
            reader = shardd.read("asked", self.socket)
            with self.assertRaises(shardd.FailedPrecondition):
                reader.release()
            with self.assertRaises(shardd.InvalidArgument):
                reader.hold(hold=11)
            with reader.snapshot(), self.assertRaises(shardd.FailedPrecondition):
                reader.hold()
            gradient = trainer.unit.gradient()
            gradient.view()[:] = array.array("f", [0.0] * gradient.elements)
            trainer.unit.reduce()
            trainer.client.step()
            with self.assertRaises(shardd.DeadlineExceeded) as caught:
                reader.hold(timeout=0.1)
            self.assertIn("the commit that follows step 0", str(caught.exception))
            reader.close()
            with self.assertRaises(shardd.FailedPrecondition):
                reader.hold()

    def test_a_job_that_ends(self):
        with Trainer(self.socket, "ends"):
            reader = shardd.read("ends", self.socket)
            reader.hold()
        with self.assertRaises(shardd.Overtaken) as caught:
            reader.release()
        self.assertIn("was deleted", str(caught.exception))
        with self.assertRaises(shardd.NotFound):
            reader.hold()
        reader.close()

    def test_units_that_come_later(self):
        with Trainer(self.socket, "grows") as trainer, shardd.read("grows", self.socket) as reader:
            with reader.snapshot():
                self.assertEqual(len(reader.tensors), 3)
            [unit] = trainer.client.register(
                [shardd.UnitSpec("more", [shardd.TensorSpec("w", (2,), a=7.0)])])
            with reader.snapshot():
                self.assertEqual(len(reader.tensors), 3)  # there, but not initialised
            unit.init_seed(1)
            trainer.client.commit(1)
            with reader.snapshot():
                self.assertEqual(reader["more.w"].view().tolist(), [7.0, 7.0])

    @unittest.skipUnless(numpy, "no numpy")
    def test_numpy(self):
        with Trainer(self.socket, "numpy"), shardd.read("numpy", self.socket) as reader, \
                reader.snapshot():
            seen = reader["block.w"].numpy()
            self.assertEqual((seen.sum(), seen.flags.writeable), (30.0, False))
            del seen


if __name__ == "__main__":
    support.main()
