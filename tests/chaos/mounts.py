"""A mount namespace of the runner's own, and a small file system in it that can be full or
read-only."""

import contextlib
import ctypes
import os
import random
import subprocess

CLONE_NEWNS = 0x20000
own = False  # there is one: /dev/shm holds only what the round's processes put there


def enter():
    """Needs root. What is mounted here ends with the runner, also if it is killed."""
    global own
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(CLONE_NEWNS):
        return
    own = (
        _quiet("mount", "--make-rprivate", "/")
        and os.path.isdir("/dev/shm")
        and _quiet("mount", "-t", "tmpfs", "chaos", "/dev/shm")
    )


def _quiet(*command):
    return subprocess.run(command, capture_output=True).returncode == 0


class Disk:
    """A tmpfs of @kib at @path, as a context."""

    def __init__(self, path, kib):
        self.path, self.kib, self.filler = path, kib, os.path.join(path, "filler")

    def __enter__(self):
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={self.kib}k", "chaos", self.path], check=True
        )
        return self

    def __exit__(self, *_):
        # A daemon that was just killed may still have a file there.
        subprocess.run(["umount", "--lazy", self.path], check=True)

    @contextlib.contextmanager
    def full(self, rng: random.Random):
        """All pages but a few are taken."""
        with open(self.filler, "wb", buffering=0) as f:
            with contextlib.suppress(OSError):
                while f.write(bytes(1 << 12)):
                    pass
            f.truncate(max(0, f.tell() - rng.randrange(8) * 4096))
        try:
            yield
        finally:
            os.unlink(self.filler)

    @contextlib.contextmanager
    def read_only(self):
        """As soon as no file is open for writing. Yields: whether that has come."""
        done = any(_quiet("mount", "-o", "remount,ro", self.path) for _ in range(200))
        try:
            yield done
        finally:
            subprocess.run(["mount", "-o", "remount,rw", self.path], check=True)
