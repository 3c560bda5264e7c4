"""The tests."""

import datetime
import os
import random
import re
import signal
import time

import checkpoints
import lab
from lab import Failed, Lab, sh, wait_for
from training import SHAPES, TWO, Training, Wandering, expect_same

THREE = (("a", 1), ("b", 1), ("c", 1))
# Steps enough that something can happen in the middle.
LONG_RUN = 100000
WIDE = "--batch 4 --hidden 512 --context 4 --embed 4"
BACK = "returns to the last commit"
KNOWN_S = 2  # links wait for 1.25 s


def trains():
    """Training over nodes gives the losses of one node, and the same bits each time."""
    with Lab(4) as x:
        alone = lab.Node(x, "alone", 20)
        x.nodes["alone"] = alone
        alone.start_alone()
        for shape in SHAPES:
            ranks = sum(n for _, n in shape)
            one = Training(x, (("alone", ranks),), job=f"one{ranks}").finish()
            losses = Training(x, shape, job="many").finish()
            again = Training(x, shape, job="many").finish()
            expect_same(again, losses, f"{shape}, the second time:")
            for step, loss in losses.items():
                if step in one and abs(loss - one[step]) > 1e-6 * abs(one[step]):
                    raise lab.Failed(f"{shape}: step {step} has loss {loss}, {one[step]} alone")


def goes_on(t):
    t.wait_step(t.step() + 20)


def kill_rank(t, rank):
    """All others read which rank is gone, and where, though data connections close sooner."""
    pid, node = t.ranks[rank].popen.pid, t.places[rank][0].name
    t.mark()
    t.ranks[rank].kill()
    others = [r for r in t.ranks if r != rank]
    t.wait_said(others, BACK, (f"rank {rank} (pid {pid}) of job '{t.job}' on node {node} ",))
    for r in others:
        if "lost contact" in t.said(r):
            raise Failed(f"rank {r}: {t.said(r)}")


def trainer_dies():
    """A trainer is killed on one node: all ranks hear of it, join again and go on."""
    for shape, victims in ((TWO, (3, 0)), (THREE, (2, 1, 0))):
        with Lab(len(shape)) as x:
            expected = Training(x, shape, steps=200, job="undisturbed").finish()
            t = Training(x, shape, steps=200)
            t.wait_step(20)
            for rank in victims:
                kill_rank(t, rank)
                t.start(rank)
                goes_on(t)
            expect_same(t.finish(), expected)


def daemon_dies():
    """A daemon is killed: its node is named, and its job is refused until it is deleted."""
    with Lab(2) as x:
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(20)
        x["b"].kill()
        t.wait_said(t.on("a"), BACK, ("node b",), s=5)
        for rank in t.on("b"):
            t.ranks[rank].wait()
        x["b"].start()
        for rank in t.on("b"):
            t.start(rank)
        for rank in t.ranks:
            if t.ranks[rank].wait() != 1:
                raise Failed(f"rank {rank} has ended with {t.ranks[rank].code}")
        refusal = "the nodes of job '0/j' are not at the same step: "
        t.wait_said(t.ranks, refusal, ("node b has nothing of it",))
        t.wait_said(t.ranks, "; delete the job (shardctl job delete, on any of its nodes) and "
                    "start it again", (refusal,))
        x["a"].ctl("job", "delete", "--force", "j")
        Training(x, TWO).finish()


def daemon_comes_back():
    """A daemon that is killed at any time comes back with its memory, and no step is lost."""
    kills = 200 if os.environ.get("SHARDD_TEST_LONG") == "1" else 6
    rng = random.Random(18)
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(held=True)
        shape = (("a", 1), ("b", 2), ("c", 1))
        steps = 25 * kills
        expected = Training(x, shape, steps=steps, job="undisturbed").finish(s=40 + kills)
        t = Training(x, shape, steps=steps)
        for i in range(kills):
            t.wait_step(25 * i + 3)
            time.sleep(rng.random() / 20)
            x[rng.choice("abc")].kill_held()
        expect_same(t.finish(s=20 + 2 * kills), expected)


def notice(x, victim, number):
    """A signal to the daemon of a node. Return: after how many seconds the last of the other nodes
    has ended the epoch, by the times in their logs."""
    at = datetime.datetime.now(datetime.timezone.utc)

    def ended(node):
        for line in node.said().splitlines():
            when, _, said = line.partition(" ")
            if "cluster epoch ends" in said and (t := datetime.datetime.fromisoformat(
                    when.replace("Z", "+00:00"))) > at:
                return t
        return None
    victim.signal_held(number)
    others = [n for n in x.nodes.values() if n != victim]
    times = [wait_for(lambda n=n: ended(n), f"node {n.name} ends the epoch") for n in others]
    return (max(times) - at).total_seconds()


