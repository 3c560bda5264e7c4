#!/usr/bin/env python3
"""Bases without PyTorch: files that load_base reads or refuses, the end of a base, of a daemon."""

import contextlib
import ctypes as C
import io
import json
import os
import struct
import subprocess
import tempfile
import time
import unittest

import held
import support

import shardd
from shardd import _abi, _library
from shardd import load as load_command

VALUES = {"a.weight": ("F32", [4, 4], bytes(range(64))), "b.bias": ("BF16", [3], b"abcdef"),
          "c.weight": ("F16", [2, 2], b"12345678"), "d.weight": ("F32", [2], b"87654321")}


def packed(tensors):
    head, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape,
                      "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    said = json.dumps(head).encode()
    return struct.pack("<Q", len(said)) + said + data


def write(folder, name, content):
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(content)
    return path


def ctl(socket, *arguments):
    return subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "--socket", socket,
                           *arguments], text=True, capture_output=True, timeout=60)


def jobs(socket):
    return json.loads(ctl(socket, "--json", "status").stdout)["jobs"]


def contents(reader):
    return {name: memory.tobytes() for name, memory in reader.items()}


EXPECTED = {name: raw for name, (_, _, raw) in VALUES.items()}


# A process of its own loads, so that nothing of the loader is mapped here.
def loader(socket, path):
    with contextlib.redirect_stdout(io.StringIO()):
        return load_command.main(["base", path, "--socket", socket])


def loads_and_dies(socket, path):
    """Before its commit."""
    shardd.Client.commit = lambda *_: os._exit(1)
    shardd.load_base("base", path, socket)


def load(socket, path):
    process = support.spawn.Process(target=loader, args=(socket, path))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def read(socket):
    """What a new reader sees, once the daemon is there."""
    with shardd.read_base("base", socket, connect_timeout=30) as reader:
        return contents(reader)


