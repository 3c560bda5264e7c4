#!/usr/bin/env python3
"""Publications: generations of weights in processes that are no ranks, without PyTorch."""

import array
import contextlib
import copy
import ctypes
import json
import multiprocessing
import os
import pathlib
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
from concurrent import futures

import support

import shardd
from shardd import _library

DECLARATION = {
    "name": "engine", "type": "bf16", "every_steps": 1,
    "rules": [{"name": "qk", "sources": ["model.q", "model.k"]},
              {"name": "norm.{i}", "sources": ["model.norm.{i}"], "type": "fp32"},
              {"name": "", "sources": ["model.unwanted"]}],
}


PACKAGE = str(support.ROOT / "client/python")
WRITES = """
import ctypes
import sys
import shardd

with shardd.Live("written", "engine", sys.argv[1], fixed=bool(sys.argv[2])) as live:
    found = live.acquire(wait=30)
    found = live.acquire()
    ctypes.memset(found["norm.0"].address, 0, 1)
"""


class Trainer:
    """One rank, whose steps add 1 to parameters that begin as 2."""

    def __init__(self, socket, job, unwanted=7):
        self.client = shardd.connect(socket)
        self.client.join(job, 1, 0)
        self.job = job
        sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1.0)
        names = {"q": (4, 3), "k": (2, 3), "norm.0": (5,), "norm.1": (5,), "unwanted": (unwanted,)}
        [self.unit] = self.client.register([shardd.UnitSpec("model", [
            shardd.TensorSpec(name, shape, shardd.Init.CONSTANT, 2.0)
            for name, shape in names.items()], optimizer=sgd)])
        self.unit.init_seed(1)

    def change(self):
        gradient = self.unit.gradient()
        gradient.view()[:] = array.array("f", [-1.0] * gradient.elements)
        self.unit.reduce()
        self.client.step()

    def step(self, number):
        self.change()
        self.client.commit(number)
        self.last = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.leave()
        self.client.close()


def bf16(value):
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


def flat(memory):
    with memory.view() as view, view.cast("B") as every:
        return list(every.cast(view.format))


def read_once(socket, job, results):
    with shardd.Live(job, "engine", socket) as live, live.generation(wait=30) as found:
        results.put((found.step, sorted(found), flat(found["qk"]), found["qk"].shape))


def swap_at_fixed_addresses(socket, limited, results, go_on):
    client = shardd.connect(socket)  # its threads reserve addresses, too
    if limited:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with client, shardd.Live("wide", "engine", socket, fixed=True) as live:
        weights = live.acquire(wait=30)
        shown = weights["model.unwanted"].view()
        for _ in range(3):
            results.put((set(shown[:5]) | set(shown[-5:]), weights.step))
            go_on.get()
            weights = live.acquire(wait=30)
        del shown, weights


def hold_forever(socket, job, results):
    live = shardd.Live(job, "engine", socket)
    results.put(live.acquire(wait=30).step)
    signal.pause()


