"""An embedded etcd: three nodes run its members, which are killed, stopped, and lose their data."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import threading

from lab import NET, PEER_PORT, Failed, Lab, sh, wait_for
from training import Training, expect_same

THREE = (("a", 1), ("b", 1), ("c", 1))
STEPS = 100000  # more than there is time for
DECIDES = "the store, which decides the commit"


def folder(node):
    return pathlib.Path(node.lab.folder, f"{node.name}-etcd")


@contextlib.contextmanager
def cluster():
    """Three nodes, which have members of etcd."""
    with Lab(3, start=False, etcd=False) as x:
        seeds = ",".join(f"{n.name}={n.address}" for n in x.nodes.values())
        for node in x.nodes.values():
            node.start(wait=False, held=True, coord="embedded", coord_seeds=seeds,
                       coord_dir=folder(node))
        for node in x.nodes.values():
            node.await_member(0)
        await_votes(x.nodes.values())
        yield x


# ---------------------------------------------------------------- members


def descendants(pid):
    with contextlib.suppress(FileNotFoundError):
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from descendants(child)


def etcd_of(node):
    """Return: its pid; None: there is none just now."""
    for pid in descendants(node.daemon.popen.pid):
        with contextlib.suppress(FileNotFoundError):
            if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == "etcd":
                return pid
    return None


def signal_etcd(node, number):
    pid = wait_for(lambda: etcd_of(node), f"node {node.name} has an etcd")
    os.kill(pid, number)


def states(node, state):
    """How often its etcd has come to @state."""
    return node.said().count(f"etcd state={state} ")


def votes(node):
    """How often it has got a vote."""
    return node.said().count('etcd state=SERVING why=""')


def await_votes(nodes, before=0):
    for node in nodes:
        wait_for(lambda n=node: votes(n) > before, f"the etcd of node {node.name} has a vote")


@contextlib.contextmanager
def kill_locked(node):
    """The member is killed; what it has locked is ours until it ends."""
    with open(folder(node) / "etcd.lock", "rb") as lock:
        taker = threading.Thread(target=fcntl.flock, args=(lock, fcntl.LOCK_EX), daemon=True)
        taker.start()
        wchan = pathlib.Path(f"/proc/self/task/{taker.native_id}/wchan")
        wait_for(lambda: "lock" in wchan.read_text(), "the lock is waited for")
        signal_etcd(node, signal.SIGKILL)
        taker.join()
        yield


@contextlib.contextmanager
def down(*nodes, forget=False):
    """Their members are killed; their daemons start them again when it ends. @forget: their data
    are removed."""
    before = {n: (states(n, "WAITING"), states(n, "SERVING")) for n in nodes}
    with contextlib.ExitStack() as locks:
        for node in nodes:
            locks.enter_context(kill_locked(node))
        for node in nodes:
            wait_for(lambda n=node: states(n, "WAITING") > before[n][0],
                     f"the daemon of node {node.name} starts etcd again")
            if forget:
                shutil.rmtree(folder(node) / "data")
        yield
    for node in () if forget else nodes:
        wait_for(lambda n=node: states(n, "SERVING") > before[n][1],
                 f"etcd of node {node.name} serves again")


# --------------------------------------------------------------- training


def epochs(x):
    """Of each node, those that have begun there."""
    return [[int(n) for n in re.findall(r"cluster epoch begins .*?epoch=(\d+)", node.said())]
            for node in x.nodes.values()]


def goes_on(t, steps=10):
    t.wait_step(t.step() + steps)


def waits(x, t):
    """A commit does, and the store is why. Return: the last step."""
    def says(node):
        ops = node.ctl("ops", t.job)["ops"]
        return any(o["op"] == "Commit" and DECIDES in o["waits_for"] for o in ops)
    wait_for(lambda: any(says(n) for n in x.nodes.values()), "a commit waits for etcd")
    step = t.step()
    wait_for(lambda: any(says(n) for n in x.nodes.values()), "it waits still")
    if t.step() > step + 1:
        raise Failed(f"step {t.step()} was committed without etcd, after {step}")
    return step


def raft_leader(x):
    """The node whose member leads the others."""
    def leads(node):
        said = sh(f"nsenter --net=/run/netns/{node.name} env ETCDCTL_API=3 etcdctl -w json "
                  f"--endpoints {node.address}:2379 endpoint status", check=False)
        status = json.loads(said)[0]["Status"] if said else {"leader": 0}
        return status["leader"] and status["leader"] == status["header"]["member_id"]
    return wait_for(lambda: next((n for n in x.nodes.values() if leads(n)), None),
                    "one member leads the others")


def member_dies():
    """A member is killed, or hangs, and be it the one that leads: the training goes on."""
    with cluster() as x:
        t = Training(x, THREE, steps=STEPS)
        t.wait_step(10)
        for which in x.nodes if os.environ.get("SHARDD_TEST_LONG") == "1" else (None,):
            with down(x[which] if which else raft_leader(x)):
                goes_on(t)
            goes_on(t)
            hangs = x[which] if which else raft_leader(x)
            signal_etcd(hangs, signal.SIGSTOP)
            goes_on(t)
            signal_etcd(hangs, signal.SIGCONT)
            goes_on(t)
        if any(len(begun) != 1 for begun in epochs(x)):
            raise Failed(f"epochs {epochs(x)}")
        t.expect_calm()


def rank_waits(x, t):
    """A rank is killed and comes again: it waits, and status says for what."""
    t.ranks[1].kill()
    t.start(1)
    wait_for(lambda: any("the store" in j["waits"] for j in x["b"].ctl("status")["jobs"]),
             "the rank waits for etcd")


def all_members_die():
    """All are killed, or hang: a commit waits, and a rank that joins, both with that reason. Then
    the job goes on."""
    with cluster() as x:
        t = Training(x, THREE, steps=STEPS)
        t.wait_step(10)
        with down(*x.nodes.values()):
            step = waits(x, t)
            rank_waits(x, t)
        t.wait_step(step + 20)
        for node in x.nodes.values():
            signal_etcd(node, signal.SIGSTOP)
        step = waits(x, t)
        for node in x.nodes.values():
            signal_etcd(node, signal.SIGCONT)
        t.wait_step(step + 20)
        t.expect_calm()


def members_forget():
    """All lose their data, and then all daemons die with them: the job goes on where it was, in an
    epoch with a higher number. At last one loses its data: it joins the others again."""
    with cluster() as x:
        t = Training(x, THREE, steps=STEPS)
        t.wait_step(10)
        for daemons_die in (False, True):
            before = max(map(max, epochs(x)))
            voted = {n: votes(n) for n in x.nodes.values()}
            with down(*x.nodes.values(), forget=True):
                step = waits(x, t)
                for node in x.nodes.values() if daemons_die else ():
                    node.kill_held()
            t.wait_step(step + 20)
            if min(map(max, epochs(x))) <= before:
                raise Failed(f"epochs {epochs(x)}, {before} before all data were lost")
            for node, had in voted.items():
                await_votes([node], had)
        before = votes(x["c"])
        with down(x["c"], forget=True):
            goes_on(t)
        await_votes([x["c"]], before)
        with down(x["a"]):
            goes_on(t)
        t.expect_calm()


def member_becomes_three():
    """Two nodes have one member of etcd. A third node comes, and all daemons start again with three
    seeds: the members are added to the store that there is."""
    with Lab(3, start=False, etcd=False) as x:
        def seeds(names):
            listed = ", ".join(f"{n}={x[n].address}" for n in names)
            for name in names:
                x[name].config.write_text(f"coord_seeds: [{listed}]\n")

        def start(names):
            for name in names:
                x[name].start(wait=False, held=True, coord="embedded", coord_dir=folder(x[name]))
            for name in names:
                x[name].await_member(0)

        for name in "abc":
            x[name].config = pathlib.Path(x.folder, f"{name}.yaml")
        seeds("ab")
        start("ab")
        t = Training(x, (("a", 1), ("b", 1)), steps=STEPS)
        t.wait_step(10)
        seeds("abc")
        step = t.step()
        for name in "ab":
            x[name].kill_held()  # and starts again, with its memory
        start("c")
        t.wait_step(step + 10)
        await_votes(x.nodes.values())
        with down(x["a"]):
            goes_on(t)
        t.expect_calm()


def two_stores():
    """The first node has lost its data while the others were down, and makes a second store: when
    they run again all nodes wait, and say why. One of the stores is removed: the job goes on."""
    with cluster() as x:
        t = Training(x, THREE, steps=STEPS)
        t.wait_step(10)
        before = votes(x["a"])
        with down(x["b"], x["c"]):
            with down(x["a"], forget=True):
                pass
            await_votes([x["a"]], before)
            goes_on(t)
        for node in x.nodes.values():
            wait_for(lambda n=node: "two stores" in n.ctl("status")["cluster"]["why"],
                     f"node {node.name} has noticed it")
        step = t.step()
        with down(x["a"], forget=True):
            pass
        t.wait_step(step + 10)
        t.expect_calm()


class Names:
    """Pods of a StatefulSet with a headless Service: the name of each, which stays, has its
    address, which does not. In /etc/hosts, of this suite alone."""

    def __init__(self, x):
        self.x, self.path = x, pathlib.Path(x.folder, "hosts")

    def __enter__(self):
        self.write()
        sh(f"mount --bind {self.path} /etc/hosts")
        return self

    def __exit__(self, kind, value, trace):
        sh("umount /etc/hosts")

    def pod(self, node):
        return f"pod-{list(self.x.nodes).index(node.name)}"

    def write(self):
        """In place: it is mounted."""
        lines = [f"{n.address} {self.pod(n)}.pods.lab\n" for n in self.x.nodes.values()]
        self.path.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def start(self, node):
        node.start(wait=False, node_name=self.pod(node), coord="embedded", coord_dir=folder(node),
                   coord_seeds="dns:pods.lab", coord_nodes=3, data_address=node.address,
                   peer_advertise=f"{self.pod(node)}.pods.lab:{PEER_PORT}")

    def move(self, node, address):
        """It ends, and is somewhere else."""
        node.stop()
        sh(f"ip -n {node.name} address del {node.address}/24 dev eth0")
        node.address = address
        sh(f"ip -n {node.name} address add {address}/24 dev eth0")
        self.write()


def members_are_pods():
    """The members are found by the name of a headless Service. One gets another address, as a pod
    that is started again does: it is a member as before."""
    with Lab(3, start=False, etcd=False) as x, Names(x) as names:
        for node in x.nodes.values():
            names.start(node)
        await_votes(x.nodes.values())
        losses = Training(x, THREE).finish()
        for name, address in (("c", f"{NET}31"), ("a", f"{NET}32")):
            before = x[name].joined()
            names.move(x[name], address)
            names.start(x[name])
            x[name].await_member(before)
            other = "b" if name == "c" else "c"
            with down(x[other]):  # two are enough, so the one with another address is needed
                expect_same(Training(x, THREE, job=f"{name}-moved").finish(), losses)


DEFAULT = [member_dies, all_members_die, members_forget, member_becomes_three, members_are_pods]
LONG = [two_stores]
