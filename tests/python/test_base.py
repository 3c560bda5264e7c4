#!/usr/bin/env python3
"""The base package, which needs no other: against a real daemon."""

import array
import ast
import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import support
from support import ranks

import shardd
from shardd import _abi, _library

try:
    import numpy
except ImportError:
    numpy = None


def floats(memory):
    return memory.view().tolist()


def spec(name="block", **settings):
    return shardd.UnitSpec(name, [
        shardd.TensorSpec("w", (3, 5), shardd.Init.CONSTANT, 2.0),
        shardd.TensorSpec("b", (5,), shardd.Init.CONSTANT, 1.0)], **settings)


def fill(memory, value):
    memory.view()[:] = array.array("f", [value] * memory.elements)


def sgd(lr):
    return shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=lr)


class Abi(unittest.TestCase):
    def test_structs_are_those_of_the_header(self):
        lines = ["#include <shardd/shardd.h>", "#include <stdio.h>", "#include <stddef.h>",
                 "int main(void) {"]
        expected = []
        for name, struct in _abi.STRUCTS.items():
            lines.append(f'printf("%zu\\n", sizeof(struct shardd_{name}));')
            expected.append((name, support_size(struct)))
            for field, _ in struct._fields_:
                lines.append(f'printf("%zu\\n", offsetof(struct shardd_{name}, {field}));')
                expected.append((f"{name}.{field}", getattr(struct, field).offset))
        include = str(support.ROOT / "client" / "include")
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "sizes")
            subprocess.run(["cc", "-I" + include, "-xc", "-", "-o", program], check=True,
                           input="\n".join([*lines, "}"]), text=True)
            said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        self.assertEqual(expected, [(n, int(v)) for (n, _), v in zip(expected, said.split())])

    def test_every_op_of_the_table_is_in_the_library(self):
        _abi.declare(_library.library())

    def test_enums_are_those_of_the_header(self):
        header = "".join(path.read_text() for path in
                         sorted((support.ROOT / "client/include/shardd").glob("*.h")))
        for enum, prefix in ((shardd.Layout, "LAYOUT_"), (shardd.Strategy, ""),
                             (shardd.Profile, "PROFILE_"), (shardd.ReduceOp, ""),
                             (shardd.OptimizerProfile, "OPTIM_"),
                             (shardd.OptimizerWhen, "OPTIM_"), (shardd.ClipProfile, "CLIP_"),
                             (shardd.Init, "INIT_"), (shardd.Lifetime, "")):
            for member in enum:
                self.assertRegex(header, rf"\bSHARDD_{prefix}{member.name} = {member.value}\b")


def support_size(struct):
    import ctypes
    return ctypes.sizeof(struct)


class Errors(unittest.TestCase):
    def test_no_daemon_says_how_to_start_one(self):
        with self.assertRaises(shardd.Unavailable) as caught:
            shardd.connect("/nonexistent/s", connect_timeout=0.05)
        self.assertIn("shardd --socket /nonexistent/s", str(caught.exception))
        self.assertIsInstance(caught.exception, ConnectionError)

    def test_no_library_says_where_it_was_looked_for(self):
        with mock.patch.dict(os.environ, SHARDD_LIBRARY="/nonexistent/lib.so"), \
                self.assertRaises(ImportError) as caught:
            _library._load()
        self.assertIn("/nonexistent/lib.so", str(caught.exception))

    def test_a_library_of_another_version_is_refused(self):
        with mock.patch.object(_library, "VERSION", "0.99.0"), \
                self.assertRaises(shardd.VersionMismatch) as caught:
            _library._load()
        self.assertIn("0.99.0", str(caught.exception))


class Daemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.socket = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def client(self, job):
        client = shardd.connect(self.socket)
        client.join(job, 1, 0)
        return client

    def test_a_training_step(self):
        with self.client("step") as client:
            [unit] = client.register([spec(optimizer=sgd(0.5))])
            self.assertFalse(unit.initialised)
            unit.init_seed(1)
            weights = unit.gather()
            self.assertEqual(floats(unit.tensor(weights, "w")), [[2.0] * 5] * 3)
            self.assertEqual(floats(unit.tensor(weights, "b")), [1.0] * 5)
            self.assertEqual(unit.release(), 0)
            fill(unit.gradient(), 1.0)
            unit.reduce()
            self.assertAlmostEqual(client.clip_grad_norm(1e9), 20 ** 0.5)
            self.assertFalse(client.step().skipped)
            client.commit(7, b"where the data is")
            self.assertEqual(floats(unit.tensor(unit.gather(), "w")), [[1.5] * 5] * 3)
            unit.release()
            me = client.join("step", 1, 0)
            self.assertEqual((me.has_commit, me.step, me.blob), (True, 7, b"where the data is"))

    def test_a_step_with_a_number(self):
        with self.client("numbered") as client:
            [unit] = client.register([spec(optimizer=sgd(0.5))])
            unit.init_seed(1)
            for number in (640, 1280):
                fill(unit.gradient(), 1.0)
                unit.reduce()
                client.step(number=number, blob=b"first" if number == 640 else b"")
            unit.gather()
            unit.release()
            me = client.join("numbered", 1, 0)
            self.assertEqual((me.has_step, me.step, me.has_commit), (True, 1280, False))
            self.assertEqual((me.blob, me.blob_step), (b"first", 640))
            with self.assertRaisesRegex(shardd.InvalidArgument, "must be above .* 1280"):
                client.step(number=1280)
            with self.assertRaisesRegex(shardd.InvalidArgument, "give both"):
                client.step(blob=b"x")

    def test_settings_of_a_step(self):
        with self.client("settings") as client:
            [unit] = client.register([spec(optimizer=sgd(0.5))])
            unit.init_seed(1)
            own = shardd.StepSettings(0.25, units=[unit.id], tensors=[1])
            fill(unit.gradient(), 1.0)
            unit.reduce()
            client.step(0.125, settings=[own])
            self.assertEqual(floats(unit.tensor(unit.gather(), "b")), [0.75] * 5)
            self.assertEqual(floats(unit.tensor(unit.gather(), "w")), [[1.875] * 5] * 3)
            for _ in range(2):
                unit.release()
            client.plan_backward(settings=[shardd.StepSettings(0.5), own])
            fill(unit.gradient(), 1.0)
            unit.reduce()
            with self.assertRaisesRegex(shardd.InvalidArgument, "give them once"):
                client.step(settings=[own])
            client.step()
            self.assertEqual(floats(unit.tensor(unit.gather(), "b")), [0.5] * 5)
            self.assertEqual(floats(unit.tensor(unit.gather(), "w")), [[1.375] * 5] * 3)
            with self.assertRaisesRegex(ValueError, "one unit for each"):
                client.step(settings=[shardd.StepSettings(0.5, tensors=[1])])

    def test_released_memory_raises(self):
        with self.client("released") as client:
            [unit] = client.register([spec()])
            unit.init_seed(1)
            weights = unit.gather()
            part = unit.tensor(weights, "b")
            unit.release()
            self.assertTrue(weights.released and part.released)
            for use in (weights.view, part.view, part.tobytes, lambda: part.address):
                with self.assertRaises(shardd.FailedPrecondition) as caught:
                    use()
                self.assertIn("gathered parameters of unit 'block'", str(caught.exception))

    def test_a_view_keeps_memory_from_being_given_back(self):
        with self.client("kept") as client:
            [unit] = client.register([spec()])
            unit.init_seed(1)
            seen = unit.gather().view()[1:3]
            with self.assertRaises(shardd.InUse):
                unit.release()
            self.assertEqual(seen.tolist(), [2.0, 2.0])  # it is still there
            with self.assertRaises(shardd.InUse):
                client.close()
            del seen
            self.assertEqual(unit.release(), 0)
            kept = unit.gradient().view()
            with self.assertRaises(BufferError):
                unit.reduce()
            kept.release()
            del kept
            fill(unit.gradient(), 0.0)
            unit.reduce()

    def test_gathers_are_counted(self):
        with self.client("counted") as client:
            [unit] = client.register([spec()])
            unit.init_seed(1)
            first = unit.gather()
            self.assertIs(unit.gather(), first)
            self.assertEqual(unit.release(), 1)
            self.assertEqual(first.view()[0], 2.0)
            self.assertEqual(unit.release(), 0)
            self.assertTrue(first.released)

    def test_gathered_memory_is_read_only(self):
        with self.client("readonly") as client:
            [unit] = client.register([spec()])
            unit.init_seed(1)
            with self.assertRaises(TypeError):
                unit.gather().view()[0] = 1.0
            unit.release()

    def test_summoned_memory_is_written_back(self):
        with self.client("summoned") as client:
            [unit] = client.register([spec()])
            unit.init_seed(1)
            fill(unit.tensor(unit.summon(), "b"), 9.0)
            unit.give_back(write=True)
            self.assertEqual(floats(unit.tensor(unit.gather(), "b")), [9.0] * 5)
            unit.release()

    def test_the_state_of_the_optimizer_is_read_and_written(self):
        adam = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.1, betas=(0.5, 0.75))
        with self.client("summoned-state") as client:
            [unit] = client.register([spec(optimizer=adam)])
            unit.init_seed(1)
            fill(unit.gradient(), 2.0)
            unit.reduce()
            client.step()
            for state, value in ((1, 1.0), (2, 1.0)):  # (1 - 0.5) * 2, (1 - 0.75) * 4
                memory, steps = unit.summon_state(state)
                self.assertEqual(steps, 1)
                self.assertEqual(floats(unit.tensor(memory, "b")), [value] * 5)
                fill(unit.tensor(memory, "b"), 6.0 + state)
                unit.give_back(write=True, optimizer_steps=9)
                self.assertTrue(memory.released)
                memory, steps = unit.summon_state(state)
                self.assertEqual((steps, floats(unit.tensor(memory, "b"))), (9, [6.0 + state] * 5))
                unit.give_back()
                if state == 1:
                    self.assertEqual(unit.summon_state(2)[1], 9)
                    unit.give_back(write=True, optimizer_steps=1)
            with self.assertRaises(shardd.InvalidArgument):
                unit.summon_state(3)

    def test_tensors_that_were_not_always_used_have_had_fewer_steps(self):
        adam = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=0.1)
        with self.client("steps-by-tensor") as client:
            [unit] = client.register([spec(optimizer=adam)])
            unit.init_seed(1)
            with self.assertRaises(shardd.InvalidArgument):
                unit.steps()
            for unused in ([], ["b"], ["b"]):
                fill(unit.gradient(), 0.0)
                unit.reduce(unused=unused)
                client.step()
            self.assertEqual(unit.summon_state(1)[1], 3)
            self.assertEqual(unit.steps(), {"w": 3, "b": 1})
            unit.give_back(write=True, optimizer_steps=7, steps={"b": 5})
            self.assertEqual(unit.summon_state(2)[1], 7)
            self.assertEqual(unit.steps(), {"w": 7, "b": 5})
            unit.give_back(write=True, optimizer_steps=7)  # they keep what they had
            unit.summon()
            self.assertEqual(unit.steps(), {"w": 7, "b": 5})
            unit.give_back(write=True, optimizer_steps=8)
            unit.summon()
            self.assertEqual(unit.steps(), {"w": 8, "b": 8})
            with self.assertRaisesRegex(shardd.InvalidArgument, "has no tensor 'c'"):
                unit.give_back(write=True, optimizer_steps=8, steps={"c": 1})

    def test_types_of_elements(self):
        with self.client("types") as client:
            [bf16, fp16] = client.register([
                spec("a", compute_dtype=shardd.Dtype.BF16),
                spec("b", compute_dtype=shardd.Dtype.FP16)])
            for unit in (bf16, fp16):
                unit.init_seed(1)
                self.assertEqual(unit.gather().view()[0], 0x4000)  # 2 in both
                if numpy and unit is fp16:
                    self.assertEqual(unit.gather().numpy()[0], numpy.float16(2))
                    unit.release()
                unit.release()

    def test_buffers_and_collectives(self):
        with self.client("collectives") as client:
            with client.alloc((4,)) as buffer:
                fill(buffer.memory, 3.0)
                client.all_reduce(buffer)
                client.broadcast(buffer, 0)
                self.assertEqual(floats(buffer.memory), [3.0] * 4)
            self.assertTrue(buffer.memory.released)
            [unit] = client.register([spec(buffers=[
                shardd.BufferSpec("mean", (2,), shardd.Dtype.FP64),
                shardd.BufferSpec("count", (), shardd.Dtype.INT64)])])
            mine = unit.buffers()
            mine["count"].view()[0] = 5
            self.assertEqual(unit.buffers()["count"].view()[0], 5)
            self.assertEqual(mine["mean"].view().tolist(), [0.0, 0.0])

    def test_own_optimizer_on_the_shard(self):
        by_trainer = shardd.OptimizerSpec(when=shardd.OptimizerWhen.BY_TRAINER)
        with self.client("own") as client:
            [unit] = client.register([spec(optimizer=by_trainer)])
            unit.init_seed(1)
            fill(unit.gradient(), 1.0)
            unit.reduce()
            shard = client.next_shard()
            self.assertIs(shard.unit, unit)
            self.assertEqual([p[0] for p in unit.pieces()], ["w", "b"])
            params, gradient = shard.params.view(), shard.gradient.view()
            for _, _, n, at in unit.pieces():
                for i in range(at, at + n):
                    params[i] -= 0.25 * gradient[i]
            del params, gradient
            unit.shard_done()
            self.assertTrue(shard.params.released)
            client.step()
            self.assertEqual(floats(unit.tensor(unit.gather(), "b")), [0.75] * 5)
            unit.release()

    def test_tickets(self):
        with self.client("tickets") as client:
            [unit] = client.register([spec()])
            unit.init_seed(1)
            ticket = unit.gather_submit()
            memory = ticket.wait(30)
            self.assertTrue(ticket.done())
            self.assertIs(ticket.wait(), memory)
            unit.release()
            with self.assertRaises(shardd.FailedPrecondition):
                client.submit("reduce", unit.id, finish=lambda r: None).wait()

    def test_a_wait_that_ends_before_the_op(self):
        one, two = shardd.connect(self.socket), shardd.connect(self.socket)
        one.join("late", 2, 0)
        two.join("late", 2, 1)
        ticket = one.submit("barrier", 0, finish=lambda r: None)
        self.assertFalse(ticket.done())
        with self.assertRaises(shardd.WaitTimeout):
            ticket.wait(0.01)
        two.barrier()
        ticket.wait()
        one.leave()
        two.leave()
        one.close()
        two.close()

    def test_a_long_wait_is_reported(self):
        # rank 0 alone in a collective op, the others in a barrier of another library: nothing said
        # so until the deadline
        one, two = shardd.connect(self.socket), shardd.connect(self.socket)
        one.join("stalls", 2, 0)
        two.join("stalls", 2, 1)
        ticket = one.submit("barrier", 0, finish=lambda r: None)
        found = io.StringIO()
        with mock.patch.object(shardd.ticket, "_STALL", 0.2), \
                contextlib.redirect_stderr(found), self.assertRaises(shardd.WaitTimeout):
            ticket.wait(4)
        lines = found.getvalue().splitlines()
        self.assertIn(len(lines), (4, 5), lines)  # after 0.2, 0.4, 0.8, 1.6 and 3.2 s
        self.assertIn("shardd: barrier has not ended after 0 s (rank 0 of job 'stalls'): rank 1 "
                      f"(pid {os.getpid()}, ", lines[0])
        self.assertIn("has not begun Barrier", lines[0])
        self.assertIn("has not begun Barrier", one.blame())
        two.barrier()
        ticket.wait()
        for client in (one, two):
            client.leave()
            client.close()

    def test_a_long_wait_is_told_to_a_function(self):
        told: list[str] = []
        one = shardd.Client(self.socket, on_stall=told.append)
        two = shardd.connect(self.socket)
        with self.assertRaises(shardd.FailedPrecondition):
            one.blame()
        one.join("told", 2, 0)
        two.join("told", 2, 1)
        self.assertEqual(one.blame(), "")
        ticket = one.submit("barrier", 0, finish=lambda r: None)
        found = io.StringIO()
        with mock.patch.object(shardd.ticket, "_STALL", 0.2), \
                contextlib.redirect_stderr(found), self.assertRaises(shardd.WaitTimeout):
            ticket.wait(2.5)
        self.assertEqual(found.getvalue(), "")
        self.assertIn("barrier has not ended after 0 s (rank 0 of job 'told'): rank 1 ", told[0])
        self.assertIn("'told'): `shardctl blame`", told[-1])  # there is no time to ask
        two.barrier()
        ticket.wait()
        for client in (one, two):
            client.leave()
            client.close()

    def test_ctrl_c_ends_a_blocked_call(self):
        # It waited until the op ended, minutes later, because C code does not run the handler.
        one, two = shardd.connect(self.socket), shardd.connect(self.socket)
        one.join("interrupted", 2, 0)
        two.join("interrupted", 2, 1)
        ticket = one.submit("barrier", 0, finish=lambda r: None)
        for timeout in (None, 60.0):
            alarm = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            alarm.start()
            begun = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                ticket.wait(timeout)
            alarm.join()
            self.assertLess(time.monotonic() - begun, 5)
        two.barrier()  # the op went on
        ticket.wait()
        alarm = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        alarm.start()
        with self.assertRaises(KeyboardInterrupt):  # a blocking call, too
            one.barrier()
        alarm.join()
        two.barrier()
        one.leave()
        two.leave()
        one.close()
        two.close()

    def test_what_is_refused_names_the_field(self):
        with self.client("refused") as client:
            with self.assertRaises(shardd.InvalidArgument) as caught:
                client.register([shardd.UnitSpec("", [shardd.TensorSpec("w", (1,))])])
            self.assertIn("name", caught.exception.field)
            self.assertEqual(caught.exception.code, 3)
            with self.assertRaises(shardd.NotFound):
                client.status("nobody")
        other = shardd.connect(self.socket)
        with self.assertRaises(shardd.InvalidArgument) as caught, \
                mock.patch.dict(os.environ):
            os.environ.pop("SHARDD_JOB", None)
            other.join()
        self.assertIn("SHARDD_JOB", str(caught.exception))
        other.close()
        with self.assertRaises(shardd.FailedPrecondition):
            other.status()

    def test_a_job_of_another_shape(self):
        with self.client("shape"):
            other = shardd.connect(self.socket)
            with self.assertRaises(shardd.FailedPrecondition) as caught:
                other.join("shape", 2, 1)
            self.assertIn("world size", str(caught.exception))
            other.close()

    def test_an_older_daemon_is_refused(self):
        with mock.patch.object(shardd.Client, "daemon_version", "0.0.9"), \
                self.assertRaises(shardd.VersionMismatch) as caught:
            shardd.connect(self.socket)
        self.assertIn("0.0.9", str(caught.exception))

    def test_fork_after_connect_is_refused_in_the_child(self):
        with self.client("fork") as client:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                said = ""
                for call in (client.barrier, lambda: shardd.connect(self.socket)):
                    try:
                        call()
                    except shardd.FailedPrecondition as error:
                        said += f"{error}\n"
                client.close()  # does not end the parent's
                os.write(write, said.encode())
                os._exit(0)
            os.waitpid(child, 0)
            said = os.read(read, 2000).decode()
            self.assertIn("this client was connected by process", said)
            self.assertIn("was connected when it forked this one", said)
            os.close(read)
            os.close(write)
            client.barrier()

    def test_a_child_connects_if_the_parent_is_not_connected(self):
        with self.client("closed"):
            pass
        child = os.fork()
        if child == 0:
            with shardd.connect(self.socket) as client:
                client.join("child", 1, 0)
                client.barrier()
            os._exit(0)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_threads(self):
        with self.client("threads") as client:
            units = client.register([spec(f"u{i}") for i in range(4)])
            for unit in units:
                unit.init_seed(1)
            failed = []

            def work(unit):
                try:
                    for _ in range(50):
                        assert unit.gather().view()[0] == 2.0
                        unit.release()
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=work, args=(u,)) for u in units]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(failed, [])

    def test_a_client_is_not_closed_under_a_thread_that_waits(self):
        client = shardd.connect(self.socket)
        client.join("waited-for", 2, 0, op_timeout=1)
        ended = []

        def wait():
            try:
                client.barrier()  # rank 1 never comes
            except shardd.DeadlineExceeded as error:
                ended.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not client._waiting:
            pass
        with self.assertRaisesRegex(shardd.InUse, "another thread waits"):
            client.close()
        thread.join()
        self.assertEqual(len(ended), 1)
        client.close()

    def test_status(self):
        with self.client("asked") as client:
            client.register([spec("seen")])
            [job] = client.status("asked")["jobs"]
            self.assertEqual([u["name"] for u in job["units"]], ["seen"])
            self.assertIn("rank 0 of 1", repr(client))

    def test_module_prints_what_it_sees(self):
        environ = dict(os.environ, PYTHONPATH=str(support.ROOT / "client/python"))
        run = [sys.executable, "-m", "shardd"]
        with self.client("printed"):
            said = subprocess.run([*run, self.socket], env=environ, capture_output=True, text=True)
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        self.assertIn("job printed: RUNNING, 1 of 1 ranks", said.stdout)
        self.assertIn("device host:0", said.stdout)
        gone = subprocess.run([*run, "/nonexistent/s"], env=environ, capture_output=True, text=True)
        self.assertEqual(gone.returncode, 1)
        self.assertIn("Start one", gone.stderr)

    @unittest.skipUnless(numpy, "no numpy")
    def test_numpy_sees_it_without_a_copy(self):
        with self.client("numpy") as client:
            [unit] = client.register([spec(optimizer=sgd(1.0))])
            unit.init_seed(1)
            weights = unit.tensor(unit.gather(), "w")
            for seen in (numpy.asarray(weights), weights.numpy()):
                self.assertEqual(seen.shape, (3, 5))
                self.assertEqual(seen.ctypes.data, weights.address)
                self.assertFalse(seen.flags.writeable)
            del seen
            seen = numpy.from_dlpack(unit.tensor(unit.gradient(), "w"))
            seen[:] = 1.0
            with self.assertRaises(shardd.InUse):
                unit.reduce()
            del seen
            unit.release()
            unit.reduce()

    def test_tensors_that_were_not_used(self):
        with self.client("unused") as client:
            decaying = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=0.5, weight_decay=1.0)
            [unit] = client.register([spec(optimizer=decaying)])
            unit.init_seed(1)  # w is 2, b is 1
            fill(unit.gradient(), 0.0)
            unit.reduce(unused=["b"])
            self.assertEqual(unit.unused(), ["b"])
            client.step()
            weights = unit.gather()
            self.assertEqual(floats(unit.tensor(weights, "w")), [[1.0] * 5] * 3)
            self.assertEqual(floats(unit.tensor(weights, "b")), [1.0] * 5)
            unit.release()
            fill(unit.gradient(), 0.0)
            unit.reduce()
            self.assertEqual(unit.unused(), [])
            fill(unit.gradient(), 0.0)
            with self.assertRaisesRegex(shardd.InvalidArgument, "no tensor 'c'"):
                unit.reduce(unused=["c"])
            unit.reduce(unused=["b", "w"])
            self.assertEqual(unit.unused(), ["w", "b"])

    def test_as_many_unused_tensors_as_a_reply_tells_apart(self):
        tensors = [shardd.TensorSpec(f"t{i}", (1,), frozen=i == 0) for i in range(4100)]
        with self.client("many") as client:
            [unit] = client.register([shardd.UnitSpec("many", tensors)])
            unit.init_seed(1)
            fill(unit.gradient(), 0.0)
            with self.assertRaisesRegex(shardd.InvalidArgument, "only the first 4096"):
                unit.reduce(unused=["t4096"])
            unit.reduce(unused=["t4095", "t1"])
            self.assertEqual(unit.unused(), ["t1", "t4095"])
            client.step(discard=True)
            fill(unit.gradient(), 0.0)
            self.assertTrue(unit.reduce_unused())
            self.assertEqual(unit.unused(), [f"t{i}" for i in range(1, 4100)])

    def test_two_ranks_share_one_gathered_unit(self):
        values = ranks(two_ranks, 2, self.socket)
        self.assertEqual(values[0], values[1])
        self.assertEqual(values[0], ([0.5] * 5, [9.0] * 3))

    def test_a_rank_that_dies_ends_the_others_wait(self):
        self.assertEqual(ranks(survive, 2, self.socket), ["ABORTED", None])


