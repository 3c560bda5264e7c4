"""The dashboard with answers that a test makes: what a daemon says only after long, or never."""

import contextlib
import copy
import functools
import http.server
import json
import pathlib
import threading
import time
import urllib.parse
import urllib.request

from dashboard import HOSTILE, look_at, must_be_quiet, running, the_browser

# The page asks twenty times as often here.
FASTER = (("POLL_MS = 2000", "POLL_MS = 100"), ("UNITS_MS = 4000", "UNITS_MS = 200"))
PAGE = pathlib.Path(__file__).resolve().parents[2] / "daemon/http/page"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
NONE = "\u2013"  # the dash of the page


class Stage:
    """A server of the page. answers: by path, a value for JSON, a callable of the parameters that
    returns one, or an int: that status of HTTP."""

    def __init__(self, answers):
        self.answers = copy.deepcopy(answers)
        self.asked = []  # path and parameters, in order
        self.tokens = []
        stage = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                stage.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def answer(self, request):
        at = urllib.parse.urlsplit(request.path)
        if at.path.startswith("/api/"):
            name = at.path.rpartition("/")[2]
            params = dict(urllib.parse.parse_qsl(at.query))
            self.asked.append((name, params))
            self.tokens.append(request.headers.get("Authorization"))
            value = self.answers.get(name, 404)
            value = value(params) if callable(value) else value
            if isinstance(value, int):
                self.send(request, value, "application/json", b'{"message": "not on this stage"}')
            else:
                self.send(request, 200, "application/json", json.dumps(value).encode())
        else:
            file = PAGE / (at.path[1:] or "index.html")
            text = file.read_text()
            for old, new in FASTER if file.name == "page.js" else ():
                assert old in text, old
                text = text.replace(old, new)
            self.send(request, 200, TYPES[file.suffix], text.encode())

    @staticmethod
    def send(request, code, kind, body):
        request.send_response(code)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.send_header(
            "Content-Security-Policy",
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
            "img-src 'self' data:",
        )
        request.end_headers()
        request.wfile.write(body)

    @property
    def status(self):
        return self.answers["status"]

    def wait(self, n, name="status"):
        """Until the page has asked n times more: all but the last answer has been drawn."""
        until = time.monotonic() + 20
        wanted = self.count(name) + n
        while self.count(name) < wanted:
            if time.monotonic() > until:
                raise AssertionError(f"the page has not asked {n} times for {name}")
            time.sleep(0.02)

    def count(self, name):
        return sum(asked == name for asked, _ in self.asked)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@functools.cache
def real_answers():
    """What a daemon says of a job with two ranks, four units and a commit."""
    with running() as daemon:
        daemon.train("letters", 2)
        look_at(daemon)
        the_browser.wait_text("#main-content", "2 of 2", "RUNNING")
        the_browser.wait(
            "return /[0-9]/.test(document.querySelector('#jobs td:nth-child(4)').innerText);"
        )
        paths = {
            "status": "status?units=no",
            "ops": "ops?job=letters&limit=200",
            "units": "units?job=letters",
            "events": "events",
            "history": "history",
        }
        answers = {}
        for name, path in paths.items():
            with urllib.request.urlopen(f"{daemon.url}api/v1/{path}") as answer:
                answers[name] = json.load(answer)
    [job] = answers["status"]["jobs"]
    calm = {"op": "", "op_on": "", "op_waits_for": "", "process_state": "S", "idle_us": 1000}
    for rank in job["ranks"]:
        rank.update(calm)
    job.update(blame=[], stall=None, last_error="", ops_failed=0)
    return answers


@contextlib.contextmanager
def on_stage(sections="jobs,job", end="", **answers):
    """The page with the answers of a real daemon, which the test changes."""
    stage = Stage({**real_answers(), **answers})
    try:
        the_browser.look(1280, 900)
        the_browser.open("about:blank")
        the_browser.open(f"{stage.url}#open={sections}{end}")
        the_browser.wait("return document.querySelector('#all');")
        yield stage
        must_be_quiet()
    finally:
        stage.close()


def with_jobs(stage, *names):
    """Copies of the real job with other names."""
    jobs = [{**copy.deepcopy(real_answers()["status"]["jobs"][0]), "name": n} for n in names]
    stage.status["jobs"] = jobs
    return jobs


