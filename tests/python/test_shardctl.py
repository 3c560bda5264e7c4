#!/usr/bin/env python3
"""What shardctl shows to people, and what shells complete, by a real daemon with trainers."""

import contextlib
import fcntl
import os
import pty
import pwd
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import time
import unicodedata
import unittest

import support

import shardd

CTL = os.path.join(support.BIN_DIR, "shardctl")
LONG = "a-job-with-a-name-that-is-quite-long.experiment-17"
UNIT = "transformer.blöcke.17.aufmerksamkeit.日本語.gewichte"
NOBODY = 65534


def ctl(at, *arguments, code=0, **environment):
    """What it prints."""
    said = subprocess.run([CTL, "--socket", at, *arguments], text=True, capture_output=True,
                          timeout=60, stdin=subprocess.DEVNULL,
                          env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", **environment})
    assert said.returncode == code, f"{arguments}: {said.returncode}: {said.stderr}"
    return said.stdout


def columns(text):
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
               for c in text)


def fork(function, *arguments):
    """The pid of a child that does so; it says on a pipe when it has, and then waits."""
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(said)
            kept = function(*arguments)
            os.write(say, b"x")
            signal.pause()
            del kept
        finally:
            os._exit(1)
    os.close(say)
    with os.fdopen(said, "rb") as pipe:
        assert pipe.read(1) == b"x", "it has failed"
    return child


def member(at, job, world, rank, unit, user=None):
    if user is not None:
        os.setgroups([])
        os.setuid(user)
    client = shardd.connect(at)
    client.join(job, world, rank)
    if world == 1:
        client.register([shardd.UnitSpec(unit, [
            shardd.TensorSpec("w", (3000, 50), shardd.Init.CONSTANT, 2.0)])])
    return client


@contextlib.contextmanager
def members():
    """A daemon with two jobs of long names, and one of another user if this one may start it."""
    with support.daemon() as at, contextlib.ExitStack() as stack:
        children = [fork(member, at, LONG, 1, 0, UNIT), fork(member, at, "b-" + LONG, 2, 1, UNIT)]
        if os.geteuid() == 0:
            os.chmod(os.path.dirname(at), 0o755)
            os.chmod(at, 0o666)
            children.append(fork(member, at, "theirs-" + LONG, 1, 0, UNIT, NOBODY))
        for child in children:
            stack.callback(os.waitpid, child, 0)
            stack.callback(os.kill, child, signal.SIGKILL)
        yield at


VERBS = [["status"], ["jobs"], ["memory"], ["units", LONG], ["sessions"], ["users"], ["ops"],
         ["blame"], ["health"]]


