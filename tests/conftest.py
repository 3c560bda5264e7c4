"""`pytest tests/python tests/torch`: a script of these folders is a program that prints TAP, since
most of what it tests runs in processes of several ranks, started once for many cases. Each case is
a test of pytest's, with what was said about it.

    pytest tests/torch/test_states.py --case AdamW     # cases with that in their name
"""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    group = parser.getgroup("shardd")
    group.addoption("--case", action="append", default=[],
                    help="run the cases that have this in their name (may be given again)")
    group.addoption("--tap", action="store_true", help="print the cases as TAP, as they end")


def pytest_pycollect_makemodule(module_path, parent):
    return Script.from_parent(parent, path=module_path)


def pytest_report_teststatus(report, config):
    """In TAP a case has its line already."""
    return (report.outcome, "", "") if config.getoption("tap") and report.when == "call" else None


class Script(pytest.File):
    def collect(self):
        yield Program.from_parent(self, name="all cases")


class Failed(Exception):
    pass


class Program(pytest.Item):
    """One run of a script. The item itself is the program's end: its status, and that all cases it
    had planned were reported."""

    def runtest(self):
        process = subprocess.Popen(
            [sys.executable, "-B", str(self.path), *self.config.getoption("case")], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "SHARDD_SOURCE_DIR": str(ROOT)})
        try:
            self._read(process.stdout)
        finally:
            process.kill()  # has no effect on one that has ended
            code = process.wait()
        if code == 77:
            pytest.skip(self.rest[-1] if self.rest else "")
        if code and not self.failed:
            raise Failed(f"ended with {code}:\n" + "\n".join(self.rest))
        if self.planned is not None and self.reported < self.planned:
            raise Failed(f"of {self.planned} cases only {self.reported} were reported")

    def _read(self, lines):
        self.planned, self.reported, self.failed, self.rest = None, 0, 0, []
        for line in map(str.rstrip, lines):
            if self.config.getoption("tap"):
                self.config.get_terminal_writer().line(line)
            if line.startswith("1.."):
                self.planned = int(line[3:].split()[0])
            elif line.startswith(("ok ", "not ok ")):
                self._case(line)
            else:
                self.rest.append(line.removeprefix("# "))

    def _case(self, line):
        status, _, title = line.partition(" - ")
        title, _, why = title.partition(" # SKIP")
        outcome = "failed" if status.startswith("not") else "skipped" if why else "passed"
        said = "\n".join(self.rest) if outcome == "failed" else None
        if outcome == "skipped":
            said = (str(self.path), 0, f"Skipped: {why.strip()}")
        self.reported += 1
        self.failed += outcome == "failed"
        self.rest.clear()
        self.ihook.pytest_runtest_logreport(report=pytest.TestReport(
            nodeid=f"{self.path.relative_to(self.config.rootpath)}::{title}",
            location=(str(self.path), None, title), keywords={}, outcome=outcome, longrepr=said,
            when="call"))

    def repr_failure(self, excinfo):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, None, f"{self.path.name}: all cases"
