"""What is told when the daemon ends and the library connects again."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _abi
from .errors import InvalidArgument

_NEVER = 0xFFFFFFFF  # SHARDD_NO_RECONNECT


class ConnectionState(enum.IntEnum):
    """What has happened to the connection to the daemon."""

    LOST = 1  #: it has broken; the library connects again
    RETRYING = 2  #: nobody answers yet; at most once a second
    BACK = 3  #: connected again: join again
    GIVEN_UP = 4  #: for good: close the client


class ConnectionEvent(NamedTuple):
    """``attempt``: attempts to connect so far. ``elapsed``: seconds since the loss. ``text``: a
    sentence."""

    state: ConnectionState
    attempt: int
    elapsed: float
    text: str


def report(event: ConnectionEvent, who: str = "") -> None:
    """What is told where a program says nothing else: a line for each state but RETRYING."""
    ends = {ConnectionState.LOST: "; connecting again",
            ConnectionState.BACK: f", after {event.elapsed:.1f} s",
            ConnectionState.GIVEN_UP: ""}
    if event.state in ends:
        print(f"shardd: {event.text}{ends[event.state]}{who}", file=sys.stderr, flush=True)


def milliseconds(seconds: float | None) -> int:
    """Of struct shardd_options: 0 leaves it to the environment."""
    if seconds is None:
        return 0
    if not 0 <= seconds < _NEVER:  # nan neither
        raise InvalidArgument(f"reconnect is {seconds}: seconds from 0, or None", "reconnect")
    return min(_NEVER - 1, max(1, int(seconds * 1000))) if seconds else _NEVER


def callback(tell: Callable[[ConnectionEvent], None]) -> Any:
    """For struct shardd_options; to be kept as long as the client."""

    def told(_: int | None, at: Any) -> None:
        event = at.contents
        tell(ConnectionEvent(ConnectionState(event.state), event.attempt, event.elapsed_ms / 1000,
                             event.text.decode()))

    return _abi.OnConnection(told)
