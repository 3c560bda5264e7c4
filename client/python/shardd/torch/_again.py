"""guard: :mod:`shardd._restart` for a program that trains with PyTorch."""

from __future__ import annotations

import contextlib
import os

from .. import _library, _restart
from ..errors import FailedPrecondition, InvalidArgument


def _load() -> None:
    """What the first optimizer, forward and connection would import."""
    import torch._dynamo
    import torch.optim  # noqa: F401

    with contextlib.suppress(ImportError):  # said by who needs it
        _library.library()


def guard(max_restarts: int = 3) -> int:
    """Run the rest of the program in a child of this process, and again if a signal kills it.

    Call it once, after the imports and before anything else: no other thread may run, and nothing
    may be connected. This process stays, with its process id, as the guard. The program continues
    in a child. If a signal kills the child (SIGKILL, SIGSEGV, out of memory), the program continues
    in another child from this call on, with everything imported. With :func:`resilient` a restart
    costs a fork, building the model and joining. The guard ends with the child's exit code, also
    that of an exception, and does not restart then. SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and
    SIGUSR2 go to the child; a child dies with its guard. This works under any launcher.

    @max_restarts: the maximum. There is also no third child if two in a row committed nothing.
    Environment: SHARDD_GUARD=N calls this when shardd.torch is imported, with N restarts;
    SHARDD_GUARD=0 makes this function do nothing.
    FailedPrecondition: other threads, a connection, or CUDA in use. Return: how many restarts
    there were.
    """
    _load()
    import torch

    if torch.cuda.is_initialized():
        raise FailedPrecondition("this process has used CUDA, and its child could not use it: "
                                 "call guard() before anything is on a GPU")
    return _restart.guard(max_restarts)


def by_environment() -> None:
    """guard, if $SHARDD_GUARD asks for it. Processes that are started from here are their
    parent's care."""
    asked = os.environ.get("SHARDD_GUARD", "0")
    if asked in ("", "0"):
        return
    if not asked.isdecimal():
        raise InvalidArgument(f"SHARDD_GUARD is {asked!r}, must be the number of restarts, or 0 "
                              "for no guard", "SHARDD_GUARD")
    del os.environ["SHARDD_GUARD"]
    guard(int(asked))


__all__ = ["by_environment", "guard"]
