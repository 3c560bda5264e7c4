"""The tests with GPUs, which are simulated (tests/sim)."""

import signal
import time

import lab
import replicas
from cases import BACK, LONG_RUN, THREE, TWO, WIDE, commit_waits, cut_off, leader_of
from lab import Failed, Lab, wait_for
from training import SMALL, Training

# Shape and options: one rank on a GPU, types, steps in the backward pass, and two ranks on a GPU.
RUNS = ((TWO, ""), (TWO, " --dtype bf16"), (TWO, " --in-backward --clip 0"),
        ((("a", 1), ("b", 2)), ""), ((("a", 4), ("b", 4)), ""))

RESTORED = "step in doubt restored job=0/j "


def start_gpus(x, **number):
    """Nodes with so many simulated GPUs; 0: host memory."""
    for name, n in number.items():
        x[name].gpus = n
        x[name].start()


def gpus():
    """Two nodes with two GPUs each, simulated, train as one node with four, to the bit.

    The simulated NCCL adds in the order of the members, wherever they are; a real one need not."""
    with Lab(2, start=False) as x:
        alone = x.nodes["alone"] = lab.Node(x, "alone", 20)
        alone.gpus = 4
        alone.start_alone()
        start_gpus(x, a=2, b=2)
        for i, (shape, more) in enumerate(RUNS):
            options, ranks = SMALL.replace("12", "24") + more, sum(n for _, n in shape)
            one = Training(x, (("alone", ranks),), options=options, job=f"one{i}").finish()
            for turn in range(2 if i == 0 else 1):
                losses = Training(x, shape, options=options, job=f"many{i}").finish()
                if losses != one:
                    raise Failed(f"{shape}{more}, {turn}: {losses}, {one} on one node")


