"""A program runs itself again in namespaces for networks, mounts and processes of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import lab

INSIDE = "SHARDD_TEST_INSIDE"
NEEDED = ("ip", "tc", "unshare", "nsenter", "etcd", "openssl")
UNSHARE = "unshare --net --mount --pid --fork --kill-child --mount-proc".split()


def skip(why):
    print(why)
    sys.exit(77)


def check():
    """Ends the program, with the reason, if it cannot make namespaces."""
    if os.geteuid():
        skip("only root makes network namespaces")
    for tool in NEEDED:
        if not shutil.which(tool):
            print(f"there is no {tool}: deploy/install-deps --test")
            sys.exit(1 if os.environ.get("SHARDD_TEST_INSTALLED") == "1" else 77)
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        skip("the kernel makes no network namespaces here")


def run_inside():
    """This program again, in namespaces that end with it, as do all processes in them. Return: its
    exit code."""
    check()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="shardd-mn.") as folder:
        run = subprocess.Popen([*UNSHARE, sys.executable, *sys.argv], preexec_fn=lab.die_with_us,
                               env=os.environ | {INSIDE: "1", "TMPDIR": folder})
        try:
            return run.wait()
        finally:
            run.kill()
            run.wait()


def prepare():
    os.environ.pop(INSIDE)
    os.makedirs("/run/netns", exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "netns", "/run/netns"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def enter():
    """Returns inside; the process outside ends here."""
    if INSIDE not in os.environ:
        sys.exit(run_inside())
    prepare()
