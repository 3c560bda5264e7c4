"""Find and load libshardd.so, once per process."""

from __future__ import annotations

import ctypes as C
import operator
import os
import pathlib
import sys
import threading
from typing import Any

from . import _abi
from ._version import VERSION
from .errors import InvalidArgument, VersionMismatch, from_code

NAME = "libshardd.so.0"

_lock = threading.Lock()
_loaded: C.CDLL | None = None


def candidates() -> list[str]:
    """Where the library is looked for, in this order.

    ``$SHARDD_LIBRARY`` alone, if it is set. Else ``_lib`` in this package, where a wheel of
    deploy/wheel has it; ``build/lib`` of the source tree that this package lies in; ``lib`` beside
    the Python that runs; and what the system's loader finds.
    """
    given = os.environ.get("SHARDD_LIBRARY")
    if given:
        return [given]
    here = pathlib.Path(__file__).resolve()
    places = [here.parent / "_lib" / NAME]
    if len(here.parents) > 3:
        places.append(here.parents[3] / "build" / "lib" / NAME)
    places.append(pathlib.Path(sys.prefix) / "lib" / NAME)
    return [str(place) for place in places if place.exists()] + [NAME]


def same_version(a: str, b: str) -> bool:
    """Are they compatible? Until 1.0, major and minor must be equal."""
    return a.split(".")[:2] == b.split(".")[:2]


def _load() -> C.CDLL:
    tried = []
    for path in candidates():
        try:
            lib = C.CDLL(path)
            _abi.declare(lib)
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
            continue
        version = lib.shardd_version().decode()
        if not same_version(version, VERSION):
            raise VersionMismatch(
                f"{path} is version {version} and this package is {VERSION}: install them from "
                "the same source tree, or set SHARDD_LIBRARY to the other library")
        return lib
    raise ImportError(
        "libshardd.so was not found: build shardd (deploy/quickstart, or cmake) or install it, "
        "or set SHARDD_LIBRARY to the file; tried " + "; ".join(tried))


def library() -> C.CDLL:
    """The library, with its functions declared. ImportError: it is not found."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def check(result: int, error: _abi.Error, call: str) -> int:
    """Raise if @result is negative. Return: @result."""
    if result >= 0:
        return result
    raise from_code(result, error.text.decode(errors="replace"), error.field.decode(),
                    error.domain.decode(), error.native, call)


def call(name: str, *arguments: Any) -> int:
    """Call ``shardd_NAME``; a negative result becomes an exception."""
    error = _abi.Error()
    return check(getattr(library(), "shardd_" + name)(*arguments, C.byref(error)), error, name)


def milliseconds(seconds: float, name: str = "wait") -> int:
    """As the library takes it: at most 49 days. @name: of the argument."""
    if not seconds >= 0:
        raise InvalidArgument(f"{name} is {seconds!r}; it is a number of seconds, 0 or more", name)
    return 0 if not seconds else max(1, int(min(seconds * 1000, 0xffffffff)))


def number(value: int, name: str) -> int:
    """@value, which must be a whole number of 64 bits. @name: of the argument."""
    if not hasattr(value, "__index__") or not 0 <= operator.index(value) < 1 << 64:
        raise InvalidArgument(f"{name} is {value!r}; it is a number from 0 to 2**64 - 1", name)
    return operator.index(value)
