"""A process that forks to run the program again when a signal has killed it.

The process that a launcher started becomes the guard: it has imported everything, and has no
other thread, no connection and no model. Its child runs the program from the call on. When a
signal kills the child (SIGKILL, SIGSEGV, out of memory), the guard forks another child, which
continues at the same line and has nothing to import. Everything else passes through: signals go
to the child, its exit code goes to the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from typing import Any, NoReturn

from .errors import FailedPrecondition, InvalidArgument

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_TASKS = "/proc/self/task"
# These signals ask the program to end: no restart after them.
_ENDINGS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_WATCHED = _ENDINGS | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
_IN_VAIN = 2  # deaths in a row without a commit between them

_libc = ctypes.CDLL(None, use_errno=True)
clients: weakref.WeakSet[Any] = weakref.WeakSet()  # every shardd.Client of this process
# In a guarded process, what its guard reads: a byte that is 1 after a commit, then the instance of
# the daemon that has the state, which the next life continues from.
_progress: mmap.mmap | None = None
_INSTANCE = slice(1, 33)
_restarts = 0


def committed() -> None:
    """Record progress: after the next death a restart makes sense."""
    if _progress is not None:
        _progress[0] = 1


def joined(instance: str) -> None:
    """The program has state in that run of the daemon: the next life must find it there."""
    if _progress is not None and len(instance) == 32:
        _progress[_INSTANCE] = instance.encode()


def lived() -> bool:
    """Is this a later life of a guarded process, which had joined a job in an earlier one?"""
    return _progress is not None and _restarts > 0 and \
        bool(bytes(_progress[_INSTANCE]).strip(b"\0"))


def _threads() -> int:
    try:
        return len(os.listdir(_TASKS))
    except OSError:
        return threading.active_count()


def _alone() -> bool:
    """Has this process only one thread? A thread that was just joined may still be listed."""
    for _ in range(20):
        if _threads() == 1:
            return True
        time.sleep(0.005)
    return False


def _refuse(max_restarts: int) -> None:
    if max_restarts < 0:
        raise InvalidArgument(f"max_restarts is {max_restarts}, must be 0 or more",
                              "max_restarts")
    if threading.current_thread() is not threading.main_thread():
        raise FailedPrecondition("guard() was called in another thread: call it in the main "
                                 "thread, before other threads start")
    if any(client.connected for client in clients):
        raise FailedPrecondition("this process is already connected, and the connection would not "
                                 "survive guard()'s fork: call guard() before init() and before "
                                 "the optimizer is built")


def _die_with(guard: int) -> None:
    """In the child: ask for SIGKILL when the guard ends. The launcher then starts a new guard."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != guard:  # it had ended before
        os._exit(1)


class _Guard:
    """The parent's side, and the moment of the fork. ``progress``: shared with the child."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts, self.progress = max_restarts, mmap.mmap(-1, mmap.PAGESIZE)
        self._in_vain = 0
        self._asked = False  # to end
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _restore(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if self._on_child is None
                      else self._on_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def start(self) -> int:
        """Fork. Return: the child; 0 in it. FailedPrecondition: there are other threads, which a
        fork would leave behind (those of OpenBLAS end by themselves before it)."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None, or closed
                stream.flush()
        self.progress[0] = 0
        guard = os.getpid()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(tell)
            _die_with(guard)
            if not os.read(told, 1):
                os._exit(1)
            os.close(told)
            self._restore()
            return 0
        os.close(told)
        alone = _alone()
        if alone:
            os.write(tell, b"g")
        os.close(tell)
        if not alone:
            os.waitpid(child, 0)
            self._restore()
            raise FailedPrecondition(
                f"this process has {_threads()} threads, which a fork would leave behind: call "
                "guard() after the imports, before anything else")
        return child

    def watch(self, child: int) -> int:
        """Wait for its end, passing signals on. Return: its exit code, or -signal."""
        while True:
            said = signal.sigwaitinfo(_WATCHED)
            if said.si_signo == signal.SIGCHLD:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
            elif said.si_code <= 0:  # else it is the terminal's: the child has it, too
                self._asked = self._asked or said.si_signo in _ENDINGS
                os.kill(child, said.si_signo)

    def expect(self) -> None:
        """Tell the next child which run of the daemon it continues from."""
        instance = bytes(self.progress[_INSTANCE])
        if instance.strip(b"\0") and not os.environ.get("SHARDD_INSTANCE"):
            os.environ["SHARDD_INSTANCE"] = instance.decode()

    def may_restart(self, child: int, ended_by: int, restarts: int) -> bool:
        """Shall there be another child? Prints the answer and the reason."""
        self._in_vain = 0 if self.progress[0] else self._in_vain + 1
        if self._asked or ended_by in _ENDINGS:
            return False
        may, then = True, f"restart {restarts + 1} of {self.max_restarts}"
        if restarts == self.max_restarts:
            may, then = False, f"no restart: all {restarts} allowed restarts are used"
        elif self._in_vain == _IN_VAIN:
            may, then = False, "no restart: two processes in a row committed no step"
        name = signal.strsignal(ended_by) or "no name"
        os.write(2, f"shardd: process {child} was killed by signal {ended_by} ({name}); {then}\n"
                 .encode())
        return may


def _end(code: int) -> NoReturn:
    """End as the child did: by the same signal if it was one."""
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    with contextlib.suppress(Exception):  # one core file is enough
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def guard(max_restarts: int) -> int:
    """Fork, and return in the child, again and again. Return: how many restarts there were.

    Twice is once; nothing happens if SHARDD_GUARD is 0. The text for users is that of
    :func:`shardd.torch.guard`.
    """
    global _progress, _restarts
    if _progress is not None or os.environ.get("SHARDD_GUARD") == "0":
        return _restarts
    _refuse(max_restarts)
    # Exempt existing objects from garbage collection, so that their pages stay shared.
    gc.collect()
    gc.freeze()
    parent = _Guard(max_restarts)
    for restarts in itertools.count():
        child = parent.start()
        if child == 0:
            _progress, _restarts = parent.progress, restarts
            return restarts
        _libc.prctl(_PR_SET_NAME, b"shardd-guard", 0, 0, 0)
        code = parent.watch(child)
        if code >= 0 or not parent.may_restart(child, -code, restarts):
            _end(code)
        parent.expect()
    raise AssertionError


__all__ = ["committed", "guard", "joined", "lived"]
