#!/usr/bin/env python3
"""Models that the program drops: their units are freed when the next model is built. Two ranks.
Prints one line of TAP a case; arguments choose by a part of the name.
"""

import gc
import json
import os
import subprocess
import sys

import fsdp
import support
import test_fully_shard as shared
import torch
from fsdp import Shardd, differences

import shardd.torch as st

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def asked(what):
    made = subprocess.run([os.path.join(support.BIN_DIR, "shardctl"), "--socket",
                           os.environ["SHARDD_SOCKET"], "--json", *what], check=True,
                          capture_output=True, text=True)
    return json.loads(made.stdout)


def units():
    [job] = [j for j in asked(["jobs"])["jobs"] if j["name"].endswith(CURRENT[0])]
    return job["unit_count"]


def live_bytes():
    """Without what a process has mapped, which goes with the process."""
    [device] = asked(["memory"])["devices"]
    return device["used_bytes"] - device["quarantined_bytes"]


CURRENT = [""]
API = Shardd.__new__(Shardd)


def built(wrap=None):
    model = (wrap or (lambda m: shared.shard_mlp(API, m)))(shared.mlp())
    return model, st.AdamW(model.parameters(), lr=0.05)


def trained(model, optimizer, rank, steps=3):
    states = []
    for step in range(steps):
        loss = shared.square(rank)(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({"loss": loss.detach(), **API.whole(model)})
    return states


def meet():
    st.session().barrier()


def seen(rank, value):
    """What rank 0 sees while nobody changes anything."""
    meet()
    found = value() if not rank else None
    meet()
    return found


@case
def one_after_the_other(rank):
    said, used, first = [], [], None
    for k in range(6):
        model, optimizer = built()
        states = trained(model, optimizer, rank)
        first = first or states
        said += [f"model {k}: {text}" for text in differences(states, first)]
        used.append((seen(rank, units), seen(rank, live_bytes)))
        del model, optimizer, states
    if not rank:
        said += [] if {n for n, _ in used} == {3} else [f"units: {used}"]
        said += [] if used[5][1] <= used[1][1] else [f"bytes: {used}"]
    return said


@case
def one_of_two(rank):
    """The other one trains on, and has what it had."""
    kept, optimizer = built()
    alone, gone = trained(kept, optimizer, rank, 2), built()
    trained(*gone, rank)
    del gone
    before = API.whole(kept)
    other = built()
    said = differences([API.whole(kept)], [before])
    trained(*other, rank)
    alone += trained(kept, optimizer, rank, 2)
    if not rank and units() != 6:
        said.append(f"{units()} units")
    meet()
    reference, optimizer = built()
    whole = trained(reference, optimizer, rank, 2) + trained(reference, optimizer, rank, 2)
    return said + differences(alone, whole)


@case
def dropped_by_one_rank_only(rank):
    """It stays until the other rank has dropped it, too."""
    model, optimizer = built()
    trained(model, optimizer, rank, 1)
    held = (model, optimizer) if rank else None
    del model, optimizer
    second = built()
    counts = [seen(rank, units)]
    del held
    third = built()
    counts.append(seen(rank, units))
    trained(*second, rank, 1)
    trained(*third, rank, 1)
    return [] if rank or counts == [6, 6] else [f"units: {counts}"]


@case
def between_forward_and_backward(rank):
    """What this rank had gathered is released."""
    model, optimizer = built(lambda m: shared.shard_mlp(API, m, reshard_after_forward=False))
    loss = shared.square(rank)(model, 0)
    del model, optimizer, loss
    model, optimizer = built()
    trained(model, optimizer, rank, 1)
    counted = seen(rank, units)
    return [] if rank or counted == 3 else [f"{counted} units"]


@case
def with_gradients_that_were_not_reduced(rank):
    """They stand in the way: the model stays, and the next one trains."""
    model, optimizer = built()
    with model.no_sync():
        shared.square(rank)(model, 0).backward()
    del model, optimizer
    model, optimizer = built()
    trained(model, optimizer, rank, 1)
    counted = seen(rank, units)
    return [] if rank or counted == 6 else [f"{counted} units"]


@case
def replicated(rank):
    said, first = [], None
    for _ in range(3):
        model, optimizer = built(lambda m: st.replicate(m, bucket_cap_mb=0.0001))
        states = trained(model, optimizer, rank)
        first = first or states
        said += differences(states, first)
        counted = seen(rank, units)
        del model, optimizer
    return said + ([] if rank or counted == 4 else [f"{counted} units"])


@case
def with_optimizers_of_torch(rank):
    counts = []
    for _ in range(3):
        model = shared.shard_mlp(API, shared.mlp())
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
        trained(model, optimizer, rank, 1)
        counts.append(seen(rank, units))
        del model, optimizer
        gc.collect()
    return [] if rank or counts == [3, 3, 3] else [f"units: {counts}"]


def trial(name, rank):
    CURRENT[0] = name
    st.init(job=name)
    try:
        return CASES[name](rank)
    finally:
        st.shutdown()


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted(CASES), trial)))
