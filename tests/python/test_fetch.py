#!/usr/bin/env python3
"""Generations as a copy, over the connection alone: what comes is what is mapped, also after a lost
connection; readers that are slow, silent or wrong cost nobody else anything."""

import array
import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
import unittest

import support

import shardd

ROWS, COLUMNS, SMALL = 700, 1024, 600
WIDE = {"name": "wide", "type": "fp32", "every_steps": 1}


class Trainer:
    """One rank with a large tensor and many small ones, whose steps add 1 to zeros."""

    def __init__(self, at, job, rows=ROWS):
        self.client = shardd.connect(at)
        self.client.join(job, 1, 0)
        sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0)
        [self.unit] = self.client.register([shardd.UnitSpec("root", [
            shardd.TensorSpec("large", (rows, COLUMNS), shardd.Init.CONSTANT, 0.0),
            *(shardd.TensorSpec(f"small.{i}", (i % 7 + 1,), shardd.Init.CONSTANT, 0.0)
              for i in range(SMALL))], optimizer=sgd)])
        self.unit.init_seed(1)

    def step(self, number):
        gradient = self.unit.gradient()
        gradient.view()[:] = array.array("f", [-1.0]) * gradient.elements
        self.unit.reduce()
        self.client.step()
        self.client.commit(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.leave()
        self.client.close()


class Relay:
    """What ssh -L does for a unix socket: a socket whose connections go on to another one, as bytes
    without descriptors. ``cut_after``: a connection ends after so many bytes to the client.
    ``spoil``: these bytes reach it with a wrong bit."""

    def __init__(self, folder, to, cut_after=None, spoil=None):
        self.at, self.to, self.cut_after = os.path.join(folder, "relay"), to, cut_after
        self.spoil = spoil
        self.cuts, self.open, self.pairs = 0, True, []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.at)
        self.listener.listen(16)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while self.open:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self.to)
            self.pairs.append((near, far))
            for source, sink, left in ((near, far, None), (far, near, self.cut_after)):
                threading.Thread(target=self.move, args=(source, sink, left), daemon=True).start()

    def move(self, source, sink, left):
        try:
            while data := source.recv(1 << 16):
                if self.spoil and source.getsockname() == "" and self.spoil in data:
                    data = data.replace(self.spoil, bytes([self.spoil[0] ^ 1]) + self.spoil[1:], 1)
                sink.sendall(data)
                left = left if left is None else left - len(data)
                if left is not None and left <= 0:
                    self.cuts += 1
                    break
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut_all(self):
        for pair in self.pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.open = False
        self.listener.close()
        for pair in self.pairs:
            for one in pair:
                one.close()


def fetch_slowly(at, job, results, how):
    """Into @results: the step, and the values of the large tensor; or the error."""
    try:
        with shardd.Client(at) as client:
            found = shardd.fetch_generation("wide", job, client, wait=30, **how)
            results.put((found.step, set(flat(found["large"]))))
    except shardd.SharddError as error:
        results.put(str(error))


def flat(memory):
    with memory.view() as view:
        return view.cast("B").cast(view.format).tolist()


def status(at, job, name="wide"):
    found = support.shardctl(at, "publications", job)["publications"]
    return next(p for p in found if p["name"] == name)