class Tables(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = members()
        cls.at = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_every_table_fits_80_columns(self):
        for verb in VERBS:
            for line in ctl(self.at, *verb, COLUMNS="80").splitlines():
                self.assertLessEqual(columns(line), 80, f"{verb}: {line}")
        self.assertIn("…", ctl(self.at, "jobs", COLUMNS="80"))

    def test_no_number_is_left_out(self):
        for verb in (["units", LONG], ["users"]):
            whole = ctl(self.at, *verb)
            narrow = re.findall(r"[\d.]+", ctl(self.at, *verb, COLUMNS="40"))
            names = re.sub(r"\S*\.\D\S*", "", whole)
            numbers = re.findall(r"(?<!\S)\d[\d.]*(?!\S)", names)
            self.assertGreater(len(numbers), 4)
            for number in numbers:
                self.assertIn(number, narrow, verb)

    def test_nothing_is_cut_in_a_pipe_nor_with_wide(self):
        for verb in VERBS:
            if verb[0] in ("jobs", "memory", "sessions", "blame"):
                self.assertIn(LONG, ctl(self.at, *verb))
                self.assertNotIn(LONG + " ", ctl(self.at, *verb, COLUMNS="40"))
                self.assertIn(LONG, ctl(self.at, *verb, "--wide", COLUMNS="40"))
                self.assertIn(LONG, ctl(self.at, "--wide", *verb, COLUMNS="40"))
        self.assertIn(UNIT, ctl(self.at, "units", LONG))

    def test_a_terminal_has_the_width_that_it_says(self):
        for width in (60, 100):
            text = Terminal([CTL, "--socket", self.at, "--no-color", "jobs"], 24, width).all()
            widest = max(columns(line) for line in text.splitlines())
            self.assertLessEqual(widest, width)
            self.assertGreater(widest, width // 2)

    def test_without_utf8_an_ellipsis_is_three_dots(self):
        text = ctl(self.at, "jobs", COLUMNS="60", LC_ALL="C")
        self.assertIn("...", text)
        self.assertNotIn("…", text)

    @unittest.skipUnless(os.geteuid() == 0, "only root starts trainers of another user")
    def test_users_have_names_and_json_has_numbers(self):
        name = pwd.getpwuid(NOBODY).pw_name
        for verb in ("sessions", "status", "jobs", "users", "memory", "blame"):
            self.assertIn(name, ctl(self.at, verb), verb)
        for verb in ("sessions", "status", "jobs", "memory", "blame", "ops"):
            self.assertNotIn(str(NOBODY), ctl(self.at, verb), verb)
        said = support.shardctl(self.at, "sessions")["sessions"]
        self.assertIn(NOBODY, [session["uid"] for session in said])


FILES = support.ROOT / "deploy/completions"
BASH = """
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shardctl
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete_in_bash(at, *words):
    """What the last of these words may become; nothing may be said beside it."""
    said = subprocess.run(["bash", "-c", BASH, "bash", str(FILES / "shardctl.bash"), CTL, *words],
                          text=True, capture_output=True, check=True, timeout=60,
                          env={"PATH": os.environ["PATH"], "SHARDD_SOCKET": at})
    assert not said.stderr, said.stderr
    return said.stdout.split()


def complete_in_fish(at, line):
    with tempfile.TemporaryDirectory() as home:
        said = subprocess.run(
            ["fish", "-c", 'source $argv[1]; complete -C "$argv[2]"', str(FILES / "shardctl.fish"),
             line], text=True, capture_output=True, check=True, timeout=60,
            env={"PATH": support.BIN_DIR + ":" + os.environ["PATH"], "SHARDD_SOCKET": at,
                 "HOME": home})
    assert not said.stderr, said.stderr
    return [word.split("\t")[0] for word in said.stdout.splitlines()]


def need(test, program):
    """Skip @test where it is not installed; where tests/run installs what it needs, fail."""
    if shutil.which(program) is None:
        why = f"not installed: {program} (deploy/install-deps --test)"
        if os.environ.get("SHARDD_TEST_INSTALLED") == "1":
            test.fail(why)
        test.skipTest(why)


def verbs():
    text = subprocess.run([CTL, "--help"], text=True, capture_output=True, check=True).stdout
    return re.findall(r"^  ([a-z]+) ", text.split("\n\n")[1], re.MULTILINE)


class Completion(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = members()
        cls.at = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_bash_knows_every_verb(self):
        self.assertGreater(len(verbs()), 15)
        self.assertEqual(verbs(), complete_in_bash(self.at, ""))

    def test_every_option_of_a_verb_is_in_its_forms(self):
        """Completion reads the forms of --help, so an option has to be there."""
        said = ctl(self.at, "--help")
        for source in (support.ROOT / "client/ctl").glob("*.c"):
            if source.name == "main.c":  # those before the verb
                continue
            for option in re.findall(r'{ "([a-z-]+)", (?:required|no)_arg', source.read_text()):
                if option not in ("help", "number", "output"):  # -h, -n and -o
                    self.assertRegex(said, rf"--{option}\b", source)

    def test_bash_knows_jobs_options_and_files(self):
        self.assertIn(LONG, complete_in_bash(self.at, "status", ""))
        self.assertEqual([LONG], complete_in_bash(self.at, "job", "delete", "a-"))
        if os.geteuid() == 0:
            self.assertEqual([pwd.getpwuid(NOBODY).pw_name + "/theirs-" + LONG],
                             complete_in_bash(self.at, "units", "nob"))
        self.assertEqual(["applied"], complete_in_bash(self.at, "job", "create", "x", "--resume",
                                                       "=", "ap"))
        self.assertEqual([str(FILES / "shardctl.fish")], complete_in_bash(
            self.at, "trace", "-o", str(FILES / "shardctl.f")))

    def test_without_a_daemon_it_is_silent(self):
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(folder + "/deaf")
            deaf.listen()
            for at in ("/nonexistent/s", folder + "/deaf"):
                begun = time.monotonic()
                self.assertEqual([], complete_in_bash(at, "job", "delete", ""))
                self.assertLess(time.monotonic() - begun, 5)

    def test_fish_and_zsh_parse_their_files(self):
        for shell in ("fish", "zsh"):
            need(self, shell)
            subprocess.run([shell, "-n", str(FILES / f"shardctl.{shell}")], check=True)

    def test_fish_knows_verbs_and_jobs(self):
        need(self, "fish")
        self.assertEqual(sorted(verbs()), sorted(complete_in_fish(self.at, "shardctl ")))
        self.assertEqual([LONG], complete_in_fish(self.at, "shardctl job delete a-"))

    def test_zsh_completes_a_verb_and_a_job(self):
        need(self, "zsh")
        with tempfile.TemporaryDirectory() as home:
            shutil.copy(FILES / "shardctl.zsh", home + "/_shardctl")
            shell = Terminal([shutil.which("zsh"), "-f", "-i"], 24, 200, SHARDD_SOCKET=self.at,
                             HOME=home, PATH=support.BIN_DIR + ":" + os.environ["PATH"])
            shell.send(f"PS1=; fpath=({home} $fpath); autoload -U compinit; compinit -u -D; "
                       "print READ''Y\n".encode())
            shell.expect("READY")
            shell.send(b"shardctl bla\t")
            shell.expect("shardctl blame")
            shell.send(b"a-\t")
            shell.expect(LONG)
            shell.kill()


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command, lines, width, **environment):
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            try:
                fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, width, 0, 0))
                os.execve(command[0], command, {
                    "PATH": os.environ["PATH"], "TERM": "xterm-256color", "LC_ALL": "C.UTF-8",
                    "SHARDD_SOCKET": "/nonexistent", **environment})
            finally:
                os._exit(127)
        self.said = b""

    def resize(self, lines, width):
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, width, 0, 0))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGWINCH)

    def send(self, keys):
        os.write(self._end, keys)

    def read(self, seconds):
        """Return: False at its end."""
        if not select.select([self._end], [], [], seconds)[0]:
            return True
        try:
            got = os.read(self._end, 65536)
        except OSError:  # EIO: nobody has the other side
            return False
        self.said += got
        return bool(got)

    def expect(self, text, seconds=30):
        """Wait until it has printed this since it was last asked. Return: what it has."""
        until = time.monotonic() + seconds
        while text not in (said := self.said.decode(errors="replace")):
            assert self.read(0.1) and time.monotonic() < until, f"no {text}: {said}"
        self.said = b""
        return said

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._end)

    def all(self, seconds=30):
        """All that it prints until it ends, and well."""
        until = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < until, self.said
        os.close(self._end)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert status == 0, f"{status}: {self.said}"
        return self.said.decode()


if __name__ == "__main__":
    support.main()
