#!/usr/bin/env python3
"""What shardctl shows to people, and what shells complete, by a real daemon with trainers."""

import contextlib
import fcntl
import json
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


def traced(at, job, user):
    client = member(at, job, 1, 0, UNIT, user)
    client.barrier()
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

    def test_sentences_fit_too(self):
        for width in (40, 80):
            for verb in (["plan", "--params", "10T", "--ranks", "1024"], ["slow", LONG],
                         ["events"]):
                code = 1 if verb[0] == "plan" else 0  # it does not fit
                for line in ctl(self.at, *verb, code=code, COLUMNS=str(width)).splitlines():
                    self.assertLessEqual(columns(line), width, f"{verb}: {line}")

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

    def test_json_may_be_behind_the_verb(self):
        for verb in (["status", "--json"], ["units", LONG, "--json"], ["ops", "--json", "-n", "3"]):
            self.assertIsInstance(json.loads(ctl(self.at, *verb)), dict)
        said = subprocess.run([CTL, "--socket", self.at, "run", "-n", "1", "--", "echo", "--json"],
                              text=True, capture_output=True, stdin=subprocess.DEVNULL)
        self.assertIn("--json", said.stdout)

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
        for verb, words in (("create", ("--world-size", "1")), ("drain", ()), ("delete", ())):
            said = ctl(self.at, "job", verb, f"{NOBODY}/named" if words == () else "named", *words,
                       *(("--user", name) if words else ()))
            self.assertIn(f"job {name}/named ", said)
        said = support.shardctl(self.at, "sessions")["sessions"]
        self.assertIn(NOBODY, [session["uid"] for session in said])

    @unittest.skipUnless(os.geteuid() == 0, "only root can be another user")
    def test_a_trace_of_several_has_those_of_others(self):
        """One of two bare names was another user's job: it was left out without a word."""
        for job, user in (("mine", None), ("theirs", NOBODY)):
            child = fork(traced, self.at, job, user)
            self.addCleanup(os.waitpid, child, 0)
            self.addCleanup(os.kill, child, signal.SIGKILL)
        trace = json.loads(ctl(self.at, "trace", "-o", "-", "mine", "theirs"))
        names = {event["args"]["name"] for event in trace["traceEvents"]
                 if event["name"] == "process_name"}
        owner = pwd.getpwuid(NOBODY).pw_name
        self.assertTrue({"job mine", f"job {owner}/theirs"} <= names, names)


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
            text = source.read_text()
            short = "".join(re.findall(r'ctl_getopt\([^"]*"([^"]*)"', text))
            for option, letter in re.findall(
                    r'{ "([a-z-]+)", (?:required|no)_argument, NULL, (\'.\'|\w+)', text):
                letter = letter.strip("'")
                if option == "help" or (letter in short and f"-{letter}" in said):
                    continue  # the letter is there
                self.assertRegex(said, rf"--{option}\b", source)

    def test_the_page_has_every_option_and_no_other(self):
        page = (support.ROOT / "docs/man/shardctl.1").read_text().replace("\\-", "-")
        options = {"complete", "data"}  # read before all others; of charlm, in an example
        for source in (support.ROOT / "client/ctl").glob("*.c"):
            options |= set(re.findall(r'{ "([a-z-]+)", *(?:required|no)_argument',
                                      source.read_text()))
        self.assertGreater(len(options), 60)
        self.assertEqual(sorted(options), sorted(set(re.findall(r"--([a-z][a-z-]*)", page))))

    def test_bash_knows_every_option_of_run(self):
        for option in ("min", "join-grace", "max-restarts", "standalone", "priority",
                       "wait-for-memory", "job"):
            self.assertIn("--" + option, complete_in_bash(self.at, "run", "--" + option[:2]))

    def test_bash_knows_jobs_options_and_files(self):
        self.assertIn(LONG, complete_in_bash(self.at, "status", ""))
        self.assertEqual([LONG], complete_in_bash(self.at, "job", "delete", "a-"))
        if os.geteuid() == 0:
            self.assertEqual([pwd.getpwuid(NOBODY).pw_name + "/theirs-" + LONG],
                             complete_in_bash(self.at, "units", "nob"))
        self.assertEqual(["applied"], complete_in_bash(self.at, "job", "create", "x", "--resume",
                                                       "=", "ap"))
        self.assertEqual(["adam", "adamw"], complete_in_bash(self.at, "plan", "--optimizer", "ad"))
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
            assert self.read(0.1) and time.monotonic() < until, f"no {text}: {said[-2000:]}"
        self.said = b""
        return said

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._end)

    def hang_up(self):
        os.close(self._end)
        os.waitpid(self.pid, 0)

    def all(self, seconds=30):
        """All that it prints until it ends, and well."""
        until = time.monotonic() + seconds
        while self.read(0.1):
            assert time.monotonic() < until, self.said
        os.close(self._end)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert status == 0, f"{status}: {self.said}"
        return self.said.decode()