class Lives(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_another_process_has_the_declared_form(self):
        context = multiprocessing.get_context("spawn")
        with Trainer(self.socket, "form") as trainer:
            nbytes = shardd.declare_publication(DECLARATION, "form", trainer.client)
            self.assertEqual(nbytes, 3 * 256)
            trainer.step(3)
            results = context.Queue()
            process = context.Process(target=read_once, args=(self.socket, "form", results))
            process.start()
            step, names, values, shape = results.get(timeout=60)
            process.join(20)
        self.assertEqual(process.exitcode, 0)
        self.assertEqual((step, names, shape), (3, ["norm.0", "norm.1", "qk"], (6, 3)))
        self.assertEqual(values, [bf16(3.0)] * 18)

    def test_fp8_has_its_scales_beside_it(self):
        """All values are the same, so codes are 448 at each step, and a delta has only scales."""
        declaration = {
            "name": "engine", "type": "e4m3", "every_steps": 1, "delta_percent": 50,
            "rules_only": True, "rules": [
                {"name": "qk", "sources": ["model.q", "model.k"], "scale_block": [4, 2],
                 "scale_name": "qk.inv"},
                {"name": "norm", "sources": ["model.norm.0"]}]}
        with Trainer(self.socket, "fp8") as trainer:
            shardd.declare_publication(declaration, "fp8", trainer.client)
            with shardd.Live("fp8", "engine", self.socket) as live:
                trainer.step(1)
                weights = live.acquire(wait=30)
                self.assertEqual({name: (m.dtype.name, m.shape) for name, m in weights.items()}, {
                    "qk": ("E4M3", (6, 3)), "qk.inv": ("FP32", (2, 2)),
                    "norm": ("E4M3", (5,)), "norm_scale": ("FP32", ())})
                self.assertEqual(flat(weights["qk"]), [0x7e] * 18)
                scale = struct.unpack("f", struct.pack("f", 3 / 448))[0]
                self.assertEqual(flat(weights["qk.inv"]), [scale] * 4)
                self.assertEqual(flat(weights["norm_scale"]), [scale])
                copies = {name: bytearray(m.tobytes()) for name, m in weights.items()}
                trainer.step(2)
                weights = live.acquire(wait=30)
                delta = weights.delta()
                self.assertEqual((delta.changed, delta.elements), (5, 18 + 4 + 5 + 1))
                self.assertEqual(delta.values("qk"), (array.array("Q"), bytearray()))
                delta.apply(copies, check=True)
                self.assertEqual(copies, {name: m.tobytes() for name, m in weights.items()})

    def test_a_file_declares_the_same(self):
        with Trainer(self.socket, "file") as trainer, tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "engine.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(DECLARATION, file)
            one = shardd.declare_publication(DECLARATION, "file", trainer.client)
            self.assertEqual(shardd.declare_publication(path, "file", trainer.client), one)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "declared otherwise"):
                shardd.declare_publication({**DECLARATION, "keep": 2}, "file", trainer.client)
            with self.assertRaisesRegex(shardd.InvalidArgument, "no tensor 'x'") as caught:
                shardd.declare_publication(
                    {"name": "other", "rules": [{"name": "y", "sources": ["x"]}]}, "file",
                    trainer.client)
            self.assertEqual(caught.exception.field, "rules[0].sources[0].tensor")

    def test_a_write_is_explained(self):
        with support.daemon() as socket, Trainer(socket, "written") as trainer:
            shardd.declare_publication(DECLARATION, "written", trainer.client)
            trainer.step(1)
            for fixed in "", "fixed":
                said = subprocess.run([sys.executable, "-c", WRITES, socket, fixed],
                                      env=dict(os.environ, PYTHONPATH=PACKAGE),
                                      capture_output=True, text=True)
                self.assertEqual(said.returncode, -signal.SIGSEGV)
                self.assertRegex(
                    said.stderr, r"shardd: write to 0x\w+, in a generation of publication 'engine' "
                    r"of job 'written', which is read-only: copy .*\(PyTorch: tensor.clone\(\)\)\n")

    def test_a_reader_may_be_there_before_the_job(self):
        with support.daemon() as socket, futures.ThreadPoolExecutor(1) as beside:
            with self.assertRaisesRegex(shardd.NotFound, "first"):
                shardd.Live("first", "engine", socket, wait=0.2)
            reader = beside.submit(shardd.Live, "first", "engine", socket, wait=60)
            with Trainer(socket, "first") as trainer:
                self.assertFalse(reader.done())
                shardd.declare_publication(DECLARATION, "first", trainer.client)
                shardd.declare_publication({"name": "asked"}, "first", trainer.client)
                trainer.client.commit(0)
                with shardd.Live("first", "asked", socket) as asked, \
                        self.assertRaisesRegex(shardd.DeadlineExceeded, "not made at commits"):
                    asked.acquire(wait=0.05)
                with reader.result(60) as live:
                    self.assertEqual(live.acquire(wait=30).step, 0)
                    with self.assertRaisesRegex(shardd.DeadlineExceeded,
                                                "for the next commit that is due"):
                        live.acquire(wait=0.05)
                    trainer.step(1)
                    self.assertEqual(live.acquire(wait=30).step, 1)

    def test_one_that_is_declared_late_has_the_last_commit(self):
        with Trainer(self.socket, "late") as trainer:
            trainer.step(1)
            shardd.declare_publication(DECLARATION, "late", trainer.client)
            with shardd.Live("late", "engine", self.socket) as live:
                found = live.acquire(wait=30)
                self.assertEqual((found.step, flat(found["norm.0"])), (1, [3.0] * 5))
            trainer.change()
            shardd.declare_publication({**DECLARATION, "name": "within"}, "late", trainer.client)
            with shardd.Live("late", "within", self.socket) as live:
                with self.assertRaisesRegex(shardd.DeadlineExceeded, "commit that follows step 1"):
                    live.acquire(wait=0.05)
                trainer.client.commit(2)
                self.assertEqual(live.acquire(wait=30).step, 2)

    def test_waits_and_numbers_are_checked(self):
        with Trainer(self.socket, "waits") as trainer:
            shardd.declare_publication(DECLARATION, "waits", trainer.client)
            trainer.step(1)
            with shardd.Live("waits", "engine", self.socket) as live, \
                    futures.ThreadPoolExecutor(1) as beside:
                for wrong in ({"wait": -1}, {"wait": float("nan")}, {"newer_than": -1},
                              {"newer_than": 1 << 64}, {"newer_than": "x"}):
                    with self.assertRaisesRegex(shardd.InvalidArgument, next(iter(wrong))):
                        live.acquire(**wrong)
                first = live.acquire(wait=30)
                kept = first["norm.0"]
                part = kept.part(1, (2,))
                with self.assertRaisesRegex(shardd.InvalidArgument, "timeout is -1"):
                    shardd.publish("engine", "waits", trainer.client, -1)
                with self.assertRaises(shardd.DeadlineExceeded):
                    live.acquire(wait=0.05)
                self.assertIs(live.acquire(), first)
                with memoryview(first["norm.1"].view()), self.assertRaises(shardd.InUse):
                    live.acquire(wait=0.05)
                self.assertEqual((flat(kept), flat(part)), ([3.0] * 5, [3.0] * 2))  # "given back"
                for step, long in ((2, 4294967.4), (3, float("inf"))):
                    waits = beside.submit(live.acquire, wait=long)
                    with self.assertRaises(futures.TimeoutError):
                        waits.result(timeout=0.5)
                    trainer.step(step)
                    self.assertEqual(waits.result(30).step, step)
                with self.assertRaisesRegex(shardd.FailedPrecondition, "given back"):
                    kept.view()
                last = live.acquire()["norm.0"]
                self.assertEqual(live.acquire().step, 3)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "given back"):
                last.view()  # the memory is not mapped any more

    def test_a_leased_generation_does_not_change(self):
        with Trainer(self.socket, "leased") as trainer:
            shardd.declare_publication(DECLARATION, "leased", trainer.client)
            with shardd.Live("leased", "engine", self.socket) as live:
                with self.assertRaisesRegex(shardd.NotFound, "no generation yet"):
                    live.acquire()
                with self.assertRaisesRegex(shardd.DeadlineExceeded, "timed out waiting"):
                    live.acquire(wait=0.05)
                trainer.step(1)
                first = live.acquire(wait=30)
                for step in range(2, 6):
                    trainer.step(step)
                self.assertEqual(flat(first["norm.0"]), [3.0] * 5)
                self.assertFalse(first["norm.0"].writable)
                self.assertIs(first["norm.0"], first["norm.0"])
                with self.assertRaisesRegex(shardd.NotFound, "no tensor 'unwanted'"):
                    first["unwanted"]
                last = first.number + 4
                support.wait_until(
                    lambda: shardd.publish("engine", "leased", trainer.client) == last)
                newest = live.acquire()
                self.assertEqual((newest.number, newest.step), (last, 5))
                self.assertEqual(flat(newest["norm.0"]), [7.0] * 5)
                with self.assertRaisesRegex(shardd.FailedPrecondition, "was given back"):
                    first["norm.0"]
                self.assertIs(live.acquire(), newest)
                live.release()
                with self.assertRaisesRegex(shardd.FailedPrecondition, "is leased"):
                    live.release()

    def test_what_is_in_use_is_not_given_back_silently(self):
        with Trainer(self.socket, "used") as trainer:
            shardd.declare_publication(DECLARATION, "used", trainer.client)
            trainer.step(1)
            with shardd.Live("used", "engine", self.socket) as live:
                found = live.acquire(wait=30)
                number = found.number
                view = found["norm.1"].view()
                trainer.step(2)
                with self.assertRaisesRegex(shardd.InUse, f"'norm.1' of generation {number}"):
                    live.acquire(wait=30)
                self.assertEqual(list(view), [3.0] * 5)
                view.release()
                del view
                self.assertEqual(live.acquire(wait=30).step, 2)

    def test_arrays_at_fixed_addresses_show_the_newest(self):
        with Trainer(self.socket, "fixed") as trainer:
            shardd.declare_publication(DECLARATION, "fixed", trainer.client)
            trainer.step(1)
            with shardd.Live("fixed", "engine", self.socket, fixed=True) as live:
                seen = live.acquire(wait=30)["qk"].view()
                first = bytes(seen)
                trainer.step(2)
                readable, _, _ = select.select([live], [], [], 30)
                self.assertEqual(readable, [live])
                self.assertEqual(bytes(seen), first)
                found = live.acquire(wait=30)
                self.assertFalse(found.moved)
                self.assertNotEqual(bytes(seen), first)
                self.assertEqual(bytes(seen), bytes(found["qk"].view()))
                with self.assertRaises(shardd.InUse):
                    live.close()
                del seen, found
            trainer.step(3)

    def test_a_reader_waits_for_a_number(self):
        with Trainer(self.socket, "numbers") as trainer:
            shardd.declare_publication(DECLARATION, "numbers", trainer.client)
            trainer.step(1)
            with shardd.Live("numbers", "engine", self.socket) as live:
                first = live.acquire(wait=30).number
                self.assertEqual(live.acquire(wait=30, newer_than=first - 1).number, first)
                with self.assertRaisesRegex(shardd.NotFound, f"newer than {first + 1} yet"):
                    live.acquire(newer_than=first + 1)
                trainer.step(2)
                with self.assertRaisesRegex(shardd.DeadlineExceeded, f"newer than {first + 1}"):
                    live.acquire(wait=0.05, newer_than=first + 1)
                trainer.step(3)
                found = live.acquire(wait=30, newer_than=first + 1)
                self.assertEqual((found.number, found.step), (first + 2, 3))
                with self.assertRaises(shardd.InvalidArgument):
                    live.acquire(newer_than=-1)

    def test_large_ones_are_at_fixed_addresses_too(self):
        # from 2 MiB on readers reserve whole GiB, which a limit of addresses may forbid
        declaration = {"name": "engine", "type": "fp32", "every_steps": 1}
        with Trainer(self.socket, "wide", unwanted=1 << 20) as trainer:
            shardd.declare_publication(declaration, "wide", trainer.client)
            trainer.step(1)
            context = multiprocessing.get_context("spawn")
            results, go_on = context.Queue(), context.Queue()
            for limited in (False, True):
                begin = trainer.last
                reader = context.Process(target=swap_at_fixed_addresses,
                                         args=(self.socket, limited, results, go_on))
                reader.start()
                for step in range(begin, begin + 3):
                    self.assertEqual(results.get(timeout=30), ({2.0 + step}, step))
                    trainer.step(step + 1)
                    go_on.put(None)
                reader.join(30)
                self.assertEqual(reader.exitcode, 0)

    def test_a_delta_makes_a_copy_the_next_generation(self):
        with Trainer(self.socket, "delta") as trainer:
            # SGD with a gradient of 1 changes every value: as much as a generation is allowed
            shardd.declare_publication({**DECLARATION, "delta_percent": 100}, "delta",
                                       trainer.client)
            trainer.step(1)
            with shardd.Live("delta", "engine", self.socket) as live:
                first = live.acquire(wait=30)
                copies = {name: bytearray(first[name].tobytes()) for name in first}
                one = first.number
                with self.assertRaisesRegex(shardd.NotFound,
                                            f"{one} of publication .* has no delta"):
                    first.delta()
                trainer.step(2)
                second = live.acquire(wait=30)
                delta = second.delta()
                self.assertEqual((delta.base, delta.number, delta.step), (one, one + 1, 2))
                self.assertEqual(delta.changed, delta.elements)
                kept = bytes(delta)
                delta.apply(copies, check=True)
                self.assertEqual(copies, {name: second[name].tobytes() for name in second})
                indices, values = delta.values("qk")
                self.assertEqual(list(indices), list(range(len(values) // 2)))
                self.assertEqual(bytes(values), second["qk"].tobytes())
                # a copy that was not of the base, a delta that is damaged, buffers that do not fit
                places = delta.places
                again = shardd.Delta(kept, places)
                with self.assertRaisesRegex(shardd.DataLoss,
                                            f"and generation {one}, the delta's base"):
                    again.apply(copies)
                self.assertEqual(copies, {name: second[name].tobytes() for name in second})
                again.apply(copies, check=False)  # every value is in it
                with self.assertRaisesRegex(shardd.InvalidArgument, "no copy of .* 2, 'norm.1'"):
                    again.apply({n: c for n, c in copies.items() if n != "norm.1"})
                with self.assertRaisesRegex(shardd.InvalidArgument, "'qk' is a list, which has no"):
                    again.apply({"qk": [1]})
                with self.assertRaisesRegex(shardd.InvalidArgument, "writable"):
                    again.apply({"qk": bytes(10)})
                with self.assertRaisesRegex(shardd.InvalidArgument, "no tensor 'nobody'"):
                    again.apply({"nobody": bytearray(10)})
                # the values of a wider type than the receiver expects were written over its memory
                for dtype in (shardd.Dtype.E4M3, shardd.Dtype.FP32):
                    others = shardd.Delta(kept, [(name, dtype, n) for name, _, n in places])
                    with self.assertRaisesRegex(shardd.InvalidArgument, "of other tensors"):
                        others.values("qk")
                payload = struct.unpack_from("<12Q", kept)[11]
                for at in range(0, len(kept), 7):
                    damaged = bytearray(kept)
                    damaged[at] ^= 0x81
                    before = {name: bytes(copy) for name, copy in copies.items()}
                    if 128 + 40 * len(places) <= at < payload:
                        continue  # nobody reads what is between
                    with self.assertRaises(shardd.SharddError):
                        shardd.Delta(damaged, places).apply(copies)
                    self.assertEqual(before, copies)
                # a reader that has missed one reads all of it
                trainer.step(3)
                trainer.step(4)
                shardd.publish("engine", "delta", trainer.client)
                fourth = live.acquire()
                self.assertEqual(fourth.step, 4)
                with self.assertRaisesRegex(
                        shardd.NotFound, f"is from generation {one + 2}, not from {one + 1}"):
                    fourth.delta()
                last = fourth.delta(one + 2)
                self.assertEqual(last.number, one + 3)
                # its memory becomes another one's
                live.release()
                for use in (bytes, lambda d: d.apply(copies), lambda d: d.values("qk")):
                    with self.assertRaisesRegex(shardd.FailedPrecondition,
                                                f"{one + 3} was given back"):
                        use(last)

    def test_a_delta_is_for_all_names_of_a_tensor(self):
        """The copy of a further name stayed what it was, without a word."""
        rule, *others = DECLARATION["rules"]
        declaration = {**DECLARATION, "delta_percent": 100,
                       "rules": [{**rule, "also": ["head", "tail"]}, *others]}
        with Trainer(self.socket, "names") as trainer:
            shardd.declare_publication(declaration, "names", trainer.client)
            trainer.step(1)
            with shardd.Live("names", "engine", self.socket) as live:
                first = live.acquire(wait=30)
                base = {name: first[name].tobytes() for name in first}
                copies = {name: bytearray(was) for name, was in base.items()}
                del copies["tail"]
                trainer.step(2)
                second = live.acquire(wait=30)
                now = {name: second[name].tobytes() for name in second}
                delta = second.delta()
                self.assertEqual(delta.values("head"), delta.values("qk"))
                kept, places = bytes(delta), delta.places
                delta.apply(copies)
                self.assertEqual({**copies, "tail": now["qk"]}, now)
                again = shardd.Delta(kept, places)
                differ = {name: bytearray(was) for name, was in base.items()}
                differ["head"][3] ^= 1
                with self.assertRaisesRegex(shardd.DataLoss, "'qk' and 'head' differ"):
                    again.apply(differ)
                unknown = shardd.Delta(kept, [place[:3] for place in places])
                for call in (lambda: unknown.apply({n: bytearray(b) for n, b in base.items()}),
                             lambda: unknown.values("head")):
                    with self.assertRaisesRegex(shardd.InvalidArgument, "nothing of .*'head'"):
                        call()
                with self.assertRaisesRegex(shardd.InvalidArgument, "of 'nobody', which is not"):
                    shardd.Delta(kept, [(*place[:3], "nobody") for place in places])

    def test_a_killed_reader_gives_its_buffer_back(self):
        context = multiprocessing.get_context("spawn")
        with Trainer(self.socket, "killed") as trainer, contextlib.ExitStack() as stack:
            shardd.declare_publication({**DECLARATION, "buffers": 2}, "killed", trainer.client)
            readers = []
            for step in (1, 2):
                trainer.step(step)
                results = context.Queue()
                reader = context.Process(target=hold_forever,
                                         args=(self.socket, "killed", results))
                reader.start()
                stack.callback(reader.kill)
                self.assertEqual(results.get(timeout=60), step)
                readers.append(reader)
            trainer.step(3)
            trainer.step(4)
            with self.assertRaisesRegex(shardd.ResourceExhausted, "all 2 buffers"):
                shardd.publish("engine", "killed", trainer.client)
            [shown] = support.shardctl(self.socket, "publications", "killed")["publications"]
            self.assertEqual((shown["job"], shown["name"], shown["made"]), ("killed", "engine", 2))
            self.assertEqual(shown["skipped"], 1)  # of step 3: that of step 4 may still be made
            self.assertEqual([(g["step"], [one["pid"] for one in g["leases"]])
                              for g in shown["generations"]],
                             [(2, [readers[1].pid]), (1, [readers[0].pid])])
            self.assertEqual((shown["waits_for_buffer"], shown["buffer_waits"]), (True, 1))
            readers[0].kill()
            readers[0].join(20)

            def newest():
                [shown] = support.shardctl(self.socket, "publications", "killed")["publications"]
                return (shown["generations"][0]["step"], shown["skipped"], shown["buffer_waits"],
                        shown["waits_for_buffer"], shown["buffer_waited_us"] > 0)

            # without a request, and without another commit
            support.wait_until(lambda: newest() == (4, 1, 1, False, True), 20)

    def test_readers_that_come_and_go_leave_nothing(self):
        """A closed reader's page stayed mapped, so the daemon kept it: a page and a descriptor for
        each, until the client ended."""
        with Trainer(self.socket, "many") as trainer, shardd.connect(self.socket) as client:
            shardd.declare_publication(DECLARATION, "many", trainer.client)
            for _ in range(20):
                handle = ctypes.c_void_p()
                _library.call("live_open", client.handle, b"many", b"engine", 0,
                              ctypes.byref(handle))
                _library.library().shardd_live_close(handle)

            def quarantined():
                [job] = [j for j in support.shardctl(self.socket, "memory")["jobs"]
                         if j["name"] == "many"]
                return int(job["quarantined_bytes"])

            support.wait_until(lambda: quarantined() == 0, 30)

    def test_a_dropped_publication_ends_for_its_readers(self):
        with Trainer(self.socket, "dropped") as trainer:
            shardd.declare_publication(DECLARATION, "dropped", trainer.client)
            trainer.step(1)
            with shardd.Live("dropped", "engine", self.socket) as live:
                found = live.acquire(wait=30)
                values = flat(found["qk"])
                shardd.drop_publication("engine", "dropped", trainer.client)
                self.assertEqual(flat(found["qk"]), values)
                with self.assertRaisesRegex(shardd.NotFound, "has no publication 'engine'"):
                    live.acquire()
                with self.assertRaises(shardd.NotFound):
                    shardd.Live("dropped", "engine", self.socket)
                # another one of the name: its generations are newer, and have other tensors
                shardd.declare_publication(
                    {"name": "engine", "rules_only": True, "every_steps": 1,
                     "rules": [{"name": "other", "sources": ["model.q"]}]}, "dropped",
                    trainer.client)
                trainer.step(2)
                again = live.acquire(wait=30)
                self.assertGreater(again.number, found.number)
                self.assertEqual((again.step, list(again)), (2, ["other"]))


def another_reader(live):
    """Of the same client."""
    other = copy.copy(live)
    other._places, other._held, other._handle = {}, None, ctypes.c_void_p()
    _library.call("live_open", live._client.handle, live.job.encode(), live.name.encode(), 0,
                  ctypes.byref(other._handle))
    return other


class Shown(unittest.TestCase):
    def test_the_tables_fit(self):
        name = "a-publication-with-a-long-name-of-63-letters-digits-dots-dashes"
        with support.daemon() as socket, Trainer(socket, "shown") as trainer:
            shardd.declare_publication({**DECLARATION, "name": name}, "shown", trainer.client)
            trainer.step(1)
            with shardd.Live("shown", name, socket) as live:
                self.assertEqual(live.acquire(wait=30).step, 1)
                shown = subprocess.run(
                    [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "publications"],
                    text=True, capture_output=True, check=True, timeout=60,
                    env={**os.environ, "COLUMNS": "80"}).stdout
                trace = json.loads(subprocess.run(
                    [os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket, "trace",
                     "shown", "-o", "-"], text=True, capture_output=True, check=True,
                    timeout=60).stdout)
                [shown_too] = support.shardctl(socket, "publications")["publications"]
                [lease] = shown_too["generations"][0]["leases"]
            self.assertLessEqual(max(map(len, shown.splitlines())), 80, shown)
            self.assertLess(lease["held_ms"], 60000)
            [made] = [event for event in trace["traceEvents"]
                      if event["name"].startswith("Publish ")]
            self.assertEqual((made["args"]["number"], made["args"]["job"]), (1, "shown"))
            head, leases = shown.split("Leases")
            self.assertIn("shown", head)
            self.assertIn(str(os.getpid()), leases)
            used = {c["name"]: c["used_bytes"]
                    for c in support.shardctl(socket, "memory")["jobs"][0]["memory"]}
            self.assertGreater(used["published"], 0)


@contextlib.contextmanager
def held_trainer(job):
    """A daemon whose jobs outlive it, and a trainer of @job with a generation of step 1."""
    with support.held_daemon() as held:
        trainer = Trainer(held.socket, job)
        try:
            shardd.declare_publication(DECLARATION, job, trainer.client)
            trainer.step(1)
            yield held, trainer
        finally:
            trainer.client.close()


class Killed(unittest.TestCase):
    def test_a_reader_does_not_get_what_another_one_of_its_client_gets(self):
        with held_trainer("two") as (held, _), \
                shardd.Live("two", "engine", held.socket) as live:
            other = another_reader(live)
            live.acquire(wait=30)
            other.acquire(wait=30)
            before = live._places["qk"][0]
            self.assertEqual(other._places["qk"][0], before)
            held.kill()
            other.acquire(wait=30)
            self.assertNotEqual(other._places["qk"][0], before)
            live.acquire(wait=30)
            self.assertEqual(live._places["qk"][0], other._places["qk"][0])
            _library.library().shardd_live_close(other._handle)

    def test_a_publication_outlives_the_daemon(self):
        with held_trainer("held") as (held, _), \
                shardd.Live("held", "engine", held.socket) as live:
            found = live.acquire(wait=30)
            self.assertEqual((found.number, found.step), (1, 1))
            values = flat(found["qk"])
            held.kill()
            self.assertEqual(flat(found["qk"]), values, "its memory is there")
            again = live.acquire(wait=30)
            # of the same step, under a number that no generation had
            self.assertEqual(again.step, 1)
            self.assertGreater(again.number, 1)
            self.assertEqual(flat(again["qk"]), values)

    def test_a_reader_that_makes_no_calls_finds_the_next_daemon(self):
        with held_trainer("quiet") as (held, _), \
                shardd.Live("quiet", "engine", held.socket) as live:
            self.assertEqual(live.acquire(wait=30).number, 1)
            held.kill()
            support.wait_until(lambda: live.acquire().number > 1, 30)

    def test_an_idle_reader_finds_the_next_daemon_at_once(self):
        """The board had changed since the reader last looked, before its daemon died: it was taken
        for one of a daemon that runs, for 3 s."""
        for wait in (0, 30):  # without a wait there may be none yet
            with held_trainer("idle") as (held, trainer), \
                    shardd.Live("idle", "engine", held.socket) as live, \
                    shardd.Live("idle", "engine", held.socket) as other:
                self.assertEqual(live.acquire(wait=30).number, 1)
                trainer.step(2)
                self.assertEqual(other.acquire(wait=30, newer_than=1).step, 2)
                for _ in range(2):  # it ends with a tick, which changes the board, too
                    with self.assertRaises(shardd.DeadlineExceeded):
                        other.acquire(wait=0.05)
                held.kill()
                with contextlib.suppress(*[] if wait else [shardd.NotFound]):
                    self.assertEqual(live.acquire(wait=wait).step, 2)
                self.assertEqual(live.acquire(wait=0 if wait else 30).step, 2)

    def test_a_descriptor_that_nothing_follows_is_readable_once(self):
        """It stayed readable after a daemon had stood still, although acquire had found nothing, so
        that an event loop was never idle again."""
        with held_trainer("still") as (held, trainer), \
                shardd.Live("still", "engine", held.socket) as live:
            live.acquire(wait=30)
            fd = live.fileno()
            os.kill(held.pid(), signal.SIGSTOP)
            try:
                self.assertTrue(select.select([fd], [], [], 60)[0], "the daemon stands still")
            finally:
                os.kill(held.pid(), signal.SIGCONT)
            support.wait_until(lambda: live.acquire() and not select.select([fd], [], [], 0)[0],
                               30)
            self.assertEqual(live.acquire().number, 1)
            trainer.step(2)
            self.assertTrue(select.select([fd], [], [], 30)[0])
            self.assertEqual(live.acquire().number, 2)

    def test_the_same_is_declared_again_to_the_next_daemon(self):
        """On request only, so that the next daemon has made nothing of it when it is asked."""
        declaration = {**DECLARATION, "every_steps": 0}
        with support.held_daemon() as held, contextlib.ExitStack() as stack:
            trainer = Trainer(held.socket, "again")
            stack.callback(trainer.client.close)
            nbytes = shardd.declare_publication(declaration, "again", trainer.client)
            held.kill()
            shardd.Live("again", "engine", held.socket).close()
            with shardd.connect(held.socket) as client:
                self.assertEqual(shardd.declare_publication(declaration, "again", client), nbytes)
                with self.assertRaisesRegex(shardd.FailedPrecondition, "declared otherwise"):
                    shardd.declare_publication(DECLARATION, "again", client)
                shardd.drop_publication("engine", "again", client)
            held.kill()
            with self.assertRaisesRegex(shardd.NotFound, "has no publication 'engine'"):
                shardd.Live("again", "engine", held.socket)


if __name__ == "__main__":
    support.main()
