#!/usr/bin/env python3
"""shardd.torch.Sharded, an optimizer of torch.optim on the shard: all that the daemon's can.

Against FSDP2 with the same optimizer, and against the daemon's own where the arithmetic is the
same: losses and parameters after every step bit for bit, on two ranks. Prints one line of TAP a
case; arguments choose by a part of the name.
"""

import contextlib
import sys
import warnings

import fsdp
import test_fully_shard as cases
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.distributed.tensor import DTensor

import shardd
import shardd.torch as st

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Own(Shardd):
    own = True


class InBackward(Own):
    def optimizer(self, kind, params, **options):
        return super().optimizer(kind, params, in_backward=True, **options)


def theirs(run, rank):
    api = Fsdp2()
    api.exact = False
    return run(api, rank)


def ours(kind, name, run, rank):
    api = kind(name)
    try:
        return run(api, rank)
    finally:
        api.close()


def against_fsdp2(kind, name):
    def both(rank):
        run = cases.CASES[name]
        return differences(ours(kind, f"{kind.__name__}-{name}", run, rank), theirs(run, rank),
                           cases.BOUNDS.get(name, 0.0))

    return both


# Of test_fully_shard: the daemon's optimizers are compared there.
EITHER = [
    "an_mlp", "a_gpt_with_tied_embeddings_and_a_frozen_layer",
    "a_branch_that_no_rank_uses_is_left_alone", "a_branch_within_a_unit_that_no_rank_uses",
    "branches_within_a_unit_that_some_ranks_use", "bf16_forward_and_fp32_sums",
    "nothing_is_released_after_forward", "gradients_added_up_without_the_others",
    "two_forwards_before_a_backward", "a_module_used_twice", "activation_checkpointing",
    "activation_checkpointing_reentrant", "checkpoints_within_a_unit", "a_compiled_model"]
AT_THE_STEP = ["gradients_reduced_twice_before_a_step", "clipping",
               "a_scheduler_and_groups_with_their_own_decay"]
for _name in EITHER + AT_THE_STEP:
    CASES[_name] = against_fsdp2(Own, _name)
for _name in EITHER:
    CASES["in_backward_" + _name] = against_fsdp2(InBackward, _name)


# ---------------------------------------------------------------------- clipping


def clipped(norm_type, twice=False):
    def run(api, rank):
        def each(model, optimizer, step):
            norm = api.clip(model, 0.05) if norm_type == 2 else _clip(api, model, norm_type)
            return {"norm": norm}

        def micro(model, step):
            for part in range(2 if twice else 1):
                value = model(cases.numbers(rank, step + 50 * part, 5, 7)).pow(2).mean()
                value.backward()
            return value

        return cases.loop(api, cases.shard_mlp(api, cases.mlp()), None, rank, "SGD", micro=micro,
                          each=each, lr=0.5, momentum=0.9, weight_decay=0.01)

    return run


def _clip(api, model, norm_type):
    function = st.clip_grad_norm_ if api.name == "shardd" else torch.nn.utils.clip_grad_norm_
    total = function(model.parameters(), 0.05, norm_type)
    return total.full_tensor() if isinstance(total, DTensor) else total


@case
def clipped_as_the_daemons_own(rank):
    said = []
    for norm_type in (2, 1, 3.5, float("inf")):
        run = clipped(norm_type, twice=True)
        got = [ours(kind, f"clip-{kind.__name__}-{norm_type}", run, rank)
               for kind in (Own, Shardd)]
        if not all(state["norm"] > 0.05 for state in got[0]):
            said.append("nothing was clipped")
        said += differences(*got)
    return said


@case
def clipped_by_the_largest_as_fsdp2_does(rank):
    run = clipped(float("inf"))
    return differences(ours(Own, "clip-largest", run, rank), theirs(run, rank))


@case
def clipped_by_the_sum_near_fsdp2(rank):
    run = clipped(1)
    return differences(ours(Own, "clip-sum", run, rank), theirs(run, rank), 1e-6)


# ------------------------------------------------------------------------ scaling


