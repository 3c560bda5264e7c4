"""The end of jobs with ranks on several nodes: they are deleted, drain, or are left by all."""

import re
import signal
import subprocess

from checkpoints import Ranks
from lab import BIN, ETCD_AT, Failed, Lab, environment, wait_for
from members import DECIDES
from replicas import Elastic, expect_alone, has_replicas, no_step_twice
from training import TWO as FOUR
from training import Training

TWO = (("a", 1), ("b", 1))
THREE = (("a", 1), ("b", 2), ("c", 1))
# Steps enough that something can happen in the middle.
LONG_RUN = 100000


def job(node, *args):
    """Return: the exit code of shardctl job, what it says."""
    r = subprocess.run([BIN / "shardctl", "--socket", node.socket, "job", *args],
                       capture_output=True, text=True, env=environment())
    return r.returncode, r.stdout + r.stderr


def etcdctl(*args):
    return subprocess.run(["nsenter", "--net=/run/netns/etcd", "--", "etcdctl", "--endpoints",
                           f"http://{ETCD_AT}:2379", *args],
                          capture_output=True, text=True, env=environment(ETCDCTL_API="3")).stdout


def keys():
    said = etcdctl("get", "--prefix", "--keys-only", "/shardd/")
    return [key for key in said.split() if "/jobs/" in key]


def names(node):
    return [j["name"] for j in node.ctl("status")["jobs"] if j["state"] != "DELETED"]


def expect_gone(x, but=()):
    """No node has a job, and the store has no key of one."""
    for node in x.nodes.values():
        if node.name not in but and names(node):
            raise Failed(f"node {node.name} has {names(node)}")
    wait_for(lambda: not keys(), "the keys of the job are removed")
    for node in x.nodes.values():
        if "no longer leads" in node.said():
            raise Failed(f"node {node.name} takes the end of the job for another leader")


def expect(got, code, *texts):
    if got[0] != code or any(text not in got[1] for text in texts):
        raise Failed(f"shardctl job has ended with {got[0]}, {code} expected: {got[1]}")


def leads(x):
    """The nodes, the leader of job j last."""
    return sorted(x.nodes.values(), key=lambda n: "leads job=0/j" in n.said())


def leader_is_deposed():
    """The store says that another node leads: the leader hears of it while a step waits, and need
    not wait for a commit."""
    with Lab(2) as x:
        t = Training(x, FOUR, steps=LONG_RUN)
        t.wait_step(10)
        leader = leads(x)[-1]
        t.mark()
        t.ranks[3].send(signal.SIGSTOP)
        wait_for(lambda: any("rank 3" in o["waits_for"] for n in x.nodes.values()
                             for o in n.ctl("ops", "j")["ops"]), "a step waits for the rank")
        if etcdctl("del", "/shardd/shardd/jobs/0/j/leader").strip() != "1":
            raise Failed(f"{keys()}")
        wait_for(lambda: "no longer leads job=0/j" in leader.said(), "the leader hears of it", 5)
        t.wait_said([0], "returns to the last commit", ("no longer leads job",))
        t.ranks[3].send(signal.SIGCONT)
        t.wait_step(t.step() + 20)
        t.expect_calm()


