#!/usr/bin/env python3
"""torch.optim's own classes on a wrapped model, optimizers that come late, and parameters that are
frozen for some time: against FSDP2 over gloo, on two ranks bit for bit. Prints one line of TAP a
case; arguments choose by a part of the name.
"""

import collections
import sys
import warnings

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from test_fully_shard import ADAMW, gpt, gpt_loss, loop, mlp, shard_mlp, square

import shardd

warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Same:
    """The same class on both sides. ``twin``: of shardd.torch, which it is then, too."""

    twin = None

    def optimizer(self, kind, params, **options):
        made = kind(params, **options)
        assert isinstance(made, kind)
        if self.name == "shardd":
            assert isinstance(made, self.twin or shardd.torch.Sharded), type(made).__mro__
        return made


class Theirs(Same, Fsdp2):
    pass


class Ours(Same, Shardd):
    pass


def in_daemon(api, rank, kind, **options):
    api.twin = getattr(shardd.torch, kind.__name__)
    return loop(api, gpt(api), gpt_loss(rank), rank, kind, **options)


def on_shard(api, rank, kind, **options):
    api.exact = False
    return loop(api, gpt(api), gpt_loss(rank), rank, kind, **options)


# ------------------------------------------------------------------ their classes


@case
def adamw(api, rank):
    return in_daemon(api, rank, torch.optim.AdamW, foreach=False, **ADAMW)


@case
def adam_with_amsgrad(api, rank):
    return in_daemon(api, rank, torch.optim.Adam, lr=0.05, amsgrad=True, foreach=False)


@case
def sgd_with_momentum(api, rank):
    return in_daemon(api, rank, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@case
def adamw_with_groups_and_a_scheduler(api, rank):
    api.twin = shardd.torch.AdamW
    model = gpt(api)
    parameters = [p for p in model.parameters()]
    groups = [{"params": parameters[::2], "weight_decay": 0.2},
              {"params": iter(parameters[1::2]), "lr": 0.01}]
    optimizer = api.optimizer(torch.optim.AdamW, groups, foreach=False, **ADAMW)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    states = []
    for step in range(4):
        value = gpt_loss(rank)(model, step)
        value.backward()
        api.step(optimizer)
        scheduler.step()
        optimizer.zero_grad()
        states.append({**api.whole(model), "loss": value.detach()})
    return states


@case
def adagrad(api, rank):  # makes its state at once
    return on_shard(api, rank, torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2)


@case
def rmsprop(api, rank):
    return on_shard(api, rank, torch.optim.RMSprop, lr=0.01, momentum=0.5)


@case
def a_setting_without_a_twin(api, rank):
    return on_shard(api, rank, torch.optim.Adam, lr=0.01, weight_decay=0.1,
                    decoupled_weight_decay=True)


class Lion(torch.optim.Optimizer):
    """Somebody's own, with attributes from before and behind Optimizer's __init__."""

    def __init__(self, params, lr):
        self.before = 0.9
        super().__init__(params, {"lr": lr})
        self.behind, self.steps = 0.99, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"]
                p.add_((mean * self.before + p.grad * (1 - self.before)).sign(),
                       alpha=-group["lr"] / self.steps)
                mean.mul_(self.behind).add_(p.grad, alpha=1 - self.behind)


@case
def a_class_of_somebodys_own(api, rank):
    return on_shard(api, rank, Lion, lr=0.01)


@case
def the_same_given_to_sharded(api, rank):
    if api.name == "shardd":
        api.optimizer = lambda kind, params, **options: shardd.torch.Sharded(
            kind, params, **options)
    return on_shard(api, rank, Lion, lr=0.01)


@case
def the_state_of_a_twin(api, rank):
    def each(model, optimizer, step):
        if api.name == "shardd" and step == 2:
            state = optimizer.state_dict()
            plain = torch.optim.AdamW(mlp().parameters(), **ADAMW)
            plain.load_state_dict(state)
            optimizer.load_state_dict(state)

    api.twin = shardd.torch.AdamW
    model = shard_mlp(api, mlp())
    return loop(api, model, square(rank), rank, torch.optim.AdamW, each=each, foreach=False,
                **ADAMW)


@case
def optimizers_of_other_parameters_are_as_ever(api, rank):
    model = torch.nn.Linear(2, 2)
    group = {"params": model.parameters(), "lr": 0.1}
    made = torch.optim.AdamW([group])
    assert type(made) is torch.optim.AdamW and made.param_groups[0] is group
    assert len(group["params"]) == 2
    named = torch.optim.AdamW(model.named_parameters())
    assert named.param_groups[0]["param_names"] == ["weight", "bias"]
    for wrong, kind in (([], ValueError), ([{"params": set(model.parameters())}], TypeError),
                        (model.weight, TypeError), ([group, model.weight], TypeError)):
        try:
            torch.optim.SGD(wrong, lr=0.1)
        except kind:
            continue
        raise AssertionError(f"{wrong} was taken")
    return []


# -------------------------------------------------- what a program does with groups and states


def of_groups(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_groups(api, rank, kind, **options):
    """Gradients and values by way of the optimizer's groups, which have the model's parameters.
    They were stand-ins without a gradient where the optimizer runs in this process, so that nothing
    was clipped, and nobody was told."""
    def each(model, optimizer, step):
        assert all(p is q for p, q in zip(of_groups(optimizer), model.parameters()))
        norm = torch.nn.utils.clip_grad_norm_(of_groups(optimizer), 0.1)
        for p in of_groups(optimizer):
            p.grad.mul_(0.5)
            with torch.no_grad():
                p.mul_(0.9)
        if step == 2:
            for p in of_groups(optimizer)[::2]:
                p.grad = None
        return {"norm": norm.full_tensor()}

    return loop(api, shard_mlp(api, mlp()), square(rank), rank, kind, each=each, **options)


@case
def groups_of_adamw(api, rank):
    api.twin = shardd.torch.AdamW
    return by_groups(api, rank, torch.optim.AdamW, **ADAMW)


@case
def groups_of_an_optimizer_on_the_shard(api, rank):
    api.exact = False
    return by_groups(api, rank, torch.optim.RMSprop, lr=0.01)


@case
def groups_of_an_optimizer_that_makes_its_state_at_once(api, rank):
    api.exact = False
    return by_groups(api, rank, torch.optim.Adagrad, lr=0.1)


@case
def groups_of_a_class_of_somebodys_own(api, rank):
    return by_groups(api, rank, Lion, lr=0.01)


@case
def groups_of_several_optimizers(api, rank):
    api.exact = False
    model = shard_mlp(api, mlp())
    optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01),
                  torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)]
    states = []
    for step in range(3):
        value = square(rank)(model, step)
        value.backward()
        norms = [torch.nn.utils.clip_grad_norm_(of_groups(o), 0.1) for o in optimizers]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        states.append({**api.whole(model), **{str(i): n.full_tensor()
                                              for i, n in enumerate(norms)}})
    return states


