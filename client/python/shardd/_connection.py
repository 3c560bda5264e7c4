"""A connection to the daemon: how it begins and ends, and what the daemon says about itself."""

from __future__ import annotations

import atexit
import contextlib
import ctypes as C
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from . import _abi, _library, _reconnect, _restart
from ._device import HOST, Gpu, Where
from ._reconnect import ConnectionEvent
from .errors import FailedPrecondition, InUse, SharddError, Unavailable, VersionMismatch
from .memory import Memory, _Mapped

DEFAULT_SOCKET = "/run/shardd/shardd.sock"


def socket_path(socket: str | None = None) -> str:
    """@socket, else $SHARDD_SOCKET, else the default path."""
    return socket or os.environ.get("SHARDD_SOCKET") or DEFAULT_SOCKET


def _not_there(error: Unavailable, socket: str) -> Unavailable:
    return Unavailable(
        f"{error.text}. Is a daemon running? Start one with `shardd --socket {socket}`, or run "
        "the trainers under `shardctl run --standalone -n N -- COMMAND`, or set SHARDD_SOCKET "
        "to the socket of a running daemon", error.field, error.domain, error.native, error.call)


class Connection:
    """What a :class:`shardd.Client` is to tickets: a handle, and threads that wait."""

    def __init__(self, socket: str | None, name: str | None, device: str | None,
                 connect_timeout: float, reconnect: float | None,
                 on_connection: Callable[[ConnectionEvent], None] | None,
                 on_stall: Callable[[str], None] | None) -> None:
        """As :class:`shardd.Client`."""
        self.socket = socket_path(socket)
        self._open = False
        self._pid = os.getpid()
        self._lent: weakref.WeakSet[_Mapped] = weakref.WeakSet()
        self._waiting: set[int] = set()  # threads
        self.kept: list[_Mapped] = []  # given back, but still in use
        self.where: Where = HOST  # this rank's memory
        self.restart_advice = ""  # of DaemonRestarted
        self._on_stall = on_stall
        handle = C.c_void_p()
        options = _abi.Options(C.sizeof(_abi.Options), self.socket.encode(),
                               name.encode() if name else None,
                               max(1, int(connect_timeout * 1000)), 0,
                               device.encode() if device else None)
        options.reconnect_ms = _reconnect.milliseconds(reconnect)
        self._tells = _reconnect.callback(
            self._reporter() if on_connection is None else on_connection)
        options.on_connection = C.cast(self._tells, C.c_void_p)
        try:
            _library.call("connect", C.byref(options), C.byref(handle))
        except Unavailable as error:
            raise _not_there(error, self.socket) from None
        self._handle, self._open = handle, True
        _restart.clients.add(self)
        self._check_version()

    def _reporter(self) -> Callable[[ConnectionEvent], None]:
        own = weakref.ref(self)

        def report(event: ConnectionEvent) -> None:
            client = own()
            _reconnect.report(event, client.who() if client is not None else "")

        return report

    def _check_version(self) -> None:
        daemon, library = self.daemon_version, _library.library().shardd_version().decode()
        if not _library.same_version(daemon, library):
            self.close()
            raise VersionMismatch(
                f"the daemon at {self.socket} is version {daemon}, this library is {library}: "
                "install both from the same release and restart the daemon (SIGTERM lets "
                "trainers commit and leave first)")

    @property
    def handle(self) -> C.c_void_p:
        """The shardd_client, for calls by ctypes. FailedPrecondition: closed."""
        if not self._open:
            raise FailedPrecondition("this client is closed: connect again")
        return self._handle

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this thread is in a call that may block, and the client cannot be closed."""
        thread = threading.get_ident()
        self._waiting.add(thread)
        try:
            yield
        finally:
            self._waiting.discard(thread)

    def lent(self, memory: Memory) -> Memory:
        """Remember memory that ends with this client. Return: @memory."""
        self._lent.add(memory._mapped)
        return memory

    def blame(self) -> str:
        """Return what holds up the ranks of the job that this client has joined, on all nodes: one
        sentence, that of ``shardctl blame``. "": no rank waits for another one. Blocks for 2 s at
        most. FailedPrecondition: no job.
        """
        text = C.create_string_buffer(1024)
        _library.call("blame", self.handle, text, C.sizeof(text))
        return text.value.decode(errors="replace")

    def stalled(self, what: str, left: float) -> None:
        """A wait takes long, and may take @left seconds more: tell it, with what holds it up."""
        why = ""
        if left >= 2:
            with contextlib.suppress(SharddError):
                why = self.blame()
        text = f"{what}: {why or '`shardctl blame` and `shardctl ops` say what it waits for'}"
        if self._on_stall is None:
            print(f"shardd: {text}", file=sys.stderr, flush=True)
        else:
            self._on_stall(text)

    def who(self) -> str:
        """For messages: " (rank 1 of job 'x')"; "" before a join."""
        return ""

    # --------------------------------------------------------------- session

    def _info(self) -> _abi.Info:
        info = _abi.Info(C.sizeof(_abi.Info))
        _library.call("get_info", self.handle, C.byref(info))
        return info

    @property
    def daemon_version(self) -> str:
        """The daemon's version."""
        text: bytes = self._info().daemon_version
        return text.decode()

    @property
    def session(self) -> int:
        """This session's number."""
        return int(self._info().session)

    @property
    def instance(self) -> str:
        """The id of this run of the daemon; a restarted daemon is another run, without state."""
        text: bytes = self._info().instance
        return text.decode()

    @property
    def daemon_started(self) -> int:
        """When the daemon started, seconds since 1970."""
        return int(self._info().daemon_started)

    @property
    def forked(self) -> bool:
        """Is this a fork of the process that connected? Then it cannot be used."""
        return self._pid != os.getpid()

    @property
    def connected(self) -> bool:
        """Can it be used, in this process?"""
        return self._open and not self.forked

    @property
    def draining(self) -> bool:
        """Has the job or the daemon been asked to drain? Then commit and leave."""
        return bool(self._info().draining)

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline of ops submitted from now on; 0: the job's."""
        _library.library().shardd_set_timeout(self.handle, int(seconds * 1000))

    def status(self, job: str | None = None) -> dict[str, Any]:
        """The status of the daemon, devices, jobs and sessions, as `shardctl --json status`."""
        text = C.c_void_p()
        _library.call("status", self.handle, job.encode() if job else None, C.byref(text))
        try:
            said: dict[str, Any] = json.loads(C.string_at(text.value or 0))
        finally:
            libc = C.CDLL(None)
            libc.free.argtypes, libc.free.restype = [C.c_void_p], None
            libc.free(text)
        return said

    def _let_go(self) -> None:
        if self._waiting:
            raise InUse("another thread waits for an op of this client: wait until the op ends, at "
                        "the latest at its deadline (Client.set_timeout), or wait with a timeout")
        for mapped in list(self._lent):
            mapped.end()

    def close(self) -> None:
        """End the session. What it holds is dropped; a rank that has not left counts as dead.

        InUse: something still uses memory of this client, or another thread waits for one of its
        ops. Calling this twice is allowed. In a child after fork it does nothing: the connection
        belongs to the parent.
        """
        if not self._open:
            return
        if self._pid != os.getpid():
            self._open = False
            return
        self._open = False  # from here on no thread begins to wait
        try:
            self._let_go()
        except InUse:
            self._open = True
            raise
        _library.library().shardd_close(self._handle)
        if isinstance(self.where, Gpu):
            self.where.close()

    def __del__(self) -> None:
        # Memory in use is not unmapped: then the session ends with the process.
        with contextlib.suppress(BaseException):
            self.close()


@atexit.register
def _close_all() -> None:
    """The library's threads call the interpreter, which is about to end."""
    for client in list(_restart.clients):
        with contextlib.suppress(Exception):
            client.close()


__all__ = ["DEFAULT_SOCKET", "Connection", "socket_path"]
