"""Booted machines: containers of Debian 12 with systemd as their process 1, on one bridge.

They are made of one image, which is kept from run to run. What a machine writes is in memory, and
is there after a reboot. A program that uses them is inside namespaces of its own (enter), and all
machines end with it.
"""

import contextlib
import ctypes
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("SHARDD_BUILD_DIR", ROOT / "build"))
CACHE = pathlib.Path(os.environ.get("SHARDD_CACHE_DIR", pathlib.Path.home() / ".cache/shardd"))
INSIDE = "SHARDD_TEST_MACHINES"
PACKAGES = "systemd,systemd-sysv,dbus,iproute2,procps"
SOURCES = "/usr/src/shardd"  # of the machines: deploy/
PATIENCE_S = 120
PR_SET_PDEATHSIG = 1
REBOOTS = 133  # the exit code of systemd-nspawn with --keep-unit
NETWORK = """[Match]
Name=host0
[Network]
Address={address}/24
LinkLocalAddressing=no
"""


class Failed(Exception):
    pass


def die_with_us():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def sh(*argv, **more):
    r = subprocess.run([str(a) for a in argv], capture_output=True, text=True,
                       stdin=subprocess.DEVNULL, **more)
    if r.returncode:
        raise Failed(f"{' '.join(map(str, argv))}: {r.stdout}{r.stderr}")
    return r.stdout


def wait_for(condition, what, s=PATIENCE_S):
    """Return: what the condition gives, when that is true."""
    until = time.monotonic() + s
    while not (got := condition()):
        if time.monotonic() > until:
            raise Failed(f"{what}: not within {s} s")
        time.sleep(0.1)
    return got


def skip(why):
    print(why)
    sys.exit(77)


# -------------------------------------------------------------------- the image

def in_image(root, *argv):
    return sh("systemd-nspawn", "--quiet", "--directory", root, "--register=no", "--keep-unit",
              "--console=pipe", *argv)


def image(install, name):
    """Debian with what the command @install installs. @name: of this image among others. Return:
    its folder."""
    key = hashlib.sha256((ROOT / "deploy/install-deps").read_bytes() + PACKAGES.encode() +
                         install.encode())
    path = CACHE / f"{name}-{key.hexdigest()[:12]}"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    new = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}.", dir=CACHE))
    try:
        print("# making an image of Debian 12", flush=True)
        new.chmod(0o755)
        sh("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", new)
        shutil.copytree(ROOT / "deploy", new / SOURCES[1:] / "deploy")
        in_image(new, f"--chdir={SOURCES}", "/bin/bash", "-euc", install)
        shutil.rmtree(new / SOURCES[1:])
        for old in CACHE.glob(f"{name}-*"):
            shutil.rmtree(old)
        new.rename(path)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return path


# --------------------------------------------------------------- the namespaces

def may_run():
    if os.environ.get("SHARDD_TEST_LONG") != "1":
        skip("long form only (tests/run --nightly)")
    if os.geteuid():
        skip("needs root")
    for tool in ("systemd-nspawn", "debootstrap"):
        if not shutil.which(tool):
            skip(f"{tool} is missing (deploy/install-deps --boot)")


def enter(install, name="machines"):
    """Returns inside, with the image (see image()); the process outside ends here."""
    if INSIDE in os.environ:
        sh("mount", "--make-rprivate", "/")
        sh("ip", "link", "set", "lo", "up")
        return pathlib.Path(os.environ.pop(INSIDE))
    may_run()
    unshare = "unshare --net --mount --pid --fork --kill-child --mount-proc".split()
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        skip("the kernel makes no namespaces here")
    path = image(install, name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="shardd-machines.") as folder:
        run = subprocess.Popen([*unshare, sys.executable, *sys.argv], preexec_fn=die_with_us,
                               env=os.environ | {INSIDE: str(path), "TMPDIR": folder})
        try:
            sys.exit(run.wait())
        finally:
            run.kill()
            run.wait()
            remove_groups(pathlib.Path(folder).name)


# ----------------------------------------------------------------- the machines

def hierarchies():
    """Of control groups, in which a systemd keeps its units: v2, v1 or both."""
    tops = [pathlib.Path("/sys/fs/cgroup", part) for part in ("", "systemd", "unified")]
    return [top for top in tops if (top / "cgroup.procs").exists()]