@case
def pytorchs_scaler_of_an_optimizer_on_the_shard(api, rank):
    api.exact = False
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model = shard_mlp(api, mlp())
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    states = []
    for step in range(5):
        value = square(rank)(model, step) * (float("inf") if step == 2 and rank else 1.0)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append({**api.whole(model), "scale": torch.tensor(scaler.get_scale())})
    assert scaler.get_scale() == 2.0**11, scaler.get_scale()
    return states


def forgetting(api, rank, kind, **options):
    """The program drops the optimizer's state in the middle."""
    def each(model, optimizer, step):
        found = len(optimizer.state), sum(p in optimizer.state for p in model.parameters())
        if step == 1:
            optimizer.state.clear()
        if step == 3:
            optimizer.state = collections.defaultdict(dict)
        if step == 4:  # PyTorch's has one only where it was stepped
            assert len(optimizer.state) == 6
        return {"found": torch.tensor(found)}

    return loop(api, shard_mlp(api, mlp()), square(rank), rank, kind, each=each, steps=5,
                **options)


@case
def a_state_that_is_dropped(api, rank):
    api.twin = shardd.torch.AdamW
    return forgetting(api, rank, torch.optim.AdamW, foreach=False, **ADAMW)


@case
def a_state_with_a_momentum_that_is_dropped(api, rank):
    api.twin = shardd.torch.SGD
    return forgetting(api, rank, torch.optim.SGD, lr=0.1, momentum=0.9)


@case
def a_state_on_the_shard_that_is_dropped(api, rank):
    api.exact = False
    return forgetting(api, rank, torch.optim.RMSprop, lr=0.01, momentum=0.5)