class Bases(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = write(self.folder, "m.safetensors", packed(VALUES))

    def test_each_tensor_has_its_bytes_at_a_line_and_is_charged_once(self):
        with support.daemon() as socket:
            load(socket, self.folder)
            with shardd.read_base("base", socket) as reader:
                self.assertEqual(contents(reader), EXPECTED)
                for t in reader.tensors.values():
                    self.assertTrue(t.frozen)
                self.assertEqual(reader["a.weight"].address % 64, 0)
            [job] = jobs(socket)
            self.assertEqual((job["lifetime"], job["used_bytes"]), ("BASE", 4096))

    def test_a_bad_file_is_refused_and_loads_nothing(self):
        good = packed(VALUES)
        length = struct.unpack("<Q", good[:8])[0]
        short = dict(VALUES, **{"b.bias": ("BF16", [3], b"abcd")})
        bad = {
            "empty": (b"", "its header would have 0 bytes"),
            "long": (struct.pack("<Q", 1 << 60) + good[8:], "its header would have 1152921504606"),
            "json": (good[:8] + b"x" * length + good[8 + length:], "its header is not JSON"),
            "list": (struct.pack("<Q", 2) + b"[]", "its header is not a JSON object"),
            "cut": (good[:-1], "tensor 'd.weight' has 8 bytes"),
            "small": (packed(short), "tensor 'b.bias' has 4 bytes in the file, where its shape"),
            "type": (packed({"q": ("I8", [1], b"1")}), "tensor 'q'.*is I8: a base has F32, BF16"),
            "nothing": (packed({"q": ("F32", [0], b"")}), r"'q' has shape \[0\], no elements"),
            "none": (packed({}), "a base needs at least one tensor"),
            "fields": (struct.pack("<Q", 8) + b'{"a":{}}', "tensor 'a' has no dtype"),
            "negative": (packed({"q": ("F32", [-1], b"1234")}), "tensor 'q' has a negative"),
        }
        with support.daemon() as socket:
            for name, (content, text) in bad.items():
                with self.subTest(name), self.assertRaisesRegex(shardd.InvalidArgument, text):
                    shardd.load_base("base", write(self.folder, name, content), socket)
            with self.assertRaisesRegex(shardd.InvalidArgument, "'a.weight' is there twice"):
                shardd.load_base("base", [self.path, self.path], socket)
            with self.assertRaises(FileNotFoundError):
                shardd.load_base("base", self.folder + "/other", socket)
            self.assertEqual(jobs(socket), [])
            os.remove(self.path)
            with self.assertRaisesRegex(shardd.InvalidArgument, r"has no \*.safetensors"):
                shardd.load_base("base", self.folder, socket)

    def test_it_outlives_the_daemon_and_its_readers_do_not_see_its_end(self):
        with held.daemon() as one:
            load(one.socket, self.path)
            with shardd.read_base("base", one.socket) as reader:
                one.kill()
                with support.spawn.Pool(1) as pool:  # this process is not to be known
                    self.assertEqual(pool.apply(read, (one.socket,)), EXPECTED)
                # the new daemon does not know the first reader, which has said nothing since
                self.assertEqual([len(job["readers"]) for job in jobs(one.socket)], [0])
                refused = ctl(one.socket, "job", "delete", "base")
                self.assertIn("base 'base' is used by processes that have it mapped",
                              refused.stderr)
                self.assertEqual(ctl(one.socket, "job", "delete", "--force", "base").returncode, 0)
                time.sleep(1.5)  # it looks each second at what it keeps
                self.assertEqual(contents(reader), EXPECTED)
                self.assertEqual([(job["state"], job["used_bytes"]) for job in jobs(one.socket)],
                                 [("DELETED", 4096)])

    def test_what_a_loader_that_died_has_left_is_loaded_anew(self):
        other = write(self.folder, "other", packed({"a.weight": ("F32", [1], b"1234")}))
        with support.daemon() as socket:
            process = support.spawn.Process(target=loads_and_dies, args=(socket, self.path))
            process.start()
            process.join(60)
            self.assertEqual([job["has_commit"] for job in jobs(socket)], [False])
            load(socket, other)
            with shardd.read_base("base", socket) as reader:
                self.assertEqual(contents(reader), {"a.weight": b"1234"})

    def test_its_time_counts_from_its_last_use(self):
        with support.daemon() as socket:
            shardd.load_base("base", self.path, socket, ttl=1)
            with shardd.read_base("base", socket):
                time.sleep(2.5)
                self.assertEqual([job["state"] for job in jobs(socket)], ["IDLE"])

    def test_a_base_is_refused_where_it_cannot_be_one(self):
        with support.daemon() as socket, shardd.Client(socket) as client:
            with self.assertRaisesRegex(shardd.InvalidArgument, "world_size is 2: a base has one"):
                client.join("base", 2, 0, shardd.Lifetime.BASE)
            client.join("job", 1, 0)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "lifetime EPHEMERAL, not BASE"):
                shardd.load_base("job", self.path, socket)

    def test_only_a_complete_base_is_read(self):
        with support.daemon() as socket, shardd.Client(socket) as client:
            with self.assertRaisesRegex(shardd.NotFound, "there is no job 'base'"):
                shardd.read_base("base", socket)
            client.join("job", 1, 0)
            [unit] = client.register([shardd.UnitSpec("root", [shardd.TensorSpec("w", (4,))])])
            unit.init_seed(1)
            client.commit(1)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "no base.*python -m shardd.lo"):
                shardd.read_base("job", socket)
            with shardd.Client(socket) as loads:
                loads.join("base", 1, 0, shardd.Lifetime.BASE)
                with self.assertRaisesRegex(shardd.FailedPrecondition, "is not loaded yet"):
                    shardd.read_base("base", socket)
            self.assertEqual([len(job["readers"]) for job in jobs(socket)], [0, 0])

    def test_a_loader_adds_nothing_after_its_commit(self):
        """It could register units, which no reader had. An alias of a tensor without a value was
        listed, with zeros."""
        with support.daemon() as socket, shardd.Client(socket) as loads:
            loads.join("base", 1, 0, shardd.Lifetime.BASE)

            def register(*units):
                return loads.register([shardd.UnitSpec(name, [
                    shardd.TensorSpec(tensor, (4,), shardd.Init.CONSTANT, 2.0, frozen=True, **more)
                    for tensor, more in tensors.items()]) for name, tensors in units])

            register(("empty", {"w": {}}))
            register(("root", {"tied": {"alias_of": "w", "alias_unit": "empty"}, "x": {}}))[
                0].init_seed(1)
            loads.commit(0)
            with self.assertRaisesRegex(shardd.FailedPrecondition, "it gets no further units"):
                register(("late", {"w": {}}))
            with shardd.read_base("base", socket) as reader:
                self.assertEqual(sorted(reader), ["x"])

    def test_its_readers_are_named_until_they_end(self):
        with support.daemon() as socket:
            load(socket, self.path)
            with shardd.read_base("base", socket) as reader:
                self.assertEqual([r["pid"] for r in jobs(socket)[0]["readers"]], [os.getpid()])
                refused = ctl(socket, "job", "delete", "base")
                self.assertIn(f"is used by 1 reader, such as pid {os.getpid()}", refused.stderr)
                self.assertIn(f"{os.getpid()}", ctl(socket, "status").stdout)
                self.assertTrue(reader["a.weight"].view().readonly)
                with self.assertRaisesRegex(shardd.NotFound, "'base' has no tensor 'other'"):
                    _ = reader["other"]
            self.assertEqual(jobs(socket)[0]["readers"], [])
            with self.assertRaisesRegex(shardd.FailedPrecondition, "is closed"):
                _ = reader["a.weight"]
            self.assertEqual(ctl(socket, "job", "delete", "base").returncode, 0)

    def test_a_client_reads_many_bases_up_to_a_bound(self):
        with support.daemon() as socket, shardd.Client(socket) as client:
            found = C.POINTER(_abi.Base)()
            for i in range(16):
                shardd.load_base(f"base{i}", self.path, socket)
            shardd.load_base("another", self.path, socket)
            for _ in range(2):  # one that it has is none more
                for i in range(16):
                    _library.call("base_open", client.handle, b"base%d" % i, C.byref(found))
                    _library.library().shardd_base_close(C.cast(found, C.c_void_p))
            with self.assertRaisesRegex(shardd.ResourceExhausted, "reads 16 bases"):
                _library.call("base_open", client.handle, b"another", C.byref(found))
            self.assertEqual(ctl(socket, "job", "delete", "--force", "base3").returncode, 0)
            _library.call("base_open", client.handle, b"another", C.byref(found))
            _library.library().shardd_base_close(C.cast(found, C.c_void_p))

    @unittest.skipUnless(os.geteuid() == 0, "only root can be another user")
    def test_another_user_does_not_see_it(self):
        with support.daemon("--set", "socket_mode=0666") as socket:
            load(socket, self.path)
            os.chmod(os.path.dirname(socket), 0o755)
            for name in ("base", "0/base"):
                said, say = os.pipe()
                child = os.fork()
                if child == 0:
                    try:
                        os.setgroups([])
                        os.setresgid(65534, 65534, 65534)
                        os.setresuid(65534, 65534, 65534)
                        shardd.read_base(name, socket)
                    except BaseException as error:
                        os.write(say, f"{type(error).__name__}: {error}".encode())
                    finally:
                        os._exit(0)
                os.close(say)
                os.waitpid(child, 0)
                with os.fdopen(said) as pipe:
                    self.assertIn(f"NotFound: base_open: NOT_FOUND: there is no job '{name}'",
                                  pipe.read())


if __name__ == "__main__":
    support.main()