def scaled(clip=False, models=1):
    """@models: trained in turns with one scaler. In step 2 rank 1 alone finds an infinity, in the
    last of them."""
    def run(api, rank):
        made = [cases.shard_mlp(api, cases.mlp()) for _ in range(models)]
        optimizers = [api.optimizer("SGD", m.parameters(), lr=0.5, momentum=0.9) for m in made]
        kind = st.GradScaler if api.name == "shardd" else torch.amp.GradScaler
        scaler, states = kind("cpu", init_scale=1024.0, growth_interval=2), []
        for step in range(7):
            for i, model in enumerate(made):
                value = model(cases.numbers(rank, step + 20 * i, 5, 7)).pow(2).mean()
                if step == 2 and rank == 1 and i == models - 1:
                    value = value * float("inf")
                scaler.scale(value).backward()
            state = {}
            for i, (model, optimizer) in enumerate(zip(made, optimizers)):
                if clip:
                    scaler.unscale_(optimizer)
                    total = _clip(api, model, float("inf"))
                    state[f"norm {i}"] = torch.nan_to_num(total, nan=-1.0)
                scaler.step(optimizer)
                optimizer.zero_grad()
                state.update({f"{i}.{n}": v for n, v in api.whole(model).items()})
            scaler.update()
            states.append({**state, "scale": torch.tensor(scaler.get_scale())})
        return states

    return run


def _scaled(kind, job, rank, **options):
    run = scaled(**options)
    got = ours(kind, job, run, rank)
    last = options.get("models", 1) - 1
    said = differences(got, theirs(run, rank))
    if [s["scale"].item() for s in got] != [1024, 2048, 1024, 1024, 2048, 2048, 4096]:
        said.append(f"scales: {[s['scale'].item() for s in got]}")
    if not torch.equal(got[1][f"{last}.0.weight"], got[2][f"{last}.0.weight"]):
        said.append("the step with an infinity was not skipped")
    if last and torch.equal(got[1]["0.0.weight"], got[2]["0.0.weight"]):
        said.append("the other model's was")
    return said


@case
def scaled_as_fsdp2(rank):
    return _scaled(Own, "scaled", rank)


@case
def scaled_and_clipped_as_fsdp2(rank):
    return _scaled(Own, "scaled-clipped", rank, clip=True)


@case
def one_scaler_for_two_models(rank):
    return _scaled(Own, "scaled-two", rank, models=2)


@case
def one_scaler_for_two_models_in_the_daemon(rank):
    return _scaled(Shardd, "scaled-two-daemon", rank, models=2, clip=True)


@case
def a_scaler_is_updated_between_steps(rank):
    st.init(job="scaler", op_timeout=60)
    model = st.fully_shard(cases.mlp())
    optimizer, scaler = sharded_sgd(model.parameters(), lr=0.1), st.GradScaler(init_scale=4.0)
    one, (two, [three]) = scaler.scale([torch.ones(1), (torch.ones(2), [torch.ones(3)])])
    said = [] if one.sum() + two.sum() + three.sum() == 24 else ["not all were scaled"]
    said += _refused(shardd.FailedPrecondition, "before a step", scaler.update)
    scaler.scale(cases.square(rank)(model, 0)).backward()
    scaler.step(optimizer)
    for again in (scaler.step, scaler.unscale_):
        said += _refused(shardd.FailedPrecondition, "since the last update()",
                         lambda again=again: again(optimizer))
    scaler.update()
    scaler.scale(cases.square(rank)(model, 0)).backward()
    scaler.step(optimizer)
    st.shutdown()
    return said


# --------------------------------------------------------------------- in backward


def _refused(kind, text, call):
    try:
        call()
    except kind as error:
        return [] if text in str(error) else [f"said: {error}"]
    return [f"not refused: {text}"]


@case
def in_backward_shards_go_as_they_come(rank):
    """Of six layers those behind are stepped while backward is still in front."""
    st.init(job="as-they-come", op_timeout=60)
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    for layer in model:
        st.fully_shard(layer)
    st.fully_shard(model)
    optimizer = st.Sharded(torch.optim.Adam, model.parameters(), in_backward=True, lr=0.1)
    stepped, seen = [], []
    inner = optimizer.inner.step
    optimizer.inner.step = lambda: (stepped.append(1), inner())

    def before_backward(layer, call):
        layer.register_forward_hook(lambda m, args, out: out.register_hook(call) and None)

    # what was reduced until then is taken with the next reduction
    before_backward(model[1], lambda g: st.session().barrier())
    before_backward(model[0], lambda g: seen.append(len(stepped)))
    model(torch.randn(3, 8)).pow(2).mean().backward()
    said = [] if seen == [4] and len(stepped) == 6 else [f"{seen} of {len(stepped)}"]
    said += _refused(shardd.FailedPrecondition, "steps in backward",
                     lambda: model.clip_grad_norm_(1.0))
    said += _refused(shardd.FailedPrecondition, "steps in backward",
                     lambda: st.GradScaler().step(optimizer))
    optimizer.step()
    st.shutdown()
    return said


