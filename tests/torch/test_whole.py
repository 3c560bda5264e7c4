#!/usr/bin/env python3
"""shardd.torch.Sharded with whole=True: optimizers that need whole tensors.

Against the same optimizer on a plain model that has the mean of all ranks' gradients, on two and
three ranks bit for bit; and which optimizers are refused without it. Prints one line of TAP a
case; arguments choose by a part of the name.
"""

import sys
import warnings

import fsdp
import test_fully_shard as shared
import torch
from fsdp import differences
from torch import nn

import shardd
import shardd.torch as st

CASES = {}
STEPS = 4


def case(function):
    CASES[function.__name__] = function
    return function


# -------------------------------------------------------------------- optimizers


class Lamb(torch.optim.Optimizer):
    """@clip: the norm of all gradients together is used, too, as timm's does."""

    def __init__(self, params, lr=0.05, decay=0.1, clip=None):
        super().__init__(params, dict(lr=lr, decay=decay, clip=clip))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            scale = 1.0
            if group["clip"] and used:
                norm = torch.stack([p.grad.norm() for p in used]).norm()
                scale = float(group["clip"] / norm.clamp(min=group["clip"]))
            for p in used:
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1 * scale)
                update = state["m"] + group["decay"] * p
                ratio = p.norm() / update.norm() if p.norm() > 0 else 1.0
                p.add_(update * ratio, alpha=-group["lr"])


class Ratio(torch.optim.Optimizer):
    """SGD by the norm of the parameter: of a name that is not known."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / (p.grad.norm() + 1e-6)))


class Clipping(torch.optim.Optimizer):
    """SGD that clips by the norm of all it has."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        used = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm() if used else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class Signs(torch.optim.Optimizer):
    """Element by element, with a state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 0.1)
                    p.sub_(m.sign(), alpha=group["lr"])


class Breaking(Signs):
    def step(self, closure=None):
        raise ValueError("needs a closure")


# ------------------------------------------------------------------------ models


def biasless():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13, bias=False), nn.Tanh(), nn.Linear(13, 9, bias=False),
                         nn.Tanh(), nn.Linear(9, 3, bias=False))


class Mixed(nn.Module):
    """With a scalar, a norm, a convolution and an embedding; the last layer has one row, so that a
    rank has nothing of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv, self.norm = nn.Conv1d(1, 4, 3), nn.LayerNorm(20)
        self.last = nn.Linear(20, 1)

    def forward(self, x):
        return self.last(self.norm(self.conv(x.unsqueeze(1)).flatten(1) * self.scale))


def loss_of(model, rank, step):
    return model(shared.numbers(rank, step, 5, 7)).pow(2).mean()


def places(model):
    """Where parameters begin in the forward, modulo a line of the cache: by name, filled by the
    first forward. On AMD's processors MKL's outer product (a Linear of one row) rounds by it."""
    found = {}

    def note(prefix):
        def hook(module, _):
            for name, p in module.named_parameters(recurse=False):
                found.setdefault(prefix + name, p.data_ptr() % 64)

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note(name + "." if name else ""))
    return found


def place(model, at):
    for name, p in model.named_parameters():
        room = torch.empty(p.numel() + 32, dtype=p.dtype)
        begin = (at[name] - room.data_ptr()) % 64 // p.element_size()
        p.data = room[begin:begin + p.numel()].view(p.shape).copy_(p.data)
        assert p.data_ptr() % 64 == at[name]


def plain(model, kind, rank, world, at, **options):
    """On each rank by itself, with the mean of the gradients of all."""
    place(model, at)
    optimizer = kind(model.parameters(), **options)
    found = []
    for step in range(STEPS):
        gradients = []
        for other in range(world):
            model.zero_grad()
            loss = loss_of(model, other, step)
            loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
            if other == rank:
                own = loss.detach()
        for p, *each in zip(model.parameters(), *gradients):
            total = each[0].clone()
            for one in each[1:]:
                total += one
            p.grad = total / world
        optimizer.step()
        found.append({**{n: p.detach().clone() for n, p in model.named_parameters()},
                      "loss": own})
    return found, optimizer.state_dict()


def wrapped(model, wrap):
    if wrap == "replicate":
        return st.replicate(model)
    if wrap == "replicas":
        return st.fully_shard(model, mesh=((0,), (1,)))
    if isinstance(model, nn.Sequential):
        st.fully_shard(model[0])
        st.fully_shard(model[2])
    return st.fully_shard(model)


def ours(make, kind, rank, world, wrap="shards", reload=False, **options):
    st.init(job=f"whole-{make.__name__}-{kind.__name__}-{wrap}-{reload}", op_timeout=60)
    try:
        model = wrapped(make(), wrap)
        at = places(model)
        optimizer = st.Sharded(kind, model.parameters(), whole=True, **options)
        found = []
        for step in range(STEPS):
            if reload and step == 2:
                full = st.optimizer_state_dict(optimizer, full=reload == "full")
                optimizer.load_state_dict({"state": {}, "param_groups":
                                           optimizer.state_dict()["param_groups"]})
                optimizer.load_state_dict(full)
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({**model.state_dict(), "loss": loss.detach()})
        return found, optimizer.state_dict(), at
    finally:
        st.shutdown()


def flat(state):
    return {f"{i}.{k}": torch.as_tensor(v) for i, s in state["state"].items()
            for k, v in s.items()}


