#!/usr/bin/env python3
"""p.grad of sharded parameters between backward and the step, against FSDP2 over gloo.

What a program reads there, and what becomes of what it writes, is compared bit for bit on two
ranks: gradients, norms, and all parameters after every step. Prints one line of TAP a case;
arguments choose by a part of the name.
"""

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

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
CASES = {}
OWN = set()  # with torch.optim's optimizer on the shard too


def case(function):
    CASES[function.__name__] = function
    return function


def on_the_shard_too(function):
    OWN.add(function.__name__)
    return case(function)


def local(value):
    return value.to_local().clone() if isinstance(value, DTensor) else value.clone()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(model):
    """Of all parameters: this rank's rows; a number for none."""
    return {f"gradient of {name}": torch.tensor(-1e30) if p.grad is None else local(p.grad)
            for name, p in model.named_parameters()}


def train(api, rank, change, model=None, kind="AdamW", micro=None, after=None, **options):
    """@change(model, step) between backward and the step; what it returns is compared, too."""
    if model is None:
        model = cases.shard_mlp(api, cases.mlp())

    def each(model, optimizer, step):
        seen = gradients(model)
        found = change(model, step) or {}
        changed = {f"{name}, changed": g for name, g in gradients(model).items()}
        return {**seen, **changed, **found}

    return cases.loop(api, model, cases.square(rank), rank, kind, each=each, micro=micro,
                      **options)


# ------------------------------------------------------------------------- reading


@on_the_shard_too
def what_is_read(api, rank):
    def change(model, step):
        for p in model.parameters():
            assert isinstance(p.grad, DTensor), type(p.grad)
            assert p.grad is p.grad
            assert p.grad.shape == p.shape and p.grad.dtype == torch.float32
        return {f"norm of {name}": whole(p.grad.norm()) for name, p in model.named_parameters()}

    return train(api, rank, change)


@case
def what_one_rank_alone_reads(api, rank):
    def change(model, step):
        if rank:
            return {}
        return {name: local(p.grad).norm() for name, p in model.named_parameters()}

    def each(model, optimizer, step):
        return change(model, step)

    model = cases.shard_mlp(api, cases.mlp())
    return cases.loop(api, model, cases.square(rank), rank, each=each)


@case
def gradients_of_bf16_with_fp32_sums(api, rank):
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = cases.shard_mlp(api, cases.mlp(), mp_policy=policy)
    return train(api, rank, lambda model, step: None, model)


@case
def none_where_no_rank_has_used_it(api, rank):
    model = api.fully_shard(cases.Branches())

    def each(model, optimizer, step):
        return gradients(model)

    def loss(model, step):
        model.used = cases.by_turns(step, rank)
        return model(cases.numbers(rank, step, 5, 6)).pow(2).mean()

    return cases.loop(api, model, loss, rank, steps=6, each=each)


# ------------------------------------------------------------------------- writing


@on_the_shard_too
def scaled_by_hand(api, rank):
    def change(model, step):
        for p in model.parameters():
            p.grad.mul_(0.5)

    return train(api, rank, change)


@on_the_shard_too
def noise(api, rank):
    def change(model, step):
        torch.manual_seed(100 * step + rank)
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.01)

    return train(api, rank, change, kind="SGD", lr=0.1, momentum=0.9)


@case
def written_as_rows(api, rank):
    def change(model, step):
        for p in model.parameters():
            p.grad.to_local().clamp_(-0.01, 0.01)

    return train(api, rank, change)


@case
def written_through_what_was_kept(api, rank):
    """A tensor that the program holds is the gradient, until it is dropped."""
    def change(model, step):
        held = [p.grad for p in model.parameters()]
        clip = st.clip_grad_norm_ if api.name == "shardd" else nn.utils.clip_grad_norm_
        clip(model.parameters(), 0.05, float("inf"))
        for gradient in held:
            gradient.mul_(2.0)
        return {f"held {i}": local(g) for i, g in enumerate(held)}

    return train(api, rank, change)


@case
def another_tensor_as_gradient(api, rank):
    def change(model, step):
        for p in model.parameters():
            p.grad = p.grad * 0.25

    return train(api, rank, change)


