#!/usr/bin/env python3
"""The base package with memory on GPUs, which are the simulator's: no processor can read their
addresses, streams run late, and what does not wait where it must has wrong numbers."""

import array
import concurrent.futures
import contextlib
import ctypes as C
import itertools
import os
import subprocess
import sys
import threading
import time
import unittest

import simulator
import support
from support import ranks

import shardd
from shardd import _dlpack

DEVICES = 2
B = [1.0] * 5


def spec(name="block", **settings):
    return shardd.UnitSpec(name, [
        shardd.TensorSpec("w", (3, 5), shardd.Init.CONSTANT, 2.0),
        shardd.TensorSpec("b", (5,), shardd.Init.CONSTANT, 1.0)], **settings)


def sgd(lr):
    return shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=lr)


def packed(value, n=20):
    return array.array("f", [value] * n)


def floats(memory):
    return array.array("f", memory.tobytes()).tolist()


get_pointer = C.PYFUNCTYPE(C.c_void_p, C.py_object, C.c_char_p)(
    ("PyCapsule_GetPointer", C.pythonapi))
set_name = C.PYFUNCTYPE(C.c_int, C.py_object, C.c_char_p)(("PyCapsule_SetName", C.pythonapi))


def taken(capsule, name=b"dltensor_versioned"):
    """What a consumer finds in a capsule, which it then owns."""
    kind = _dlpack._Versioned if b"versioned" in name else _dlpack._Managed
    managed = C.cast(get_pointer(capsule, name), C.POINTER(kind)).contents
    set_name(capsule, b"used_" + name)
    return managed


def given_back(managed):
    """The consumer does not want it any more."""
    C.CFUNCTYPE(None, C.c_void_p)(managed.deleter)(C.addressof(managed))


