"""The program shardctl: where it is, and what it says."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from . import errors
from .errors import NotFound, SharddError

_BY_NAME = {kind.name: kind for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, SharddError)
            and kind not in (errors.DaemonRestarted, errors.VersionMismatch,
                             errors.WaitTimeout)}


def find(given: str | os.PathLike[str] | None = None) -> str:
    """@given; else in the PATH; else beside the Python that runs; else in the source tree that this
    package lies in. NotFound: nowhere."""
    if given is not None:
        return os.fspath(given)
    here = pathlib.Path(__file__).resolve()
    places = [shutil.which("shardctl"), pathlib.Path(sys.prefix, "bin", "shardctl")]
    if len(here.parents) > 3:
        places.append(here.parents[3] / "build" / "bin" / "shardctl")
    for place in places:
        if place is not None and os.access(place, os.X_OK):
            return os.fspath(place)
    raise NotFound("there is no program shardctl: install shardd, or put its folder into PATH")


def failure(stderr: str, code: int) -> SharddError:
    """What a shardctl that ended with @code has said."""
    line = (stderr.strip().splitlines() or [f"it ended with {code} and said nothing"])[-1]
    name, _, text = line.removeprefix("shardctl: ").partition(": ")
    kind = _BY_NAME.get(name)
    return kind(text) if kind is not None else SharddError(f"shardctl: {line}")


def run(program: str, *words: str) -> Any:
    """What ``shardctl --json WORDS`` prints."""
    done = subprocess.run([program, "--json", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise failure(done.stderr, done.returncode)
    return json.loads(done.stdout)


__all__ = ["failure", "find", "run"]