@on_the_shard_too
def some_are_set_to_none(api, rank):
    def change(model, step):
        for i, p in enumerate(model.parameters()):
            if (i + step) % 3 == 0:
                p.grad = None

    return train(api, rank, change, steps=6)


@case
def all_of_one_unit_are_set_to_none(api, rank):
    def change(model, step):
        if step in (0, 2):
            for p in model[0].parameters():
                p.grad = None

    return train(api, rank, change, kind="SGD", lr=0.1, momentum=0.9, dampening=0.3)


@case
def part_of_the_model_is_zeroed(api, rank):
    def change(model, step):
        if step % 2:
            model[2].zero_grad()

    return train(api, rank, change)


@on_the_shard_too
def changed_between_two_backwards(api, rank):
    def micro(model, step):
        for part in range(2):
            value = model(cases.numbers(rank, step + 50 * part, 5, 7)).pow(2).mean()
            value.backward()
            if not part:
                for i, p in enumerate(model.parameters()):
                    if i == 3 and step == 1:
                        p.grad = None
                    else:
                        p.grad.mul_(3.0)
        return value

    return train(api, rank, lambda model, step: None, micro=micro)


@case
def zeroed_in_place(api, rank):
    def change(model, step):
        if step == 1:
            for p in model[0].parameters():
                p.grad.zero_()

    return train(api, rank, change)


# ------------------------------------------------------------------------- clipping


def clipped(norm_type):
    def run(api, rank):
        def change(model, step):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
            return {"norm": whole(norm)}

        return train(api, rank, change, kind="SGD", lr=0.5, momentum=0.9)

    return run


for _type in (1.0, 2.0, 3.5, float("inf")):
    CASES[f"clipped_by_pytorch_norm_{_type:g}"] = clipped(_type)
    OWN.add(f"clipped_by_pytorch_norm_{_type:g}")


@on_the_shard_too
def some_are_clipped(api, rank):
    def change(model, step):
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.02) for module in
                 (model[0], model[4])]
        return {f"norm {i}": whole(n) for i, n in enumerate(norms)}

    return train(api, rank, change)


@case
def clipped_by_value(api, rank):
    def change(model, step):
        nn.utils.clip_grad_value_(model.parameters(), 0.003)

    return train(api, rank, change)


@case
def clipped_in_a_gpt(api, rank):
    def each(model, optimizer, step):
        return {"norm": whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))}

    return cases.loop(api, cases.gpt(api), cases.gpt_loss(rank), rank, each=each)


@case
def scaled_by_pytorchs_own_scaler(api, rank):
    return _scaled(api, rank, torch.amp.GradScaler)


@on_the_shard_too
def scaled_and_clipped_by_pytorch(api, rank):
    return _scaled(api, rank, st.GradScaler if api.name == "shardd" else torch.amp.GradScaler)


def _scaled(api, rank, kind):
    """An infinity of one rank in step 2."""
    model = cases.shard_mlp(api, cases.mlp())
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.5, momentum=0.9)
    scaler, states = kind("cpu", init_scale=1024.0, growth_interval=2), []
    for step in range(5):
        value = model(cases.numbers(rank, step, 5, 7)).pow(2).mean()
        if step == 2 and rank == 1:
            value = value * float("inf")
        scaler.scale(value).backward()
        held = [p.grad for p in model.parameters()]
        scaler.unscale_(optimizer)
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        state = {f"held {i}": local(g).nan_to_num(-1.0) for i, g in enumerate(held)}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append({**api.whole(model), **state, "norm": norm.nan_to_num(-1.0),
                       "scale": torch.tensor(scaler.get_scale())})
    return states


# ---------------------------------------------------------------------- in backward


