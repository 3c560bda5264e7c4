#!/usr/bin/env python3
"""Readers of other users: an inference service of another user reads weights, and nothing else of
the job; what it is not named for does not exist for it."""

import contextlib
import os
import shutil
import subprocess
import threading
import unittest

import support
from test_live import DECLARATION, Trainer, bf16, flat

import shardd
from shardd import _library

REFUSED = []  # what calls of this process have ended with
ALICE, BOB, CAROL, GROUP = 30001, 30002, 30003, 30100


def become(uid, gids):
    _library.library()  # the build need not be open to other users
    os.setgroups(gids)
    os.setgid(uid)
    os.setuid(uid)


def serve(uid, gids, pipe):
    become(uid, gids)
    while request := pipe.recv():
        function, arguments = request
        try:
            pipe.send((True, function(*arguments)))
        except Exception as error:  # the test judges it
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Users:
    """A process for each user and set of groups."""

    def __init__(self):
        self.users = {}

    def ask(self, uid, function, *arguments, gids=()):
        """What @function returns in a process of that user; or its error, as a string."""
        if (uid, gids) not in self.users:
            near, far = support.spawn.Pipe()
            process = support.spawn.Process(target=serve, args=(uid, gids, far))
            process.start()
            self.users[uid, gids] = near, process
        pipe, _ = self.users[uid, gids]
        pipe.send((function, arguments))
        assert pipe.poll(60), (uid, function)
        good, value = pipe.recv()
        return value if good else str(value)

    def kill(self):
        for _, process in self.users.values():
            process.kill()
            process.join(20)

    def close(self):
        for pipe, process in self.users.values():
            pipe.send(None)
            process.join(20)


def train(at, named, go, ready):
    """Alice's job, with publications whose readers are @named by name."""
    become(ALICE, ())
    with Trainer(at, "hers") as trainer:
        for name, more in named.items():
            declaration = {**DECLARATION, **more, "name": name}
            shardd.declare_publication(declaration, "hers", trainer.client)
        trainer.step(1)
        ready.set()
        go.wait(60)


def read(at, name, job=f"{ALICE}/hers"):
    """By lease and mapping, and as a copy."""
    with shardd.Live(job, name, at) as live, live.generation(wait=5) as found:
        mapped = found.step, flat(found["qk"])
    with shardd.Client(at) as client:
        copy = shardd.fetch_generation(name, job, client, wait=5)
    return [mapped, (copy.step, flat(copy["qk"]))]


def publish(at, name):
    with shardd.Client(at) as client:
        return shardd.publish(name, f"{ALICE}/hers", client, timeout=5)


def wait_for_copies(at, name, n):
    """Begin @n calls that wait for a generation, and leave them."""
    client = shardd.Client(at)

    def fetch():
        try:
            shardd.fetch_generation(name, f"{ALICE}/hers", client, wait=60, newer_than=1 << 40)
        except shardd.SharddError as error:
            REFUSED.append(str(error))

    for _ in range(n):
        threading.Thread(target=fetch, daemon=True).start()


def refused():
    return REFUSED


def attacks(at, name, job=f"{ALICE}/hers"):
    """All that a reader must not do, each with its error; the last ones are of what others cannot
    know."""
    said = {}

    def try_to(what, call, *arguments):
        try:
            call(*arguments)
            said[what] = "was done"
        except shardd.SharddError as error:
            said[what] = f"{type(error).__name__}: {error}"

    with shardd.Client(at) as client:
        try_to("drop", shardd.drop_publication, name, job, client)
        try_to("declare", shardd.declare_publication, {"name": "own"}, job, client)
        try_to("redeclare", shardd.declare_publication, {**DECLARATION, "name": name}, job, client)
        try_to("read", lambda: shardd.read_base(job, at))
        try_to("join", lambda: client.join(job, 1, 0))
        try_to("other", lambda: shardd.Live(job, "closed", at))
        try_to("missing", lambda: shardd.Live(job, "missing", at))
        try_to("fetch other", shardd.fetch_generation, "closed", job, client)
        try_to("publish other", shardd.publish, "closed", job, client, 1)
        try_to("no job", lambda: shardd.Live(f"{ALICE}/nothing", "closed", at))
        try_to("bare", lambda: shardd.Live("hers", name, at))
    return said