def remove_groups(name):
    """Those of the machines of one program, which have ended with it."""
    for top in hierarchies():
        for folder, _, _ in os.walk(top / name, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                wait_for(lambda folder=folder: not pathlib.Path(
                    folder, "cgroup.procs").read_text().split(), f"the end of {folder}")
                os.rmdir(folder)


class Machine:
    def __init__(self, all_, name, address):
        self.name, self.address, self.all = name, address, all_
        at = all_.folder / name
        self.root, self.log = at / "root", all_.folder / f"{name}.console"
        for part in ("root", "upper", "work"):
            (at / part).mkdir(parents=True)
        lower = f"lowerdir={all_.installed}:{all_.image},upperdir={at}/upper,workdir={at}/work"
        sh("mount", "-t", "overlay", "overlay", "-o", lower, self.root)
        self.write("etc/hostname", f"{name}\n")
        self.write("etc/machine-id", "")
        self.write("etc/systemd/network/10-host0.network", NETWORK.format(address=address))
        sh("systemctl", f"--root={self.root}", "enable", "systemd-networkd")
        shutil.copytree(ROOT / "deploy", self.root / SOURCES[1:] / "deploy")
        self.popen, self.started = None, []
        self.groups = [top / pathlib.Path(tempfile.gettempdir()).name / name
                       for top in hierarchies()]
        for group in self.groups:
            group.mkdir(parents=True)

    def enter_groups(self):
        """Its units have names that those of another machine have, too."""
        die_with_us()
        for group in self.groups:
            (group / "cgroup.procs").write_text("0")

    def end(self):
        if self.popen and self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def boot(self):
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(
                ["systemd-nspawn", "--quiet", "--directory", self.root, "--register=no",
                 "--keep-unit", f"--machine={self.name}", f"--hostname={self.name}",
                 "--network-bridge=br0", "--resolv-conf=off", "--link-journal=no",
                 f"--bind={self.all.shared}:/srv/checkpoints", "--console=read-only", "--boot"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=self.enter_groups)
        wait_for(lambda: self.state() in ("running", "degraded"), f"machine {self.name} is up")

    def init(self):
        """The process that is its process 1; None: it has none now."""
        if self.popen.poll() is not None:
            raise Failed(f"machine {self.name} has ended: {self.log.read_text(errors='replace')}")
        pid = self.popen.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    def state(self):
        return self.try_run("systemctl is-system-running")[1].strip()

    def command(self, text, user="root"):
        init = self.init()
        if init is None:
            raise Failed(f"machine {self.name} is not running")
        enter_it = f"nsenter --target={init} --mount --uts --ipc --net --pid --root --wd --".split()
        clean = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
        as_user = [] if user == "root" else ["setpriv", f"--reuid={user}", f"--regid={user}",
                                             "--init-groups", "--no-new-privs"]
        return [*enter_it, *clean, *as_user, "bash", "-c", text]

    def try_run(self, text, user="root", s=PATIENCE_S):
        """Return: its exit code, what it says. It begins in the folder of the sources."""
        if self.init() is None:
            return 1, ""
        r = subprocess.run(self.command(f"cd {SOURCES} 2>/dev/null; {text}", user), text=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, timeout=s)
        return r.returncode, r.stdout

    def run(self, text, user="root", s=PATIENCE_S):
        code, said = self.try_run(text, user, s)
        if code:
            raise Failed(f"{self.name}# {text}: exit code {code}: {said}")
        return said

    def start(self, text, log, user):
        """In the background, until it ends or the machine does. Return: its Popen."""
        with open(log, "ab") as out:
            popen = subprocess.Popen(self.command(f"cd /tmp; exec {text}", user), stdout=out,
                                     stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
                                     preexec_fn=die_with_us)
        self.started.append(popen)
        return popen

    def is_down(self):
        """A shutdown stops all processes before it ends them; each nsenter stops with its own."""
        for popen in self.started:
            if popen.poll() is None:
                popen.send_signal(signal.SIGCONT)
        return self.popen.poll() is not None

    def reboot(self):
        self.try_run("systemctl reboot")
        wait_for(self.is_down, f"machine {self.name} is down")
        if self.popen.returncode != REBOOTS:
            raise Failed(f"machine {self.name} has ended with {self.popen.returncode}")
        self.boot()

    def journal(self, unit="shardd"):
        return self.run(f"journalctl --no-pager -o cat -u {unit}")


class Machines:
    """Use it in a with statement. @addresses: by the machine's name. @with_build: the build is
    installed in them."""

    def __init__(self, image_, addresses, with_build=True):
        self.image = image_
        self.folder = pathlib.Path(tempfile.mkdtemp())
        sh("mount", "-t", "tmpfs", "tmpfs", self.folder)
        self.installed, self.shared = self.folder / "installed", self.folder / "shared"
        self.shared.mkdir()
        self.installed.mkdir()
        if with_build:
            sh("cmake", "--install", BUILD, "--prefix", "/usr",
               env=os.environ | {"DESTDIR": str(self.installed)})
        sh("ip", "link", "add", "br0", "type", "bridge")
        sh("ip", "link", "set", "br0", "up")
        self.machines = {}
        for name, address in addresses.items():
            self.machines[name] = Machine(self, name, address)

    def __enter__(self):
        return self

    def __getitem__(self, name):
        return self.machines[name]

    def __iter__(self):
        return iter(self.machines.values())

    def __exit__(self, kind, value, trace):
        for m in self:
            m.end()
