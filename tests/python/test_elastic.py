#!/usr/bin/env python3
"""A job that changes its number of ranks by itself: the ranks that are left go on in the same
process, and one that comes back is taken in at a commit."""

import threading
import unittest

import support

import shardd

GRACE = 0.5
COMMITS = 2


class Rank(threading.Thread):
    """Commits, joins again when the epoch ends, and notes which rank of how many it was. ``until``:
    leaves, or dies, after some commits as one of the last of these numbers of ranks."""

    def __init__(self, socket, number, until, dies=False):
        super().__init__()
        self.socket, self.number, self.until, self.dies = socket, number, until, dies
        self.seen, self.steps, self.error = [], [], None
        self.grown = threading.Event()

    def run(self):
        try:
            with shardd.connect(self.socket) as client:
                self.train(client)
                if self.dies:
                    client.close()
                    client.member = None
        except BaseException as error:
            self.error = error

    def train(self, client):
        found = client.join("elastic", 3, self.number, shardd.Lifetime.KEEP,
                            elastic=(2, 3, GRACE), op_timeout=60)
        while not self.epoch(client, found):
            found = client.rejoin()

    def epoch(self, client, found):
        now = (found.rank, found.world_size)
        if self.seen[-1:] != [now]:
            self.seen.append(now)
        made = 0
        try:
            [unit] = client.register([shardd.UnitSpec("u", [shardd.TensorSpec("w", (3, 4))])])
            if not unit.initialised:
                unit.init_seed(3)
            step = found.step if found.has_commit else 0
            last = [world for _, world in self.seen] == self.until
            while not last or made < COMMITS:
                step += 1
                client.commit(step, f"{self.number} at {step}".encode())
                self.steps.append(step)
                made += 1
                if found.world_size == 2:
                    self.grown.set()
        except shardd.Aborted:
            return False
        return True


class Elastic(unittest.TestCase):
    def setUp(self):
        self.socket = self.enterContext(support.daemon())

    def test_ranks_go_on_with_fewer_and_with_more(self):
        numbers = [3, 2, 3]
        ranks = [Rank(self.socket, 0, numbers), Rank(self.socket, 2, numbers)]
        lost = Rank(self.socket, 1, [3], dies=True)
        for rank in (*ranks, lost):
            rank.start()
        lost.join(60)
        self.assertIsNone(lost.error)
        self.assertTrue(ranks[0].grown.wait(60))
        back = Rank(self.socket, 1, [3])
        back.start()
        for rank in (*ranks, back):
            rank.join(60)
            self.assertIsNone(rank.error)
        self.assertEqual(ranks[0].seen, [(0, 3), (0, 2), (0, 3)])
        self.assertEqual(ranks[1].seen, [(2, 3), (1, 2), (2, 3)])
        self.assertEqual(back.seen, [(1, 3)])
        self.assertEqual(ranks[0].steps, list(range(1, ranks[0].steps[-1] + 1)), "none twice")

    def test_a_process_joins_with_the_numbers_it_was_started_with(self):
        with shardd.connect(self.socket) as client:
            client.join("alone", 2, 1, elastic=(1, 2, 0.1))
            with self.assertRaisesRegex(shardd.FailedPrecondition, "cannot become rank 0"):
                client.join("alone", 2, 0, elastic=(1, 2, 0.1))
            with self.assertRaisesRegex(shardd.FailedPrecondition,
                                        "was started as rank 1 of 2 in job 'alone'"):
                client.join("alone", 1, 0, elastic=(1, 2, 0.1))

    def test_all_ranks_give_the_same(self):
        with shardd.connect(self.socket) as client, shardd.connect(self.socket) as other:
            client.join("same", 2, 0, elastic=(1, 2, 5))
            with self.assertRaisesRegex(shardd.FailedPrecondition, "join_grace_ms of 5000, not 0"):
                other.join("same", 2, 1, elastic=(1, 2))
            self.assertEqual(other.join("same", 2, 1).world_size, 2)

    def test_wrong_values_are_refused(self):
        with shardd.connect(self.socket) as client:
            for given in (1,), (1, 2, 3, 4), (1, 2, -1), (1, 2, 5e9):
                with self.assertRaisesRegex(shardd.InvalidArgument, "elastic is "):
                    client.join("wrong", 1, 0, elastic=given)


if __name__ == "__main__":
    support.main()
