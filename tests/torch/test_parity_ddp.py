#!/usr/bin/env python3
"""What PyTorch's own tests check of DistributedDataParallel, of shardd.torch.replicate: the same
training with both over gloo, on two ranks bit for bit (docs/parity-ddp.md). Prints one line of TAP
a case; arguments choose by a part of the name.
"""

import collections
import contextlib
import dataclasses
import os
import sys

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardd
import shardd.torch as st
from shardd.torch._tree import units_of

CASES, ALONE = {}, {}


def case(function):
    CASES[function.__name__] = function
    return function


def alone(function):
    ALONE[function.__name__] = function
    return function


class Ddp(Fsdp2):
    def replicate(self, module, **options):
        return DistributedDataParallel(module, **options)

    def whole(self, model):
        return {name.removeprefix("module."): value.detach().clone()
                for name, value in model.state_dict().items()}


class Replicated(Shardd):
    def replicate(self, module, **options):
        return st.replicate(module, **options)

    def whole(self, model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def numbers(rank, step, *shape):
    return shared.numbers(rank, step, *(shape or (5, 7)))


def seeded(make, *args):
    torch.manual_seed(11)
    return make(*args)


def trained(api, model, loss, steps=4, **options):
    """@loss: of the model and the step's number; None: no backward. States after each step."""
    optimizer = api.optimizer("SGD", model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})
    states = []
    for step in range(steps):
        value = loss(model, step)
        value.backward()
        api.step(optimizer)
        optimizer.zero_grad()
        states.append({"loss": value.detach(), **api.whole(model)})
    return states


# -------------------------------------------------------------- what forward takes and gives


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x, kind):
        a, b, c = self.second(self.first(x)), self.second(x), self.first(x)
        return {"tuple": (a, (b, c)), "list": [a, [b, c]], "dict": {"a": a, "b": {"c": b, "d": c}},
                "dataclass": Outputs(a, [b, c])}[kind]


@dataclasses.dataclass
class Outputs:
    first: torch.Tensor
    rest: list


def total(output):
    if isinstance(output, torch.Tensor):
        return output.pow(2).mean()
    if dataclasses.is_dataclass(output):
        return total([output.first, output.rest])
    return sum(total(o) for o in (output.values() if isinstance(output, dict) else output))


def nested(api, rank, **options):
    model, states = api.replicate(seeded(Nested), **options), []
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)
    for step, kind in enumerate(("tuple", "list", "dict", "dataclass")):
        output = model(numbers(rank, step), kind)
        value = total(output)
        value.backward()
        api.step(optimizer)
        optimizer.zero_grad()
        states.append({"loss": value.detach(), **api.whole(model)})
    return states


@case
def nested_outputs(api, rank):
    return nested(api, rank)


@case
def nested_outputs_of_a_static_graph(api, rank):
    return nested(api, rank, static_graph=True)


@case
def nested_outputs_and_unused_parameters(api, rank):
    return nested(api, rank, find_unused_parameters=True)


Pair = collections.namedtuple("Pair", "a b")


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 3)

    def forward(self, pair, *, scale):
        assert type(pair) in (Pair, Outputs), type(pair)
        a, b = pair if isinstance(pair, Pair) else (pair.first, pair.rest[0])
        return self.linear(a * b) * scale["by"]


@case
def named_tuples_and_keywords_as_inputs(api, rank):
    model = api.replicate(seeded(Takes))
    return trained(api, model, lambda m, step: m(
        Pair(numbers(rank, step), numbers(rank, step + 50)), scale={"by": 2.0}).pow(2).mean())


@case
def dataclasses_as_inputs(api, rank):
    model = api.replicate(seeded(Takes))
    return trained(api, model, lambda m, step: m(
        Outputs(numbers(rank, step), [numbers(rank, step + 50)]), scale={"by": 2.0}).pow(2).mean())


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        return y.detach(), y.clone()


def detached(api, rank, **options):
    model = api.replicate(seeded(Detached), **options)

    def loss(m, step):
        without, with_gradient = m(numbers(rank, step))
        assert not without.requires_grad
        return (without + with_gradient).pow(2).mean()

    return trained(api, model, loss)


@case
def outputs_without_a_gradient(api, rank):
    return detached(api, rank)