def in_backward(norm_type=None, scale=False):
    """The optimizer of shardd steps in backward, and clips and unscales there. An infinity of one
    rank in step 2 where it is scaled."""
    def run(api, rank):
        ours = api.name == "shardd"
        model = cases.shard_mlp(api, cases.mlp())
        optimizer = api.optimizer("SGD", model.parameters(), lr=0.5, momentum=0.9,
                                  **({"in_backward": True} if ours else {}))
        scaler = (st.GradScaler if ours else torch.amp.GradScaler)(
            "cpu", init_scale=1024.0, growth_interval=2, enabled=scale)
        if ours:
            optimizer.plan_backward(max_norm=0.05 if norm_type else None,
                                    norm_type=norm_type or 2.0, scaler=scaler if scale else None)
        states = []
        for step in range(6):
            value = model(cases.numbers(rank, step, 5, 7)).pow(2).mean()
            if scale and step == 2 and rank == 1:
                value = value * float("inf")
            scaler.scale(value).backward()
            norm = None
            if norm_type and not ours:
                scaler.unscale_(optimizer)
                norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type))
            scaler.step(optimizer)
            if norm_type and ours:
                norm = optimizer.total_norm
            scaler.update()
            optimizer.zero_grad()
            extra = {} if norm is None else {"norm": torch.nan_to_num(norm.float(), nan=-1.0)}
            states.append({**api.whole(model), **extra, "scale": torch.tensor(scaler.get_scale())})
        return states

    return run


CASES["clipped_in_backward_by_the_largest"] = in_backward(float("inf"))
CASES["scaled_in_backward"] = in_backward(scale=True)
CASES["scaled_and_clipped_in_backward"] = in_backward(float("inf"), scale=True)


# --------------------------------------------------------------------------- hooks


@on_the_shard_too
def hooks_of_reduced_gradients(api, rank):
    model, calls = cases.shard_mlp(api, cases.mlp()), []
    names = {id(p): name for name, p in model.named_parameters()}
    handles = []

    def hook(p):
        calls.append(names[id(p)])
        p.grad.mul_(0.5).clamp_(-0.01, 0.01)

    handles += [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]

    def change(model, step):
        seen = sorted(calls)
        calls.clear()
        if step == 2:
            handles[0].remove()
        return {f"called {i}": torch.tensor([float(ord(c)) for c in name])
                for i, name in enumerate(seen)}

    return train(api, rank, change, model)


@case
def hooks_under_no_sync(api, rank):
    model, calls = cases.shard_mlp(api, cases.mlp()), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(local(p.grad)))

    def micro(model, step):
        for part in range(3):
            api.sync(model, part != 0)
            value = model(cases.numbers(rank, step + 50 * part, 5, 7)).pow(2).mean()
            value.backward()
        return value

    def change(model, step):
        return {"calls": torch.tensor(float(len(calls)))}

    return train(api, rank, change, model, micro=micro)


@case
def hooks_of_what_is_unused(api, rank):
    model, calls = api.fully_shard(cases.Branches()), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.shape.numel()))

    def loss(model, step):
        model.used = cases.by_turns(step, rank)
        return model(cases.numbers(rank, step, 5, 6)).pow(2).mean()

    def each(model, optimizer, step):
        seen = sorted(calls)
        calls.clear()
        return {f"call {i}": torch.tensor(float(n)) for i, n in enumerate(seen)}

    return cases.loop(api, model, loss, rank, steps=6, each=each)


# -------------------------------------------------------------------------- running


class Own(Shardd):
    own = True


def against_fsdp2(name, rank):
    name, own = name.removesuffix(" on the shard"), name.endswith(" on the shard")
    theirs = Fsdp2()
    theirs.exact = not own
    expected = CASES[name](theirs, rank)
    api = (Own if own else Shardd)(f"{name}-{own}"[:60])
    try:
        got = CASES[name](api, rank)
    finally:
        api.close()
    return differences(got, expected)


# ------------------------------------------------------------------------- refusals


def refused(error, part, function):
    try:
        function()
    except error as said:
        return [] if part in str(said) else [f"'{part}' is not in: {said}"]
    except Exception as other:
        return [f"{type(other).__name__} in place of {error}: {other}"]
    return [f"'{part}' was not refused"]


def refusals(name, rank):
    """On two ranks without torch.distributed."""
    st.init(job=f"refusals-{name}", op_timeout=20)
    try:
        return REFUSALS[name](rank)
    finally:
        st.shutdown()