def delete_on_all():
    """A job is deleted on all nodes from any of them, with its keys; not while it has trainers."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(held=True)
        for i, forced in enumerate((False, True, False)):
            t = Training(x, THREE, steps=LONG_RUN)
            t.wait_step(20)
            asked = leads(x)[(0, -1, 1)[i]]
            expect(job(asked, "delete", "j"), 1, "has 4 trainers on its nodes")
            t.wait_step(t.step() + 20)
            t.stop()
            if not forced:  # no rank is in it, and no daemon knows of the others any more
                for node in x.nodes.values():
                    before = node.joined()
                    node.kill_held()
                    node.await_member(before)
                    if names(node) != ["j"]:
                        raise Failed(f"node {node.name} has {names(node)}")
            expect(job(asked, "resize", "j", "3"), 1, "resizing is not possible",
                   "has ranks on 3 nodes")
            expect(job(asked, "delete", *["--force"] * forced, "j"), 0, "job j deleted")
            expect_gone(x)
        expect(job(x["a"], "delete", "j"), 1, "NOT_FOUND")
        Training(x, THREE).finish()
        expect_gone(x)


def delete_while_it_trains():
    """By force, from a node that does not lead it: the trainers read why, and the name is free."""
    with Lab(2) as x:
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(20)
        t.mark()
        expect(job(leads(x)[0], "delete", "--force", "j"), 0, "job j deleted")
        t.wait_said(t.ranks, "was deleted", ("job 'j'",))
        t.stop()


def delete_without_a_node():
    """The answer names a node that is not reached, whose memory is not that of the next job."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(held=True)
        t = Training(x, THREE, steps=LONG_RUN)
        t.wait_step(20)
        x["b"].link(up=False)
        t.stop()
        got = job(x["a"], "delete", "--force", "j")
        expect(got, 1, "job j deleted", "node b has not done it", "shardctl job delete j")
        expect_gone(x, but="b")
        x["b"].link(up=True)
        other = Training(x, (("a", 2), ("c", 2)), steps=LONG_RUN)
        other.wait_step(20)
        other.stop()
        wait_for(lambda: all(x[n].said().count("rpc job session ended") == 3 for n in "ac"),
                 "all ranks of both jobs are gone")
        late = Training(x, THREE, steps=LONG_RUN)
        late.wait_said(late.ranks, "the memory of an earlier job '0/j'", ("node b has",))
        late.stop()
        for node in (x["a"], x["b"]):
            expect(job(node, "delete", "--force", "j"), 0, "job j deleted")
        expect_gone(x)
        Training(x, THREE).finish()


def delete_after_a_refusal():
    """A node has lost its memory, and the job is refused on all; then it is deleted from any."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(held=True)
        for lost, asked in (("c", "b"), ("a", "a"), ("b", "a"), ("a", "c")):
            t = Training(x, THREE, steps=LONG_RUN)
            t.wait_step(10)
            x[lost].daemon.send(signal.SIGSTOP)  # the holder starts no other daemon
            x[lost].kill_held()
            x[lost].kill()
            t.stop()
            x[lost].start(held=True)
            refused = Training(x, THREE, steps=LONG_RUN)
            wait_for(lambda t=refused: all(p.code for p in t.ranks.values()), "all are refused")
            for rank in refused.ranks:
                if f"node {lost} has nothing of it" not in refused.said(rank):
                    raise Failed(refused.said(rank))
            expect(job(x[asked], "delete", "j"), 0, "job j deleted")
            expect_gone(x)


def drains_on_all():
    """All trainers of a job are told to commit and leave, from any of its nodes."""
    with Lab(2) as x:
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(20)
        expect(job(leads(x)[0], "drain", "j"), 0, "2 trainers were told")
        for p in t.ranks.values():
            if p.wait() != 3:  # asked to stop
                raise Failed(f"a trainer has ended with {p.code}: {p.text()[-600:]}")
        expect_gone(x)


def elastic_on_all():
    """An elastic job drains, and is deleted on all nodes, also on one that it goes on without.
    The second time that one led it, and the daemons have the job from their records."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(held=True, replicas=1)
        for i, again in enumerate((False, True)):
            grace = 2.5 if i else 0.5  # longer than a leader asks whether it leads still
            t = Elastic(x, THREE, steps=LONG_RUN, options=f"2 4 {grace}")
            wait_for(lambda t=t: t.check() or has_replicas(x, 5), "replicas on all nodes")
            leader = x[re.findall("epoch begins job=0/j .*leader=(.)", x["a"].said())[-1]]
            victim = leader.name if i else "b" if leader.name == "c" else "c"
            for rank in t.on(victim):
                t.ranks.pop(rank).kill()
            rest = 4 - len(t.on(victim))
            t.wait_world(rest)  # that node has a part of the job, and no rank
            asked = leader if i else next(n for n in x.nodes.values()
                                          if n not in (leader, x[victim]))
            expect(job(asked, "delete", "j"), 1, f"has {rest} trainers on its nodes")
            expect(job(asked, "drain", "j"), 0, f"{rest} trainers were told")
            t.stop()
            for node in x.nodes.values() if again else ():
                before = node.joined()
                node.kill_held()
                node.await_member(before)
            expect(job(asked, "delete", *["--force"] * i, "j"), 0, "job j deleted")
            expect_gone(x)
        Training(x, THREE).finish()