@case
def outputs_without_a_gradient_and_unused_parameters(api, rank):
    return detached(api, rank, find_unused_parameters=True)


@case
def outputs_without_a_gradient_of_a_static_graph(api, rank):
    return detached(api, rank, static_graph=True)


class Fresh(nn.Module):
    """Makes a tensor in forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x):
        extra = torch.zeros(2, 2)
        return {"out": self.linear(x), "extra": extra, "more": [extra]}


@case
def tensors_made_in_forward(api, rank):
    def loss(m, step):
        out = m(numbers(rank, step))
        assert out["extra"].grad_fn is None
        return out["out"].pow(2).mean()

    return trained(api, api.replicate(seeded(Fresh), find_unused_parameters=True), loss)


@case
def no_gradient_wanted(api, rank):
    """Forwards under no_grad between the steps, of one rank alone: they wait for nobody."""
    model = api.replicate(shared.mlp())

    def loss(m, step):
        if rank == 0:
            with torch.no_grad():
                m(numbers(rank, step + 90))
        return m(numbers(rank, step)).pow(2).mean()

    return trained(api, model, loss)


@case
def evaluation_of_one_rank(api, rank):
    model, seen = api.replicate(shared.mlp()), []

    def loss(m, step):
        if rank == 0 and step == 2:
            m.eval()
            with torch.no_grad():
                seen.extend({"out": m(numbers(0, k))} for k in range(3))
            m.train()
        return m(numbers(rank, step)).pow(2).mean()

    return trained(api, model, loss) + seen


# -------------------------------------------------------------------------- control flow


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)

    def forward(self, x, twice):
        x = torch.relu(self.first(x))
        return self.second(x) if twice else x


def optional(api, rank, twice, **options):
    model = api.replicate(seeded(Optional), **options)
    return trained(api, model, lambda m, step: m(
        numbers(rank, step), twice(step)).pow(2).mean(), 6)


@case
def control_flow_that_is_the_same_on_all_ranks(api, rank):
    return optional(api, rank, lambda step: step % 2, find_unused_parameters=True)


@case
def control_flow_that_differs_between_ranks(api, rank):
    return optional(api, rank, lambda step: step % 2 and rank == 1, find_unused_parameters=True)


@case
def another_graph_on_each_rank(api, rank):
    return optional(api, rank, lambda step: rank == 0, find_unused_parameters=True)


@case
def unused_parameters_wanted_and_none_there(api, rank):
    return optional(api, rank, lambda step: True, find_unused_parameters=True)


class Tied(nn.Module):
    """A bias of two modules, neither of which is used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 5, bias=False)
        self.bias = nn.Parameter(torch.zeros(5))
        self.first.bias = self.bias
        self.second = nn.Linear(7, 5)

    def forward(self, x):
        return self.second(x)


@case
def another_layer_in_each_pass_under_no_sync(api, rank):
    """Rank 0 uses the first and then the second layer, the other one the third and the fourth."""
    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

        def forward(self, x, which):
            return self.layers[2 * rank + which](x)

    model, states = api.replicate(seeded(Four), find_unused_parameters=True), []
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)
    for step in range(3):
        with model.no_sync():
            model(numbers(rank, 2 * step), 0).pow(2).mean().backward()
        model(numbers(rank, 2 * step + 1), 1).pow(2).mean().backward()
        api.step(optimizer)
        optimizer.zero_grad()
        states.append(api.whole(model))
    return states


@case
def outputs_that_the_loss_does_not_use(api, rank):
    model = api.replicate(seeded(Nested), find_unused_parameters=True)

    def loss(m, step):
        one, (two, _) = m(numbers(rank, step), "tuple")
        return (one if step % 2 else two).pow(2).mean()

    return trained(api, model, loss)


@case
def compiled(api, rank):
    model = api.replicate(shared.mlp(), static_graph=True)
    made = torch.compile(model, backend="eager")
    return trained(api, model, lambda m, s: made(numbers(rank, s)).pow(2).mean(), 3)


@case
def unused_parameters_with_two_names(api, rank):
    model = api.replicate(seeded(Tied), find_unused_parameters=True)
    return trained(api, model, lambda m, s: m(numbers(rank, s)).pow(2).mean() / 10)