@case
def in_backward_once_a_step(rank):
    st.init(job="once", op_timeout=60)
    model = st.fully_shard(cases.mlp())
    optimizer = st.Sharded(torch.optim.SGD, model.parameters(), in_backward=True, lr=0.1)
    loss = cases.square(rank)
    loss(model, 0).backward()
    before = model.state_dict()
    said = _refused(shardd.FailedPrecondition, "end the pass with Step",
                    lambda: loss(model, 1).backward())
    optimizer.zero_grad()
    if not torch.equal(before["0.weight"], model.state_dict()["0.weight"]):
        said.append("what was refused has changed parameters")
    loss(model, 2).backward()
    optimizer.step()
    if torch.equal(before["0.weight"], model.state_dict()["0.weight"]):
        said.append("nothing is stepped afterwards")
    st.shutdown()
    return said


# ------------------------------------------------------------ what is dropped, and kept


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("on purpose")


def sharded_mlp():
    model = cases.mlp()
    for layer in (model[0], model[2]):
        st.fully_shard(layer)
    return st.fully_shard(model)


def _run(job, make, rank, before=None, after=None, model=sharded_mlp):
    """Three steps of an optimizer that @make makes. @before(model, optimizer), @after(model): the
    step's backward."""
    st.init(job=job, op_timeout=60)
    model, states = model(), []
    optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        if before:
            before(model, optimizer)
        cases.square(rank)(model, step).backward()
        if after:
            after(model)
        optimizer.step()
        states.append(model.state_dict())
    st.shutdown()
    return states


def sharded_sgd(params, **options):
    return st.Sharded(torch.optim.SGD, params, **options)


@case
def gradients_are_dropped(rank):
    """By zero_grad before the step, also after an exception in backward when all are reduced."""
    def before(model, optimizer):
        cases.square(rank)(model, 7).backward()
        optimizer.zero_grad()
        x = cases.numbers(rank, 9, 5, 7).requires_grad_()
        try:
            model(Fails.apply(x)).sum().backward()
        except ValueError:
            optimizer.zero_grad()

    return differences(_run("dropped", sharded_sgd, rank, before),
                       _run("not-dropped", sharded_sgd, rank))


@case
def an_exception_in_backward(rank):
    """All was reduced before it: the step is as after one that ends well."""
    def make(in_backward):
        return lambda params, **options: sharded_sgd(params, in_backward=in_backward, **options)

    def fails(in_backward):
        st.init(job=f"fails-{in_backward}", op_timeout=60)
        model, states = sharded_mlp(), []
        optimizer = make(in_backward)(model.parameters(), lr=0.1)
        for step in range(3):
            x = cases.numbers(rank, step, 5, 7).requires_grad_()
            try:
                model(Fails.apply(x)).pow(2).mean().backward()
            except ValueError:
                optimizer.step()
            states.append(model.state_dict())
        st.shutdown()
        return states

    want = _run("fails-not", lambda params, **options: sharded_sgd(params, lr=0.1), rank)
    return differences(fails(False), want) + differences(fails(True), want)


@case
def gradients_that_are_not_reduced_stay(rank):
    """Of a backward under no_sync before a step: for the next one."""
    def after(model):
        with model.no_sync():
            cases.square(rank)(model, 20).backward()

    return differences(_run("stay", sharded_sgd, rank, after=after),
                       _run("stay-daemon", st.SGD, rank, after=after))


@case
def replicated_as_the_daemons_own(rank):
    """At the step and in backward, dropped in between, and clipped."""
    def make():
        return st.replicate(cases.mlp(), bucket_cap_mb=1e-4)

    def before(model, optimizer):
        cases.square(rank)(model, 7).backward()
        optimizer.zero_grad()

    def clip(model):
        model.clip_grad_norm_(0.05)

    def in_backward(params, **options):
        return sharded_sgd(params, in_backward=True, **options)

    want = _run("replicated", st.SGD, rank, model=make)
    said = differences(_run("replicated-own", sharded_sgd, rank, before, model=make), want)
    said += differences(_run("replicated-back", in_backward, rank, before, model=make), want)
    return said + differences(*[_run(f"replicated-clip-{i}", kind, rank, after=clip, model=make)
                                for i, kind in enumerate((sharded_sgd, st.SGD))])


@case
def steps_that_wait_for_the_commit(rank):
    """As those that do not, also where parameters are wanted before it."""
    def run(resilient):
        st.init(job=f"wait-{resilient}", op_timeout=60)
        model, states, waits = sharded_mlp(), [], []
        optimizer = sharded_sgd(model.parameters(), lr=0.1, momentum=0.9, resilient=resilient)
        block = st.resilient(model) if resilient else contextlib.nullcontext()
        for step in range(4):
            with block:
                cases.square(rank)(model, step).backward()
                optimizer.step()
                waits.append(len(optimizer._stepped))
                optimizer.zero_grad()
                if step == 1:
                    with torch.no_grad():
                        states.append({"loss": cases.square(rank)(model, 7)})
                if step == 2:
                    states.append(model.state_dict())
                    cases.square(rank)(model, 8).backward()  # a second step in one block
                    optimizer.step()
            states.append(model.state_dict())
        said = [] if waits == [3 * resilient] * 4 else [f"{waits} units waited"]
        if not resilient:
            said += _refused(shardd.FailedPrecondition, "resilient=True",
                             lambda: st.resilient(model))
        st.shutdown()
        return states, said

    (with_it, said), (without, also) = run(True), run(False)
    return differences(with_it, without) + said + also