def two_ranks(rank, world, socket):
    os.environ.update(SHARDD_SOCKET=socket, SHARDD_JOB="two", RANK=str(rank), WORLD_SIZE="2")
    with shardd.connect() as client:
        client.join()
        [unit] = client.register([spec(optimizer=sgd(1.0))])
        if rank == 0:
            with client.alloc((unit.packed_elements,)) as values:
                fill(values.memory, 2.0)
                unit.init_broadcast(0, values)
        else:
            unit.init_broadcast(0, None)
        fill(unit.gradient(), 1.0 + rank)  # mean 1.5
        unit.reduce()
        client.step()
        got = floats(unit.tensor(unit.gather(), "b"))
        unit.release()
        with client.alloc((3,)) as buffer:
            fill(buffer.memory, 4.0 + rank)
            client.all_reduce(buffer)
            total = floats(buffer.memory)
        client.barrier()
    return got, total


def survive(rank, world, socket):
    client = shardd.connect(socket)
    client.join("dies", 2, rank)
    client.barrier()
    if rank == 1:
        client.close()  # without leaving
        return None
    try:
        client.barrier()
    except shardd.Aborted as error:
        client.close()
        return error.name
    return "no error"


class Wheel(unittest.TestCase):
    def test_the_package_says_what_the_tree_says(self):
        tree = (support.ROOT / "CMakeLists.txt").read_text()
        project = (support.ROOT / "client/python/pyproject.toml").read_text()
        self.assertIn(f'version = "{shardd.__version__}"', project)
        self.assertRegex(tree, rf"VERSION {shardd.__version__}\b")

    def test_no_module_of_the_base_imports_numpy_or_torch(self):
        code = ("import sys, shardd; "
                "sys.exit(any(m in sys.modules for m in ('numpy', 'torch')))")
        environ = dict(os.environ, PYTHONPATH=str(support.ROOT / "client/python"))
        self.assertEqual(subprocess.run([sys.executable, "-c", code], env=environ).returncode, 0)

    def test_the_python_that_is_claimed(self):
        folder = pathlib.Path(shardd.__file__).parent
        self.assertTrue((folder / "py.typed").exists())
        for path in folder.rglob("*.py"):
            ast.parse(path.read_text(), str(path), feature_version=(3, 9))


if __name__ == "__main__":
    support.main()
