#!/usr/bin/env python3
"""State dicts of shardd.torch and of PyTorch, from the one into the other.

A model trains with the one engine, is saved, goes on; and goes on from what was saved with the
other engine. Losses, parameters and the optimizer's state after every step must be equal bit for
bit. Prints one line of TAP a case; arguments choose by a part of the name.
"""

import copy
import os
import sys
import tempfile

import fsdp
import test_fully_shard as cases
import torch
import transformer
from fsdp import Fsdp2, Shardd, differences
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor

import shardd
import shardd.torch as st

BEFORE, AFTER = 3, 3
KINDS = {
    "AdamW": cases.ADAMW,
    "Adam": dict(lr=0.01, amsgrad=True, weight_decay=0.1),
    "SGD": dict(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
}
CASES, ALONE = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def alone(function):
    """Without torch.distributed."""
    ALONE[function.__name__] = function
    return function


class Branches(torch.nn.Module):
    """One unit, of which the second half is used in two steps of three."""

    blocks = ()

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = torch.nn.Linear(6, 5), torch.nn.Linear(5, 5)

    def forward(self, x, step):
        x = self.always(x)
        return x if step % 3 == 1 else self.sometimes(x)

    @staticmethod
    def loss(model, rank, step):
        return model(cases.numbers(rank, step, 4, 6), step).pow(2).mean()


class Run:
    """A model on one engine, a transformer if nothing is said. @seed: of its values before
    anything is loaded."""

    def __init__(self, api, kind, rank, seed=5, settings=None, make=transformer.make,
                 loss=transformer.loss, **options):
        self.api, self.rank, self.loss = api, rank, loss
        model = make()
        with torch.no_grad():
            torch.manual_seed(seed)
            for p in model.parameters():
                p.add_(0.1 * (seed - 5))
        for block in model.blocks:
            api.fully_shard(block, **options)
        self.model = api.fully_shard(model, **options)
        self.optimizer = api.optimizer(kind, self.model.parameters(),
                                       **{**KINDS[kind], **(settings or {})})

    def train(self, first, steps):
        """Return: a dictionary a step."""
        states = []
        for step in range(first, first + steps):
            loss = self.loss(self.model, self.rank, step)
            loss.backward()
            self.api.step(self.optimizer)
            self.optimizer.zero_grad()
            states.append({**self.api.whole(self.model), "loss": loss.detach()})
        return states

    def sharded(self):
        """{"model": ..., "optim": ...} of this rank's rows, for DCP."""
        if self.api.name == "shardd":
            return {"model": st.state_dict(self.model, full=False),
                    "optim": st.optimizer_state_dict(self.optimizer, full=False)}
        return {"model": dsd.get_model_state_dict(self.model),
                "optim": dsd.get_optimizer_state_dict(self.model, self.optimizer)}

    def full(self):
        if self.api.name == "shardd":
            return {"model": st.state_dict(self.model),
                    "optim": st.optimizer_state_dict(self.optimizer)}
        options = dsd.StateDictOptions(full_state_dict=True)
        state = {"model": dsd.get_model_state_dict(self.model, options=options),
                 "optim": dsd.get_optimizer_state_dict(self.model, self.optimizer,
                                                       options=options)}
        return state

    def load(self, state, full=False):
        if self.api.name == "shardd":
            st.load_state_dict(self.model, state["model"])
            self.optimizer.load_state_dict(state["optim"])
            return
        options = dsd.StateDictOptions(full_state_dict=full)
        dsd.set_model_state_dict(self.model, state["model"], options=options)
        dsd.set_optimizer_state_dict(self.model, self.optimizer, state["optim"], options=options)


def flat(state):
    """The tensors of a full optimizer state, by name."""
    return {f"{name}.{key}": value for name, one in state["state"].items()
            for key, value in one.items()}


def through_dcp(kind, source, target, rank):
    """@source trains, saves, goes on; @target starts elsewhere, loads, goes on. Differences."""
    path = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(path)
    first = Run(source(), kind, rank)
    first.train(0, BEFORE)
    dcp.save(first.sharded(), checkpoint_id=path[0])
    want = [*first.train(BEFORE, AFTER), flat(first.full()["optim"])]
    st.shutdown()
    second = Run(target(), kind, rank, seed=6)
    state = second.sharded()
    dcp.load(state, checkpoint_id=path[0])
    second.load(state)
    got = [*second.train(BEFORE, AFTER), flat(second.full()["optim"])]
    st.shutdown()
    return differences(got, want)


def through_memory(kind, source, target, rank):
    first = Run(source(), kind, rank)
    first.train(0, BEFORE)
    state = copy.deepcopy(first.full())  # FSDP2's steps are the optimizer's own tensors
    want = [*first.train(BEFORE, AFTER), flat(first.full()["optim"])]
    st.shutdown()
    second = Run(target(), kind, rank, seed=6)
    second.train(0, 1)  # what is loaded over a state
    second.load(state, full=True)
    got = [*second.train(BEFORE, AFTER), flat(second.full()["optim"])]
    st.shutdown()
    return differences(got, want)


def ours():
    ours.number += 1
    return Shardd(f"states-{ours.number}")


ours.number = 0


def _engines(name):
    return {"fsdp2": Fsdp2, "shardd": ours}[name]


def _register(way, how, source, target, kind):
    def run(rank):
        return how(kind, _engines(source), _engines(target), rank)

    CASES[f"{kind}_{way}_{source}_to_{target}"] = run


for _kind in KINDS:
    for _source, _target in (("fsdp2", "shardd"), ("shardd", "fsdp2"), ("shardd", "shardd")):
        _register("sharded_through_dcp", through_dcp, _source, _target, _kind)
        _register("full", through_memory, _source, _target, _kind)


@case
def steps_of_parameters_that_were_not_always_used(rank):
    """Each has a count of its own, there and back; of momentum: it is there or not yet."""
    said = []
    for kind, settings in (("AdamW", {}), ("SGD", {"nesterov": False, "dampening": 0.3})):
        for source, target in ((Fsdp2, ours), (ours, Fsdp2), (ours, ours)):
            # Saved behind two steps, and behind one in which the second half was not used; a state
            # in which a parameter has none cannot be set in FSDP2.
            for first_step, before in ((0, 2), (1, 1))[:1 if target is Fsdp2 else 2]:
                options = dict(settings=settings, make=Branches, loss=Branches.loss)
                first = Run(source(), kind, rank, **options)
                first.train(first_step, before)
                state = copy.deepcopy(first.full())
                want = [*first.train(2, AFTER), flat(first.full()["optim"])]
                st.shutdown()
                second = Run(target(), kind, rank, seed=6, **options)
                second.train(2, 1)
                second.load(state, full=True)
                got = [*second.train(2, AFTER), flat(second.full()["optim"])]
                st.shutdown()
                said += [f"{kind} {source.__name__} {target.__name__} {before}: {s}"
                         for s in differences(got, want)]
                if kind == "AdamW" and \
                        want[-1]["sometimes.bias.step"] + 2 != want[-1]["always.bias.step"]:
                    said.append("not two steps were missed")
    return said


@case
def sharded_values_are_those_of_fsdp2(rank):
    """Shape, local rows, placements, names and order of the model's and the optimizer's."""
    theirs = Run(Fsdp2(), "AdamW", rank)
    theirs.train(0, 1)
    ours_ = Run(ours(), "AdamW", rank)
    ours_.train(0, 1)
    said = []
    a, b = theirs.sharded(), ours_.sharded()
    if list(a["model"]) != list(b["model"]):
        said.append(f"names: {list(a['model'])} {list(b['model'])}")
    pairs = [(n, v, b["model"].get(n)) for n, v in a["model"].items()]
    pairs += [(n, v, flat(b["optim"]).get(n)) for n, v in flat(a["optim"]).items()]
    for name, x, y in pairs:
        if type(x) is not type(y):
            said.append(f"{name}: {type(x)} and {type(y)}")
        elif isinstance(x, DTensor):
            if x.placements != y.placements or x.shape != y.shape or x.stride() != y.stride():
                said.append(f"{name}: {x.placements} {x.shape} and {y.placements} {y.shape}")
            if not torch.equal(x.to_local(), y.to_local()):
                said.append(f"{name}: local rows differ")
        elif not torch.equal(x, y):
            said.append(f"{name} differs")
    if a["optim"]["param_groups"] != [{**g, "foreach": False} for g in b["optim"]["param_groups"]]:
        said.append(f"groups: {a['optim']['param_groups']} {b['optim']['param_groups']}")
    st.shutdown()
    return said


@case
def an_optimizer_of_torch_on_the_shard(rank):
    """Full, by number and name, and sharded; against FSDP2's, too."""
    said = []

    class OnShard(Shardd):
        own = True

    class Theirs(Fsdp2):
        exact = False

    def run(seed=5):
        ours.number += 1
        return Run(OnShard(f"states-{ours.number}"), "Adam", rank, seed)

    theirs = Run(Theirs(), "Adam", rank)
    theirs.train(0, BEFORE)
    first = run()
    first.train(0, BEFORE)
    saved = {"full": first.full(), "sharded": first.sharded(),
             "numbers": {"model": st.state_dict(first.model), "optim":
                         first.optimizer.state_dict()}}
    said += differences([flat(saved["full"]["optim"])], [flat(theirs.full()["optim"])])
    if not isinstance(saved["sharded"]["optim"]["state"]["places"]["exp_avg"], DTensor):
        said.append("not sharded")
    want = [*theirs.train(BEFORE, AFTER), flat(theirs.full()["optim"])]
    st.shutdown()
    for way, state in saved.items():
        second = run(6)
        second.load(state)
        said += [f"{way}: {s}" for s in differences(
            [*second.train(BEFORE, AFTER), flat(second.full()["optim"])], want)]
        st.shutdown()
    return said


@case
def pytorchs_own_functions(rank):
    """get_state_dict and set_state_dict on a model and an optimizer of shardd."""
    said = []
    for full, flattened in ((False, False), (True, False), (False, True)):
        options = dsd.StateDictOptions(full_state_dict=full,
                                       flatten_optimizer_state_dict=flattened)
        run = Run(ours(), "Adam", rank)
        run.train(0, BEFORE)
        state = copy.deepcopy(dsd.get_state_dict(run.model, run.optimizer, options=options))
        want = [*run.train(BEFORE, AFTER), flat(run.full()["optim"])]
        st.shutdown()
        run = Run(ours(), "Adam", rank, seed=6)
        dsd.set_state_dict(run.model, run.optimizer, model_state_dict=state[0],
                           optim_state_dict=state[1], options=dsd.StateDictOptions(
                               flatten_optimizer_state_dict=flattened))
        said += differences([*run.train(BEFORE, AFTER), flat(run.full()["optim"])], want)
        st.shutdown()
    return said


@case
def pytorchs_functions_and_a_fresh_optimizer(rank):
    """As FSDP2's users load a checkpoint: the states of a new model and optimizer, loaded into and
    set. The optimizer's was empty, so nothing of it was loaded."""
    said = []
    for kind in KINDS:
        for source, target in ((Fsdp2, ours), (ours, Fsdp2), (ours, ours)):
            path = [tempfile.mkdtemp() if rank == 0 else None]
            torch.distributed.broadcast_object_list(path)
            run = Run(source(), kind, rank)
            run.train(0, BEFORE)
            model, optim = dsd.get_state_dict(run.model, run.optimizer)
            dcp.save({"model": model, "optim": optim}, checkpoint_id=path[0])
            want = [*run.train(BEFORE, AFTER), flat(run.full()["optim"])]
            st.shutdown()
            run = Run(target(), kind, rank, seed=6)
            model, optim = dsd.get_state_dict(run.model, run.optimizer)
            dcp.load({"model": model, "optim": optim}, checkpoint_id=path[0])
            dsd.set_state_dict(run.model, run.optimizer, model_state_dict=model,
                               optim_state_dict=optim)
            got = [*run.train(BEFORE, AFTER), flat(run.full()["optim"])]
            st.shutdown()
            said += [f"{kind} {source.__name__} {target.__name__}: {s}"
                     for s in differences(got, want)]
    return said


@case
def pytorchs_functions_give_what_they_give_of_fsdp2(rank):
    """Types, placements, names and values: before the first step, of whole states too, and with
    cpu_offload on rank 0 only. The state of a fresh optimizer is 0, and has had no step."""
    said = []
    ways = {"rows": {}, "whole": dict(full_state_dict=True),
            "offloaded": dict(full_state_dict=True, cpu_offload=True),
            "flattened": dict(flatten_optimizer_state_dict=True)}
    for kind in KINDS:
        for steps in (0, 2):
            theirs, own = Run(Fsdp2(), kind, rank), Run(ours(), kind, rank)
            for run in (theirs, own):
                run.train(0, steps)
            for way, options in ways.items():
                found = [dsd.get_state_dict(r.model, r.optimizer, options=dsd.StateDictOptions(
                    **options)) for r in (theirs, own)]
                for part, a, b in zip(("model", "optim"), *found):
                    if part == "optim" and "flat" not in way and a:
                        a, b = flat(a), flat(b)
                    if set(a) != set(b):
                        said.append(f"{kind} {steps} {way} {part}: {set(a) ^ set(b)}")
                    for name in {n for n in set(a) & set(b) if not n.endswith(".foreach")}:
                        x, y = a[name], b[name]
                        if isinstance(x, DTensor) and isinstance(y, DTensor) and \
                                x.placements == y.placements and x.shape == y.shape:
                            x, y = x.to_local(), y.to_local()
                        if not isinstance(x, torch.Tensor) and x == y:
                            continue
                        if type(x) is not type(y):
                            said.append(f"{kind} {steps} {way} {name}: {type(x)} {type(y)}")
                        elif isinstance(x, torch.Tensor):
                            # PyTorch's own step, with weight decay, is no part of a fresh state
                            x = torch.zeros_like(y) if part == "optim" and not steps else x
                            if not torch.equal(x, y):
                                off = (x.float() - y.float()).abs().max()
                                said.append(f"{kind} {steps} {way} {name}: off by {off}")
            st.shutdown()
    return said


@case
def a_whole_state_is_set_on_all_ranks_or_from_one(rank):
    """With full_state_dict, and with broadcast_from_rank0, into a fresh optimizer."""
    said = []
    whole = dsd.StateDictOptions(full_state_dict=True)
    for kind in KINDS:
        first = Run(ours(), kind, rank)
        first.train(0, BEFORE)
        state = dsd.get_state_dict(first.model, first.optimizer, options=whole)
        want = [*first.train(BEFORE, AFTER), flat(first.full()["optim"])]
        st.shutdown()
        for source in (False, True):
            run = Run(ours(), kind, rank, seed=6)
            model, optim = copy.deepcopy(state) if not source or rank == 0 else ({}, {})
            options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=source)
            dsd.set_model_state_dict(run.model, model, options=options)
            dsd.set_optimizer_state_dict(run.model, run.optimizer, optim, options=options)
            got = [*run.train(BEFORE, AFTER), flat(run.full()["optim"])]
            said += [f"{kind} {source}: {s}" for s in differences(got, want)]
            st.shutdown()
    return said