def backward(model, rank):
    model(cases.numbers(rank, 0, 5, 7)).pow(2).mean().backward()


def without_torch_distributed(rank):
    model = st.fully_shard(cases.mlp())
    plain, said = cases.mlp(), []
    optimizer = st.SGD(model.parameters(), lr=0.1)
    ours = torch.optim.SGD(plain.parameters(), lr=0.1)
    backward(model, rank)
    said += refused(shardd.FailedPrecondition, "torch.distributed is not initialised",
                    lambda: model[0].weight.grad.norm())
    for r in range(2):
        (plain(cases.numbers(r, 0, 5, 7)).pow(2).mean() / 2).backward()
    rows = model[0].weight.grad.to_local()
    expected = plain[0].weight.grad[7 * rank:7 * rank + len(rows)]
    if not torch.allclose(rows, expected):
        said.append(f"rows differ by {(rows - expected).abs().max()}")
    rows.zero_()
    plain[0].weight.grad.zero_()
    optimizer.step()
    ours.step()
    if not torch.equal(model.state_dict()["0.weight"], plain.state_dict()["0.weight"]):
        said.append("what was written to the rows was lost")
    return said


def what_was_used_up(rank):
    model = st.fully_shard(cases.mlp())
    st.AdamW(model.parameters(), in_backward=True)
    backward(model, rank)
    said = refused(shardd.FailedPrecondition, "'0.weight' cannot be used here",
                   lambda: model[0].weight.grad.norm())
    said += refused(shardd.FailedPrecondition, "steps in backward",
                    lambda: model[0].weight.grad + 1)
    model[0].weight.register_post_accumulate_grad_hook(print)
    said += refused(shardd.FailedPrecondition, "remove the hook", lambda: backward(model, rank))
    return said


def hooks_that_would_not_be_called(rank):
    plain = cases.mlp()
    plain[0].weight.register_post_accumulate_grad_hook(print)
    said = refused(shardd.FailedPrecondition, "'0.weight' has hooks",
                   lambda: st.fully_shard(plain))
    plain = cases.mlp()
    plain[0].bias.register_hook(print)
    said += refused(shardd.FailedPrecondition, "'0.bias' has hooks",
                    lambda: st.fully_shard(plain))
    model = st.fully_shard(cases.mlp())
    said += refused(shardd.Unimplemented, "register_post_accumulate_grad_hook",
                    lambda: model[0].weight.register_hook(print))
    return said


def gradients_that_are_not_there(rank):
    model, said = st.fully_shard(cases.mlp()), []
    optimizer = st.SGD(model.parameters(), lr=0.1)
    said += refused(shardd.InvalidArgument, "no reduced gradient",
                    lambda: setattr(model[0].weight, "grad", torch.ones(13, 7)))
    with model.no_sync():
        backward(model, rank)
        said += refused(shardd.FailedPrecondition, "was not reduced yet",
                        lambda: model[0].weight.grad.norm())
        model[0].weight.grad = None
        said += refused(shardd.FailedPrecondition, "were not reduced", optimizer.step)
    optimizer.zero_grad()
    backward(model, rank)
    said += refused(shardd.InvalidArgument, "shape [3]",
                    lambda: setattr(model[0].weight, "grad", torch.ones(3)))
    held = model[0].weight.grad.to_local()
    optimizer.step()
    if model[0].weight.grad is not None:
        said.append("a gradient is left after the step")
    held.mul_(2.0)  # the program's own from there on
    return said


def a_rank_alone_drops_a_gradient(rank):
    model = st.fully_shard(cases.mlp())
    optimizer = st.SGD(model.parameters(), lr=0.1)
    backward(model, rank)
    if rank:
        model[0].weight.grad = None
    return refused(shardd.FailedPrecondition, "DropGradients", optimizer.step)