def known_soon():
    """A daemon that is killed, or hangs, is soon known to all other nodes: 2 s are too late."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(held=True)
        t = Training(x, THREE, steps=LONG_RUN)
        t.wait_step(20)
        for leads in (False, True):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                leader = leader_of(x["a"])
                name = leader if leads else next(n for n in "abc" if n != leader)
                seconds = notice(x, x[name], number)
                if number == signal.SIGSTOP:
                    x[name].signal_held(signal.SIGCONT)
                print(f"# {'leader' if leads else 'other'} {signal.Signals(number).name}: known "
                      f"after {seconds:.2f} s")
                if seconds > KNOWN_S:
                    raise Failed(f"node {name} was gone for {seconds:.2f} s before all knew")
                goes_on(t)
        t.stop()


def rank_leaves():
    """A rank that leaves cleanly is named at once to ranks of other nodes that wait for it."""
    with Lab(3) as x:
        for job, shape, leaves in (("follower", THREE, 2), ("first", THREE, 0),
                                   ("beside", (("a", 1), ("b", 2), ("c", 1)), 2)):
            t = Training(x, shape, steps=LONG_RUN, own={leaves: "--steps 10"}, job=job)
            pid, node = t.ranks[leaves].popen.pid, t.places[leaves][0].name
            if code := t.ranks[leaves].wait():
                raise Failed(f"rank {leaves} has ended with {code}")
            others = t.ranks.keys() - {leaves}
            why = [f"rank {leaves} (pid {pid}){on} has left job '{t.job}'"
                   for on in ("", f" on node {node}")]
            # A rank that has read it joins again, maybe before the next op of another rank.
            t.wait_said(others, BACK, (*why, "join again"))
            if not any(text in t.said(r) for r in others for text in why):
                raise Failed(f"nobody has read {why}")
            t.stop()


def waits_of(node, job):
    """What ranks that join there wait for."""
    return next((j["waits"] for j in node.ctl("status")["jobs"] if j["name"] == job), "")


def gives_up():
    """A rank that gives up joining is not counted among those that wait, on whichever node."""
    with Lab(2) as x:
        for gone in (0, 2):
            t = Training(x, TWO, job=f"j{gone}", start=(0, 2))
            wait_for(lambda t=t: "2 of 4 ranks have not joined on any node: 1, 3" in
                     waits_of(x["a"], t.job) + waits_of(x["b"], t.job), "two ranks wait")
            t.ranks[gone].kill()
            t.start(1)
            t.start(3)
            wait_for(lambda t=t, gone=gone: f"1 of 4 ranks have not joined on any node: {gone}" in
                     waits_of(x["a"], t.job) + waits_of(x["b"], t.job), "three ranks wait")
            if any(f"epoch begins job=0/{t.job} " in n.said() for n in x.nodes.values()):
                raise Failed("the epoch has begun without one of its ranks")
            t.start(gone)
            t.finish()


def gives_up_again():
    """Ranks that die while they come back after the death of another one are not counted."""
    rng = random.Random(1)
    with Lab(2) as x:
        t = Training(x, TWO, steps=LONG_RUN)
        for _ in range(15):
            t.wait_step(t.step() + 5)
            t.ranks[0].kill()
            time.sleep(rng.random() * 0.003)
            for rank in rng.sample((1, 2, 3), 3):
                t.ranks[rank].send(signal.SIGKILL)
            t.stop()
            wait_for(lambda: not any(n.ctl("sessions")["sessions"] for n in x.nodes.values()),
                     "all ranks are gone")
            t.start(0)
            t.start(3)
            wait_for(lambda: "2 of 4 ranks have not joined on any node: 1, 2" in
                     waits_of(x["a"], t.job) + waits_of(x["b"], t.job), "two ranks wait")
            t.start(1)
            t.start(2)
        t.stop()


def job_of(node, *verb):
    return node.ctl(*verb)["jobs"][0]


def stall_of(node):
    stall = job_of(node, "status")["stall"]
    return stall["text"] if stall else ""


def blame():
    """Each node names the rank that holds everybody up, and a node that does not answer."""
    with Lab(3, start=False) as x:
        for node in x.nodes.values():
            node.start(stall_after_ms="300ms")
        t = Training(x, (("a", 1), ("b", 2), ("c", 1)), steps=LONG_RUN)
        t.wait_step(20)
        slow_reads_its_own(x, t)
        for rank in (3, 1):
            pid, on = t.ranks[rank].popen.pid, t.places[rank][0].name
            t.ranks[rank].send(signal.SIGSTOP)
            for node in x.nodes.values():
                start = f"rank {rank} (pid {pid}, stopped) on node {on} has not begun "
                wait_for(lambda node=node, start=start: [
                    b["text"] for b in job_of(node, "blame", t.job)["blame"]
                    if b["text"].startswith(start) and "in which 3 ranks wait" in b["text"]],
                    f"node {node.name} names rank {rank}")
                wait_for(lambda node=node, start=start: stall_of(node).startswith(start),
                         f"node {node.name} says that the job stalls")
                if t.on(node.name) != [rank]:  # another rank waits there
                    wait_for(lambda node=node, start=start: f'what="{start}' in node.said(),
                             f"the log of node {node.name} names rank {rank}")
                ranks = job_of(node, "status")["ranks"]
                if [r["state"] for r in ranks] != ["JOINED"] * 4 or not all(
                        r["pid"] == p.popen.pid for r, p in zip(ranks, t.ranks.values())):
                    raise Failed(f"node {node.name}: {ranks}")
                if not all(r["waited_us"] for r in ranks) or not ranks[1]["late_us"]:
                    raise Failed(f"node {node.name} does not say who waited: {ranks}")
            t.ranks[rank].send(signal.SIGCONT)
            t.wait_step(t.step() + 5)
        leader = leader_of(x["a"])  # through which the others are asked
        mute_node(x, next(n for n in "abc" if n != leader))
        goes_on(t)
        t.stop()


def slow_reads_its_own(x, t):
    """slow compares the ranks of its node, and says of which nodes it has no records."""
    for node, ranks in (("a", []), ("b", [1, 2])):
        s = x[node].ctl("slow", t.job)
        if [n["name"] for n in s["nodes_read"]] != [node] or sorted(
                n["name"] for n in s["nodes_not_read"]) != sorted(set("abc") - {node}):
            raise Failed(f"node {node}: {s}")
        if sorted(r["rank"] for r in s["ranks"]) != ranks or (s["steps"] < 10 and ranks):
            raise Failed(f"node {node}: {s}")


def mute_node(x, mute):
    x[mute].daemon.send(signal.SIGSTOP)
    for name in x.nodes.keys() - {mute}:
        errors = {n["name"]: n["error"] for n in job_of(x[name], "status")["nodes"]}
        of_mute = errors.pop(mute)
        if not of_mute or any(errors.values()):
            raise Failed(f"node {name}, when {mute} is mute: {of_mute}, {errors}")
    x[mute].daemon.send(signal.SIGCONT)


def leader_of(node):
    """Of the job's last epoch."""
    return re.findall(r"cluster epoch begins .* leader=(\w+)", node.said())[-1]