def another_job_is_shown():
    """Nothing of one job is shown as another's when the page goes over to that one."""
    real = real_answers()

    def only(job, answer):
        return lambda params: answer if params["job"].endswith(f"/{job}") else 503

    with on_stage("jobs,timeline,units", ops=only("a", real["ops"])) as stage:
        stage.answers["units"] = only("a", real["units"])
        _, b = with_jobs(stage, "a", "b")
        the_browser.wait("return document.querySelector('.timeline');")
        the_browser.run("document.querySelector('#unit-map').focus();")
        the_browser.press("End")
        the_browser.wait_text("#units .details", "Gathered by")
        b["stall"] = {"wait_us": 5e6, "text": "it waits", "culprit": None}
        the_browser.wait_text("#timeline", "Timeline of job b", "not on this stage")
        assert not the_browser.run("return document.querySelector('.timeline, #unit-map');")
        b["stall"] = None
        the_browser.wait_text("#units", "job a", "Point at a cell")
        assert "not on this stage" not in the_browser.text("#timeline")


def zoom_while_ops_come():
    """A timeline that was zoomed shows the ops that come."""
    real = real_answers()["ops"]
    begun = time.monotonic()
    base = max(o["finished_us"] for o in real["ops"]) + 1000000

    def ops(_):
        now = base + int((time.monotonic() - begun) * 1e6)
        of = {**real["ops"][-1], "state": "DONE", "waits_for": ""}
        return {
            **real,
            "now_us": now,
            "ops": [
                {
                    **of,
                    "id": at,
                    "announced_us": at * 10000,
                    "active_us": at * 10000,
                    "started_us": at * 10000 + 4000,
                    "finished_us": at * 10000 + 8000,
                }
                for at in range((now - 1000000) // 10000, now // 10000)
            ],
        }

    with on_stage("timeline", ops=ops) as stage:
        the_browser.wait("return document.querySelector('.timeline g');")
        the_browser.run("document.querySelector('.timeline').focus();")
        the_browser.press("+", "+", "+")
        stage.wait(6, "ops")
        assert the_browser.run("return document.querySelectorAll('.timeline g').length;") > 5
        assert "125 ms shown" in the_browser.text("#timeline"), the_browser.text("#timeline")
        the_browser.run("document.querySelector('[aria-label=Earlier]').click();")
        the_browser.wait_text("#timeline", "held")
        stage.wait(6, "ops")
        assert the_browser.run("return document.querySelectorAll('.timeline g').length;") > 5


def page_with_an_error():
    """An error of the page is told, ends nothing else, and goes when the answer is good again."""
    with on_stage("jobs,devices") as stage:
        the_browser.wait_text("#facts", "SERVING")
        good = stage.status["devices"], stage.status["comms"]
        stage.status["comms"] = [None]
        the_browser.wait_text("#devices", "This part cannot be shown")
        the_browser.wait_text("#jobs", "letters")
        stage.status["devices"] = None
        the_browser.wait_text("#connection", "This page has an error", "shardctl status")
        stage.status["devices"], stage.status["comms"] = good
        the_browser.wait("return !document.querySelector('#connection').innerText;")
        the_browser.wait_text("#devices", "works")
        assert any("TypeError" in entry["message"] for entry in the_browser.console())


def other_version():
    """A page of another version of the daemon loads itself again."""
    with on_stage() as stage:
        the_browser.wait_text("#facts", "SERVING")
        the_browser.run("window.old = true;")
        stage.wait(2)
        assert the_browser.run("return window.old;")
        stage.status["version"] = "99.9"
        the_browser.wait("return !window.old;")
        the_browser.wait_text("#facts", "Version 99.9")


def tokens_with_any_characters():
    """A token in the address is taken as it is; one that cannot be sent does not lock the tab."""
    with on_stage(end="&token=a+b/c%3D=") as stage:
        the_browser.wait_text("#facts", "SERVING")
        assert stage.tokens[-1] == "Bearer a+b/c==", stage.tokens
        the_browser.run("location.hash = '#open=jobs&token=caf%C3%A9';")
        the_browser.wait_text("#token-form", "not ASCII")
        the_browser.run("document.querySelector('#token-input').focus();")
        the_browser.press(*"ключ", "Enter")
        the_browser.wait_text("#token-form", "not ASCII")
        the_browser.press(*"plain", "Enter")
        the_browser.wait("return document.querySelector('#token-form').hidden;")
        stage.wait(2)
        assert stage.tokens[-1] == "Bearer plain", stage.tokens
        the_browser.run("sessionStorage.clear();")


def times_of_an_old_answer():
    """Times in an answer do not move while no other one comes."""
    stall = {"wait_us": 600e6, "text": "it waits", "culprit": None}
    with on_stage() as stage:
        stage.status["jobs"][0]["stall"] = stall
        first = the_browser.wait_text("#problems", "STALLED since", "(10 min 0 s)")
        stage.answers["status"] = 503
        the_browser.wait_text("#connection", "No answer since")
        first = the_browser.text("#problems")
        time.sleep(1.2)
        stage.wait(2)
        assert the_browser.text("#problems") == first, (first, the_browser.text("#problems"))


def old_errors():
    """An op that failed long ago is a note, one that failed just now is wrong."""
    with on_stage() as stage:
        job = stage.status["jobs"][0]
        job.update(ops_failed=2, last_error="X: ops differ at 3", last_error_us=600e6)
        text = the_browser.wait_text("#problems", "2 ops failed, the last one 10 min 0 s ago")
        assert "Note" in text and "Wrong" not in text and "same program" not in text, text
        job["last_error_us"] = 3e6
        text = the_browser.wait_text("#problems", "Wrong", "do not run the same program")


def rate_of_a_resumed_job():
    """The first commit of a job that resumes, and a checkpoint that is loaded, are no steps."""
    with on_stage() as stage:
        job = stage.status["jobs"][0]
        job.update(has_commit=False, step=0)
        job["counts"]["commits"] = 0
        stage.wait(2)
        for jump in (100000, 900000):
            job.update(has_commit=True, step=jump)
            job["counts"]["commits"] += jump == 100000
            for _ in range(4):
                stage.wait(1)
                job["counts"]["commits"] += 1
                job["step"] += 1
            stage.wait(1)
            rate = the_browser.run(
                "return document.querySelector('#jobs tbody tr').children[4].innerText;"
            )
            assert rate.endswith(" /s") and 0 < float(rate.split()[0]) < 50, rate
            highest = the_browser.text("#job figcaption")
            assert float(highest.split("highest ")[1].split()[0]) < 100, highest


def job_and_its_deleted_namesake():
    """A deleted job and the one that has its name now are two jobs."""
    with on_stage("jobs,job,timeline") as stage:
        dead, _, _ = with_jobs(stage, "twin", "twin", "other")
        dead["state"] = "DELETED"
        state = "return document.querySelector('#jobs tbody').children[%d].innerText;"
        current = "return document.querySelectorAll('#jobs tr[aria-current]').length;"
        press = "document.querySelectorAll('#jobs tbody button')[%d].click();"
        the_browser.wait_text("#timeline", "of job twin", "Keys")
        assert "DELETED" in the_browser.run(state % 0)
        the_browser.run(press % 0)
        the_browser.wait_text("#job", "This job is deleted")
        the_browser.wait_text("#timeline", "has no ops")
        assert the_browser.run(current) == 1
        the_browser.run(press % 1)
        the_browser.wait_text("#job", "RUNNING")
        stage.wait(3)
        assert the_browser.run(current) == 1
        assert the_browser.run("return document.querySelectorAll('#jobs tbody tr').length;") == 3


def focus_stays():
    """The focus stays where it is when rows and notes before it come, go or change places."""
    with on_stage() as stage:
        jobs = with_jobs(stage, "a", "b", "c", "d")
        at = "return document.activeElement.innerText;"
        rows = "return [...document.querySelectorAll('#jobs tbody tr')].map((r) => r.innerText[0])"
        the_browser.wait(f"{rows}.join('') === 'abcd';")
        the_browser.run("document.querySelectorAll('#jobs tbody button')[2].focus();")
        for names in ("bcd", "dcb", "cbd", "abcd", "dbac", "c"):
            stage.status["jobs"] = [j for n in names for j in jobs if j["name"] == n]
            the_browser.wait(f"{rows}.join('') === '{names}';")
            assert the_browser.run(at) == "c", names
        the_browser.run("document.querySelector('#job .scroll').focus();")
        for error in ("it went wrong", ""):
            jobs[2].update(last_error=error, last_error_us=1)
            stage.wait(2)
            assert the_browser.run("return document.activeElement.className;") == "scroll", error


def private_job():
    """Of another user's private job the page says what is hidden, and from whom."""
    with on_stage("jobs,job,timeline,units") as stage:
        [job] = with_jobs(stage, "secret")
        hidden = {"ranks": [], "units": [], "memory": [], "counts": None, "world_size": 0}
        job.update(is_private=True, uid=4711, **hidden)
        for part in ("job", "timeline", "units"):
            the_browser.wait_text(f"#{part}", "Job secret is private and belongs to user 4711")
        before = stage.count("ops"), stage.count("units")
        stage.wait(4)
        assert before == (stage.count("ops"), stage.count("units"))


def stopped_and_nobody_waits():
    """A stopped process that holds nobody up is a warning, and says so."""
    with on_stage() as stage:
        rank = stage.status["jobs"][0]["ranks"][1]
        rank["process_state"] = "T"
        text = the_browser.wait_text(
            "#problems", "Warning", "rank 1", "No rank waits for it", f"kill -CONT {rank['pid']}"
        )
        assert "Wrong" not in text, text
        text = the_browser.wait_text("#job", "JOINED, stopped")
        assert "holding others up" not in text, text


def ranks_that_nobody_measured():
    """What a rank has waited is not 0 where nobody says how long that was."""
    shares = """
        return [...document.querySelectorAll('#job tbody tr')].map((row) =>
            [row.children[6].innerText, row.children[7].innerText]);"""
    with on_stage() as stage:
        job = stage.status["jobs"][0]
        job["ranks"][1]["state"] = "EMPTY"
        the_browser.wait_text("#job", "EMPTY")
        stage.wait(2)
        assert the_browser.run(shares) == [["0 %", "0 %"], [NONE, NONE]], the_browser.run(shares)
        node = {"leads": False, "error": ""}
        job["nodes"] = [
            {**node, "name": "n1", "first": 0, "ranks": 1, "here": True},
            {**node, "name": "n2", "first": 1, "ranks": 1, "here": False},
        ]
        job["ranks"][1].update(state="ELSEWHERE", waited_us=0, late_us=0, node="n2")
        stage.wait(3)
        assert the_browser.run(shares) == [["0 %", NONE], [NONE, NONE]], the_browser.run(shares)
        assert "Node n1\nrank 0, here" in the_browser.text("#job")


def one_and_many():
    """Sentences fit their numbers, and end with one full stop."""
    with on_stage("jobs,job,sessions") as stage:
        stage.status["log_dropped"] = 1
        stage.status["devices"][0]["quarantined_bytes"] = 1
        stage.status["sessions"][0]["ring"].update(submissions=1, full=1)
        stall = {"wait_us": 5e6, "text": "who waits? it waits.", "culprit": None}
        stage.status["jobs"][0]["stall"] = stall
        text = the_browser.wait_text(
            "#problems", "1 log line was dropped.", "1 B of device host:0 is in quarantine"
        )
        assert "Who waits? it waits." in text and ".." not in text, text
        the_browser.wait_text("#sessions", "1 submission, full 1 time")
        stage.status["log_dropped"] = 2
        the_browser.wait_text("#problems", "2 log lines were dropped.")


def events_that_come():
    """Only new events are asked for, and those of another run of the daemon take their place."""
    event = {"nth": 1, "unix_ms": time.time() * 1000, "uid": 0, "rank": 1, "pid": 7, "epoch": 1}
    event.update(kind="DIED", job="j")
    answers = {"run": 5, "next": 3}

    def events(params):
        first = "after" not in params or int(params["run"]) != answers["run"]
        ids = [1, 2] if first else range(int(params["after"]) + 1, answers["next"])
        list_ = [{**event, "id": i, "text": f"{HOSTILE} {answers['run']}.{i}"} for i in ids]
        return {"events": list_, "last": answers["next"] - 1, "run": answers["run"]}

    with on_stage("events", events=events) as stage:
        now = time.strftime("%H:%M:%S", time.localtime(event["unix_ms"] / 1000))
        text = the_browser.wait_text("#events", "5.1", "5.2", "DIED", "1, pid 7", "0/j", HOSTILE)
        assert now in text, (now, text)
        assert text.index("5.2") < text.index("5.1"), text
        answers["next"] = 4
        the_browser.wait_text("#events", "5.1", "5.3")
        stage.wait(2, "events")
        assert stage.asked[-1] == ("events", {"after": "3", "run": "5"}), stage.asked[-1]
        answers.update(run=6, next=3)
        text = the_browser.wait_text("#events", "6.1", "6.2")
        assert "5." not in text, text
        the_browser.run("document.querySelector('#only-job').click();")
        stage.wait(2, "events")
        assert stage.asked[-1][1]["job"] == "0/letters", stage.asked[-1]


def states_of_a_culprit():
    """What the kernel says of the process that holds a job up is explained."""
    culprit = {**dict.fromkeys(("node", "text", "last_op"), ""), "rank": 1, "pid": 77, "holds": 1}
    with on_stage() as stage:
        for state, text in (
            ("R", "endless loop"),
            ("S", "waits for something other than shardd"),
            ("D", "cannot be interrupted"),
            ("t", "A debugger holds the process"),
            ("Z", "is dead"),
        ):
            stage.status["jobs"][0]["stall"] = {
                "wait_us": 5e6,
                "text": "it waits",
                "culprit": {**culprit, "process_state": state, "wait_us": 5e6},
            }
            the_browser.wait_text("#problems", "rank 1 (pid 77) holds it up", text)


def the_line_and_groups():
    """A job that waits for memory, and what the members of a group use together."""
    with on_stage("jobs,users") as stage:
        [job] = stage.status["jobs"]
        job["memory_wait"] = {"position": 2, "ranks": 1, "bytes": 3 << 30, "waited_ms": 5000}
        job["memory_wait"].update(left_ms=90000, why="2 jobs are before it")
        kinds = {"name": "state_bytes", "used": 95 << 20, "peak": 96 << 20, "refused": 4}
        stage.status["groups"] = [
            {"gid": 1234, "members": 2, "usage": [{**kinds, "limit": 100 << 20}]}
        ]
        the_browser.wait_text(
            "#problems",
            "Job letters waits for memory: number 2 in the line, for 3.0 GiB.",
            "2 jobs are before it.",
            "It gives up in 90 s.",
            "The members of group 1234 are near a limit: state_bytes 95.0 MiB of 100 MiB together.",
        )
        the_browser.wait_text("#users", "@1234 state_bytes", "95.0 MiB of 100 MiB")


def a_sentence_each():
    """What else can be wrong has a sentence each."""
    with on_stage() as stage:
        status, job = stage.status, stage.status["jobs"][0]
        status["devices"][0]["lost"] = "it fell off the bus"
        status["cluster"] = {"name": "c", "node": "n1", "state": "JOINING", "why": "no store"}
        status["users"][0]["usage"][0].update(used=95, limit=100)
        job["state"] = "TORN"
        text = the_browser.wait_text(
            "#problems",
            "Job letters is TORN",
            "Device host:0 is lost: it fell off the bus",
            "Node n1 is no member of cluster c (JOINING): no store.",
            "User 0 is near a limit: connections 95 of 100.",
        )
        assert text.startswith("4 problems") or "4 problems" in the_browser.text("#live"), text
        status["users"][0]["usage"][0]["refused"] += 1
        the_browser.wait_text("#problems", "User 0 is refused requests")


def ended_jobs():
    """Jobs that have ended are listed with the cause, and hidden parts are said to be hidden."""
    ended = {"id": 2, "name": "j", "uid": 0, "began_unix_s": 1000, "ended_unix_s": 1090}
    ended.update(end="CRASHED", peak_bytes=1 << 20, is_private=False, world_size=4, has_commit=True)
    ended.update(step=1234, ops_total=7, torn=True, last_error=HOSTILE)
    hidden = {**ended, "id": 1, "uid": 4711, "is_private": True, "world_size": 0, "last_error": ""}
    hidden.update(has_commit=False, torn=False, end="DELETED")
    ended["ended_unix_s"] += 86400
    ended["began_unix_s"] += 86400
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(86400 + 1090))
    with on_stage("ended", history={"jobs": [ended, hidden], "next": 1}):
        text = the_browser.wait_text("#ended", HOSTILE, "TORN", "none came back", "1\u202f234", day)
        assert "90 s" in text, text
        assert "hidden: private" in text and "These are the latest 2 jobs" in text, text


