#!/usr/bin/python3
"""A trainer whose steps repeat, but for those in which it does something else. Rank 0 prints a line
of JSON for each step: its number, and a hash of the parameters.

usage: wander.py STEPS [WHAT@STEP[:RANK]]...

WHAT: 'barrier': one more; 'reverse': units are gathered in the other order; 'evaluate': a rank
gathers all units by itself, in the other order, before the step; 'late': a rank sleeps before its
last gather.
"""
import hashlib
import json
import sys
import time

import shardd

UNITS = 3
LATE_S = 0.4


def detours(words):
    """Return: by step what there is to do; -1: by all ranks."""
    found = {}
    for word in words:
        what, at = word.split("@")
        step, _, rank = at.partition(":")
        found.setdefault(int(step), []).append((what, int(rank or -1)))
    return found


def register(client):
    adam = shardd.OptimizerSpec(shardd.OptimizerKind.ADAMW, lr=1e-2)
    specs = [shardd.UnitSpec(f"layer{i}",
                             [shardd.TensorSpec("w", (37, 11 + i), shardd.Init.UNIFORM, -1, 1)],
                             compute_dtype=shardd.Dtype.BF16, optimizer=adam)
             for i in range(UNITS)]
    units = client.register(specs)
    for i, unit in enumerate(units):
        unit.init_seed(i + 1)
    return units


def look(unit, digest):
    with unit.gather().view() as seen:
        digest.update(seen.cast("B"))
    unit.release()


def reduce(unit, rank, step):
    with unit.gradient().view() as bits:
        for i in range(0, len(bits), 7):  # of bf16: between 0.5 and 2
            bits[i] = 0x3F00 + (i * 31 + rank * 7 + step * 13) % 256
    unit.reduce()


def main():
    steps, todo = int(sys.argv[1]), detours(sys.argv[2:])
    client = shardd.connect()
    me = client.join()
    units = register(client)
    for step in range(1, steps + 1):
        mine = [what for what, rank in todo.get(step, ()) if rank in (-1, me.rank)]
        digest = hashlib.sha256()
        if "evaluate" in mine:
            for unit in reversed(units):
                look(unit, hashlib.sha256())
        if "barrier" in mine:
            client.barrier()
        for unit in reversed(units) if "reverse" in mine else units:
            if "late" in mine and unit is units[-1]:
                time.sleep(LATE_S)
            look(unit, digest if "reverse" not in mine else hashlib.sha256())
        for unit in reversed(units):
            reduce(unit, me.rank, step)
        client.clip_grad_norm(1.0)
        client.step(lr=1e-2 / step)
        client.commit(step)
        if me.rank == 0:
            print(json.dumps({"step": step, "loss": digest.hexdigest()}), flush=True)
    client.leave()


if __name__ == "__main__":
    main()
