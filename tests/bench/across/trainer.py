"""A rank of shardd for tests/bench/nodes.

usage: trainer.py FOLDER GROUP big MIB ROUNDS      all-gather and reduce-scatter of a unit of MIB
       trainer.py FOLDER GROUP small OPS ROUNDS    OPS of one element in each of ROUNDS commits
       trainer.py FOLDER GROUP many UNITS ROUNDS   reductions of 16 KiB, all submitted at once
       trainer.py FOLDER GROUP every MIB K         steps of a unit of MIB, each K-th is committed
"""

import sys

import turns

import shardd

STEPS = 16  # of a block of every


def go_on(client, me, buffer, t, begins):
    """All ranks learn from rank 0 whether there is another block. A step is the same in all rounds,
    so that it is recorded: each has this."""
    buffer.memory.view()[0] = float(not begins or (me.rank == 0 and t.await_next()))
    client.all_reduce(buffer)
    return buffer.memory.view()[0] > 0


def big(client, me, t, mib, rounds):
    sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1e-3)
    weight = shardd.TensorSpec("w", (mib << 18,), shardd.Init.UNIFORM, -1, 1)
    [unit] = client.register([shardd.UnitSpec("layer", [weight], optimizer=sgd)])
    unit.init_seed(1)
    buffer, step = client.alloc((1,)), 0
    found = {"gather": [], "reduce": []}
    while go_on(client, me, buffer, t, step % rounds == 0):
        step += 1
        client.barrier()
        turns.timed(found["gather"], unit.gather)
        unit.release()
        unit.gradient()
        client.barrier()
        turns.timed(found["reduce"], unit.reduce)
        client.step()
        client.commit(step)
        if step % rounds == 0:
            t.told(**found)
            found = {"gather": [], "reduce": []}


def small(client, me, t, ops, rounds):
    buffer, one, step = client.alloc((1,)), client.alloc((1,)), 0
    found = {"op": [], "commit": []}
    while go_on(client, me, buffer, t, step % rounds == 0):
        step += 1
        times = []
        for _ in range(ops):
            turns.timed(times, lambda: client.all_reduce(one))
        found["op"].append(turns.median(times))
        client.barrier()
        turns.timed(found["commit"], lambda at=step: client.commit(at))
        if step % rounds == 0:
            t.told(**found)
            found = {"op": [], "commit": []}


def many(client, me, t, n, rounds):
    sgd = shardd.OptimizerSpec(shardd.OptimizerKind.SGD, lr=1e-3)
    weight = shardd.TensorSpec("w", (4096,), shardd.Init.UNIFORM, -1, 1)
    units = client.register([
        shardd.UnitSpec(f"layer{i}", [weight], optimizer=sgd) for i in range(n)])
    for unit in units:
        unit.init_seed(1)
    buffer, step, found = client.alloc((1,)), 0, {"many": []}

    def reduce_all():
        for ticket in [unit.reduce_submit() for unit in units]:
            ticket.wait()
    while go_on(client, me, buffer, t, step % rounds == 0):
        step += 1
        for unit in units:
            unit.gradient()
        client.barrier()
        turns.timed(found["many"], reduce_all)
        client.step()
        client.commit(step)
        if step % rounds == 0:
            t.told(**found)
            found = {"many": []}


def every(client, me, t, mib, k):
    """A block is STEPS steps, the last of which is committed whatever @k is."""
    adamw = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=1e-3)
    weight = shardd.TensorSpec("w", (mib << 18,), shardd.Init.UNIFORM, -1, 1)
    [unit] = client.register([shardd.UnitSpec("layer", [weight], optimizer=adamw)])
    unit.init_seed(1)
    buffer, step, times = client.alloc((1,)), 0, []

    def one():
        unit.gather()
        unit.release()
        unit.gradient()
        unit.reduce()
        client.step()
        if step % k == 0:
            client.commit(step)
    while go_on(client, me, buffer, t, step % STEPS == 0):
        step += 1
        turns.timed(times, one)
        if step % STEPS == 0:
            t.told(step=[sum(times) / STEPS])
            times = []


def main():
    folder, group, kind, size, rounds = sys.argv[1:]
    client = shardd.connect()
    # where not each step is committed the job goes on from the last commit, of which it has a copy
    me = client.join(resume_from="committed" if kind == "every" else None)
    measure = {"big": big, "small": small, "many": many, "every": every}[kind]
    measure(client, me, turns.Turns(folder, group), int(size), int(rounds))
    client.leave()


if __name__ == "__main__":
    main()