def plain(kind, state=None):
    """A model and optimizer of PyTorch alone."""
    model = transformer.make()
    optimizer = getattr(torch.optim, kind)(model.parameters(), foreach=False, **KINDS[kind])
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    return model, optimizer


def _plain_step(model, optimizer, step):
    import test_training

    transformer.loss(model, 0, step).backward()
    with test_training.correctly_rounded():
        optimizer.step()
    optimizer.zero_grad()


@alone
def a_plain_model_and_back(rank):
    """One rank against one process: states by number, as torch.optim has them."""
    said = []
    for kind in KINDS:
        run = Run(Shardd(f"plain-{kind}-{rank}"), kind, 0)
        fresh = run.optimizer.state_dict()
        if fresh["state"]:
            said.append(f"{kind}: there is a state before the first step")
        if set(fresh["param_groups"][0]) != set(plain(kind)[1].state_dict()["param_groups"][0]):
            said.append(f"{kind}: {fresh['param_groups'][0].keys()}")
        run.train(0, BEFORE)
        model, optimizer = plain(kind, (run.model.state_dict(), run.optimizer.state_dict()))
        _plain_step(model, optimizer, BEFORE)
        run.train(BEFORE, 1)
        said += differences([run.model.state_dict()], [model.state_dict()])
        run.train(BEFORE + 1, 1)
        run.model.load_state_dict(model.state_dict())
        run.optimizer.load_state_dict(optimizer.state_dict())
        _plain_step(model, optimizer, BEFORE + 1)
        run.train(BEFORE + 1, 1)
        said += differences([run.model.state_dict(), flat(run.optimizer.state_dict())],
                            [model.state_dict(), flat(optimizer.state_dict())])
        st.shutdown()
    return said


