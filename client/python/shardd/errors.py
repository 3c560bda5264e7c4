"""Errors, one class for each code of shardd.h.

Every error that the library or the daemon reports is a :class:`SharddError` with the
code's name, the field of the request that was wrong (where there is one), the sentence and
the native number of the operating system, CUDA or NCCL (0 where there is none).
"""

from __future__ import annotations


class SharddError(Exception):
    """An op or call failed.

    Attributes: ``code`` (the number of gRPC's status codes, positive), ``name``
    ("INVALID_ARGUMENT"...), ``text`` (one sentence), ``field`` (which argument, or ""),
    ``domain`` ("shardd", "os", "cuda", "nccl"), ``native`` (that domain's number, or 0).
    """

    code = 2
    name = "UNKNOWN"

    def __init__(self, text: str, field: str = "", domain: str = "shardd", native: int = 0,
                 call: str = "") -> None:
        super().__init__(text)
        self.text, self.field, self.domain = text, field, domain
        self.native, self.call = native, call

    def advised(self, what: str) -> SharddError:
        """The same error with advice: @what to do."""
        return type(self)(f"{self.text}; {what}", self.field, self.domain, self.native, self.call)

    def __str__(self) -> str:
        where = f"{self.call}: " if self.call else ""
        field = f" ({self.field})" if self.field else ""
        return f"{where}{self.name}{field}: {self.text}"


class Cancelled(SharddError):
    """The caller cancelled the op."""

    code, name = 1, "CANCELLED"


class InvalidArgument(SharddError, ValueError):
    """A value that is not allowed; ``field`` names it."""

    code, name = 3, "INVALID_ARGUMENT"


class DeadlineExceeded(SharddError, TimeoutError):
    """The op's deadline has passed; the text says what was waited for."""

    code, name = 4, "DEADLINE_EXCEEDED"


class WaitTimeout(DeadlineExceeded):
    """Only the wait ended: the op continues and its ticket stays valid."""


class NotFound(SharddError, LookupError):
    """No such job, unit, group or buffer."""

    code, name = 5, "NOT_FOUND"


class AlreadyExists(SharddError):
    """It exists already."""

    code, name = 6, "ALREADY_EXISTS"


class PermissionDenied(SharddError, PermissionError):
    """Another user's job, or a socket that this user may not use."""

    code, name = 7, "PERMISSION_DENIED"


class ResourceExhausted(SharddError, MemoryError):
    """Memory, a quota or a limit is exhausted; the text says who holds what."""

    code, name = 8, "RESOURCE_EXHAUSTED"


class FailedPrecondition(SharddError, RuntimeError):
    """Not allowed in this state; the text names the state."""

    code, name = 9, "FAILED_PRECONDITION"


class Aborted(SharddError, RuntimeError):
    """A rank died or left: the epoch has ended, join again."""

    code, name = 10, "ABORTED"


class DaemonRestarted(Aborted):
    """The daemon was restarted and has the job's state; this client is connected to it again, and
    memory is mapped where it was. What was committed, and every step that was applied, is there;
    an op that was not answered may have been executed or not. Join again
    (:meth:`shardd.Client.rejoin`) and begin the step again."""


class Unimplemented(SharddError, NotImplementedError):
    """The library, the daemon or the device cannot do that."""

    code, name = 12, "UNIMPLEMENTED"


class Internal(SharddError, RuntimeError):
    """The system or a device refused something."""

    code, name = 13, "INTERNAL"


class Unavailable(SharddError, ConnectionError):
    """The daemon does not run, has ended, or is about to end."""

    code, name = 14, "UNAVAILABLE"


class DataLoss(SharddError, RuntimeError):
    """The daemon was restarted and the job's state is lost. Nothing was restarted at step 0."""

    code, name = 15, "DATA_LOSS"


class VersionMismatch(SharddError, RuntimeError):
    """Package, library and daemon have different versions."""

    code, name = 9, "FAILED_PRECONDITION"


class InUse(BufferError):
    """Memory cannot be given back because a view, array or tensor still uses it."""


_CLASSES = {c.code: c for c in (
    Cancelled, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists, PermissionDenied,
    ResourceExhausted, FailedPrecondition, Aborted, Unimplemented, Internal, Unavailable,
    DataLoss)}


_RESTARTED = "was restarted; this process is connected to it again"  # as reconnect.c says it


def from_code(code: int, text: str, field: str = "", domain: str = "shardd", native: int = 0,
              call: str = "") -> SharddError:
    """The error of a code (positive or negative)."""
    made = _CLASSES.get(abs(code), SharddError)
    if made is Aborted and _RESTARTED in text:
        made = DaemonRestarted
    return made(text, field, domain, native, call)
