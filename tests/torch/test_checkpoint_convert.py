#!/usr/bin/env python3
"""Checkpoints of the daemon from and to PyTorch's distributed checkpoints: a run that goes on with
the other engine has the bits of the one that was saved. Prints one line of TAP a case; arguments
choose by a part of the name."""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback

import fsdp
import support
import torch
import transformer
from fsdp import Fsdp2, Shardd, differences
from test_states import AFTER, BEFORE, KINDS, Run, flat
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd

import shardd
import shardd.torch as st
from shardd.torch.checkpoint import from_dcp, to_dcp

TIED = {"head.weight": "tokens.weight"}
SHARDCTL = os.path.join(support.BIN_DIR, "shardctl")
CASES = {}  # by name: (ranks, function of the rank and the folder)


class Kept(Shardd):
    """A job that outlives its ranks."""

    def __init__(self, job, resume=False):
        st.init(job=job, op_timeout=60, lifetime=shardd.Lifetime.KEEP, resume=resume)


def ctl(*words):
    done = subprocess.run([SHARDCTL, "--json", *map(str, words)], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def on_rank_0(rank, function):
    """What goes wrong there does so on all ranks."""
    said = [None]
    if rank == 0:
        try:
            function()
        except Exception as error:
            said = [repr(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    assert said[0] is None, said[0]


def registered(job, kind, **options):
    """The job has the units of the model, and nothing else."""
    run = Run(Kept(job), kind, 0, seed=6, **options)
    st.shutdown()
    return run


def loaded(job, folder, kind, rank, **options):
    """The job, which is registered, from the checkpoint in @folder."""
    on_rank_0(rank, lambda: ctl("checkpoint", "load", job, folder))
    return Run(Kept(job, resume=True), kind, rank, seed=6, **options)


def whole(run):
    state = run.full()
    return {**state["model"], **flat(state["optim"])}


def new(folder, *names):
    path = folder.joinpath(*names)
    path.mkdir(parents=True, exist_ok=True)
    return path


def from_fsdp2(kind):
    """A run of FSDP2 on 2 ranks goes on in shardd."""
    def trial(rank, folder):
        source, saved = folder / f"{kind}.dcp", new(folder, kind)
        first = Run(Fsdp2(), kind, rank)
        first.train(0, BEFORE)
        dcp.save(first.sharded(), checkpoint_id=source)
        there = copy.deepcopy(whole(first))  # steps are the optimizer's own tensors
        want = [*first.train(BEFORE, AFTER), flat(first.full()["optim"])]
        if rank == 0:
            torch.save(there, folder / f"{kind}.pt")
        job = f"of-fsdp2-{kind}"
        registered(job, kind)
        on_rank_0(rank, lambda: from_dcp(source, saved, BEFORE if kind == "SGD" else None,
                                         like_job=job, aliases=TIED, shardctl=SHARDCTL))
        second = loaded(job, saved, kind, rank)
        said = differences([whole(second)], [there])
        got = [*second.train(BEFORE, AFTER), flat(second.full()["optim"])]
        st.shutdown()
        return said + differences(got, want)
    return trial


def to_fsdp2(kind):
    """A run of shardd on 2 ranks goes on in FSDP2."""
    def trial(rank, folder):
        saved, target = new(folder, f"own-{kind}"), folder / f"own-{kind}.dcp"
        job = f"of-shardd-{kind}"
        first = Run(Kept(job), kind, rank)
        first.train(0, BEFORE)
        st.commit(BEFORE)
        on_rank_0(rank, lambda: ctl("checkpoint", "save", job, saved))
        there = whole(first)
        want = [*first.train(BEFORE, AFTER), flat(first.full()["optim"])]
        st.shutdown()
        second = Run(Fsdp2(), kind, rank, seed=6)
        state = second.sharded()
        on_rank_0(rank, lambda: to_dcp(saved, target, optimizer=state["optim"], aliases=TIED,
                                       shardctl=SHARDCTL, piece_bytes=4096, file_bytes=16384))
        dcp.load(state, checkpoint_id=target)
        second.load(state)
        said = differences([whole(second)], [there])
        got = [*second.train(BEFORE, AFTER), flat(second.full()["optim"])]
        if rank == 0 and len(list(target.glob("*.distcp"))) < 3:
            said.append("it was not written in pieces")
        return said + differences(got, want)
    return trial


def on_other_ranks(kind):
    """What two ranks of FSDP2 have saved."""
    def trial(rank, folder):
        job = f"ranks-{kind}-{os.environ['WORLD_SIZE']}"
        registered(job, kind)
        run = loaded(job, folder / kind, kind, rank)
        said = differences([whole(run)], [torch.load(folder / f"{kind}.pt")])
        run.train(BEFORE, 1)
        st.shutdown()
        return said
    return trial


def from_ddp(rank, folder):
    """DistributedDataParallel saves whole tensors; its job is one of fully_shard."""
    source, saved = folder / "ddp.dcp", new(folder, "ddp")
    model = torch.nn.parallel.DistributedDataParallel(transformer.make())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **KINDS["AdamW"])
    for step in range(2):
        optimizer.zero_grad()
        transformer.loss(model, rank, step).backward()
        optimizer.step()
    state = {"model": dsd.get_model_state_dict(model),
             "optim": dsd.get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=source)
    on_rank_0(rank, lambda: from_dcp(source, saved, units=["blocks.*"], aliases=TIED,
                                     shardctl=SHARDCTL))
    registered("ddp", "AdamW")
    run = loaded("ddp", saved, "AdamW", rank)
    said = differences([whole(run)], [{**state["model"], **flat(state["optim"])}])
    if st.session().member.step != 2:
        said.append(f"the step is {st.session().member.step}")
    try:
        st.resilient(run.model)
        said.append("resilient has found its state")
    except shardd.FailedPrecondition as error:
        if "has no blob of this rank" not in error.text:
            said.append(error.text)
    st.shutdown()
    return said


class Rounded(Fsdp2):
    exact = False


def half():
    return transformer.make().to(torch.bfloat16)


def parameters_in_bf16(rank, folder):
    """The daemon stores them so, and has no optimizer for them: they are converted, both ways.
    The state of FSDP2's optimizer is bf16 as well: it is refused by name."""
    source, saved, back = folder / "bf16.dcp", new(folder, "bf16"), folder / "bf16-back.dcp"
    first = Run(Rounded(), "AdamW", rank, make=half)
    first.train(0, 1)
    dcp.save(first.sharded(), checkpoint_id=source)
    there = first.full()["model"]
    options = dict(units=["blocks.*"], aliases=TIED, shardctl=SHARDCTL)

    def convert():
        try:
            from_dcp(source, saved, **options)
        except shardd.FailedPrecondition as error:
            assert "exp_avg' is bfloat16" in error.text, error.text
        else:
            raise AssertionError("a state of bf16 was taken")
        from_dcp(source, saved, 1, without_optimizer=True, **options)
        to_dcp(saved, back, aliases=TIED, shardctl=SHARDCTL)

    on_rank_0(rank, convert)
    second = Run(Rounded(), "AdamW", rank, seed=6, make=half)
    state = {"model": second.sharded()["model"]}
    dcp.load(state, checkpoint_id=back)
    dsd.set_model_state_dict(second.model, state["model"])
    said = [f"{n} differs" for n, v in second.full()["model"].items()
            if v.dtype != torch.bfloat16 or not torch.equal(v, there[n])]

    def build(job, **how):
        api = Kept(job, **how)
        model = half()
        for block in model.blocks:
            api.fully_shard(block)
        model = api.fully_shard(model)
        return model, st.Sharded(torch.optim.AdamW, model.parameters(), foreach=False)

    build("bf16")
    st.shutdown()
    on_rank_0(rank, lambda: ctl("checkpoint", "load", "bf16", saved))
    model, _ = build("bf16", resume=True)
    said += [f"{n} differs in the job" for n, v in st.state_dict(model).items()
             if v.dtype != torch.bfloat16 or not torch.equal(v, there[n])]
    st.shutdown()
    return said


for kind in KINDS:
    CASES[f"FSDP2 to shardd, {kind}"] = 2, from_fsdp2(kind)
    CASES[f"shardd to FSDP2, {kind}"] = 2, to_fsdp2(kind)
CASES["DDP to shardd"] = 2, from_ddp
CASES["bf16, both ways"] = 2, parameters_in_bf16
for kind in KINDS:
    for world in 1, 3:
        CASES[f"loaded of FSDP2, {kind} on {world}"] = world, on_other_ranks(kind)


def on_rank(rank, world, names, socket, folder, root):
    fsdp.start(rank, world, socket, folder)
    results = {}
    for name in names:
        try:
            results[name] = CASES[name][1](rank, pathlib.Path(root))
        except Exception:
            results[name] = [traceback.format_exc()]
            st.shutdown()
    dist.destroy_process_group()
    return results


def main():
    names = fsdp.wanted(CASES)
    print(f"1..{len(names)}")
    failed = 0
    with tempfile.TemporaryDirectory() as root, \
            support.daemon("--set", f"checkpoint_roots={root}") as socket:
        for world in 2, 1, 3:  # the others need what the first ones save
            some = [n for n in names if CASES[n][0] == world]
            if not some:
                continue
            with tempfile.TemporaryDirectory() as folder:
                results = support.ranks(on_rank, world, some, socket, folder, root)
            failed += fsdp.tell(some, results, world)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