@case
def a_state_on_the_shard_that_is_changed(api, rank):
    def each(model, optimizer, step):
        for state in optimizer.state.values() if step == 2 else ():
            state["momentum_buffer"].zero_()

    api.exact = False
    return loop(api, shard_mlp(api, mlp()), square(rank), rank, torch.optim.RMSprop, each=each,
                lr=0.01, momentum=0.5)


@case
def a_state_in_the_daemon_is_not_changed_unnoticed(api, rank):
    if api.name == "FSDP2":
        return []
    model = shard_mlp(api, mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    square(rank)(model, 0).backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and not hasattr(state["step"], "to")
    for change in (lambda: state["exp_avg"].zero_(), lambda: torch.zeros_like(state["exp_avg"]),
                   lambda: float(state["step"]), lambda: optimizer.state.update({}),
                   lambda: optimizer.state.pop(model[0].weight),
                   lambda: setattr(optimizer, "state", {model[0].weight: {}}),
                   lambda: optimizer.state.__setitem__(model[0].weight, {})):
        try:
            change()
        except shardd.Unimplemented as error:
            assert "reset_state" in str(error) and error.name == "UNIMPLEMENTED", error
        else:
            raise AssertionError("it was taken")
    return []


@case
def groups_of_which_parameters_were_taken(api, rank):
    if api.name == "FSDP2":
        return []
    for kind in (torch.optim.AdamW, torch.optim.RMSprop):
        model = shard_mlp(api, mlp())
        optimizer = kind(model.parameters())
        square(rank)(model, 0).backward()
        optimizer.param_groups[0]["params"] = of_groups(optimizer)[1:]
        try:
            optimizer.step()
        except shardd.FailedPrecondition as error:
            assert "param_groups" in str(error)
        else:
            raise AssertionError("it has stepped")
    return []


# ---------------------------------------------------------------- late optimizers


@case
def an_optimizer_after_the_first_backward(api, rank):
    api.exact = False
    model = gpt(api)
    gpt_loss(rank)(model, 0)
    gpt_loss(rank)(model, 50).backward()  # its gradients stay
    return loop(api, model, gpt_loss(rank), rank, torch.optim.AdamW, foreach=False, **ADAMW)


@case
def another_optimizer_later(api, rank):
    api.exact = False
    model = gpt(api, reshard_after_forward=True)
    with torch.no_grad():
        gpt_loss(rank)(model, 0)
    first = loop(api, model, gpt_loss(rank), rank, torch.optim.AdamW, foreach=False, **ADAMW)
    second = loop(api, model, gpt_loss(rank), rank, torch.optim.Adagrad, lr=0.1)
    return first + second


@case
def an_optimizer_that_was_replaced_is_refused(api, rank):
    if api.name == "FSDP2":
        return []
    model = shard_mlp(api, mlp())
    square(rank)(model, 0)
    before = torch.optim.AdamW(model.parameters())
    torch.optim.AdamW(model.parameters())
    square(rank)(model, 0).backward()
    try:
        before.step()
    except shardd.FailedPrecondition as error:
        assert "was replaced" in str(error)
    else:
        raise AssertionError("it has stepped")
    return []


# ------------------------------------------------------------------------ frozen


def _freezing(api, rank, kind, **options):
    model = mlp()
    model[0].bias.requires_grad_(False)
    model = shard_mlp(api, model)
    model[0].bias.requires_grad_(True)  # before the optimizer: it is trained
    frozen = {1: [model[0]], 2: [model[0], model[2]], 3: [], 4: [model[4]], 5: []}

    def loss(model, step):
        for part in model:
            part.requires_grad_(part not in frozen.get(step, []))
        return square(rank)(model, step)

    return loop(api, model, loss, rank, kind, steps=6, **options)


@case
def layers_frozen_for_some_steps(api, rank):
    api.twin = shardd.torch.AdamW
    return _freezing(api, rank, torch.optim.AdamW, foreach=False, **ADAMW)


@case
def layers_frozen_for_some_steps_on_the_shard(api, rank):
    api.exact = False
    return _freezing(api, rank, torch.optim.RMSprop, lr=0.01)


def both(name, rank):
    theirs = CASES[name](Theirs(), rank)
    api = Ours(name)
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    assert len(ours) == len(theirs)
    return differences(ours, theirs)


if __name__ == "__main__":
    assert shared.STEPS
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted(CASES), both)))
