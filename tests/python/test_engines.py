#!/usr/bin/env python3
"""What the backends for inference engines share, without PyTorch and without an engine: the
generation that an update asks for, the same one on all ranks. tests/engines has the engines."""

import contextlib
import importlib
import logging
import threading
import time
import unittest
from concurrent import futures
from unittest import mock

import support
from test_live import DECLARATION, Trainer

import shardd
from shardd.engines import _weights, register_vllm
from shardd.engines._weights import Weights, _used_names, placed

PATIENCE = 30


class Together:
    """Ranks that exchange what they have: each one's turn comes when all are there."""

    def __init__(self, ranks):
        self.answers, self.rounds = [None] * ranks, 0
        self.all_there = threading.Barrier(ranks, self._count)
        self.arrived = threading.Event()

    def _count(self):
        self.rounds += 1

    def of(self, rank):
        def exchange(mine):
            self.answers[rank] = mine
            self.arrived.set()
            self.all_there.wait(PATIENCE)
            every = list(self.answers)
            self.all_there.wait(PATIENCE)
            return every
        return exchange


class AsksForGenerations(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    @contextlib.contextmanager
    def job(self, name, *publications, **more):
        """A trainer, and a pool for what happens beside it."""
        with Trainer(self.socket, name) as trainer, futures.ThreadPoolExecutor(4) as pool:
            for publication in publications or ("engine",):
                shardd.declare_publication({**DECLARATION, "name": publication, "keep": 2, **more},
                                           name, trainer.client)
            self.trainer, self.pool, self.name = trainer, pool, name
            yield trainer

    def step(self, number):
        """A step whose generation is there."""
        self.trainer.step(number)
        return shardd.publish("engine", self.name, self.trainer.client)

    def leases(self):
        [shown] = support.shardctl(self.socket, "publications", self.name)["publications"]
        self.assertTrue(shown["generations"])
        return [one for generation in shown["generations"] for one in generation["leases"]]

    @contextlib.contextmanager
    def weights(self, publication="engine"):
        reader = Weights(self.name, publication, self.socket)
        with contextlib.closing(reader):
            yield reader

    def test_an_update_waits_for_the_number_that_it_asks_for(self):
        with self.job("number"), self.weights() as reader:
            first = self.step(1)
            waits = self.pool.submit(reader.acquire, number=first + 1, wait=PATIENCE)
            with self.assertRaises(futures.TimeoutError):
                waits.result(timeout=0.3)
            self.assertEqual(self.step(2), first + 1)
            found = waits.result(PATIENCE)
            self.assertEqual((found.number, found.step), (first + 1, 2))
            self.assertEqual(reader.acquire().number, first + 1)
            reader.release()

    def test_an_update_waits_for_the_step_that_it_asks_for(self):
        with self.job("step"), self.weights() as reader:
            waits = self.pool.submit(reader.acquire, step=7, wait=PATIENCE)
            for step in (5, 6, 7):
                self.assertFalse(waits.done())
                self.step(step)
            self.assertEqual(waits.result(PATIENCE).step, 7)
            reader.release()

    def test_what_does_not_come_in_time_is_said_and_nothing_stays_leased(self):
        with self.job("late"), self.weights() as reader:
            begin = time.monotonic()
            with self.assertRaisesRegex(
                    shardd.DeadlineExceeded,
                    "got no generation of any number in time; there is none at all"):
                reader.acquire(wait=0.2)
            self.assertLess(time.monotonic() - begin, 5)
            number = self.step(1)
            with self.assertRaisesRegex(
                    shardd.DeadlineExceeded,
                    f"'engine' of job 'late' got no generation of number {number + 9} or later and "
                    f"step 2 or later in time; the newest one is {number}, of step 1"):
                reader.acquire(number=number + 9, step=2, wait=0.2)
            self.assertEqual(self.leases(), [])
            self.assertEqual(reader.acquire(number).step, 1)
            self.assertEqual(len(self.leases()), 1)

    def test_ranks_that_find_different_generations_take_the_newer_one(self):
        """A commit comes between the two: without agreement one rank would compute with the weights
        of the step before."""
        with self.job("between"), self.weights() as one, self.weights() as other:
            together = Together(2)
            self.step(1)
            early = self.pool.submit(one.acquire, wait=PATIENCE, exchange=together.of(0))
            self.assertTrue(together.arrived.wait(PATIENCE))
            newer = self.step(2)
            late = self.pool.submit(other.acquire, wait=PATIENCE, exchange=together.of(1))
            self.assertEqual([early.result(PATIENCE).number, late.result(PATIENCE).number],
                             [newer, newer])
            self.assertEqual(together.rounds % 2, 0)
            self.assertEqual(together.rounds // 2, 2)

    def test_ranks_with_publications_of_their_own_take_the_same_step(self):
        with self.job("own", "engine", "engine-1", every_steps=0):
            for step in (1, 2):
                self.step(step)
            shardd.publish("engine-1", "own", self.trainer.client)
            with self.weights() as one, self.weights("engine-1") as other:
                together = Together(2)
                early = self.pool.submit(one.acquire, wait=PATIENCE, exchange=together.of(0))
                self.assertTrue(together.arrived.wait(PATIENCE))
                self.step(3)
                shardd.publish("engine-1", "own", self.trainer.client)
                late = self.pool.submit(other.acquire, wait=PATIENCE, exchange=together.of(1))
                found = [early.result(PATIENCE), late.result(PATIENCE)]
                self.assertEqual([one.step for one in found], [3, 3])
                self.assertNotEqual(found[0].number, found[1].number)

    def test_a_rank_without_weights_stops_all(self):
        with self.job("missing"), self.weights() as one, self.weights() as other:
            number, together = self.step(1), Together(2)
            has = self.pool.submit(one.acquire, wait=PATIENCE, exchange=together.of(0))
            lacks = self.pool.submit(other.acquire, number=number + 1, wait=0.1,
                                     exchange=together.of(1))
            with self.assertRaisesRegex(
                    shardd.FailedPrecondition,
                    f"rank 1: DeadlineExceeded.*the newest one is {number}, of step 1"):
                has.result(PATIENCE)
            with self.assertRaises(shardd.DeadlineExceeded):
                lacks.result(PATIENCE)
            self.assertEqual(self.leases(), [])

    def test_what_is_named_wrongly_is_said_at_once(self):
        with self.job("names"):
            with self.assertRaisesRegex(shardd.NotFound, "nobody"):
                Weights("nobody", "engine", self.socket)
            with self.assertRaisesRegex(shardd.NotFound, "motor"):
                Weights("names", "motor", self.socket)

    def test_a_publication_that_is_dropped_ends_the_wait(self):
        with self.job("dropped"), self.weights() as reader:
            number = self.step(1)
            shardd.drop_publication("engine", "dropped", self.trainer.client)
            begin = time.monotonic()
            with self.assertRaises(shardd.NotFound):
                reader.acquire(number=number + 1, wait=PATIENCE)
            self.assertLess(time.monotonic() - begin, PATIENCE / 2)


class SurvivesTheDaemon(unittest.TestCase):
    def test_an_engine_outlives_the_daemon(self):
        """A reader has nothing when the next daemon is there but what that one makes."""
        with support.held_daemon() as held, contextlib.ExitStack() as stack:
            trainer = Trainer(held.socket, "outlives")
            stack.callback(trainer.client.close)
            shardd.declare_publication(DECLARATION, "outlives", trainer.client)
            trainer.step(1)
            reader = stack.enter_context(contextlib.closing(
                Weights("outlives", "engine", held.socket)))
            former = reader.acquire(wait=PATIENCE).number
            reader.release()
            held.kill()
            found = reader.acquire(number=former + 1, wait=PATIENCE)
            self.assertEqual(found.step, 1)


class Options(unittest.TestCase):
    def test_names_of_one_tensor_and_parameters_of_the_model(self):
        """A model that has the second name only, or two parameters of one tensor."""
        one, two = object(), object()
        owners = {"embed": "embed", "head": "embed", "norm": "norm"}
        for parameters, used in (({"embed": one, "head": one, "norm": two}, ["embed", "norm"]),
                                 ({"embed": one, "head": two}, ["embed", "head", "norm"]),
                                 ({"head": one}, ["head", "norm"]),
                                 ({"norm": one}, ["embed", "head", "norm"])):
            self.assertEqual(_used_names(parameters, owners), used)
        # its loader knows a name that no parameter has
        self.assertEqual(_used_names({"embed": one, "lm.head": two}, owners, True),
                         ["embed", "head", "norm"])
        self.assertEqual(_used_names({"embed": one, "head": one}, owners, True),
                         ["embed", "norm"])

    def test_each_rank_may_have_its_own_publication(self):
        self.assertEqual(placed("a-{tp_rank}of{pp_rank}-{x}", 3, 1), "a-3of1-{x}")
        self.assertEqual(placed("engine", 3, 1), "engine")

    def test_what_comes_from_outside_is_checked(self):
        for given in ({"job": ""}, {"job": 3}, {"publication": None}, {"number": "7"},
                      {"number": True}, {"number": -1}, {"step": 1.5}, {"wait": "long"},
                      {"wait": -1}, {"wait": float("nan")}, {"complete": 1}, {"copy": "yes"},
                      {"patches": 1}, {"whole": "no"},
                      {"names": "vllm"}, {"socket": 7}):
            with self.subTest(given), self.assertRaises(shardd.InvalidArgument) as caught:
                _weights.checked("this", **given)
            self.assertEqual(caught.exception.field, next(iter(given)))
        _weights.checked("this", job="a", publication="b", socket=None, number=0, step=3, wait=0.5,
                         names="parameters", complete=False, copy=True, patches=True, whole=False)

    def test_many_problems_are_said_in_few_words(self):
        self.assertEqual(_weights.few(["a", "b"]), "a; b")
        self.assertEqual(_weights.few([str(i) for i in range(9)], 2), "0; 1; and 7 more")

    def test_without_vllm_nothing_is_registered_and_nothing_raised(self):
        """vLLM calls this in all its processes, also a version without weight transfer."""
        with mock.patch.dict("sys.modules", {"vllm": None}), \
                self.assertLogs("shardd.engines", logging.WARNING) as said:
            register_vllm()
        self.assertIn("no backend 'shardd'", said.output[0])

    def test_the_entry_point_names_what_is_there(self):
        text = (support.ROOT / "client/python/pyproject.toml").read_text()
        section = text.split('[project.entry-points."vllm.general_plugins"]\n')[1]
        name, value = section.splitlines()[0].split(" = ")
        module, function = value.strip('"').split(":")
        self.assertEqual(name, "shardd")
        self.assertIs(getattr(importlib.import_module(module), function), register_vllm)


if __name__ == "__main__":
    support.main()