def clipped_in_backward_as_at_the_step(rank):
    """Norms are added up alike, so the bits are those of clip_grad_norm_ of shardd."""
    said, states = [], []
    for early in (False, True):
        for norm_type in (1.0, 2.0):
            model = st.fully_shard(cases.mlp())
            optimizer = st.SGD(model.parameters(), lr=0.5, momentum=0.9, in_backward=early)
            if early:
                optimizer.plan_backward(max_norm=0.05, norm_type=norm_type)
            for step in range(3):
                model(cases.numbers(rank, step, 5, 7)).pow(2).mean().backward()
                norm = None if early else st.clip_grad_norm_(model.parameters(), 0.05, norm_type)
                optimizer.step()
                norm = optimizer.total_norm if early else norm
                states.append({**model.state_dict(), "norm": norm})
    said += differences(states[:6], states[6:])
    if not all(s["norm"] > 0.05 for s in states):
        said.append("nothing was clipped")
    return said


def plans_that_cannot_be(rank):
    model = st.fully_shard(cases.mlp())
    optimizer = st.SGD(model.parameters(), lr=0.5)
    said = refused(shardd.FailedPrecondition, "in_backward=True",
                   lambda: optimizer.plan_backward(max_norm=1.0))
    model = st.fully_shard(cases.mlp())
    optimizer = st.SGD(model.parameters(), lr=0.5, in_backward=True)
    said += refused(shardd.InvalidArgument, "without max_norm",
                    lambda: optimizer.plan_backward(norm_type=1.0))
    scaler = st.GradScaler()
    optimizer.plan_backward(max_norm=1.0, scaler=scaler)
    backward(model, rank)
    said += refused(shardd.FailedPrecondition, "after a backward", optimizer.plan_backward)
    said += refused(shardd.FailedPrecondition, "leave out unscale_",
                    lambda: scaler.unscale_(optimizer))
    said += refused(shardd.FailedPrecondition, "plan_backward",
                    lambda: st.GradScaler().step(optimizer))
    said += refused(shardd.FailedPrecondition, "plan_backward", lambda: model.clip_grad_norm_(1.0))
    optimizer.step()
    return said


def warned(model, optimizer, behind):
    """What is said in two steps, of which each is followed by @behind."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            behind()
    return [str(w.message) for w in found if w.filename == __file__]


def what_relies_on_gradients_after_the_step(rank):
    """PyTorch keeps them until zero_grad(): who reads them there, adds to them or steps again was
    not told that it is another program here."""
    said = []
    for wrap in (st.fully_shard, st.replicate):
        for kind in (torch.optim.AdamW, torch.optim.RMSprop):
            for wanted, behind in (
                    ("", lambda model, optimizer: optimizer.zero_grad()),
                    ("", lambda model, optimizer: model.zero_grad()),
                    ("", lambda model, optimizer: nn.Sequential(model).zero_grad()),
                    ("", lambda model, optimizer: [setattr(p, "grad", None)
                                                   for p in model.parameters()]),
                    ("without zero_grad() between", lambda model, optimizer: None),
                    ("is read after the step", lambda model, optimizer: [
                        p.grad for p in model.parameters()]),
                    ("called twice", lambda model, optimizer: optimizer.step())):
                model = wrap(cases.mlp())
                optimizer = kind(model.parameters(), lr=0.1)
                found = warned(model, optimizer, lambda b=behind, m=model, o=optimizer: b(m, o))
                if len(found) != bool(wanted) or not all(wanted in text for text in found):
                    said.append(f"{wrap.__name__}, {kind.__name__}, '{wanted}': {found}")
    return said


REFUSALS = {f.__name__: f for f in (
    what_relies_on_gradients_after_the_step,
    clipped_in_backward_as_at_the_step, plans_that_cannot_be,
    without_torch_distributed, what_was_used_up, hooks_that_would_not_be_called,
    gradients_that_are_not_there, a_rank_alone_drops_a_gradient)}


def main():
    names = list(CASES) + [f"{name} on the shard" for name in CASES if name in OWN]
    return fsdp.report(fsdp.Plan(2, fsdp.wanted(names), against_fsdp2),
                       fsdp.Plan(2, fsdp.wanted(REFUSALS), refusals, gloo=False))


if __name__ == "__main__":
    sys.exit(main())
