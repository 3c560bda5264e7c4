"""Resource limits of running processes, for a while."""

import contextlib
import os
import resource

FILES, MEMORY = resource.RLIMIT_NOFILE, resource.RLIMIT_AS
ALL = (FILES, MEMORY)


def _in_use(pid, what):
    if what == FILES:
        return len(os.listdir(f"/proc/{pid}/fd"))
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[0]) * resource.getpagesize()


def _near(rng, pid, what):
    """A limit that is met at once, soon, or not at all."""
    if what == FILES:
        return max(1, _in_use(pid, what) + rng.randint(-4, 3))
    return _in_use(pid, what) + rng.choice((0, 4096, 1 << 16, 1 << 20, 9 << 20))


@contextlib.contextmanager
def lowered(rng, pid, what, heirs):
    """The soft limit of @pid is near what it uses. Afterwards it is as before, and so is that of
    heirs(), which may have inherited it."""
    try:
        before = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (_near(rng, pid, what), before[1]))
    except (OSError, TypeError):  # it has just ended
        yield
        return
    try:
        yield
    finally:
        for p in (pid, *heirs()):
            with contextlib.suppress(OSError, TypeError):
                resource.prlimit(p, what, before)