def cut_off(x, t, cut):
    """The cable of a node is pulled: all ranks hear of it."""
    t.mark()
    cut.link(False)
    t.wait_said(t.ranks, BACK, ("node ",), s=10)

    def named():
        said = [line for n in x.nodes.values() if n != cut for line in n.said().splitlines()]
        return any("cluster epoch ends" in line and f"node {cut.name}" in line for line in said)

    lab.wait_for(named, f"a daemon names node {cut.name} in its log")


def link_cut():
    """The network of a node is cut: all ranks hear of it, and go on, with the same losses, when it
    is back."""
    with Lab(3) as x:
        t = Training(x, THREE, steps=LONG_RUN)
        t.wait_step(20)
        for leads in (False, True):
            leader = leader_of(x["a"])
            cut = x[leader if leads else next(n for n in "abc" if n != leader)]
            cut_off(x, t, cut)
            cut.link(True)
            goes_on(t)
        t.expect_calm()


def commit_while_cut():
    """A node that is cut off while a commit is decided, and be it the one that asks for it, has the
    commit when it is back, or no node has it: the losses are those of a calm run."""
    with Lab(3) as x:
        t = Training(x, THREE, steps=LONG_RUN)
        t.wait_step(20)
        for leads in (False, True):
            leader = leader_of(x["a"])
            cut = x[leader if leads else next(n for n in "abc" if n != leader)]
            x.etcd.send(signal.SIGSTOP)
            wait_for(lambda n=x[leader]: "the store" in commit_waits(n), "a commit that waits")
            step = t.step()
            t.mark()
            cut.link(False)
            x.etcd.send(signal.SIGCONT)
            t.wait_said(t.ranks, BACK, ("node ",), s=10)
            cut.link(True)
            t.wait_step(step + 20)
        t.expect_calm()


