"""Progress on a terminal: of saving, loading and initialising what takes a while.

Only where stderr is a terminal, only on rank 0, and only if it takes longer than an instant.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

DELAY = 0.5  # seconds before anything is shown
_EVERY = 0.1  # seconds between two pictures
_WIDTH = 24


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


class Bar:
    """A bar of bytes. A context manager: after it the line is there to stay, or, if nothing
    was shown, nothing."""

    def __init__(self, what: str, total: int, rank: int) -> None:
        """@what: "saving"... @total: bytes that will be done. @rank: this process's."""
        self.what, self.total, self.done = what, total, 0
        self._unit = ""
        self._on = rank == 0 and total > 0 and sys.stderr is not None and sys.stderr.isatty()
        self._began = time.monotonic()
        self._drawn = 0.0
        self._shown = False

    def add(self, nbytes: int, unit: str) -> None:
        """@nbytes more are done, of @unit."""
        self.done, self._unit = self.done + nbytes, unit
        now = time.monotonic()
        if self._on and now - self._began >= DELAY and now - self._drawn >= _EVERY:
            self._drawn = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        part = min(1.0, self.done / self.total)
        full = int(part * _WIDTH)
        rate = self.done / max(1e-9, now - self._began)
        # \x1b[K: what a longer line before it had behind goes.
        sys.stderr.write(
            f"\r{self.what} [{'#' * full}{'.' * (_WIDTH - full)}] {100 * part:3.0f}%  "
            f"{_size(self.done)} of {_size(self.total)}, {_size(rate)}/s  {self._unit[:40]}\x1b[K")
        sys.stderr.flush()
        self._shown = True

    def close(self) -> None:
        """The end, of all or before it. Twice is allowed."""
        if self._shown:
            self._unit = ""
            self._draw(time.monotonic())
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._on = self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


__all__ = ["Bar"]