@case
def parameters_of_global_and_local_use(api, rank):
    """Three layers: all use one, each rank one of its own, nobody the third."""

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.all, self.mine, self.nobody = (nn.Linear(7, 7) for _ in range(3))

        def forward(self, x):
            return self.all(x) if rank else self.mine(self.all(x))

    return trained(api, api.replicate(seeded(Three), find_unused_parameters=True),
                   lambda m, s: m(numbers(rank, s)).pow(2).mean())


@case
def two_forwards_before_a_backward(api, rank):
    model = api.replicate(shared.mlp(), static_graph=True)
    return trained(api, model, lambda m, s: m(numbers(rank, s)).pow(2).mean()
                   + m(numbers(rank, s + 40)).pow(2).mean())


@case
def several_outputs_and_backwards(api, rank):
    """Backward of the parts of one forward, reduced by the last one."""
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
                              for _ in range(2))

        def forward(self, x):
            return self.a(x), self.b(x)

    model, states = api.replicate(seeded(Two)), []
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)
    for step in range(3):
        one, two = model(numbers(rank, step))
        one.pow(2).mean().backward(retain_graph=True)
        two.pow(2).mean().backward()
        api.step(optimizer)
        optimizer.zero_grad()
        states.append(api.whole(model))
    return states


@case
def gradients_that_are_undefined(api, rank):
    model = api.replicate(shared.mlp(), find_unused_parameters=True)

    def loss(m, step):
        value = m(numbers(rank, step)).pow(2).mean()
        return torch._C._functions.UndefinedGrad()(value) if step == 1 else value

    return trained(api, model, loss, momentum=0.0)


# -------------------------------------------------------------------------- checkpoints


class Once(nn.Module):
    def __init__(self, times=1, reentrant=True, tied=False):
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        if tied:
            self.first.weight = self.second.weight
        self.times, self.reentrant = times, reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return x


def checkpointed(api, rank, *how, **options):
    model = api.replicate(seeded(Once, *how), **options)
    return trained(api, model, lambda m, s: m(
        numbers(rank, s).requires_grad_()).pow(2).mean())


@case
def a_checkpoint_reentrant(api, rank):
    return checkpointed(api, rank, 1, True)


@case
def a_checkpoint_not_reentrant(api, rank):
    return checkpointed(api, rank, 1, False)


@case
def a_checkpoint_and_unused_parameters(api, rank):
    return checkpointed(api, rank, 1, False, find_unused_parameters=True)


@case
def two_checkpoints_of_one_layer(api, rank):
    return checkpointed(api, rank, 2, False)


@case
def two_checkpoints_of_one_layer_in_a_static_graph(api, rank):
    return checkpointed(api, rank, 2, True, static_graph=True)


@case
def checkpoints_with_shared_weights(api, rank):
    return checkpointed(api, rank, 1, False, True)


@case
def checkpoints_with_shared_weights_in_a_static_graph(api, rank):
    return checkpointed(api, rank, 2, True, True, static_graph=True)


@case
def a_layer_that_differs_from_step_to_step(api, rank):
    class Dynamic(Once):
        count = 0

        def forward(self, x):
            self.count += 1
            layer = self.first if self.count % 2 else self.second
            return checkpoint(layer, x, use_reentrant=False)

    model = api.replicate(seeded(Dynamic), find_unused_parameters=True)
    return trained(api, model, lambda m, s: m(numbers(rank, s).requires_grad_()).pow(2).mean())


# -------------------------------------------------------------------- hooks, types, buffers


@case
def hooks_of_modules(api, rank):
    model = shared.mlp()
    model[2].register_forward_pre_hook(lambda m, x: torch.relu(x[0]))
    model[2].register_forward_hook(lambda m, x, y: nn.functional.gelu(y))
    model[0].register_full_backward_hook(lambda m, gi, go: tuple(
        None if g is None else g * 2 for g in gi))
    model[4].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
    return trained(api, api.replicate(model), lambda m, s: m(
        numbers(rank, s).requires_grad_()).pow(2).mean())