class Fetches(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon("--set", "stream_stall_ms=500ms")
        cls.at = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def trainer(self, job, rows=ROWS, **more):
        trainer = self.enterContext(Trainer(self.at, job, rows))
        shardd.declare_publication({**WIDE, **more}, job, trainer.client)
        return trainer

    def client(self, at=None):
        return self.enterContext(shardd.Client(at or self.at))

    def test_a_copy_is_what_is_mapped(self):
        trainer = self.trainer("same")
        trainer.step(1)
        client = self.client()
        copy = shardd.fetch_generation("wide", "same", client, wait=30)
        with shardd.Live("same", "wide", self.at) as live:
            mapped = live.acquire(wait=30)
            self.assertEqual((copy.number, copy.step, copy.checksum, list(copy)),
                             (mapped.number, 1, mapped.checksum, list(mapped)))
            for name in copy:
                self.assertEqual(copy[name].shape, mapped[name].shape)
                self.assertEqual(copy[name].tobytes(), mapped[name].tobytes())
        self.assertEqual(flat(copy["large"])[:3], [1.0] * 3)
        # it is this process's own, and stays what it is
        trainer.step(2)
        newer = shardd.fetch_generation("wide", "same", client, wait=30, newer_than=copy.number)
        self.assertEqual((newer.step, flat(newer["small.3"])), (2, [2.0] * 4))
        self.assertEqual(flat(copy["small.3"]), [1.0] * 4)
        sent = status(self.at, "same")
        self.assertEqual(sent["streams"], 0)
        self.assertGreaterEqual(sent["streamed_bytes"], 2 * ROWS * COLUMNS * 4)
        self.assertEqual([g["leases"] for g in sent["generations"]],
                         [[] for _ in sent["generations"]])

    def test_what_comes_too_late_costs_nothing(self):
        """The memory of the generation before was freed, and with it the base of the next delta."""
        trainer = self.trainer("late", delta_percent=20, every_steps=0, buffers=4)
        trainer.step(1)
        client = self.client()
        shardd.publish("wide", "late", trainer.client)
        copy = shardd.fetch_generation("wide", "late", client)
        kept = copy["small.3"]
        was = kept.tobytes()
        for error, more in ((shardd.DeadlineExceeded, {"wait": 0.05}), (shardd.NotFound, {}),
                            (shardd.InvalidArgument, {"wait": -1}),
                            (shardd.InvalidArgument, {"bytes_per_second": -1}),
                            (shardd.InvalidArgument, {"bytes_per_second": 1})):
            with self.assertRaises(error):
                shardd.fetch_generation("wide", "late", client, into=copy,
                                        **{"newer_than": copy.number, **more})
            self.assertEqual((copy["small.3"].tobytes(), kept.tobytes()), (was, was))
        with memoryview(copy["small.2"].view()), self.assertRaises(shardd.InUse):
            shardd.fetch_generation("wide", "late", client, into=copy)
        self.assertEqual(kept.tobytes(), was)
        with self.assertRaisesRegex(shardd.InvalidArgument, "newer_than"):
            shardd.fetch_generation("wide", "late", client, into=copy, newer_than=1 << 64)
        trainer.step(2)
        shardd.publish("wide", "late", trainer.client)
        copy = shardd.fetch_generation("wide", "late", client, wait=30, newer_than=copy.number,
                                       into=copy)
        self.assertEqual((copy.step, flat(copy["small.3"])), (2, [2.0] * 4))

    def test_memory_is_used_again(self):
        trainer = self.trainer("again")
        trainer.step(1)
        client = self.client()
        first = shardd.fetch_generation("wide", "again", client, wait=30)
        address = first["large"].address
        trainer.step(2)
        seen = first["large"].view()
        with self.assertRaises(shardd.InUse):
            shardd.fetch_generation("wide", "again", client, into=first)
        del seen
        second = shardd.fetch_generation("wide", "again", client, wait=30,
                                         newer_than=first.number, into=first)
        self.assertEqual((second["large"].address, second.step), (address, 2))
        self.assertEqual(flat(second["small.6"]), [2.0] * 7)
        with self.assertRaisesRegex(shardd.FailedPrecondition, "has another one now"):
            first["large"]
        # what looks at it keeps it
        view = second["large"].view()
        del second
        self.assertEqual(view[1, 1], 2.0)

    def test_only_what_has_changed_comes(self):
        trainer = self.trainer("deltas", delta_percent=20, every_steps=0, buffers=4)

        def change(number):
            gradient = trainer.unit.gradient()
            values = array.array("f", [0.0]) * gradient.elements
            values[::50] = array.array("f", [-1.0]) * len(values[::50])
            gradient.view()[:] = values
            trainer.unit.reduce()
            trainer.client.step()
            trainer.client.commit(number)
            shardd.publish("wide", "deltas", trainer.client)

        client = self.client()
        live = self.enterContext(shardd.Live("deltas", "wide", self.at))
        change(1)
        copy = shardd.fetch_generation("wide", "deltas", client)
        whole = status(self.at, "deltas")["streamed_bytes"]
        for number in range(2, 6):
            change(number)
            before = status(self.at, "deltas")["streamed_bytes"]
            if number == 4:  # a copy that somebody has changed is the base of nothing
                copy["small.3"].view()[0] = 7.0
            copy = shardd.fetch_generation("wide", "deltas", client, into=copy)
            share = (status(self.at, "deltas")["streamed_bytes"] - before) / whole
            (self.assertGreater if number == 4 else self.assertLess)(share, 0.5)
            weights = live.acquire()
            self.assertEqual((copy.number, copy.step), (weights.number, number))
            for name in weights:
                self.assertEqual(copy[name].tobytes(), weights[name].tobytes(), name)

    def test_what_is_not_there(self):
        trainer = self.trainer("none")
        client = self.client()
        fetch = shardd.fetch_generation
        with self.assertRaisesRegex(shardd.NotFound, "no generation newer than 0"):
            fetch("wide", "none", client)
        with self.assertRaisesRegex(shardd.DeadlineExceeded, "timed out waiting"):
            fetch("wide", "none", client, wait=0.05)
        with self.assertRaisesRegex(shardd.NotFound, "no publication 'other'"):
            fetch("other", "none", client)
        with self.assertRaisesRegex(shardd.NotFound, "there is no job 'nobody'"):
            fetch("wide", "nobody", client)
        with self.assertRaises(shardd.InvalidArgument) as caught:
            fetch("wide", "none", client, bytes_per_second=1)
        self.assertEqual(caught.exception.field, "bytes_per_second")
        waits = threading.Thread(target=lambda: self.assertRaisesRegex(
            shardd.NotFound, "was dropped", fetch, "wide", "none", client, 30))
        waits.start()
        support.wait_until(lambda: status(self.at, "none")["waiting"] == 1)
        shardd.drop_publication("wide", "none", trainer.client)
        waits.join(20)
        self.assertFalse(waits.is_alive())

    def test_over_a_relay_that_breaks(self):
        trainer = self.trainer("relay", rows=3 * ROWS)
        trainer.step(1)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        relay = Relay(folder, self.at, cut_after=3 << 20)
        self.addCleanup(relay.close)
        client = self.client(relay.at)
        before = status(self.at, "relay")["streamed_bytes"]
        found = shardd.fetch_generation("wide", "relay", client, wait=30)
        self.assertEqual(flat(found["large"]), [1.0] * (3 * ROWS * COLUMNS))
        self.assertGreaterEqual(relay.cuts, 2)
        # it went on, and did not begin again: at most a few messages came twice
        sent = status(self.at, "relay")["streamed_bytes"] - before
        self.assertLess(sent, 2 * 3 * ROWS * COLUMNS * 4)

    def test_a_delta_goes_on_after_a_cut(self):
        # each connection carries a third of the delta: from its begin it would never be complete
        trainer = self.trainer("cut", rows=4 * ROWS, delta_percent=90, every_steps=0, buffers=4)
        trainer.client.commit(1)
        shardd.publish("wide", "cut", trainer.client)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        relay = Relay(folder, self.at)
        self.addCleanup(relay.close)
        client = self.client(relay.at)
        base = shardd.fetch_generation("wide", "cut", client)
        live = self.enterContext(shardd.Live("cut", "wide", self.at))
        live.acquire()
        gradient = trainer.unit.gradient()
        values = array.array("f", [0.0]) * gradient.elements
        values[::2] = array.array("f", [-1.0]) * len(values[::2])
        gradient.view()[:] = values
        trainer.unit.reduce()
        trainer.client.step()
        trainer.client.commit(2)
        shardd.publish("wide", "cut", trainer.client)
        weights = live.acquire()
        expected = {name: memory.tobytes() for name, memory in weights.items()}
        bytes_of_delta = len(bytes(weights.delta()))
        before = status(self.at, "cut")["streamed_bytes"]
        relay.cut_after = bytes_of_delta * 2 // 5
        relay.cut_all()
        copy = shardd.fetch_generation("wide", "cut", client, into=base)
        self.assertGreaterEqual(relay.cuts, 2)
        self.assertEqual({name: copy[name].tobytes() for name in copy}, expected)
        sent = status(self.at, "cut")["streamed_bytes"] - before
        self.assertGreaterEqual(sent, bytes_of_delta)
        # what was on its way at a cut is lost, up to the sockets' buffers
        self.assertLess(sent, 2 * bytes_of_delta + (2 << 20))

    def test_a_relay_carries_no_memory(self):
        trainer = self.trainer("far")
        trainer.step(1)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        relay = Relay(folder, self.at)
        self.addCleanup(relay.close)
        with self.assertRaisesRegex(shardd.FailedPrecondition, "can be fetched"), \
                shardd.Live("far", "wide", relay.at) as live:
            live.acquire(wait=30)
        client = self.client(relay.at)
        with self.assertRaisesRegex(shardd.FailedPrecondition, "only processes of its own host"):
            client.join("near", 1, 0)
        self.assertEqual(shardd.fetch_generation("wide", "far", client, wait=30).step, 1)

    def test_a_wrong_bit_is_seen(self):
        trainer = self.trainer("spoilt")
        trainer.step(1)
        folder = self.enterContext(tempfile.TemporaryDirectory())
        relay = Relay(folder, self.at, spoil=array.array("f", [1.0] * 64).tobytes())
        self.addCleanup(relay.close)
        with self.assertRaisesRegex(shardd.Internal, "the next 131072 bytes have checksum"):
            shardd.fetch_generation("wide", "spoilt", self.client(relay.at), wait=30)
        relay.spoil = None
        found = shardd.fetch_generation("wide", "spoilt", self.client(relay.at))
        self.assertEqual(set(flat(found["large"])), {1.0})

    def test_a_user_has_so_many_streams(self):
        trainer = self.trainer("many")
        client, said = self.client(), []

        def read():
            try:
                said.append(shardd.fetch_generation("wide", "many", client, wait=30).step)
            except shardd.SharddError as error:
                said.append(error)

        readers = [threading.Thread(target=read) for _ in range(66)]
        for reader in readers:
            reader.start()
        support.wait_until(lambda: status(self.at, "many")["waiting"] == 64 and len(said) == 2)
        for error in said:
            self.assertRegex(str(error), "RESOURCE_EXHAUSTED: 64 generations are being sent, 64")
        trainer.step(1)
        for reader in readers:
            reader.join(60)
        self.assertEqual(said[2:], [1] * 64)

    def streams(self, job):
        """Leases of streams of the job's publication."""
        return [lease for g in status(self.at, job)["generations"] for lease in g["leases"]
                if lease["streams"]]

    def slow(self, job, results, **how):
        """A process that fetches slowly, after its stream has begun."""
        process = support.spawn.Process(target=fetch_slowly, args=(self.at, job, results, how))
        process.start()
        self.addCleanup(process.kill)
        support.wait_until(lambda: any(s["sent_bytes"] > 0 for s in self.streams(job)))
        return process

    def test_a_reader_that_takes_nothing_loses_it_and_goes_on(self):
        trainer = self.trainer("silent", rows=4 * ROWS)
        trainer.step(1)
        results = support.spawn.Queue()
        reader = self.slow("silent", results, bytes_per_second=8 << 20)
        os.kill(reader.pid, signal.SIGSTOP)
        try:
            support.wait_until(lambda: not self.streams("silent"), 20)
        finally:
            os.kill(reader.pid, signal.SIGCONT)
        step, values = results.get(timeout=60)
        self.assertEqual((step, values), (1, {1.0}))
        reader.join(20)

    def test_a_generation_stays_while_it_is_sent(self):
        trainer = self.trainer("stays", rows=2 * ROWS)
        trainer.step(1)
        results = support.spawn.Queue()
        reader = self.slow("stays", results, bytes_per_second=6 << 20)
        for number in range(2, 5):
            trainer.step(number)
        self.assertEqual(len(self.streams("stays")), 1)
        self.assertEqual(results.get(timeout=60), (1, {1.0}))
        reader.join(20)
        support.wait_until(lambda: not self.streams("stays"))

    def test_a_reader_that_dies_gives_it_back(self):
        trainer = self.trainer("dies", rows=8 * ROWS)
        trainer.step(1)
        reader = self.slow("dies", support.spawn.Queue(), bytes_per_second=1 << 20)
        reader.kill()
        support.wait_until(lambda: not self.streams("dies"))

    def test_a_publication_that_ends(self):
        trainer = self.trainer("ends", rows=8 * ROWS)
        trainer.step(1)
        results = support.spawn.Queue()
        self.slow("ends", results, bytes_per_second=1 << 20)
        shardd.drop_publication("wide", "ends", trainer.client)
        said = results.get(timeout=20)
        self.assertRegex(said, "NOT_FOUND .*no publication 'wide'")

    def test_the_rate_of_a_reader(self):
        trainer = self.trainer("rate", rows=ROWS)
        trainer.step(1)
        client, nbytes = self.client(), ROWS * COLUMNS * 4
        shardd.fetch_generation("wide", "rate", client, wait=30)
        began = time.monotonic()
        shardd.fetch_generation("wide", "rate", client, bytes_per_second=4 * nbytes)
        took = time.monotonic() - began
        self.assertGreater(took, 0.15)  # 0.25 s, but that the last message is not waited for


class Limited(unittest.TestCase):
    @unittest.skipUnless(os.environ.get("SHARDD_TEST_LONG") == "1", "only in the long form")
    def test_a_daemon_that_dies_while_it_sends(self):
        """The next one has no such generation, but makes another one of the same step."""
        held = self.enterContext(support.held_daemon())
        trainer = Trainer(held.socket, "held", 4 * ROWS)
        self.addCleanup(trainer.client.close)
        shardd.declare_publication(WIDE, "held", trainer.client)
        trainer.step(1)
        results = support.spawn.Queue()
        reader = support.spawn.Process(
            target=fetch_slowly, args=(held.socket, "held", results, {"bytes_per_second": 8 << 20}))
        reader.start()
        support.wait_until(lambda: status(held.socket, "held")["streamed_bytes"] > 0)
        held.kill()
        self.assertEqual(results.get(timeout=60), (1, {1.0}))
        reader.join(20)

    def test_readers_share_the_rate_of_the_daemon(self):
        nbytes = 2 * ROWS * COLUMNS * 4
        folder = self.enterContext(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "shardd.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"stream_bytes_per_s: {2 * nbytes}\n")
        at = self.enterContext(support.daemon("--config", path))
        trainer = self.enterContext(Trainer(at, "shared", 2 * ROWS))
        shardd.declare_publication(WIDE, "shared", trainer.client)
        trainer.step(1)
        ends, began = {}, time.monotonic()

        def read(number):
            with shardd.Client(at) as client:
                shardd.fetch_generation("wide", "shared", client, wait=30)
                ends[number] = time.monotonic() - began

        def read_all(n):
            readers = [threading.Thread(target=read, args=(i,)) for i in range(n)]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join(60)

        read_all(2)
        self.assertGreater(min(ends.values()), 0.7)  # both at the half rate: 1 s
        limited = min(ends.values())
        with open(path, "w", encoding="utf-8") as file:
            file.write("stream_bytes_per_s: 0\n")
        os.kill(support.shardctl(at, "status")["pid"], signal.SIGHUP)

        def is_faster():
            nonlocal began
            began = time.monotonic()
            read_all(2)
            return max(ends.values()) < limited / 2

        support.wait_until(is_faster, 30)

    def test_a_daemon_that_ends_while_it_sends(self):
        results = support.spawn.Queue()
        with support.daemon("--set", "drain_timeout_ms=1") as at:
            trainer = Trainer(at, "over", 4 * ROWS)
            self.addCleanup(trainer.client.close)
            shardd.declare_publication(WIDE, "over", trainer.client)
            trainer.step(1)
            reader = support.spawn.Process(
                target=fetch_slowly, args=(at, "over", results, {"bytes_per_second": 1 << 20}))
            reader.start()
            support.wait_until(lambda: status(at, "over")["streamed_bytes"] > 0)
        # support.daemon has seen that it ended well
        self.assertRegex(results.get(timeout=60), "UNAVAILABLE")
        reader.join(20)


if __name__ == "__main__":
    support.main()