def commit_waits(node):
    """What a commit waits for, as shardctl shows it; "": there is none."""
    ops = node.ctl("ops", "j")["ops"]
    return next((o["waits_for"] for o in ops if o["op"] == "Commit" and o["waits_for"]), "")


def await_etcd(x, t):
    """Commits wait for it, and their leader knows."""
    wait_for(lambda: any("the store, which decides the commit" in commit_waits(n)
                         for n in x.nodes.values()), "a commit that waits for etcd")
    return t.step()


def etcd_dies():
    """Without etcd a commit waits, with the reason, and training goes on when it is back."""
    with Lab(2) as x:
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(20)
        x.etcd.kill()
        step = await_etcd(x, t)
        time.sleep(1)
        if t.step() > step + 1:
            raise Failed(f"step {t.step()} was committed without etcd, after {step}")
        x.start_etcd()
        t.wait_step(step + 20)
        x.etcd.send(signal.SIGSTOP)
        step = await_etcd(x, t)
        time.sleep(3)
        x.etcd.send(signal.SIGCONT)
        t.wait_step(step + 20)
        t.check()
        t.expect_calm()


def orders(node, recorded):
    return node.said().count(f"recorded={recorded}")


def recorded():
    """Nodes follow a recorded step, and leave it for what is new: with equal parameters."""
    detours = ("barrier@20", "evaluate@40:0", "reverse@60", "evaluate@80:3", "late@100:2")
    with Lab(2, start=False) as x:
        for node in x.nodes.values():
            node.start(recorded_order="no")
        expected = Wandering(x, TWO, 120, detours, job="announced").finish()
        if any(orders(n, "yes") for n in x.nodes.values()):
            raise Failed("a step was recorded, and must not be")
        for node in x.nodes.values():
            node.stop()
            node.start(recorded_order="yes")
        if (seen := Wandering(x, TWO, 120, detours).finish()) != expected:
            raise Failed(f"parameters {seen}, {expected} when each operation is announced")
        for node in x.nodes.values():
            left = [orders(node, r) for r in ("yes", "no")]
            print(f"# node {node.name} has followed a recorded step {left[0]} times, and left it "
                  f"{left[1]} times")
            if min(left) < 2:
                raise Failed(f"node {node.name}: {left}")


def by_ranks():
    """With sums in rank order the losses are those of one node, bit for bit."""
    with Lab(2, start=False) as x:
        x.nodes["alone"] = lab.Node(x, "alone", 20)
        x.nodes["alone"].start_alone()
        for name in "ab":
            x[name].start(order="ranks")
        one = Training(x, (("alone", 4),), job="one").finish()
        for shape in (TWO, (("a", 1), ("b", 3))):
            expect_same(Training(x, shape, job="many").finish(), one, shape)


def etcd_is_away():
    """etcd is away for longer than the lease of the nodes."""
    with Lab(2) as x:
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(20)
        x.etcd.kill()
        step = await_etcd(x, t)
        time.sleep(15)
        x.start_etcd()
        t.wait_step(step + 20, s=60)
        t.check()
        t.expect_calm()


def mismatch():
    """Ranks of one node with other options than those of another are refused on both."""
    with Lab(2) as x:
        for job, own, words in (("batch", "--batch 16", ("AllReduce of 17", "AllReduce of 13")),
                                ("size", "--hidden 32", ("definition",))):
            t = Training(x, TWO, job=job, own={2: own, 3: own})
            for rank, p in t.ranks.items():
                code, text = p.wait(), t.said(rank)
                whole = all(w in text for w in (*words, "on node a", "on node b", "(pid "))
                if code != 1 or not whole:
                    raise Failed(f"rank {rank} of job {job} has ended with {code}: {text}")