def a_publication(**given):
    """What a daemon says of one without generations."""
    counts = ("made", "made_us", "made_bytes", "skipped", "dropped", "failed", "deltas", "changed")
    more = ("delta_bytes", "compared", "not_deltas", "delta_percent", "readers", "streams")
    waits = ("buffer_waits", "buffer_waited_us", "delta_us")
    none = dict.fromkeys((*counts, *more, *waits), 0)
    return {
        **none,
        "name": "engine",
        "bytes": 1 << 20,
        "every_steps": 1,
        "waits_for_buffer": False,
        "why": "",
        "generations": [],
        **given,
    }


def publications_that_go_wrong():
    """Lag, skipped and failed generations are marked; one that is being made is not the newest."""

    def generation(number, step, state="READY", leases=()):
        return {"number": number, "step": step, "state": state, "leases": list(leases)}

    lease = {"pid": 4711, "held_ms": 90000, "streams": False, "sent_bytes": 0}
    stream = {"pid": 4712, "held_ms": 1000, "streams": True, "sent_bytes": 3 << 20}
    cell = "return document.querySelectorAll('#publications tbody tr')[%d].children[%d].%s;"
    with on_stage("jobs,publications") as stage:
        for job in with_jobs(stage, "a", "b"):
            job["step"] = 20
        a, b = stage.status["jobs"]
        a["publications"] = [
            a_publication(
                generations=[
                    generation(9, 20, "MAKING"),
                    generation(8, 17, leases=[lease, stream]),
                ],
                made=5,
                made_us=5000,
                skipped=2,
                buffer_waits=3,
                buffer_waited_us=4000000,
                waits_for_buffer=True,
                readers=1,
                delta_percent=10,
                not_deltas=4,
            ),
        ]
        b["publications"] = [a_publication(failed=1, why=f"no memory for {HOSTILE}")]
        text = the_browser.wait_text("#publications", "8", "4711", "90 s", "a stream, 3", HOSTILE)
        assert "4 not made" in text, text
        assert "waiting for a buffer, 3 waits for a buffer (4.0 s)" in text, text
        row = [the_browser.run(cell % (0, i, "innerText")) for i in range(12)]
        assert row[0:2] == ["a", "engine"] and row[2:4] == ["8", "17"], row
        assert "3" in row[4] and row[5:7] == ["1", "2"] and "5 made" in row[7], row
        the_browser.wait_text("#problems", "Job a: publication engine is 3 steps behind",
                              "2 generations skipped", "Job b: the last generation", HOSTILE)
        for at in ((0, 4), (0, 7), (1, 7)):
            assert "badge" in the_browser.run(cell % (*at, "innerHTML")), at
        assert "badge" not in the_browser.run(cell % (1, 4, "innerHTML"))
        row = [the_browser.run(cell % (1, i, "innerText")) for i in range(12)]
        assert row[2:5] == [NONE] * 3, row
        a["publications"][0]["generations"][1]["step"] = 19  # on time
        the_browser.wait(
            "return !document.querySelectorAll('#publications tbody tr')[0].children[4]"
            ".innerHTML.includes('badge');"
        )
        a["publications"][0]["generations"][1]["leases"] = [lease] * 203
        the_browser.wait_text("#publications", "3 leases more")
        a["publications"] = b["publications"] = []
        the_browser.wait_text("#publications", "No job has a publication")


# Together they take some seconds; LONG_TESTS are for the long form.
TESTS = [
    another_job_is_shown,
    page_with_an_error,
    other_version,
    tokens_with_any_characters,
    old_errors,
    private_job,
    publications_that_go_wrong,
    stopped_and_nobody_waits,
    one_and_many,
    events_that_come,
    the_line_and_groups,
]
LONG_TESTS = [
    zoom_while_ops_come,
    times_of_an_old_answer,
    rate_of_a_resumed_job,
    job_and_its_deleted_namesake,
    focus_stays,
    ranks_that_nobody_measured,
    states_of_a_culprit,
    a_sentence_each,
    ended_jobs,
]