@case
def autocast(api, rank):
    def loss(m, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(numbers(rank, step)).float().pow(2).mean()

    return trained(api, api.replicate(shared.mlp()), loss)


@case
def parameters_in_bf16(api, rank):
    """Each rank has its gradients in bf16; sums of two are rounded once."""
    model = api.replicate(shared.mlp().bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    states = []
    for step in range(3):
        value = model(numbers(rank, step).bfloat16()).float().pow(2).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({"loss": value.detach(), **api.whole(model)})
    return states


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.linear(x) + self.seen


@case
def a_buffer_that_rank_0_replaces(api, rank):
    model = api.replicate(seeded(Buffered))
    inner = getattr(model, "module", model)

    def loss(m, step):
        if rank == 0:
            inner.seen = inner.seen + 1
        return m(numbers(rank, step)).pow(2).mean()

    return trained(api, model, loss)


@case
def buffers_of_their_own_in_join(api, rank):
    """forward_sync_buffers=False: the end of join() leaves them alone, too."""
    model = api.replicate(seeded(Buffered), forward_sync_buffers=False)
    inner = getattr(model, "module", model)
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)  # now it is rank 0's in shardd
    with torch.no_grad():
        inner.seen.fill_(rank + 1.0)
    with model.join():
        for step in range(rank + 1):
            model(numbers(rank, step)).pow(2).mean().backward()
            api.step(optimizer)
            optimizer.zero_grad()
    return [{"seen": inner.seen.clone()}]


@case
def uneven_inputs_divided_by_the_ranks_that_have_some(api, rank):
    model = api.replicate(seeded(nn.Linear, 5, 5))
    optimizer = api.optimizer("SGD", model.parameters(), lr=0.05)
    with model.join(divide_by_initial_world_size=False):
        for _ in range(3 + 2 * rank):
            model(50 * torch.ones(1, 5)).sum().backward()
            api.step(optimizer)
            optimizer.zero_grad()
    return [api.whole(model)]


@case
def an_exception_in_join(api, rank):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise ValueError("on purpose")

    model, said = api.replicate(Raises()), ""
    try:
        with model.join():
            model(torch.ones(1)).sum().backward()
    except ValueError as error:
        said = str(error)
    return [{"raised": torch.tensor(float(said == "on purpose"))}]


@case
def values_of_rank_0_at_the_beginning(api, rank):
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with torch.no_grad():
        model[1].running_mean.fill_(rank + 3.0)
    model = api.replicate(model)
    model(numbers(rank, 0)).sum().backward()
    return [api.whole(model)] if rank == 0 else [
        {n: v for n, v in api.whole(model).items() if "running" not in n}]


@case
def gradients_in_views_of_buckets(api, rank):
    model = api.replicate(shared.mlp(), gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    return trained(api, model, lambda m, s: m(numbers(rank, s)).pow(2).mean())


@case
def buckets_of_several_sizes(api, rank):
    model = api.replicate(shared.mlp(), bucket_cap_mb_list=[0.0001, 0.0003])
    if api.name == "shardd":  # of 364, 52, 468, 36, 108 and 12 bytes
        assert [len(u.params) for u in units_of(model)] == [1, 2, 3], units_of(model)
    return trained(api, model, lambda m, s: m(numbers(rank, s)).pow(2).mean())


@case
def unused_parameters_that_are_not_reduced(api, rank):
    return optional(api, rank, lambda step: False, find_unused_parameters=True,
                    skip_all_reduce_unused_params=True)


@case
def a_mesh_instead_of_a_group(api, rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    return trained(api, api.replicate(shared.mlp(), device_mesh=mesh),
                   lambda m, s: m(numbers(rank, s)).pow(2).mean())


@case
def a_checkpoint_file(api, rank):
    """Saved by rank 0, loaded by all into a model of other values."""
    folder = fsdp.shared_folder(rank)
    path = os.path.join(folder, "model.pt")
    model = api.replicate(shared.mlp())
    trained(api, model, lambda m, s: m(numbers(rank, s)).pow(2).mean(), 2)
    state = model.state_dict()
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    torch.manual_seed(77)
    other = api.replicate(shared.mlp().apply(
        lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None))
    other.load_state_dict(torch.load(path))
    return trained(api, other, lambda m, s: m(numbers(rank, s)).pow(2).mean(), 2)


# -------------------------------------------------------------------------------- alone


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        return [] if words in str(error) else [f"said: {error}"]
    return [f"not refused: {words}"]


@contextlib.contextmanager
def job(name):
    st.init(job=name, op_timeout=30)
    try:
        yield
    finally:
        st.shutdown()


def table():
    """The rows of docs/parity-ddp.md: PyTorch's test, behaviour, verdict, our tests."""
    page = (fsdp.HERE.parents[1] / "docs" / "parity-ddp.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in page.splitlines() if line.startswith("| `test_")]
    return page, rows


@alone
def the_table_is_true(rank):
    """Its counts are right, and the tests that it names exist."""
    page, rows = table()
    counts = collections.Counter(row[2].split(":")[0] for row in rows)
    said = [f"{row[0]}: verdict {row[2]}" for row in rows
            if row[2].split(":")[0] not in ("equal", "different", "not there", "internal")]
    counted = len(rows) - counts["internal"]
    first = (f"Of {len(rows)} tests {counts['internal']} look at PyTorch's internals. Of the other "
             f"{counted}, {counts['equal']} are equal, {counts['different']} deliberately "
             f"different, and {counts['not there']} not there.")
    said += [] if first in page.replace("\n", " ") else [f"the page does not say: {first}"]
    said += [] if counts["equal"] >= 0.8 * counted else ["less than 80 % are equal"]
    for row in rows:
        for named in [n.strip("` ") for n in row[3].split(",") if n.strip("` -")]:
            name, _, function = named.partition("::")
            source = fsdp.HERE / f"{name}.py"
            if not source.exists() or f"def {function}" not in source.read_text():
                said.append(f"{row[0]}: there is no {named}")
    return said


@alone
def a_static_graph_that_changes(rank):
    """DDP says that the graph is not static; here nothing depends on it."""
    def states(name, **options):
        with job(name):
            return optional(Replicated.__new__(Replicated), rank, lambda step: step % 2, **options)

    return differences(states("static", static_graph=True),
                       states("found", find_unused_parameters=True))


@alone
def unused_parameters_are_named(rank):
    with job("named"):
        model = st.replicate(seeded(Optional))
        optimizer = st.SGD(model.parameters(), lr=0.1)
        model(numbers(rank, 0), False).pow(2).mean().backward()
        said = refused(shardd.FailedPrecondition, "second.weight", optimizer.step)
        optimizer.zero_grad()
        model(numbers(rank, 1), False).pow(2).mean().backward()
        said += refused(shardd.FailedPrecondition, "second.weight",
                        lambda: model(numbers(rank, 2), True))
        optimizer.zero_grad()
        model(numbers(rank, 3), True).pow(2).mean().backward()
        optimizer.step()
        return said


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 10, sparse=True)

    def forward(self, x):
        return torch.softmax(self.bag(x), dim=1)


@case
def sparse_gradients(api, rank):
    """They are made dense: the steps of SGD are the same."""
    rows = torch.tensor([[1, 2, 2], [rank, 9 - rank, 4]])
    return trained(api, api.replicate(seeded(Rows)),
                   lambda m, s: m((rows + s) % 10).pow(2).mean(), momentum=0.0)


@case
def parameters_to_ignore(api, rank):
    """Names that DDP is told not to look at: every rank steps its own."""
    model = shared.mlp()
    model._ddp_params_and_buffers_to_ignore = ["0.weight", "0.bias"]
    own = [model[0].weight, model[0].bias]
    wrapped = api.replicate(model)
    ours = torch.optim.SGD(own, lr=0.05)
    optimizer = api.optimizer("SGD", [p for n, p in wrapped.named_parameters()
                                      if not n.removeprefix("module.").startswith("0.")], lr=0.05)
    states = []
    for step in range(3):
        wrapped(numbers(rank, step)).pow(2).mean().backward()
        for each in (ours, optimizer):
            each.step()
            each.zero_grad()
        states.append(api.whole(wrapped))
    return states


@case
def an_optimizer_built_after_the_first_step(api, rank):
    model = api.replicate(shared.mlp())
    model(numbers(rank, 8)).pow(2).mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    states = []
    for step in range(3):
        optimizer.step()
        optimizer.zero_grad()
        states.append(api.whole(model))
        model(numbers(rank, step)).pow(2).mean().backward()
    return states


@case
def an_optimizer_built_between_forward_and_backward(api, rank):
    model = api.replicate(shared.mlp())
    loss = model(numbers(rank, 8)).pow(2).mean()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05, foreach=False)
    loss.backward()
    optimizer.step()
    return [api.whole(model)]


@alone
def weights_given_to_functional_call(rank):
    with job("functional"):
        model = st.replicate(nn.Linear(2, 2))
        given = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
        return refused(shardd.FailedPrecondition, "was replaced",
                       lambda: torch.func.functional_call(model, given, torch.ones(1, 2)))


@alone
def clipping_by_torch_is_told_where_the_gradients_are(rank):
    with job("clip"):
        model = st.replicate(shared.mlp())
        st.SGD(model.parameters(), lr=0.1)
        model(numbers(rank, 0)).pow(2).mean().backward()
        return refused(shardd.FailedPrecondition, "use shardd.torch.clip_grad_norm_",
                       lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@alone
def models_of_other_shapes(rank):
    said = []
    for name, make in (("shapes", lambda: nn.Linear(7, 3 + rank)),
                       ("number", lambda: nn.Sequential(*[nn.Linear(7, 7)] * (1 + rank))
                        if rank else nn.Linear(7, 7))):
        with contextlib.suppress(shardd.SharddError), job(name):
            model = st.replicate(make())
            said += refused(shardd.SharddError, "build the same model",
                            lambda model=model: model(numbers(rank, 0)))
    return said


@alone
def gradients_of_gradients_are_refused(rank):
    with job("graph"):
        model = st.replicate(shared.mlp())
        value = model(numbers(rank, 0)).pow(2).mean()
        return refused(shardd.Unimplemented, "create_graph",
                       lambda: value.backward(create_graph=True))


@alone
def arguments_that_are_refused(rank):
    said = []
    with job("arguments"):
        grid = dist.device_mesh.init_device_mesh("cpu", (2, 1))
        for kind, words, options in (
                (shardd.InvalidArgument, "bucket_cap_mb_list", {"bucket_cap_mb_list": [1, 0]}),
                (shardd.InvalidArgument, "bucket_cap_mb_list", {"bucket_cap_mb_list": []}),
                (shardd.SharddError, "device_mesh", {"device_mesh": grid}),
                (shardd.SharddError, "process_group",
                 {"device_mesh": grid, "process_group": dist.group.WORLD})):
            said += refused(kind, words, lambda o=options: st.replicate(shared.mlp(), **o))
        frozen = shared.mlp().requires_grad_(False)
        said += refused(shardd.SharddError, "no parameters", lambda: st.replicate(
            nn.Tanh())(numbers(rank, 0)))
        model = st.replicate(frozen)  # DDP refuses it; here it is shared memory
        out = model(numbers(rank, 0))
        said += [] if not out.requires_grad else ["a frozen model has a gradient"]
    return said


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("on purpose")


@alone
def a_backward_that_fails(rank):
    """The next steps are those of a model that never failed."""
    def states(name, failing):
        with job(name):
            model = st.replicate(shared.mlp(), bucket_cap_mb=0.0001)
            api = Replicated.__new__(Replicated)
            optimizer = st.SGD(model.parameters(), lr=0.05)
            seen = []
            for step in range(4):
                if failing and step == 2:
                    with contextlib.suppress(RuntimeError):
                        model(Fails.apply(numbers(rank, 9).requires_grad_())).sum().backward()
                    optimizer.zero_grad()
                model(numbers(rank, step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(api.whole(model))
            return seen

    return differences(states("failing", True), states("working", False))


# From the second step on PyTorch adds the gradients of the two checkpoints in another order.
# Whether the sums differ depends on the processor's products of matrices.
BOUNDS = {"two_checkpoints_of_one_layer_in_a_static_graph": 1e-7,
          "checkpoints_with_shared_weights_in_a_static_graph": 1e-7}


def both(name, rank):
    if name in ALONE:
        return ALONE[name](rank)
    theirs = CASES[name](Ddp(), rank)
    api = Replicated(name)
    try:
        ours = CASES[name](api, rank)
    finally:
        api.close()
    return differences(ours, theirs, BOUNDS.get(name, 0.0))


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted([*CASES, *ALONE]), both)))