@unittest.skipUnless(simulator.THERE, simulator.WHY_NOT)
class Gpus(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        simulator.use(DEVICES)
        cls.gpu = simulator.Gpu()
        cls.context = support.daemon(backend="cuda")
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def client(self, job, quota_bytes=0, **options):
        client = shardd.connect(self.socket, **options)
        client.join(job, 1, 0, quota_bytes=quota_bytes)
        return client

    def unit(self, client, **settings):
        [unit] = client.register([spec(**settings)])
        unit.init_seed(1)
        return unit

    def step(self, client, unit, number):
        """One that adds 1 to all parameters, if they have SGD with a rate of 1."""
        gradient = unit.gradient()
        gradient.write(array.array("f", [-1.0] * gradient.elements).tobytes())
        unit.reduce()
        client.step()
        client.commit(number)

    # ------------------------------------------------------------------- DLPack

    def test_a_capsule_says_which_gpu_and_what_is_there(self):
        with self.client("capsule") as client:
            self.assertEqual((client.device.id, client.device.streams), ("cuda:0", True))
            unit = self.unit(client)
            gathered = unit.gather()
            part = unit.tensor(gathered, "w")
            self.assertEqual(part.__dlpack_device__(), (2, 0))
            managed = taken(part.__dlpack__(max_version=(1, 0)))
            t = managed.tensor
            self.assertEqual((managed.major, managed.flags), (1, 1))  # read-only
            self.assertEqual((t.device_type, t.device_id, t.byte_offset), (2, 0, 0))
            self.assertEqual((t.code, t.bits, t.lanes, t.ndim), (2, 32, 1, 2))
            self.assertEqual((t.shape[:2], t.strides[:2]), ([3, 5], [5, 1]))
            self.assertEqual(t.data, gathered.address + 4 * unit.places["w"].offset)
            seen = self.gpu.host_address(self.gpu.stream(), t.data, 60)
            self.assertEqual((C.c_float * 15).from_address(seen)[:], [2.0] * 15)
            self.assertNotEqual(seen, t.data)
            given_back(managed)
            unit.release()

    def test_a_capsule_of_memory_to_write_to(self):
        with self.client("writable") as client:
            unit = self.unit(client, compute_dtype=shardd.Dtype.BF16)
            gradient = unit.gradient()
            managed = taken(gradient.__dlpack__(stream=-1), b"dltensor")
            t = managed.tensor
            self.assertEqual((t.device_type, t.code, t.bits, t.shape[0]), (2, 4, 16, 20))
            self.assertEqual(t.data, gradient.address)
            given_back(managed)
            with self.assertRaisesRegex(BufferError, "does not support read-only"):
                unit.gather().__dlpack__()
            unit.release()

    def test_a_tensor_keeps_memory_from_being_given_back(self):
        with self.client("kept") as client:
            unit = self.unit(client)
            gathered = unit.gather()
            managed = taken(gathered.__dlpack__(max_version=(1, 1)))
            with self.assertRaisesRegex(shardd.InUse, "gathered parameters of unit 'block'"):
                unit.release()
            with self.assertRaises(shardd.InUse):
                client.close()
            given_back(managed)
            ignored = gathered.__dlpack__(max_version=(1, 1))
            del ignored  # by a consumer that never took it
            self.assertEqual(unit.release(), 0)
            for use in (gathered.tobytes, gathered.device_view, lambda: gathered.address,
                        lambda: gathered.__dlpack__(max_version=(1, 0)),
                        lambda: gathered.write(b"")):
                with self.assertRaisesRegex(shardd.FailedPrecondition, "given back to the daemon"):
                    use()

    def test_other_devices_and_streams_are_refused(self):
        with self.client("refused") as client:
            gathered = self.unit(client).gather()
            for wrong in ((1, 0), (2, 1)):
                with self.assertRaisesRegex(BufferError, r"on device \(2, 0\)"):
                    gathered.__dlpack__(dl_device=wrong, max_version=(1, 0))
            for wrong in (0, -2, "x"):
                with self.assertRaisesRegex(BufferError, "CUDA stream's handle"):
                    gathered.__dlpack__(stream=wrong, max_version=(1, 0))

    def test_a_gpu_has_the_number_of_this_process(self):
        self.assertEqual(ranks(number_of_second, 1, self.socket), [("cuda:1", (2, 0))])
        self.assertEqual(ranks(number_of_second, 1, self.socket, "0,1"), [("cuda:1", (2, 1))])

    def test_a_gpu_that_this_process_does_not_see(self):
        [said] = ranks(number_of_second, 1, self.socket, "0")
        self.assertIn("not visible in this process (CUDA_VISIBLE_DEVICES is 0)", said)

    # ------------------------------------------------------------ the processor

    def test_the_processor_is_refused(self):
        with self.client("processor") as client:
            gradient = self.unit(client).gradient()
            uses = [gradient.view, gradient.numpy, gradient.__array__]
            if sys.version_info >= (3, 12):
                uses.append(lambda: memoryview(gradient))
            for use in uses:
                with self.assertRaisesRegex(BufferError, "is on cuda:0, where the processor"):
                    use()

    def test_copies(self):
        with self.client("copies") as client:
            unit = self.unit(client)
            gathered, gradient = unit.gather(), unit.gradient()
            self.assertEqual(floats(unit.tensor(gathered, "b")), B)
            unit.tensor(gradient, "w").write(packed(3.0, 15))
            unit.tensor(gradient, "b").write(packed(4.0, 5))
            self.assertEqual(floats(gradient)[:20], [3.0] * 15 + [4.0] * 5)
            with self.assertRaisesRegex(shardd.InvalidArgument, "8 bytes, must have 80"):
                gradient.write(packed(1.0, 2))
            with self.assertRaisesRegex(BufferError, "read-only"):
                gathered.write(packed(1.0))

    def test_cuda_array_interface(self):
        with self.client("interface") as client:
            unit = self.unit(client)
            gathered = unit.gather()
            seen = unit.tensor(gathered, "w").device_view()
            self.assertEqual(seen.__cuda_array_interface__, {
                "shape": (3, 5), "typestr": "<f4", "strides": None, "version": 3, "stream": None,
                "data": (gathered.address + 4 * unit.places["w"].offset, True)})
            with self.assertRaises(shardd.InUse):
                unit.release()
            del seen
            unit.release()
            client.set_stream(0)
            seen = unit.gradient().device_view().__cuda_array_interface__
            self.assertEqual((seen["stream"], seen["data"][1]), (1, False))

    # ------------------------------------------------------------------ streams

    def test_ops_are_ordered_with_the_stream(self):
        """Gradients are copied to the GPU behind other work, and nobody waits for it."""
        gpu = self.gpu
        with self.client("ordered") as client:
            unit = self.unit(client, optimizer=sgd(1.0))
            stream, out = gpu.stream(), gpu.pinned(80)
            client.set_stream(stream)
            values = gpu.pinned(80)
            for step in range(5):
                gradient = unit.gradient()
                self.assertEqual(gradient.stream, stream)
                gpu.synchronize(stream)
                C.memmove(values, packed(0.25 * (step + 1)).tobytes(), 80)
                gpu.hold(stream)
                gpu.copy_in(stream, gradient.address, values)
                ticket = unit.reduce_submit()
                ticket.wait()
                self.assertFalse(gpu.idle(stream))
                gpu.let_go()
                client.step()
                gathered = unit.gather()
                gpu.copy_out(stream, out, unit.tensor(gathered, "b").address - 60)
                gpu.synchronize(stream)
                unit.release()
                left = -0.25 * sum(range(1, step + 2))
                self.assertEqual(array.array("f", bytes(out)).tolist(),
                                 [2 + left] * 15 + [1 + left] * 5)
            client.set_stream(None)
            self.assertIsNone(unit.gather().stream)
            unit.release()

    def exported(self, job, consumer, stream):
        """Export memory on a stream that is held, to @consumer, which DLPack gets as @stream.
        Return: did the consumer's next work wait?"""
        gpu = self.gpu
        with self.client(job) as client:
            unit = self.unit(client)
            own, out = gpu.stream(), gpu.pinned(20)
            unit.gather()  # new memory waits for streams: let it be mapped
            unit.release()
            client.set_stream(own)
            gpu.hold(own)
            gathered = unit.tensor(unit.gather(), "b")
            managed = taken(gathered.__dlpack__(stream=stream(own), max_version=(1, 0)))
            gpu.copy_out(consumer, out, managed.tensor.data)
            until = time.monotonic() + 0.3
            while not gpu.idle(consumer) and time.monotonic() < until:
                time.sleep(0.001)
            waited = not gpu.idle(consumer)
            gpu.let_go()
            gpu.synchronize(own)
            gpu.synchronize(consumer)
            self.assertEqual(array.array("f", bytes(out)).tolist(), B)
            given_back(managed)
            unit.release()
            client.set_stream(None)
        return waited

    def test_a_consumer_on_another_stream_waits(self):
        consumer = self.gpu.stream()
        self.assertTrue(self.exported("behind", consumer, lambda own: consumer))

    def test_a_consumer_on_the_default_stream_waits(self):
        self.assertTrue(self.exported("default", 1, lambda own: None))
        self.assertTrue(self.exported("default", 1, lambda own: 1))

    def test_a_consumer_that_wants_no_order_does_not_wait(self):
        consumer, gpu = self.gpu.stream(), self.gpu
        with self.client("unordered") as client:
            unit = self.unit(client)
            own, out = gpu.stream(), gpu.pinned(20)
            gathered = unit.tensor(unit.gather(), "b")
            client.set_stream(own)
            gpu.hold(own)
            self.assertEqual(unit.gather().stream, own)
            managed = taken(gathered.__dlpack__(stream=-1, max_version=(1, 0)))
            gpu.copy_out(consumer, out, managed.tensor.data)
            gpu.synchronize(consumer)  # for ever, if it waited for own
            self.assertFalse(gpu.idle(own))
            gpu.let_go()
            given_back(managed)
            unit.release()
            unit.release()
            client.set_stream(None)

    def test_the_stream_is_the_threads(self):
        with self.client("threads") as client:
            unit = self.unit(client)
            client.set_stream(self.gpu.stream())
            found = []

            def work():
                self.gpu.enter()
                found.append(unit.gather().stream)
                unit.release()

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            self.assertEqual(found, [None])
            client.set_stream(None)

    def test_streams_that_are_followed(self):
        with self.client("followed") as client:
            unit = self.unit(client)
            streams = [self.gpu.stream(), self.gpu.stream()]
            now = [streams[0]]
            client.follow_stream(lambda: now[0])
            self.assertEqual(unit.gather().stream, streams[0])
            now[0] = streams[1]
            self.assertEqual(unit.gather().stream, streams[1])
            unit.release()
            now[0] = None
            unit.release()
            self.assertIsNone(unit.gather().stream)
            unit.release()
            client.follow_stream(None)

    def test_closing_waits_for_what_is_on_a_stream(self):
        """A release is answered at once; the word that it raises is raised by the stream, in
        memory that closing takes away."""
        stream = self.gpu.stream()
        with self.client("closed") as client:
            unit = self.unit(client)
            unit.gather()
            unit.release()
            client.set_stream(stream)
            unit.gather()
            self.gpu.busy(stream, 0.3)
            unit.release()
            client.set_stream(None)
            self.assertFalse(self.gpu.idle(stream))
        self.gpu.synchronize(stream)

    def test_a_stream_that_is_none(self):
        with self.client("none") as client, self.assertRaises(shardd.InvalidArgument):
            client.set_stream(12345678)

    # -------------------------------------------------------------------- more

    def test_two_ranks_on_two_gpus(self):
        self.assertEqual(ranks(two_ranks, 2, self.socket),
                         [("cuda:0", [0.5] * 5), ("cuda:1", [0.5] * 5)])

    def check_generation(self, job, client, device, number):
        with shardd.Live(job, "engine", self.socket, device=device) as live:
            shardd.publish("engine", job, client)
            with live.generation() as weights:
                [name] = [n for n in weights if n.endswith("w")]
                memory = weights[name]
                self.assertEqual(memory.__dlpack_device__(), (2, number))
                managed = taken(memory.__dlpack__(max_version=(1, 0)))
                self.assertEqual((managed.tensor.code, managed.tensor.bits), (4, 16))  # bf16
                given_back(managed)
                self.assertEqual(memory.tobytes(), b"\x00\x40" * 15)  # 2
                with self.assertRaises(BufferError):
                    memory.view()
        copy = shardd.fetch_generation("engine", job, client)
        self.assertEqual(copy[name].tobytes(), b"\x00\x40" * 15)

    def read_generation(self, job, where, *readers):
        """@where: of the publication; @readers: the GPU that each asks for, whether its thread has
        a context on the first one, and the number of the GPU on which it finds the tensors."""
        with self.client(job) as client:
            self.unit(client)
            client.commit(1)
            shardd.declare_publication({"name": "engine", "type": "bf16", **where}, job, client)
            for device, here, number in readers:
                if here:
                    self.check_generation(job, client, device, number)
                    continue
                with concurrent.futures.ThreadPoolExecutor(1) as fresh:
                    fresh.submit(self.check_generation, job, client, device, number).result()

    def test_a_generation_is_on_the_jobs_gpu(self):
        self.read_generation("own", {}, (None, True, 0), (None, False, 0))

    def test_a_generation_is_read_from_another_gpu(self):
        self.read_generation("other", {}, (simulator.UUID.format(1), False, 1))

    def test_a_generation_is_made_on_another_gpu(self):
        self.read_generation("by-id", {"device": "cuda:1"}, (None, False, 1), (None, True, 0))
        self.read_generation("by-uuid", {"device": simulator.UUID.format(1)}, (None, False, 1))

    def test_without_memory_for_deltas_generations_have_none(self):
        declaration = {"name": "engine", "type": "bf16", "delta_percent": 100, "buffers": 2}
        large = [shardd.TensorSpec("w", (4 << 20,), shardd.Init.CONSTANT, 2.0)]  # 8 MiB in bf16
        quota = 0
        for job, deltas in ("room", 1), ("no-room", 0):
            with self.client(job, quota) as client:
                [unit] = client.register([shardd.UnitSpec("large", large, optimizer=sgd(1.0))])
                unit.init_seed(1)
                self.step(client, unit, 1)
                if not quota:  # two generations and the tables
                    now = next(one for one in support.shardctl(self.socket, "memory")["jobs"]
                               if one["name"] == job)
                    quota = sum(int(c["taken_bytes"]) for c in now["memory"]) + (20 << 20)
                shardd.declare_publication(declaration, job, client)
                shardd.publish("engine", job, client)
                self.step(client, unit, 2)
                shardd.publish("engine", job, client)
                [shown] = support.shardctl(self.socket, "publications", job)["publications"]
                self.assertEqual((shown["made"], shown["failed"], shown["deltas"],
                                  shown["not_deltas"]), (2, 0, deltas, 1 - deltas))

    def test_memory_that_is_free_again_has_room_for_deltas(self):
        """Deltas were given up although a generation without them had no memory, either."""
        large = [shardd.TensorSpec("w", (4 << 20,), shardd.Init.CONSTANT, 2.0)]  # 8 MiB in bf16
        declared = {"type": "bf16", "buffers": 2}
        with self.client("again", 100 << 20) as client:
            [unit] = client.register([shardd.UnitSpec("large", large, optimizer=sgd(1.0))])
            unit.init_seed(1)
            steps = itertools.count(1)
            for name in "a", "b", "c":  # what is free is taken
                shardd.declare_publication({**declared, "name": name}, "again", client)
                for _ in range(2):
                    self.step(client, unit, next(steps))
                    with contextlib.suppress(shardd.ResourceExhausted):
                        shardd.publish(name, "again", client)
            shardd.declare_publication({**declared, "name": "engine", "delta_percent": 100},
                                       "again", client)
            with self.assertRaises(shardd.ResourceExhausted):
                shardd.publish("engine", "again", client)
            for name in "a", "b", "c":
                shardd.drop_publication(name, "again", client)
            for _ in range(2):
                self.step(client, unit, next(steps))
                shardd.publish("engine", "again", client)
            [shown] = support.shardctl(self.socket, "publications", "again")["publications"]
            self.assertEqual((shown["made"], shown["deltas"], shown["not_deltas"]), (2, 1, 0))

    def test_a_delta_of_a_generation_is_in_host_memory(self):
        declaration = {"name": "engine", "type": "bf16", "delta_percent": 100, "buffers": 4}
        with self.client("delta") as client:
            unit = self.unit(client, optimizer=sgd(1.0))
            client.commit(1)
            shardd.declare_publication(declaration, "delta", client)
            shardd.publish("engine", "delta", client)
            with shardd.Live("delta", "engine", self.socket) as live:
                first = live.acquire()
                copies = {name: bytearray(first[name].tobytes()) for name in first}
                fetched = shardd.fetch_generation("engine", "delta", client)
                for number in (2, 3):
                    self.step(client, unit, number)
                    shardd.publish("engine", "delta", client)
                    weights = live.acquire()
                    delta = weights.delta()
                    self.assertEqual((delta.step, delta.changed), (number, delta.elements))
                    delta.apply(copies)
                    fetched = shardd.fetch_generation("engine", "delta", client, into=fetched)
                    for name in weights:
                        self.assertEqual(copies[name], weights[name].tobytes())
                        self.assertEqual(fetched[name].tobytes(), weights[name].tobytes())

    def check_fixed(self, client, unit, device, number):
        with (shardd.Live("fixed", "engine", self.socket, fixed=True, device=device) as live,
              shardd.Live("fixed", "engine", self.socket, device=device) as plain):
            kept = dict(live.acquire())
            first = {name: memory.address for name, memory in kept.items()}
            self.assertEqual({memory.device for memory in kept.values()}, {(2, number)})
            for step in range(10 * number + 2, 10 * number + 7):
                self.step(client, unit, step)
                shardd.publish("engine", "fixed", client)
                found, other = live.acquire(), plain.acquire()
                self.assertEqual((found.step, found.moved, other.step), (step, False, step))
                for name, address in first.items():
                    self.assertEqual(found[name].address, address)
                    self.assertEqual(kept[name].tobytes(), other[name].tobytes())
            live.release()
            self.assertEqual(live.acquire().number, plain.acquire().number)

    def test_fixed_addresses_show_one_generation_after_another(self):
        """Also on another GPU than that of the generations."""
        with self.client("fixed") as client:
            unit = self.unit(client, optimizer=sgd(1.0))
            client.commit(1)
            shardd.declare_publication({"name": "engine", "keep": 2}, "fixed", client)
            shardd.publish("engine", "fixed", client)
            self.check_fixed(client, unit, None, 0)
            with concurrent.futures.ThreadPoolExecutor(1) as fresh:
                fresh.submit(self.check_fixed, client, unit, simulator.UUID.format(1), 1).result()

    def test_a_publication_outlives_the_daemon(self):
        """What a reader has stays until it takes a generation of the next daemon."""
        with support.held_daemon(backend="cuda") as held, shardd.connect(held.socket) as client:
            client.join("killed", 1, 0)
            unit = self.unit(client, optimizer=sgd(1.0))
            shardd.declare_publication({"name": "engine", "every_steps": 1}, "killed", client)
            client.commit(1)
            with (shardd.Live("killed", "engine", held.socket, fixed=True) as fixed,
                  shardd.Live("killed", "engine", held.socket) as plain):
                before = [live.acquire(wait=30) for live in (fixed, plain)]
                for step in (2, 3):
                    was = {name: memory.tobytes() for name, memory in before[0].items()}
                    held.kill()
                    for found in before:
                        for name, value in was.items():
                            self.assertEqual(found[name].tobytes(), value)
                    with contextlib.suppress(shardd.DaemonRestarted):
                        unit.gather()
                    client.join("killed", 1, 0)
                    self.step(client, unit, step)
                    after = [live.acquire(wait=30) for live in (fixed, plain)]
                    while after[0].step < step or after[1].step < step:
                        after = [live.acquire(wait=30) if live._held.step < step else live._held
                                 for live in (fixed, plain)]
                    self.assertGreater(after[0].number, before[0].number)
                    for name, value in was.items():
                        self.assertNotEqual(after[0][name].tobytes(), value)
                        self.assertEqual(after[0][name].tobytes(), after[1][name].tobytes())
                    dead = before[1]._places[name]
                    before = after
                for step in (4, 5):  # the memory of the last one but these is let go of
                    self.step(client, unit, step)
                    plain.acquire(wait=30)
                with self.assertRaisesRegex(shardd.InvalidArgument, "not all in memory"):
                    plain._where.read(dead[0], dead[1])

    def test_a_window_waits_for_all_work_on_the_gpu(self):
        """Also for what was begun after a release: work on addresses without memory would end the
        context."""
        stream = self.gpu.stream()
        pinned = self.gpu.pinned(12)
        with self.client("busy") as client:
            unit = self.unit(client, optimizer=sgd(1.0))
            client.commit(1)
            shardd.declare_publication({"name": "engine", "keep": 2}, "busy", client)
            shardd.publish("engine", "busy", client)
            with shardd.Live("busy", "engine", self.socket, fixed=True) as live:
                for step in range(2, 6):
                    found = live.acquire()
                    name = next(iter(found))
                    address, was = found[name].address, found[name].tobytes()[:12]
                    if step % 2:
                        live.release()
                    self.gpu.busy(stream, 0.1)
                    self.gpu.copy_out(stream, pinned, address)
                    self.step(client, unit, step)
                    shardd.publish("engine", "busy", client)
                    self.assertEqual(live.acquire().step, step)
                    self.assertTrue(self.gpu.idle(stream))
                    self.assertEqual(bytes(pinned), was)

    def test_a_reader_with_another_gpu_current(self):
        """As in a process that computes on several: the thread's context is on the first one."""
        with self.client("several") as client:
            self.unit(client)
            client.commit(1)
            shardd.declare_publication({"name": "engine", "type": "bf16"}, "several", client)
            self.check_generation("several", client, simulator.UUID.format(1), 1)

    def test_a_generation_that_finds_no_room_at_its_address(self):
        """The reader keeps the one that it has, or has none if that has no room, either."""
        for fails in (2,), (2, 3):
            job = f"no-room-{len(fails)}"
            with self.client(job) as client:
                unit = self.unit(client, optimizer=sgd(1.0))
                self.step(client, unit, 1)
                shardd.declare_publication({"name": "engine", "keep": 2}, job, client)
                shardd.publish("engine", job, client)
                environ = dict(os.environ, PYTHONPATH=str(support.ROOT / "client/python"),
                               SHARDD_SIM_FAIL=",".join(f"cuMemRetainAllocationHandle:{n}"
                                                        for n in fails))
                reader = subprocess.Popen(
                    [sys.executable, "-c", NO_ROOM, self.socket, job, str(len(fails))],
                    env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, text=True)
                self.assertEqual(reader.stdout.readline(), "1\n")
                self.step(client, unit, 2)
                shardd.publish("engine", job, client)
                self.assertEqual(reader.communicate("go\n", timeout=60), ("", ""))
                self.assertEqual(reader.returncode, 0)

    def test_what_publications_on_gpus_have_not_is_refused(self):
        with self.client("refused") as client:
            self.unit(client)
            client.commit(1)
            with self.assertRaisesRegex(shardd.InvalidArgument,
                                        "no device 'cuda:7': this daemon has cuda:0") as error:
                shardd.declare_publication({"name": "engine", "device": "cuda:7"}, "refused",
                                           client)
            self.assertEqual(error.exception.field, "device")

    def test_module_prints_the_devices(self):
        environ = dict(os.environ, PYTHONPATH=str(support.ROOT / "client/python"))
        with self.client("printed"):
            said = subprocess.run([sys.executable, "-m", "shardd", self.socket], env=environ,
                                  capture_output=True, text=True)
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        for number in range(DEVICES):
            self.assertIn(f"device cuda:{number}: ", said.stdout)
            self.assertIn(f"  {simulator.UUID.format(number)}, Simulated GPU {number}, 4 "
                          "multiprocessors", said.stdout)
            self.assertIn("streams ordered by timeline", said.stdout)
        self.assertIn("rank 0 on cuda:0", said.stdout)


NO_ROOM = """
import sys
import shardd

socket, job, none = sys.argv[1], sys.argv[2], sys.argv[3] == "2"
with shardd.Live(job, "engine", socket, fixed=True) as live:
    first = live.acquire()
    name = next(iter(first))
    was = first[name].tobytes()
    print(first.step, flush=True)
    input()
    try:
        live.acquire()
    except shardd.SharddError as error:
        assert "at its address on GPU" in str(error), error
        assert ("has no generation now" in str(error)) is none, error
        assert error.field == ("generation" if none else ""), error
    else:
        raise AssertionError("it was shown")
    if none:
        try:
            live.release()
        except shardd.FailedPrecondition:
            pass
        else:
            raise AssertionError("it has one")
    else:
        assert first[name].tobytes() == was
    second = live.acquire()
    assert second.step == 2 and second[name].tobytes() != was
"""


def number_of_second(rank, world, socket, visible="1"):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    with shardd.connect(socket, device="cuda:1") as client:
        try:
            client.join("second", 1, 0)
        except shardd.FailedPrecondition as error:
            return str(error)
        with client.alloc((4,)) as buffer:
            found = client.device.id, buffer.memory.__dlpack_device__()
            buffer.memory.write(packed(7.0, 4))
            assert floats(buffer.memory) == [7.0] * 4
    return found


def two_ranks(rank, world, socket):
    with shardd.connect(socket, device=f"cuda:{rank}") as client:
        client.join("two", world, rank)
        [unit] = client.register([spec(optimizer=sgd(1.0))])
        if rank == 0:
            with client.alloc((unit.packed_elements,)) as values:
                values.memory.write(packed(2.0, unit.packed_elements))
                unit.init_broadcast(0, values)
        else:
            unit.init_broadcast(0, None)
        unit.gradient().write(packed(1.0 + rank, unit.gradient_elements))  # mean 1.5
        unit.reduce()
        client.step()
        got = floats(unit.tensor(unit.gather(), "b"))
        unit.release()
        client.barrier()
        return client.device.id, got


if __name__ == "__main__":
    support.main()
