"""The connection after the daemon has died: what a program is told of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable

from . import _abi
from .errors import InvalidArgument

_STATES = {1: "lost", 2: "retrying", 3: "back", 4: "given up"}
_OFF = 0xFFFFFFFF  # SHARDD_NO_RECONNECT


@dataclass(frozen=True)
class ConnectionEvent:
    """What has become of the connection to the daemon. ``state``: "lost" (it has broken, and the
    library connects again), "retrying" (nobody answers yet; at most once a second), "back" (join
    again) or "given up" (for good: close the client). ``attempt``: attempts to connect so far;
    ``elapsed``: seconds since the loss was found; ``text``: a sentence."""

    state: str
    attempt: int
    elapsed: float
    text: str


def milliseconds(seconds: float | None) -> int:
    """For struct shardd_options; None: what the environment says, 0: not at all."""
    if seconds is None:
        return 0
    # nan is neither
    if not 0 <= seconds <= 0x7FFFFFFF / 1000:
        raise InvalidArgument(f"reconnect_timeout is {seconds}, must be from 0 to 2147483 seconds",
                              "reconnect_timeout")
    return max(1, int(seconds * 1000)) if seconds else _OFF


def callback(call: Callable[[ConnectionEvent], Any]) -> Any:
    """@call for struct shardd_options; the result must outlive the client. A thread of the library
    calls it; what it raises goes to sys.unraisablehook."""
    def tell(_: Any, event: Any) -> None:
        e = event.contents
        call(ConnectionEvent(_STATES.get(e.state, str(e.state)), e.attempt, e.elapsed_ms / 1000,
                             e.text.decode(errors="replace")))
    return _abi.CONNECTION_CALLBACK(tell)


def say(event: ConnectionEvent, socket: str, who: str) -> None:
    """On standard error, unless the program wants to be told itself. @who: which rank."""
    text = {
        "lost": f"shardd: the connection to the daemon at {socket} has broken{who}; it is tried "
                "again",
        "back": f"shardd: the daemon at {socket} is back with its state after "
                f"{event.elapsed:.1f} s{who}",
        "given up": f"shardd: {event.text}{who}"}.get(event.state)
    if text is not None and sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


__all__ = ["ConnectionEvent", "callback", "milliseconds", "say"]