@case
def no_room_for_the_state(rank):
    st.init(job="no-room", op_timeout=60)
    model = st.replicate(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    said = _refused(shardd.Unimplemented, "broadcast_buffers=False",
                    lambda: sharded_sgd(model.parameters(), lr=0.1, resilient=True))
    st.shutdown()
    return said


# ------------------------------------------------------------------------ state dicts


class Scalars(nn.Module):
    """A scalar, and more rows than there are ranks, or fewer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Linear(7, 1)
        self.body = nn.Linear(7, 7)

    def forward(self, x):
        return self.scale * self.one(torch.tanh(self.body(x)))


KINDS = {"Adam": dict(lr=0.05, amsgrad=True), "NAdam": dict(lr=0.05),
         "Adagrad": dict(lr=0.1), "SGD": dict(lr=0.1, momentum=0.9)}


def sharded_plainly(model):
    st.fully_shard(model.body)
    return st.fully_shard(model)


def replicated(model):
    return st.replicate(model, bucket_cap_mb=1e-4)


def hybrid(model):
    mesh = ((0,), (1,)) if st.world_size() == 2 else ((0, 1), (2, 3))
    st.fully_shard(model.body, mesh=mesh)
    return st.fully_shard(model, mesh=mesh)


def _train(model, optimizer, rank, steps, one_rank=True):
    out = []
    for step in steps:
        # every rank the same, so that a plain model is stepped alike
        value = model(cases.numbers(0 if one_rank else rank, step, 5, 7)).pow(2).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append({"loss": value.detach(), **{k: v.clone() for k, v in
                                               model.state_dict().items()}})
    return out


def _flat(state):
    return {f"{name}.{key}": value for name, one in state["state"].items()
            for key, value in one.items()}


def _states(wrap, rank):
    """Against torch.optim on a plain model, bit for bit, and back into itself by each kind of
    state dict."""
    said = []
    for kind, options in KINDS.items():
        st.init(job=f"states-{wrap.__name__}-{kind}", op_timeout=60)
        plain, model = Scalars(), wrap(Scalars())
        other = getattr(torch.optim, kind)(plain.parameters(), foreach=False, **options)
        optimizer = st.Sharded(getattr(torch.optim, kind), model.parameters(), foreach=False,
                               **options)
        said += differences(_train(model, optimizer, rank, range(2)),
                            _train(plain, other, rank, range(2)))
        want = other.state_dict()
        got = optimizer.state_dict()
        for number, one in want["state"].items():
            for key, value in one.items():
                found = got["state"][number].get(key)
                if not torch.equal(torch.as_tensor(found), torch.as_tensor(value)) or \
                        torch.as_tensor(found).shape != torch.as_tensor(value).shape:
                    said.append(f"{kind}: {key} of {number}: {found}, not {value}")
        by_name = st.optimizer_state_dict(optimizer, full=False)
        parameters = model.state_dict()
        goes_on = _train(model, optimizer, rank, range(2, 4), False)
        for saved in (got, want, by_name):
            model.load_state_dict(parameters)
            optimizer.load_state_dict(saved)
            said += differences(_train(model, optimizer, rank, range(2, 4), False), goes_on)
        st.shutdown()
        said = [f"{kind}: {s}" if not s.startswith(kind) else s for s in said]
    return said


@case
def states_of_shards_and_scalars(rank):
    return _states(sharded_plainly, rank)


@case
def states_of_a_replicated_model(rank):
    return _states(replicated, rank)


@case
def states_of_replicas_of_shards(rank):
    return _states(hybrid, rank)


# ------------------------------------------------------------------------ running


def trial(name, rank):
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    return CASES[name](rank)


def main():
    names = fsdp.wanted(CASES)
    alone = [n for n in names if n.startswith("states_of")]
    four = [n for n in names if n == "states_of_replicas_of_shards"]
    return fsdp.report(fsdp.Plan(2, [n for n in names if n not in alone], trial),
                       fsdp.Plan(2, alone, trial, gloo=False),
                       fsdp.Plan(4, four, trial, gloo=False))


if __name__ == "__main__":
    sys.exit(main())