@alone
def rows_without_torch_distributed(rank):
    run = Run(Shardd("rows"), "AdamW", rank)
    run.train(0, BEFORE)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        torch.save(run.sharded(), path)
        state = torch.load(path, weights_only=True)
    said = []
    weight = state["model"]["blocks.0.down.weight"]
    if type(weight) is not st.Rows or weight.first != 9 * rank or weight.rows.shape[0] != 9:
        said.append(f"rows: {weight}")
    if state["model"]["head.weight"].shape != (31, 18) or \
            len(state["model"]["head.weight"].rows) != (16, 15)[rank]:
        said.append("the head has other rows")
    want = [*run.train(BEFORE, AFTER), flat(st.optimizer_state_dict(run.optimizer))]
    run.load(state)
    said += differences([*run.train(BEFORE, AFTER),
                         flat(st.optimizer_state_dict(run.optimizer))], want)
    foreign = {**state["model"], "blocks.0.down.weight": st.Rows(weight.rows, 3, weight.shape)}
    try:
        st.load_state_dict(run.model, foreign)
        said.append("rows of another rank were taken")
    except shardd.InvalidArgument as error:
        if "full=True" not in str(error):
            said.append(str(error))
    st.shutdown()
    return said


@alone
def an_optimizer_on_a_shard_without_rows(rank):
    """There is one row, which rank 0 has."""
    st.init(job="no-rows", op_timeout=60)
    model = st.fully_shard(torch.nn.Linear(3, 1))
    optimizer = st.Sharded(torch.optim.Adam, model.parameters(), lr=0.1)

    def train(steps):
        for step in steps:
            model(cases.numbers(rank, step, 5, 3)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {**model.state_dict(), **flat({"state": {
            str(n): s for n, s in optimizer.state_dict()["state"].items()}})}

    before = train(range(2))
    state, rows = optimizer.state_dict(), st.optimizer_state_dict(optimizer, full=False)
    said = []
    if before["0.step"] != 2 or not before["0.exp_avg"].all() or \
            before["0.exp_avg"].shape != (1, 3):
        said.append(f"{before}")
    if rows["state"]["weight"]["exp_avg"].rows.shape != ((1, 3), (0, 3))[rank]:
        said.append(f"{rows['state']['weight']}")
    parameters = model.state_dict()
    want = train(range(2, 4))
    for saved in (state, rows):
        model.load_state_dict(parameters)
        optimizer.load_state_dict(saved)
        said += differences([train(range(2, 4))], [want])
    st.shutdown()
    return said


@alone
def what_one_rank_cannot_load_no_rank_does(rank):
    said = []
    for own in (False, True):
        api = Shardd(f"one-cannot-{own}")
        api.own = own
        run = Run(api, "Adam", rank)
        run.train(0, 1)
        state, want = run.sharded(), [flat(run.full()["optim"]), st.state_dict(run.model)]
        run.train(1, 1)
        there = [flat(run.full()["optim"]), st.state_dict(run.model)]
        name = "blocks.0.down.weight"
        wrong, optim = copy.copy(state), copy.deepcopy(state["optim"])
        if rank:
            rows = state["model"][name]
            wrong["model"] = {**state["model"], name: st.Rows(rows.rows, 3, rows.shape)}
            optim["state"][name]["exp_avg"] = st.Rows(rows.rows, 3, rows.shape)
        for load in (lambda r=run, w=wrong: st.load_state_dict(r.model, w["model"]),
                     lambda r=run, o=optim: r.optimizer.load_state_dict(o)):
            try:
                load()
                said.append("nothing was raised")
            except shardd.InvalidArgument as error:
                if ("full=True" if rank else "another rank") not in str(error):
                    said.append(str(error))
        said += differences([flat(run.full()["optim"]), st.state_dict(run.model)], there)
        run.load(state)
        said += differences([flat(run.full()["optim"]), st.state_dict(run.model)], want)
        run.train(1, 1)
        st.shutdown()
    return said


@alone
def whole_tensors_on_rank_0_alone(rank):
    run = Run(Shardd("rank-0"), "AdamW", rank)
    run.train(0, 1)
    everywhere = run.full()
    model = st.state_dict(run.model, rank0_only=True)
    optim = st.optimizer_state_dict(run.optimizer, rank0_only=True)
    st.shutdown()
    if rank:
        return [] if not model and not optim else [f"{list(model)} {list(optim)}"]
    return differences([model, flat(optim)], [everywhere["model"], flat(everywhere["optim"])])


@alone
def in_backward_and_at_the_step(rank):
    """What an optimizer in backward has made, one that steps afterwards goes on with."""
    first = Run(Shardd("in-backward"), "AdamW", rank, settings={"in_backward": True})
    first.train(0, BEFORE)
    state = first.full()
    want = [*first.train(BEFORE, AFTER), flat(first.full()["optim"])]
    first.load(state)
    said = differences([*first.train(BEFORE, AFTER), flat(first.full()["optim"])], want)
    st.shutdown()
    second = Run(Shardd("at-the-step"), "AdamW", rank, seed=6)
    second.load(state)
    said += differences([*second.train(BEFORE, AFTER), flat(second.full()["optim"])], want)
    st.shutdown()
    return said


@alone
def what_does_not_fit(rank):
    said = []

    def expect(kind, text, change):
        state = st.optimizer_state_dict(run.optimizer)
        change(state)
        try:
            run.optimizer.load_state_dict(state)
            said.append(f"nothing was raised instead of {text}")
        except kind as error:
            if text not in str(error):
                said.append(f"{text!r} is not in {error}")

    name = "blocks.0.down.weight"
    run = Run(Shardd("misfits"), "AdamW", rank)
    before = st.optimizer_state_dict(run.optimizer)
    expect(shardd.InvalidArgument, "parameter groups", lambda s: s["param_groups"].pop())
    expect(shardd.InvalidArgument, "has the same",
           lambda s: s["param_groups"][0]["params"].__setitem__(0, "nobody"))
    expect(shardd.InvalidArgument, "shape",
           lambda s: s["state"][name].__setitem__("exp_avg", torch.zeros(2)))
    expect(shardd.InvalidArgument, "no exp_avg_sq", lambda s: s["state"][name].pop("exp_avg_sq"))
    expect(shardd.Unimplemented, "amsgrad is",
           lambda s: s["param_groups"][0].__setitem__("amsgrad", "another"))
    expect(shardd.Unimplemented, "Adam and AdamW",
           lambda s: s["param_groups"][0].__setitem__("decoupled_weight_decay", False))
    said += differences([flat(st.optimizer_state_dict(run.optimizer))], [flat(before)])
    changed = st.optimizer_state_dict(run.optimizer)
    changed["param_groups"][0].update(lr=0.5, eps=0.25)
    run.optimizer.load_state_dict(changed)
    group = run.optimizer.param_groups[0]
    if (group["lr"], group["eps"]) != (0.5, 0.25):
        said.append("the learning rate or eps was not loaded")
    st.shutdown()
    return said


@alone
def replicas_have_whole_tensors(rank):
    st.init(job="replicas", op_timeout=60)
    model = st.replicate(cases.mlp(), bucket_cap_mb=1e-4)
    optimizer = st.AdamW(model.parameters(), **cases.ADAMW)

    def train(steps):
        out = []
        for step in steps:
            value = model(cases.numbers(rank, step, 5, 7)).pow(2).mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append({"loss": value.detach(), **model.state_dict()})
        return out

    train(range(3))
    saved = st.state_dict(model, full=False), st.optimizer_state_dict(optimizer, full=False)
    said = [] if all(type(v) is torch.Tensor for v in saved[0].values()) else ["not whole"]
    want = train(range(3, 6))
    st.load_state_dict(model, saved[0])
    optimizer.load_state_dict(saved[1])
    said += differences(train(range(3, 6)), want)
    st.shutdown()
    return said


@alone
def a_rank_saves_alone(rank):
    """As a program of DistributedDataParallel does. The error was about numbers of ops alone."""
    said = []
    for what in ("model", "optimizer"):
        st.init(job=f"a-rank-saves-alone-{what}", op_timeout=20)
        model = st.fully_shard(cases.mlp())
        optimizer = st.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        try:
            if rank == 0:
                (model if what == "model" else optimizer).state_dict()
            else:
                model.clip_grad_norm_(1.0)
            said.append(f"{what}: nothing was refused")
        except shardd.SharddError as error:
            if rank == 0 and "on every rank" not in str(error):
                said.append(f"{what}: {error}")
        st.shutdown()
    return said


# ------------------------------------------------------------------------ running


def trial(name, rank):
    return {**CASES, **ALONE}[name](rank)


def main():
    alone = fsdp.wanted(ALONE)
    plain = [n for n in alone if n == "a_plain_model_and_back"]
    return fsdp.report(fsdp.Plan(2, fsdp.wanted(CASES), trial),
                       fsdp.Plan(1, plain, trial, gloo=False),
                       fsdp.Plan(2, [n for n in alone if n not in plain], trial, gloo=False))


if __name__ == "__main__":
    sys.exit(main())