def equal(make, kind, wrap="shards", reload=False, **options):
    def both(rank):
        world = torch.distributed.get_world_size()
        got, state, at = ours(make, kind, rank, world, wrap, reload, **options)
        wanted, its = plain(make(), kind, rank, world, at, **options)
        said = differences(got, wanted) + differences([flat(state)], [flat(its)])
        if torch.equal(wanted[0]["loss"], wanted[-1]["loss"]):
            said.append("nothing was trained")
        return said

    return both


Adafactor, Muon = torch.optim.Adafactor, torch.optim.Muon
CASES["muon"] = equal(biasless, Muon, lr=0.02)
CASES["muon_reloaded"] = equal(biasless, Muon, lr=0.02, reload="full")
CASES["muon_reloaded_by_rows"] = equal(biasless, Muon, lr=0.02, reload="rows")
CASES["muon_of_replicas"] = equal(biasless, Muon, "replicas", lr=0.02)
CASES["muon_of_a_replicated_model"] = equal(biasless, Muon, "replicate", lr=0.02)
CASES["adafactor"] = equal(shared.mlp, Adafactor, lr=0.05, foreach=False)
CASES["adafactor_foreach"] = equal(shared.mlp, Adafactor, lr=0.05, foreach=True)
CASES["adafactor_reloaded"] = equal(shared.mlp, Adafactor, lr=0.05, reload="full")
CASES["adafactor_reloaded_by_rows"] = equal(shared.mlp, Adafactor, lr=0.05, reload="rows")
CASES["lamb"] = equal(shared.mlp, Lamb)
CASES["lamb_of_scalars_and_convolutions"] = equal(Mixed, Lamb)
CASES["lamb_of_scalars_reloaded"] = equal(Mixed, Lamb, reload="full")
CASES["lamb_of_a_replicated_model"] = equal(Mixed, Lamb, "replicate")
CASES["adagrad"] = equal(shared.mlp, torch.optim.Adagrad, lr=0.1)


# ------------------------------------------------------------------------ refused


def _refused(text, call):
    try:
        call()
    except shardd.Unimplemented as error:
        return [] if text in str(error) else [f"said: {error}"]
    return [f"not refused: {text}"]


@case
def what_needs_whole_tensors_is_refused(rank):
    st.init(job="refused", op_timeout=60)
    model = st.fully_shard(shared.mlp())
    said = []

    def build(kind, **options):
        return lambda: st.Sharded(kind, model.parameters(), **options)

    for kind in (Adafactor, Muon, Lamb, type("MyMuon", (Muon,), {})):
        said += _refused("whole=True", build(kind))
        said += _refused("whole=True", lambda kind=kind: kind(model.parameters()))
    for whole in (False, True):
        said += _refused("all tensors", build(torch.optim.LBFGS, whole=whole))
        said += _refused("all tensors", build(Clipping, whole=whole))
    said += _refused("two halves", build(Ratio))
    said += _refused("two halves", build(Ratio, lr=0))
    said += _refused("two halves", build(Ratio, lr=1e-9))
    said += _refused("all tensors", build(Lamb, clip=0.5, whole=True))
    for name in ("in_backward", "resilient"):
        said += _refused("leave out in_backward",
                         build(torch.optim.Adagrad, whole=True, **{name: True}))
    optimizer = st.Sharded(Ratio, model.parameters(), probe=False)
    said += [] if type(optimizer) is st.Sharded else ["no Sharded"]
    st.shutdown()
    return said


@case
def an_adopted_one_is_probed_at_its_first_step(rank):
    st.init(job="adopted", op_timeout=60)
    said = []
    for kind, text in ((Ratio, "two halves"), (Clipping, "all tensors"), (Signs, None)):
        model = st.fully_shard(shared.mlp())
        optimizer = kind(model.parameters())
        loss_of(model, rank, 0).backward()
        before = model.state_dict()
        if text is None:
            optimizer.step()
            if torch.equal(before["0.weight"], model.state_dict()["0.weight"]):
                said.append("nothing was stepped")
            continue
        for _ in range(2):
            said += _refused(text, optimizer.step)
        if not torch.equal(before["0.weight"], model.state_dict()["0.weight"]):
            said.append(f"{kind.__name__} has changed parameters")
    st.shutdown()
    return said


@case
def what_works_by_elements_is_not_refused(rank):
    st.init(job="elements", op_timeout=60)
    o, said = torch.optim, []
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (o.ASGD, o.Adadelta, o.Adagrad, o.Adam, o.AdamW, o.Adamax, o.NAdam, o.RAdam,
                     o.RMSprop, o.Rprop, o.SGD, Signs):
            for lr in (1e-6, 0.1):
                model = st.fully_shard(nn.Linear(3, 4))
                with torch.random.fork_rng():
                    st.Sharded(kind, model.parameters(), lr=lr)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = st.fully_shard(nn.Linear(3, 4))
        st.Sharded(Breaking, model.parameters())
        if not any("needs a closure" in str(w.message) for w in seen):
            said.append("no warning")
    torch.random.set_rng_state(state)
    st.shutdown()
    return said


def each(name, rank):
    return CASES[name](rank)


if __name__ == "__main__":
    names = fsdp.wanted(CASES)
    three = [n for n in names if n in ("muon", "adafactor", "lamb_of_scalars_and_convolutions")]
    sys.exit(fsdp.report(fsdp.Plan(2, names, each), fsdp.Plan(3, three, each)))