def ctl(at, *arguments):
    """What shardctl prints for this user, and its exit code."""
    said = subprocess.run([os.path.join(os.path.dirname(at), "shardctl"), "--socket", at,
                           *arguments], text=True, capture_output=True, timeout=60)
    return said.returncode, said.stdout + said.stderr


@unittest.skipUnless(os.geteuid() == 0, "becoming other users needs the superuser")
class Readers(unittest.TestCase):
    NAMED = {
        "closed": {},
        "users": {"readers": {"users": [BOB]}},
        "groups": {"readers": {"groups": [GROUP]}},
        "asks": {"readers": {"users": [BOB], "groups": [GROUP]}, "readers_may_publish": True},
    }

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.at = cls.stack.enter_context(support.daemon("--set", "socket_mode=0666"))
        os.chmod(os.path.dirname(cls.at), 0o755)
        context = support.spawn
        shutil.copy(os.path.join(support.BIN_DIR, "shardctl"), os.path.dirname(cls.at))
        cls.users = Users()
        cls.stack.callback(cls.users.close)
        cls.go, ready = context.Event(), context.Event()
        cls.trainer = context.Process(target=train, args=(cls.at, cls.NAMED, cls.go, ready))
        cls.trainer.start()
        assert ready.wait(60)

    @classmethod
    def tearDownClass(cls):
        cls.go.set()
        cls.trainer.join(20)
        cls.stack.close()

    GOOD = [(1, [bf16(3.0)] * 18)] * 2

    def test_a_named_user_reads(self):
        self.assertEqual(self.users.ask(BOB, read, self.at, "users"), self.GOOD)
        self.assertEqual(self.users.ask(ALICE, read, self.at, "users", "hers"), self.GOOD)

    def test_a_member_of_a_named_group_reads(self):
        ask = self.users.ask
        self.assertEqual(ask(CAROL, read, self.at, "groups", gids=(GROUP, 30101)), self.GOOD)
        self.assertEqual(ask(GROUP, read, self.at, "groups"), self.GOOD)  # its primary group
        self.assertRegex(ask(CAROL, read, self.at, "groups", gids=(30101,)), "there is no job")

    def test_others_learn_nothing(self):
        for name in ("users", "closed", "missing"):
            said = self.users.ask(CAROL, read, self.at, name)
            none = self.users.ask(CAROL, read, self.at, name, f"{ALICE}/nothing")
            self.assertRegex(said, "^NotFound: .*there is no job")
            self.assertEqual(said, none.replace("nothing", "hers"))

    def test_a_reader_does_nothing_else(self):
        said = self.users.ask(BOB, attacks, self.at, "users")
        denied = f"PermissionDenied: .*uid {BOB} may read publication 'users' of job " \
                 f"'{ALICE}/hers' and nothing else"
        self.assertRegex(said.pop("drop"), denied)
        self.assertRegex(said["other"], "^NotFound: .*has no publication 'closed'")
        self.assertEqual(said.pop("other"), said.pop("missing").replace("missing", "closed"))
        for what in ("fetch other", "publish other"):
            self.assertRegex(said.pop(what), "^NotFound: .*has no publication 'closed'", what)
        self.assertIn("declare", said)
        for what, text in said.items():
            self.assertRegex(text, "^(NotFound|PermissionDenied): ", what)
            self.assertNotRegex(text, "has no publication|was done", what)
        # it is all as it was
        self.assertEqual(self.users.ask(BOB, read, self.at, "users"), self.GOOD)

    def test_readers_publish_if_they_may(self):
        self.assertEqual(self.users.ask(BOB, publish, self.at, "asks"),
                         self.users.ask(BOB, publish, self.at, "asks"))
        self.assertRegex(self.users.ask(BOB, publish, self.at, "users"),
                         "^PermissionDenied: .*no readers_may_publish")
        self.assertRegex(self.users.ask(CAROL, publish, self.at, "asks"),
                         "^NotFound: .*there is no job")

    def waiting(self, name):
        found = support.shardctl(self.at, "publications", f"{ALICE}/hers")["publications"]
        return next(p["waiting"] for p in found if p["name"] == name)

    def test_a_few_users_do_not_take_all_streams(self):
        users = Users()
        try:
            for n, (uid, gids) in enumerate(((BOB, ()), (CAROL, (GROUP,))), 1):
                users.ask(uid, wait_for_copies, self.at, "asks", 64, gids=gids)
                support.wait_until(lambda n=n: self.waiting("asks") == 64 * n)
            users.ask(GROUP, wait_for_copies, self.at, "asks", 10)
            support.wait_until(lambda: len(users.ask(GROUP, refused)) == 2)
            self.assertEqual(self.waiting("asks"), 136)
            for error in users.ask(GROUP, refused):
                self.assertIn(f"136 generations are being sent, 8 of them to uid {GROUP}", error)
        finally:
            users.kill()
        support.wait_until(lambda: self.waiting("asks") == 0)

    def test_a_reader_sees_what_it_may_read(self):
        code, said = self.users.ask(BOB, ctl, self.at, "publications", f"{ALICE}/hers")
        rows = [line.split() for line in said.splitlines()[1:]]
        self.assertEqual((code, [(row[0], row[1], row[-1]) for row in rows]),
                         (0, [("users", "3", "no"), ("asks", "3", "yes")]))
        for verb in ("status", "publications", "jobs", "history", "memory", "sessions"):
            _, said = self.users.ask(BOB, ctl, self.at, verb)
            self.assertNotRegex(said, "hers|closed|users|30001", verb)
        code, said = self.users.ask(CAROL, ctl, self.at, "publications", f"{ALICE}/hers")
        self.assertEqual((code, said),
                         (1, f"shardctl: NOT_FOUND: there is no job '{ALICE}/hers'\n"))
        # the owner has the whole table
        _, said = self.users.ask(ALICE, ctl, self.at, "publications")
        self.assertRegex(said, rf"(?m)^ +hers +asks +yes +{BOB} +{GROUP}$")

    def test_the_rule_outlives_the_daemon(self):
        held = self.enterContext(support.held_daemon("--set", "socket_mode=0666"))
        os.chmod(os.path.dirname(held.socket), 0o755)
        trainer = Trainer(held.socket, "kept")
        self.addCleanup(trainer.client.close)
        shardd.declare_publication({**DECLARATION, "readers": {"users": [BOB]}}, "kept",
                                   trainer.client)
        trainer.step(1)
        held.kill()
        self.assertEqual(self.users.ask(BOB, read, held.socket, "engine", "0/kept"), self.GOOD)
        self.assertRegex(self.users.ask(CAROL, read, held.socket, "engine", "0/kept"),
                         "there is no job")

    def test_status_shows_the_rule_to_the_owner(self):
        found = support.shardctl(self.at, "publications")["publications"]
        rules = {p["name"]: (p["reader_users"], p["reader_groups"], p["readers_may_publish"])
                 for p in found}
        self.assertEqual(rules, {"closed": ([], [], False), "users": ([BOB], [], False),
                                 "groups": ([], [GROUP], False), "asks": ([BOB], [GROUP], True)})

    def test_names_are_as_good_as_numbers(self):
        with shardd.Client(self.at) as client:
            shardd.declare_publication(
                {**DECLARATION, "name": "names",
                 "readers": {"users": ["root", str(BOB)], "groups": ["daemon"]}},
                f"{ALICE}/hers", client)
            [found] = [p for p in support.shardctl(self.at, "publications")["publications"]
                       if p["name"] == "names"]
            shardd.drop_publication("names", f"{ALICE}/hers", client)
        self.assertEqual((found["reader_users"], found["reader_groups"]), ([0, BOB], [1]))

    def test_declarations_that_are_wrong(self):
        with shardd.Client(self.at) as client:
            for readers, more, field, text in (
                    ({"users": [2**32 - 1]}, {}, "readers.users[0]", "nobody has"),
                    ({"users": list(range(65))}, {}, "readers.users", "at most 64"),
                    ({"groups": list(range(65))}, {}, "readers.groups", "at most 64"),
                    ({"groups": [-1]}, {}, "readers.groups[0]", "must be an integer"),
                    ({"users": ["nobody-of-this-name"]}, {}, "readers.users[0]", "no user"),
                    ({"groups": ["nobody-of-this-name"]}, {}, "readers.groups[0]", "no group"),
                    ({"people": [1]}, {}, "readers", "people"),
                    ({}, {"readers_may_publish": True}, "readers_may_publish", "nobody")):
                declaration = {**DECLARATION, "name": "wrong", "readers": readers, **more}
                with self.subTest(readers), self.assertRaisesRegex(
                        shardd.InvalidArgument, text) as caught:
                    shardd.declare_publication(declaration, f"{ALICE}/hers", client)
                self.assertTrue(caught.exception.field.endswith(field), caught.exception.field)


if __name__ == "__main__":
    support.main()