@contextlib.contextmanager
def training(at, job, ranks):
    """charlm in that many ranks; the pids of these."""
    with subprocess.Popen(
            [CTL, "run", "-n", str(ranks), "--job", job, "--",
             os.path.join(support.BIN_DIR, "charlm"), "--data", __file__, "--steps", "1000000"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "SHARDD_SOCKET": at}) as run:
        try:
            def steps():
                jobs = support.shardctl(at, "jobs")["jobs"]
                return any(j["name"] == job and j["step"] > 3 for j in jobs)
            support.wait_until(steps)
            status = support.shardctl(at, "status", job)
            yield [rank["pid"] for rank in status["jobs"][0]["ranks"]]
        finally:
            run.kill()


def row(text, first):
    """The words of the row of a table that begins with this word."""
    return next(line.split() for line in text.splitlines()
                if re.match(rf" *{first} +([A-Z]|\d+%)", line))


class Top(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.context = contextlib.ExitStack()
        cls.at = cls.context.enter_context(support.daemon())
        cls.pids = cls.context.enter_context(training(cls.at, "alpha", 2))
        ctl(cls.at, "job", "create", "beta", "--world-size", "3")

    @classmethod
    def tearDownClass(cls):
        cls.context.close()

    def top(self, lines, width, *arguments, **environment):
        return Terminal([CTL, "--socket", self.at, "top", "-d", "0.2", *arguments], lines, width,
                        **environment)

    def test_batch_prints_frames_with_rates(self):
        text = ctl(self.at, "top", "-b", "-n", "2", "-d", "0.3")
        self.assertEqual(2, text.count("SERVING shardd"))
        alpha = row(text, "alpha")
        self.assertEqual("RUNNING", alpha[1])
        self.assertGreater(float(alpha[3]), 0, "steps in a second")
        self.assertIn("2 jobs, 2 trainers", text)
        self.assertEqual(["0.00", "0/3"], [row(text, "beta")[3], row(text, "beta")[7]])
        for pid in self.pids:
            self.assertIn(str(pid), text)

    def test_a_stopped_rank_makes_the_other_one_wait(self):
        os.kill(self.pids[1], signal.SIGSTOP)
        try:
            support.wait_until(lambda: all(
                rank["process_state"] == ("T" if rank["rank"] else "S") and bool(rank["op"]) !=
                bool(rank["rank"]) for rank in support.shardctl(
                    self.at, "blame", "alpha")["jobs"][0]["ranks"]))
            text = ctl(self.at, "top", "-b", "-n", "1", "-d", "0.5", "alpha")
        finally:
            os.kill(self.pids[1], signal.SIGCONT)
        self.assertEqual("100%", row(text, "0")[1], text)
        self.assertIn(row(text, "0")[2], "SR")  # a rank that waits looks up now and then
        self.assertEqual(["0%", "T"], row(text, "1")[1:3], text)
        self.assertEqual(["0.00", "50%"], row(text, "alpha")[3:5], text)

    def test_what_it_refuses(self):
        for arguments, code in ((["-d", "0"], 2), (["-d", "x"], 2), (["-d", "nan"], 2),
                                (["-s", "size"], 2), (["-n", "0"], 2), (["a", "b"], 2), ([], 2),
                                (["-b", "nobody"], 1)):
            ctl(self.at, "top", *arguments, code=code)
        ctl(self.at, "--json", "top", "-b", code=2)
        ctl("/nonexistent/s", "top", "-b", code=3)

    def test_keys_choose_sort_explain_and_end(self):
        screen = self.top(24, 100)
        screen.expect("q quit")
        screen.send(b"m")
        screen.expect("memory")
        screen.send(b"h")
        screen.expect("choose a job")
        screen.send(b"hj")
        screen.expect("EMPTY")  # the ranks of beta, which nobody has joined
        screen.send(b"q")
        self.assertIn("\x1b[?1049l", screen.all())  # the terminal is as it was

    def test_an_interrupt_and_a_hangup_end_it(self):
        screen = self.top(24, 100)
        screen.expect("q quit")
        screen.send(b"\x03")
        self.assertIn("\x1b[?1049l", screen.all())
        for ignore in ("", "trap '' HUP;"):  # what ignores the signal sees the terminal's end
            screen = Terminal(["/bin/sh", "-c", ignore + 'exec "$@"', "sh", CTL, "--socket",
                               self.at, "top"], 24, 100)
            screen.expect("q quit")
            screen.hang_up()

    def test_colours_are_off_when_they_are_not_wanted(self):
        for wanted, arguments, environment in ((True, [], {}), (False, ["--no-color"], {}),
                                               (False, [], {"NO_COLOR": "1"})):
            screen = Terminal([CTL, *arguments, "--socket", self.at, "top", "-n", "1"], 24, 100,
                              **environment)
            self.assertEqual(wanted, "\x1b[36m" in screen.all())

    def test_windows_of_any_size(self):
        screen = self.top(24, 100)
        screen.expect("EPOCH")
        for lines, width in ((24, 40), (5, 20), (2, 10), (1, 1)):
            screen.resize(lines, width)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                self.assertTrue(screen.read(0.05), screen.said[-2000:])
        screen.said = b""
        screen.resize(50, 200)
        screen.expect("EPOCH")  # for which no other was wide enough
        screen.send(b"q")
        screen.all()

    def test_a_terminal_that_cannot_is_refused(self):
        screen = self.top(24, 80, TERM="dumb")
        while screen.read(1):
            pass
        self.assertIn(b"with -b it prints text", screen.said)


class ExitCodes(unittest.TestCase):
    """Those of the page, section EXIT STATUS."""

    @classmethod
    def setUpClass(cls):
        cls.context = support.daemon()
        cls.at = cls.context.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.context.__exit__(None, None, None)

    def test_verbs(self):
        for code, arguments in ((0, ["status"]), (0, ["health"]),
                                (0, ["drain", "--help"]), (1, ["status", "nobody"]),
                                (1, ["job", "delete", "nobody"]),
                                (1, ["checkpoint", "verify", "/nonexistent"]), (2, []),
                                (2, ["nonsense"]), (2, ["status", "no-such-user/j"]),
                                (2, ["trace", "-o", "/nonexistent/file"])):
            ctl(self.at, *arguments, code=code)
        subprocess.run([CTL, "--complete", "no-such-verb", ""], check=True)
        ctl(self.at, "cordon")
        ctl(self.at, "job", "create", "x", "--world-size", "1", code=3)
        ctl(self.at, "uncordon")
        for verb in ("status", "health", "top", "units"):
            ctl("/nonexistent/s", verb, *(["-b"] if verb == "top" else []),
                *(["x"] if verb == "units" else []), code=3)
        ctl("/" + "long/" * 40, "status", code=2)

    def test_output_that_cannot_be_written(self):
        for arguments in (["status"], ["--json", "jobs"], ["health"], ["--help"],
                          ["jobs", "--help"], ["top", "-b", "-n", "1", "-d", "0.1"]):
            with open("/dev/full", "w") as full:
                said = subprocess.run([CTL, "--socket", self.at, *arguments], stdout=full,
                                      stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
            self.assertEqual(1, said.returncode, arguments)
            self.assertEqual(1, said.stderr.count(b"cannot write the output"), arguments)
        ctl(self.at, "trace", "--all", "-o", "/dev/full", code=1)

    def test_output_that_is_closed(self):
        """The connection to the daemon used to be file 1, and to get what was printed."""
        for arguments in (["status"], ["--json", "ops"], ["--help"], ["health"]):
            for closed in ((1,), (0, 1), (0, 1, 2)):
                said = subprocess.run(
                    [CTL, "--socket", self.at, *arguments], stderr=subprocess.PIPE, timeout=60,
                    stdin=subprocess.DEVNULL,
                    preexec_fn=lambda closed=closed: [os.close(fd) for fd in closed])
                self.assertEqual(1, said.returncode, (arguments, closed))
                if 2 not in closed:
                    self.assertIn(b"cannot write the output", said.stderr)
        with open("/dev/null", "w") as null:
            subprocess.run([CTL, "--socket", self.at, "status"], stdout=null, check=True,
                           stdin=null, preexec_fn=lambda: os.close(2))
            said = subprocess.run([CTL, "--socket", self.at, "status", "nobody"], stdout=null,
                                  stdin=null, preexec_fn=lambda: os.close(2))
        self.assertEqual(1, said.returncode)

    def test_errors_cannot_control_the_terminal(self):
        bad = "/nonexistent/\x9b31m\u202e\x1b[31m"
        for arguments in (["checkpoint", "verify", bad], ["--socket", bad, "status"]):
            said = subprocess.run([CTL, "--socket", self.at, *arguments], text=True, timeout=60,
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                  encoding="utf-8")
            self.assertIn("/nonexistent/?31m??[31m", said.stderr)

    def test_run(self):
        for code, command in ((0, "true"), (7, "exit 7"), (137, "kill -9 $$"), (143, "kill $$")):
            ctl(self.at, "run", "-n", "2", "--", "sh", "-c", command, code=code)
        ctl(self.at, "run", "-n", "1", "--", "/nonexistent/command", code=127)

    def test_help_and_page_have_them(self):
        page = (support.ROOT / "docs/man/shardctl.1").read_text()
        page = page.split(".SH EXIT STATUS")[1].split(".SH")[0]
        for code in "0123":
            self.assertIn(f".B {code}\n", page)
        for arguments in (["--help"], ["health", "--help"]):
            said = ctl(self.at, *arguments).split("exit code:")[1]
            for code in ("0 ", "1 ", "2 ", "3 ", "127 ", "128+"):
                self.assertIn(code, said)


class Events(unittest.TestCase):
    def test_a_path_cannot_control_the_terminal(self):
        with tempfile.TemporaryDirectory() as root, \
                support.daemon("--set", f"checkpoint_roots={root}") as at, training(at, "j", 1):
            folder = root + "/\x9b31m\u202e\x1b[31m"
            os.mkdir(folder)
            ctl(at, "checkpoint", "policy", "j", folder, "--every-steps", "1")
            os.rename(folder, root + "/gone")
            support.wait_until(lambda: "CHECKPOINT_FAILED" in ctl(at, "events"))
            said = ctl(at, "events")
            self.assertIn("/?31m??[31m", said)
            self.assertNotRegex(said, "[\x9b\u202e\x1b]")


class TopAlone(unittest.TestCase):
    def test_an_interrupt_ends_it_though_the_daemon_hangs(self):
        with support.daemon() as at:
            support.wait_until(lambda: subprocess.run([CTL, "--socket", at, "health"],
                                                      capture_output=True).returncode == 0)
            pid = json.loads(ctl(at, "--json", "status"))["pid"]
            os.kill(pid, signal.SIGSTOP)
            try:
                top = subprocess.Popen([CTL, "--socket", at, "top", "-b"],
                                       stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
                time.sleep(0.5)  # it asks, and gets no answer for 5 s
                began = time.monotonic()
                top.send_signal(signal.SIGINT)
                self.assertEqual(b"", top.communicate(timeout=60)[1])
                self.assertEqual(0, top.returncode)
                self.assertLess(time.monotonic() - began, 3)
            finally:
                os.kill(pid, signal.SIGCONT)

    def test_it_says_that_the_daemon_is_gone_and_finds_the_next(self):
        with tempfile.TemporaryDirectory() as folder:
            at = folder + "/s"
            command = [os.path.join(support.BIN_DIR, "shardd"), "--socket", at, "--backend", "host"]
            with contextlib.ExitStack() as stack:
                def start():
                    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
                    stack.callback(daemon.wait)
                    stack.callback(daemon.kill)
                    support.wait_until(lambda: os.path.exists(at))
                    return daemon
                first = start()
                screen = Terminal([CTL, "--socket", at, "top", "-d", "0.2"], 24, 100)
                batch = subprocess.Popen([CTL, "--socket", at, "top", "-b", "-d", "0.2", "-n", "5"],
                                         stdout=subprocess.PIPE, text=True)
                screen.expect(f"pid {first.pid}")
                self.assertIn("SERVING", batch.stdout.readline())
                first.kill()
                first.wait()
                os.unlink(at)
                screen.expect("NO ANSWER")
                while "NO ANSWER" not in batch.stdout.readline():
                    pass
                said = batch.communicate(timeout=60)[0]
                self.assertEqual(3, batch.returncode, said)
                second = start()
                screen.expect(f"pid {second.pid}")
                screen.send(b"q")
                screen.all()


class Denied(unittest.TestCase):
    @unittest.skipUnless(os.geteuid() == 0, "only the superuser is several users")
    def test_a_user_who_may_not_connect_sees_who_may(self):
        with support.daemon("--set", "socket_mode=0640") as at:
            os.chmod(os.path.dirname(at), 0o755)
            os.chown(at, 0, 1234)
            done = subprocess.run([CTL, "--socket", at, "health"], text=True, capture_output=True,
                                  user=65534, group=65534, extra_groups=[])
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn(f"{at} (mode 0640, group 1234): Permission denied", done.stderr)


if __name__ == "__main__":
    support.main()