def cut_off(x, t, node):
    """Its cable is cut, and its ranks end."""
    x[node].link(up=False)
    for rank in t.on(node):
        t.ranks.pop(rank).kill()


def waits_for(node, text):
    return any(text in j["waits"] for j in node.ctl("status")["jobs"])


def alone_in_trouble():
    """A node of an elastic job is cut off, and the other one goes on alone: without etcd its
    commits wait; its daemon dies, and no step is lost, though the other node is there first, with
    memory of an earlier epoch. Alone again, it drains, and its job is deleted."""
    with Lab(2, start=False) as x:
        a, b = x.nodes.values()
        for node in (a, b):
            node.start(held=True, replicas=1)
        t = Elastic(x, FOUR, steps=LONG_RUN, options="2 4 0.5")
        wait_for(lambda: t.check() or has_replicas(x, 5), "replicas on both nodes")
        cut_off(x, t, "b")
        expect_alone(x, t, a)

        x.etcd.kill()
        wait_for(lambda: any(o["op"] == "Commit" and DECIDES in o["waits_for"]
                             for o in a.ctl("ops", "j")["ops"]), "a commit waits for etcd")
        step = t.step()
        x.start_etcd()
        t.wait_step(step + 10)

        before = a.joined()
        a.kill_held()
        for rank in t.on("a"):
            t.ranks.pop(rank).kill()
        a.await_member(before)
        b.link(up=True)
        for rank in t.on("b"):
            t.start(rank)
        wait_for(lambda: t.check() or waits_for(b, "that made the last commit"), "b waits")
        t.start(1)  # three of four are there, and no copy of what node a has committed alone
        wait_for(lambda: t.check() or any(waits_for(n, "the last commit is in no copies here")
                                          for n in (a, b)), "rank 0 is waited for")
        t.start(0)
        t.wait_world(4)
        no_step_twice(t, 2)

        cut_off(x, t, "b")
        expect_alone(x, t, a)
        expect(job(a, "drain", "j"), 0, "2 trainers were told")
        gone = a.said().count("rpc job session ended")
        t.stop()
        wait_for(lambda: a.said().count("rpc job session ended") == gone + 2, "its ranks end")
        expect(job(a, "delete", "j"), 1, "job j deleted", "node b has not done it")
        expect_gone(x, but="b")
        b.link(up=True)
        expect(job(b, "delete", "--force", "j"), 0, "job j deleted")
        expect_gone(x)


def name_again():
    """A rank of the next job of a name comes before those of other nodes have left: it waits."""
    with Lab(2) as x:
        for early in (1, 0):
            x.nodes = dict(reversed(x.nodes.items()))
            go = f"{x.folder}/go{early}"
            steps = ["init", "train=3"]
            old = Ranks(x, TWO, *steps, own={1 - early: [*steps, f"wait={go}"]})
            if old.ranks[early].wait():
                raise Failed(old.ranks[early].text())
            new = Ranks(x, TWO, "init", "train=2", start=[early])
            node = old.places[early]
            wait_for(lambda n=node: "to leave the job" in str(n.ctl("blame", "j")), "it waits")
            open(go, "w").close()
            old.finish()
            new.start(1 - early)
            new.finish()
            if new.said() != ["1", "2"]:
                raise Failed(f"the second job has made steps {new.said()}")
            expect_gone(x)


DEFAULT = [leader_is_deposed, delete_on_all, delete_while_it_trains, delete_without_a_node,
           delete_after_a_refusal, drains_on_all, elastic_on_all, alone_in_trouble, name_again]