def make_certs(folder):
    """A CA, and one that nobody trusts, each with certificates of nodes a and b."""
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    for ca in ("ca", "other"):
        sh(f"{new} -keyout {folder}/{ca}.key -out {folder}/{ca}.pem -subj /CN={ca}")
        for node in "ab":
            at = f"{folder}/{ca}-{node}"
            sh(f"{new} -keyout {at}.key -out {at}.pem -subj /CN={node} "
               f"-CA {folder}/{ca}.pem -CAkey {folder}/{ca}.key "
               f"-addext basicConstraints=critical,CA:FALSE -addext subjectAltName=DNS:{node}")


def tls_keys(folder, node, ca):
    return {"peer_insecure": "no", "peer_ca": f"{folder}/{ca}.pem",
            "peer_cert": f"{folder}/{ca}-{node}.pem", "peer_key": f"{folder}/{ca}-{node}.key"}


def tls():
    """Nodes with certificates of one CA train together; with those of two the log says why not."""
    with Lab(2, start=False) as x:
        make_certs(x.folder)
        for name in "ab":
            x[name].start(**tls_keys(x.folder, name, "ca"))
        Training(x, TWO).finish()
        x["b"].stop()
        x["b"].start(**tls_keys(x.folder, "b", "other"))
        t = Training(x, TWO)
        wait_for(lambda: any("certificate verify failed" in line and "cluster link gone" in line
                             for n in x.nodes.values() for line in n.said().splitlines()),
                 "the reason in a log")
        if t.lines():
            raise Failed("they have trained together")
        t.stop()


def other_cluster():
    """Nodes of two clusters do not meet in one etcd: their ranks wait for the others."""
    with Lab(2, start=False) as x:
        for name, cluster in (("a", "red"), ("b", "blue")):
            x[name].start(cluster=cluster)
        t = Training(x, TWO)
        wait_for(lambda: all("cluster leads job=0/j" in n.said() for n in x.nodes.values()),
                 "both lead a job of their own")
        time.sleep(1)
        if t.lines():
            raise Failed("they have trained together")
        if any("link up" in n.said() for n in x.nodes.values()):
            raise Failed("they are connected")
        t.stop()


def stopped():
    """A daemon that is stopped leaves the cluster: its name is free for another address at once."""
    with Lab(2) as x:
        b = x["b"]
        b.stop()
        b.start(peer_listen=f"{b.address}:{lab.PEER_PORT + 1}")
        if "another node is a member" in b.said():
            raise Failed("its name was taken still")
        Training(x, TWO, steps=3).finish()


def slow_link():
    """Through 100 Mbit/s a step sends what an all-gather and a reduce-scatter need, and no more."""
    with Lab(2) as x:
        plain = Training(x, TWO, steps=10, options=WIDE, job="plain").finish()
        sh("ip netns exec a tc qdisc add dev eth0 root tbf rate 100mbit burst 64kb latency 50ms")
        moved, elements = [], 0
        for steps in (10, 30):
            before = x["a"].payload()
            t = Training(x, TWO, steps=steps, options=WIDE)
            t.wait_step(1)
            elements = elements or sum(u["elements"] for u in x["a"].ctl("units", "j")["units"])
            begun = time.monotonic()
            losses = t.finish()
            seconds = time.monotonic() - begun
            moved.append([b - a for a, b in zip(before, x["a"].payload())])
            if any(losses[step] != loss for step, loss in plain.items()):
                raise Failed(f"losses {losses}, {plain} through a fast link")
        best = 2 * 4 * elements * (2 - 1) / 2
        per_step = [(b - a) / 20 for a, b in zip(*moved)]
        print(f"# {elements} parameters, bytes of a step: {per_step[0]:.0f} received, "
              f"{per_step[1]:.0f} sent, {best:.0f} are the least; 30 steps in {seconds:.1f} s")
        if seconds < 0.8 * 29 * best * 8 / 100e6:
            raise Failed(f"30 steps took {seconds:.1f} s: the link was not slow")
        if max(per_step) > 1.03 * best:
            raise Failed("that is more than 3 % above")


DEFAULT = [trains, by_ranks, trainer_dies, daemon_dies, daemon_comes_back, known_soon,
           rank_leaves, gives_up, gives_up_again, blame, link_cut, etcd_dies, recorded, mismatch,
           tls, other_cluster, stopped, commit_while_cut, slow_link, checkpoints.checkpoints_move,
           checkpoints.checkpoint_of_a_killed_node, checkpoints.node_is_lost,
           checkpoints.checkpoints_regularly, checkpoints.checkpoints_not_shared]
LONG = [etcd_is_away]