def gpus_hybrid():
    """Sharded on the GPUs of a node, replicated over nodes: the bits of one node with as many GPUs,
    and between nodes goes what it takes to add the replicas, but no parameters."""
    shape = (("a", 2), ("b", 2))
    options = WIDE + " --batch 24 --dtype bf16"
    with Lab(2, start=False) as x:
        alone = x.nodes["alone"] = lab.Node(x, "alone", 20)
        alone.gpus = 4
        alone.start_alone()
        start_gpus(x, a=2, b=2)
        moved, elements = {}, 0
        for name, more in (("sharded", ""), ("hybrid", " --shard-ranks 2")):
            one = Training(x, (("alone", 4),), options=options + more, job=f"one-{name}").finish()
            per_run = []
            for steps in (4, 10):
                before = x["a"].payload()
                t = Training(x, shape, steps=steps, options=options + more, job=f"{name}{steps}")
                t.wait_step(1)
                units = x["a"].ctl("units", t.job)["units"]
                elements = sum(u["elements"] for u in units)
                places = {(u["copies"], u["copy_devices"]) for u in units}
                if places != {(2, 2) if name == "hybrid" else (1, 4)}:
                    raise Failed(f"{name}: copies on so many devices: {places}")
                losses = t.finish()
                per_run.append([b - a for a, b in zip(before, x["a"].payload())])
                if any(one[step] != loss for step, loss in losses.items()):
                    raise Failed(f"{name}: {losses}, {one} on one node")
            moved[name] = max((b - a) // 6 for a, b in zip(*per_run))
        least = 4 * elements  # the sums of a replica, in fp32, to the other one
        print(f"# {elements} parameters, bytes of a step: {moved}, {least} are the least to add")
        if moved["hybrid"] > 1.03 * least:
            raise Failed("parameters have gone from node to node")
        if moved["sharded"] < 1.5 * least:
            raise Failed("what is sharded over nodes was not gathered")


def gpus_sets():
    """Replicas that have a GPU of each of two nodes, of which one is in both."""
    with Lab(3, start=False) as x:
        alone = x.nodes["alone"] = lab.Node(x, "alone", 20)
        alone.gpus = 4
        alone.start_alone()
        start_gpus(x, a=1, b=2, c=1)
        for i, more in enumerate(("", " --dtype bf16 --in-backward --clip 0")):
            options = SMALL.replace("12", "24") + " --shard-ranks 2" + more
            one = Training(x, (("alone", 4),), options=options, job=f"one{i}").finish()
            t = Training(x, (("a", 1), ("b", 2), ("c", 1)), options=options, job=f"many{i}")
            if (losses := t.finish()) != one:
                raise Failed(f"{more}: {losses}, {one} on one node")


def gpus_many_sets():
    """Replicas that have two of the four GPUs of a node each."""
    with Lab(2, start=False) as x:
        alone = x.nodes["alone"] = lab.Node(x, "alone", 20)
        alone.gpus = 8
        alone.start_alone()
        start_gpus(x, a=4, b=4)
        options = SMALL.replace("12", "24") + " --shard-ranks 2"
        one = Training(x, (("alone", 8),), options=options, job="one").finish()
        losses = Training(x, (("a", 4), ("b", 4)), options=options, job="many").finish()
        if losses != one:
            raise Failed(f"{losses}, {one} on one node")


def gpus_mixed():
    """A node with GPUs and one with host memory train no job together, and both say why."""
    with Lab(2, start=False) as x:
        start_gpus(x, a=2, b=0)
        t = Training(x, TWO)
        for rank, p in t.ranks.items():
            code, text = p.wait(), t.said(rank)
            if code != 1 or "on GPUs of node a, and in host memory of node b" not in text:
                raise Failed(f"rank {rank} has ended with {code}: {text}")


def gpus_two_jobs():
    """A second job over the same GPUs is refused, and names the first one, which goes on."""
    with Lab(2, start=False) as x:
        start_gpus(x, a=2, b=2)
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(5)
        second = Training(x, TWO, job="second")
        for rank, p in second.ranks.items():
            code, text = p.wait(), second.said(rank)
            if code != 1 or "job 'second' and job 'j' both have ranks of several" not in text:
                raise Failed(f"rank {rank} has ended with {code}: {text}")
        t.wait_step(t.step() + 5)
        t.stop()


def gpus_daemon_dies():
    """A daemon with GPUs is killed in a collective between nodes: all go on when it is back."""
    with Lab(2, start=False) as x:
        b = x["b"]
        b.gpus, b.more = 2, {"SHARDD_SIM_NCCL_HANG": "500"}
        b.start(held=True)
        start_gpus(x, a=2)
        expected = Training(x, TWO, steps=10, job="undisturbed").finish()
        t = Training(x, TWO, steps=LONG_RUN)
        t.wait_step(10)
        await_hang(t)
        joined = b.joined()
        t.mark()
        b.kill_held()
        t.wait_said(t.on("a"), BACK, ("node b",), s=10)
        t.wait_said(t.on("b"), BACK, ("was restarted",), s=10)
        b.await_member(joined)
        t.wait_step(t.step() + 20)
        t.stop()
        if any(t.losses()[step] != loss for step, loss in expected.items()):
            raise Failed(f"losses {t.losses()}, {expected} before")


def gpus_doubt():
    """A daemon with GPUs is killed while it does not know of a commit: its step is not lost.

    The store has not decided it; or it has, and the daemon was cut off, and makes the step.
    Rank 0 has not said the loss of such a step."""
    with Lab(2, start=False) as x:
        for node in x.nodes.values():
            node.gpus = 2
            node.start(held=True)
        expected = Training(x, TWO, steps=30, job="undisturbed").finish()
        t = Training(x, TWO, steps=LONG_RUN)
        for decided in (False, True):
            t.wait_step(t.step() + 5)
            leader = leader_of(x["a"])
            node = next(n for n in x.nodes.values() if n.name != leader)
            x.etcd.send(signal.SIGSTOP)
            wait_for(lambda n=x[leader]: "the store" in commit_waits(n), "a commit that waits")
            joined = node.joined()
            if decided:
                t.mark()
                node.link(False)
                x.etcd.send(signal.SIGCONT)
                t.wait_said(t.ranks, BACK, ("node ",), s=10)
            before = node.said().count(RESTORED)
            node.kill_held()
            await_restored(node, before)
            node.link(True)
            x.etcd.send(signal.SIGCONT)
            node.await_member(joined)
            t.wait_step(t.step() + 5)
            if decided and "step in doubt completed job=0/j" not in node.said():
                raise Failed("the commit was dropped")
        t.wait_step(max(expected))
        t.stop()
        losses = {step: loss for step, loss in t.losses().items() if step in expected}
        if len(losses) < len(expected) - 2 or any(expected[s] != losses[s] for s in losses):
            raise Failed(f"losses {losses}, {expected} without deaths")


def await_restored(node, before):
    """Its next daemon has what was in doubt."""
    wait_for(lambda: node.said().count(RESTORED) > before, RESTORED)
    if "prepared=yes commit=yes" not in node.said().split(RESTORED)[-1].split("\n")[0]:
        raise Failed(f"node {node.name} has lost its step")


def gpus_link_cut():
    """The network of a node with GPUs is cut: NCCL says nothing, the others do, and all go on."""
    with Lab(3, start=False) as x:
        start_gpus(x, a=1, b=1, c=1)
        t = Training(x, THREE, steps=LONG_RUN)
        t.wait_step(10)
        leader = leader_of(x["a"])
        cut = x[next(n for n in "abc" if n != leader)]
        cut_off(x, t, cut)
        cut.link(True)
        t.wait_step(t.step() + 20)
        t.expect_calm()


def of_host_memory(x, training, *args, **more):
    """The losses of a calm run there. Then the nodes, with so many GPUs as each has ranks, keep
    replicas."""
    for node in x.nodes.values():
        node.start(replicas=1)
    losses = training(x, replicas.SHAPE, *args, **more, job="calm").finish()
    for name, n in replicas.SHAPE:
        x[name].stop()
        x[name].gpus = n
        x[name].start()
    return losses


def gpus_node_is_lost():
    """A node with GPUs is gone with its memory, also the one that leads: the copies have its state.

    The losses are those of a run without deaths, and those of host memory but for roundings."""
    with Lab(3, start=False) as x:
        steps = 60
        host = of_host_memory(x, Training, steps)
        expected = Training(x, replicas.SHAPE, steps=steps, job="calm").finish()
        t = Training(x, replicas.SHAPE, steps=steps)
        for i in range(2):
            t.wait_step(t.step() + 10)
            wait_for(lambda i=i: t.check() or replicas.has_replicas(x, 10 * i + 5), "replicas")
            leader, before = leader_of(x["a"]), replicas.restored(x)
            replicas.lose(x, t, leader if i else next(n for n in "bca" if n != leader))
            if replicas.restored(x) == before:
                raise Failed("no node has restored the job")
        for step, loss in t.finish(missing=20).items():
            if expected[step] != loss or abs(host[step] - loss) > 1e-6 * abs(loss):
                raise Failed(f"step {step} has loss {loss}, {expected[step]} without deaths, "
                             f"{host[step]} in host memory")


def gpus_go_on_without_a_node():
    """An elastic job on GPUs goes on without a node, and grows when it comes back.

    The parameters of each step are those of host memory without deaths."""
    with Lab(3, start=False) as x:
        steps, options = 100, "2 4 0.5"
        expected = of_host_memory(x, replicas.Elastic, steps, options=options)
        t = replicas.Elastic(x, replicas.SHAPE, steps, options=options)
        wait_for(lambda: t.check() or replicas.has_replicas(x, 10), "replicas on all nodes")
        replicas.lose_node(x, t, "b")
        t.wait_step(t.wait_world(2)["step"] + 10)
        replicas.come_back(x, t, "b")
        t.wait_world(4)
        replicas.no_step_twice(t, 2)
        losses = t.finish(missing=60)
        if any(expected[step] != loss for step, loss in losses.items()):
            raise Failed(f"parameters differ: {losses}, {expected} in host memory")


def await_hang(t):
    """Until no step ends any more."""
    last = [t.step(), time.monotonic()]

    def hangs():
        t.check()
        if t.step() != last[0]:
            last[:] = [t.step(), time.monotonic()]
        return time.monotonic() > last[1] + 2
    wait_for(hangs, "a collective that hangs")


DEFAULT = [gpus, gpus_hybrid, gpus_sets, gpus_mixed, gpus_two_jobs, gpus_daemon_dies, gpus_doubt,
           gpus_link_cut, gpus_node_is_lost, gpus_go_on_without_a_node]
LONG = [gpus_many_sets]
