#!/usr/bin/env python3
"""test_parity.py's, of types, values that are loaded and made, and arguments that are refused; and
that docs/parity.md names tests that exist, and counts right.
"""

import collections
import copy
import dataclasses
import functools
import itertools
import re
import sys

import fsdp
import test_fully_shard as cases
import test_parity as parity
import torch
from fsdp import HERE, Shardd
from test_parity import (
    BF16,
    FP32,
    backward,
    gradients,
    linear,
    numbers,
    parameters,
    seeded,
    shard,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import shardd
import shardd.torch as st

CASES = {}
PAGE = HERE.parents[1] / "docs" / "parity.md"
FP16 = torch.float16
NUMBERS = {FP32: 1.0, FP16: 2.0, BF16: 3.0}


def case(function):
    """@function(api, rank) gives the same with FSDP2 and here."""
    CASES[function.__name__] = 2, functools.partial(parity.both, known=BOTH)
    BOTH[function.__name__] = 2, function
    return function


def alone(function):
    """@function(rank) gives sentences."""
    CASES[function.__name__] = 2, lambda name, rank: function(rank)
    return function


BOTH = {}


def seen_types(*seen):
    return torch.tensor([NUMBERS[dtype] for dtype in itertools.chain(*seen)])


# -------------------------------------------------------------------------------- types


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Outer:
    inner: Data
    z: torch.Tensor


TO = {
    "lists": lambda x: [x], "tuples": lambda x: (x,), "dictionaries": lambda x: {"x": x},
    "named_tuples": lambda x: Pair(x, torch.ones_like(x)),
    "dataclasses": lambda x: Data(x, x.clone()),
    "nested_dataclasses": lambda x: Outer(Data(x, x.clone()), x.clone())}


class Into(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return TO[self.kind](x)


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def one(self, x):
        return torch.tanh(self.layer(x))

    def forward(self, given):
        return self.through(given)

    def through(self, given):
        if isinstance(given, Pair):
            return Pair(self.one(given.x), given.y)
        if isinstance(given, Data):
            return Data(self.one(given.x), self.one(given.y))
        if isinstance(given, Outer):
            return Outer(self.through(given.inner), self.one(given.z))
        if isinstance(given, dict):
            return {"x": self.one(given["x"])}
        return type(given)([self.one(given[0])])


class OutOf(nn.Module):
    def forward(self, given):
        if isinstance(given, Data):
            return given.x + given.y
        if isinstance(given, Outer):
            return given.inner.x + given.inner.y + given.z
        return given["x"] if isinstance(given, dict) else given[0]


def between_units(kind):
    def run(api, rank):
        states = []
        for compute, reduce in ((None, None), (BF16, BF16), (BF16, FP32)):
            torch.manual_seed(0)
            model = nn.Sequential(Into(kind), Within(), Within(), OutOf())
            shard(api, *model, model,
                  mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce))
            states += train(api, model, lambda model, step: model(
                numbers(rank, step, 2, 8)).float().sum())
        return states

    run.__name__ = f"{kind}_between_units"
    return run


for kind in TO:
    case(between_units(kind))


class Seen(nn.Linear):
    """Notes the types of its inputs."""

    def __init__(self):
        super().__init__(8, 8)
        self.seen = []

    def forward(self, x, other=None):
        self.seen += [x.dtype] if other is None else [x.dtype, other.dtype]
        return super().forward(x.to(self.weight.dtype))


@case
def fp16_in_one_unit(api, rank):
    states = []
    for which, policy in ((1, dict(param_dtype=FP16)),
                          (1, dict(param_dtype=FP16, cast_forward_inputs=False)),
                          (0, dict(param_dtype=FP16, output_dtype=FP32))):
        model = seeded(Seen, Seen)
        api.fully_shard(model[which], mp_policy=MixedPrecisionPolicy(**policy))
        api.fully_shard(model)
        out = model(numbers(rank, 0, 2, 8))
        states.append({**backward(model, out.float().sum()), "out": out,
                       "types": seen_types(model[0].seen, model[1].seen)})
    return states


@case
def inputs_from_outside_of_a_unit(api, rank):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Seen(), Seen()

        def forward(self, x):
            return self.second(self.first(x), torch.ones(2, 8))

    states = []
    for cast in (True, False):
        torch.manual_seed(0)
        model = Net()
        api.fully_shard(model.second, mp_policy=MixedPrecisionPolicy(
            param_dtype=FP16, cast_forward_inputs=cast))
        api.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
        found = backward(model, model(numbers(rank, 0, 2, 8)).float().sum())
        states.append({**found, "types": seen_types(model.first.seen, model.second.seen)})
    return states


@case
def types_where_a_checkpoint_computes_again(api, rank):
    states = []
    reduced = dict(param_dtype=BF16, reduce_dtype=BF16)
    for given, policy in ((FP32, reduced), (
            BF16, dict(reduced, output_dtype=FP32, cast_forward_inputs=False))):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.outputs = Seen(), []

            def part(self, x):
                x = self.layer(x)
                self.outputs.append(x.dtype)
                return x

            def forward(self, x, given=given):
                return checkpoint(self.part, x.to(given), use_reentrant=False,
                                  early_stop=False).float().sum()

        torch.manual_seed(0)
        model = Net()
        shard(api, model.layer, model, mp_policy=MixedPrecisionPolicy(**policy))
        found = backward(model, model(numbers(rank, 0, 2, 8)))
        states.append({**found, "types": seen_types(model.layer.seen, model.outputs)})
    return states


def _norms(api, rank, dtype):
    policy, states = MixedPrecisionPolicy(param_dtype=dtype), []

    def one(norm, shape, first, last, policy_of_norm=policy, narrow=False):
        model = seeded(first, norm, last)
        api.fully_shard(model[1], mp_policy=policy_of_norm)
        shard(api, model[0], model[2], model, mp_policy=policy)
        if narrow:
            for name in ("running_mean", "running_var"):
                setattr(model[1], name, getattr(model[1], name).to(dtype))
        out = model(numbers(rank, 0, *shape))
        assert out.dtype == dtype, out.dtype
        states.append({"out": out, **backward(model, out.sum()), **dict(model.named_buffers())})

    def lines():
        return nn.Linear(8, 8)

    def planes():
        return (lambda: nn.Conv2d(1, 5, 3)), (lambda: nn.Conv2d(5, 4, 3))

    one(lambda: nn.LayerNorm(8), (4, 8), lines, lines)
    wide = MixedPrecisionPolicy(output_dtype=dtype)
    one(lambda: nn.BatchNorm2d(5), (3, 1, 9, 9), *planes(), wide)
    one(lambda: nn.BatchNorm1d(8), (4, 8), lines, lines, narrow=True)
    one(lambda: nn.BatchNorm2d(5), (3, 1, 9, 9), *planes(), narrow=True)
    return states


@case
def norms_in_bf16(api, rank):
    return _norms(api, rank, BF16)


@case
def norms_in_fp16(api, rank):
    return _norms(api, rank, FP16)


@case
def inputs_of_the_modules_of_a_list(api, rank):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = (nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, x):
            return self.b(self.a(x).float())

    model = Net()
    shard(api, [model.a, model.b], model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    out = model(numbers(rank, 0, 2, 8))
    return [{**backward(model, out.sum()), "out": out, "type": seen_types([out.dtype])}]


@case
def computed_in_fp16(api, rank):
    states = []
    for policy in (dict(param_dtype=FP16), dict(param_dtype=FP16, reduce_dtype=FP32),
                   dict(reduce_dtype=BF16)):
        model = cases.shard_mlp(api, cases.mlp(), mp_policy=MixedPrecisionPolicy(**policy))
        states += train(api, model, cases.square(rank))
    return states


@case
def forward_mode_before_anything_was_used(api, rank):
    torch.manual_seed(0)
    encode, decode = nn.Linear(8, 12, bias=False), nn.Linear(12, 6, bias=False)
    shard(api, encode, decode, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32))
    x = encode(torch.ones(8, dtype=BF16))
    out, tangent = torch.func.jvp(lambda unused: decode(x), (torch.ones(6, requires_grad=True),),
                                  (torch.ones(6),))
    return [{"out": out.detach(), "tangent": tangent.detach(), "type": seen_types([out.dtype])}]


@case
def frozen_parameters_of_other_types(api, rank):
    """Integers and fp8: not used, and used."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)
            self.whole = nn.Parameter(torch.arange(8), requires_grad=False)
            self.small = nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn),
                                      requires_grad=False)

        def forward(self, x):
            return self.layer(x) * self.whole

    model = api.fully_shard(Net())
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    states = []
    for step in range(3):
        cases.square(rank, 8)(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(parameters(model.layer))
    return states


# --------------------------------------------------------------------- values and states


def _made_empty(api, rank, initialise):
    states = []
    for width, policy in itertools.product((8, 3, 1), (MixedPrecisionPolicy(), MixedPrecisionPolicy(
            param_dtype=BF16, reduce_dtype=FP32))):
        with torch.device("meta"):
            model = nn.Sequential(linear(7, width), linear(width, 3, bias=False))
            model.register_buffer("seen", torch.ones(3))
        shard(api, *model, model, mp_policy=policy)
        model.to_empty(device="cpu")
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        torch.manual_seed(3)
        initialise(model)
        states += train(api, model, lambda model, step: model(
            numbers(rank, step, 4, 7)).float().pow(2).sum())
        states.append({"buffer": model.seen.clone()})
    return states


@case
def made_empty_and_filled(api, rank):
    def initialise(model):
        with torch.no_grad():
            for i, tensor in enumerate((*model.parameters(), *model.buffers())):
                tensor.fill_(0.1 * (i + 1))

    return _made_empty(api, rank, initialise)


@case
def made_empty_and_reset(api, rank):
    def initialise(model):
        model.seen.zero_()
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    return _made_empty(api, rank, initialise)


def _assigned(api, rank, order, plain=False):
    with torch.device("meta"):
        model = seeded(*[lambda: nn.Linear(4, 4, bias=False)] * 2)
    shard(api, *model, model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    for name in order:
        value = torch.randn(4, 4)
        value = value if plain else distribute_tensor(value, mesh, [Shard(0)])
        model.load_state_dict({name: value}, assign=True, strict=False)
    loaded = parameters(model)
    return [loaded, *train(api, model, cases.square(rank, 4))]


@case
def assigned_one_by_one_from_the_meta_device(api, rank):
    return _assigned(api, rank, ("0.weight", "1.weight"))


@case
def sharded_values_are_loaded_after_steps(api, rank):
    """Into parameters that are kept after a forward, too."""
    model = cases.shard_mlp(api, cases.mlp(), reshard_after_forward=False)
    states = train(api, model, cases.square(rank), torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        state = {name: p.detach().clone().fill_(42.0 + rank)
                 for name, p in model.named_parameters()}
        model(numbers(rank, 0, 2, 7))
    model.reshard()
    model.load_state_dict(state)
    return [*states, parameters(model)]


@case
def rows_of_odd_sizes(api, rank):
    """Size, strides, placements and local rows, of a module that is there twice, too."""
    states = []
    for shared in (False, True):
        model = seeded(*[lambda: nn.Sequential(nn.Linear(3, 9), nn.Linear(9, 3))] * 3)
        if shared:
            model[0][0] = model[1][0]
        api.fully_shard(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                states.append({
                    "name": torch.tensor([float(ord(c)) for c in name]),
                    "size": torch.tensor(p.size()), "stride": torch.tensor(p.stride()),
                    "dim": torch.tensor([float(s.dim) for s in p.placements]),
                    "mesh": p.device_mesh.mesh, "rows": p.to_local().detach().clone()})
    return states


@alone
def which_parameters_a_unit_has(rank):
    """Once each, and not those of units inside."""
    said = []

    def check(what, module, wanted):
        found = [p.name for p in module._unit().params]
        if found != wanted:
            said.append(f"{what}: {found}")

    both, api = ["weight", "bias"], Shardd("units")
    model = seeded(*[lambda: nn.Linear(8, 8)] * 3)
    check("a single one", st.fully_shard(nn.Linear(8, 8)), both)
    st.fully_shard(model[0])
    check("a nested one", st.fully_shard(model), ["1.weight", "1.bias", "2.weight", "2.bias"])
    layer = nn.Linear(8, 8)
    check("a module twice", st.fully_shard(nn.Sequential(layer, layer)), ["0.weight", "0.bias"])
    model = seeded(*[lambda: nn.Linear(8, 8)] * 4)
    st.fully_shard([model[1], model[3]])
    check("one of a list", model[3], both)
    check("around a list", st.fully_shard(model), ["0.weight", "0.bias", "2.weight", "2.bias"])
    model = seeded(*[lambda: nn.Linear(8, 8)] * 3)
    model[0].weight = model[2].weight = model[1].weight
    check("tied ones", st.fully_shard(model), ["0.weight", "0.bias", "1.bias", "2.bias"])
    api.close()
    return said


# ------------------------------------------------------------------------------ arguments


def refused(said, kind, text, call):
    try:
        call()
    except kind as error:
        if text not in str(error):
            said.append(f"{text!r} is not in: {error}")
    else:
        said.append(f"{text!r} was not refused")


class Extended(torch.Tensor):
    def fsdp_pre_all_gather(self, *_):
        raise AssertionError


@alone
def what_cannot_be_is_refused(rank):
    said, api = [], Shardd("refused")
    layer = st.fully_shard(nn.Linear(4, 4))
    buffers = layer.set_reduce_scatter_max_input_buffers
    refused(said, ValueError, "at least 1", lambda: buffers(0))
    for wrong in (2.5, True):
        refused(said, TypeError, "must be an int", lambda wrong=wrong: buffers(wrong))
    buffers(2)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Extended))
    refused(said, shardd.Unimplemented, "fsdp_pre_all_gather", lambda: st.fully_shard(model))
    st.fully_shard(model, ignored_params={model.weight})
    tied = seeded(*[lambda: nn.Linear(4, 4, bias=False)] * 2)
    tied[1].weight = tied[0].weight
    refused(said, ValueError, "tied to a parameter of another module",
            functools.partial(shard, st, *tied))
    tied = seeded(*[lambda: nn.Linear(4, 4, bias=False)] * 2)
    tied[1].weight = tied[0].weight
    shard(st, list(tied))
    refused(said, shardd.FailedPrecondition, "fully_shard on a module that contains both",
            functools.partial(tied, torch.ones(4)))
    st.fully_shard(tied)
    st.SGD(tied.parameters(), lr=0.1)
    tied(torch.ones(4)).sum().backward()
    refused(said, shardd.FailedPrecondition, "forward of a wrapped module that contains both",
            lambda: tied[1](torch.ones(4)))
    mesh = init_device_mesh("cpu", (2, 1, 1))
    refused(said, shardd.Unimplemented, "3 dimensions",
            lambda: st.fully_shard(nn.Linear(4, 4), mesh=mesh))
    st.fully_shard(nn.LayerNorm(4), shard_placement_fn=lambda p: Shard(-1))
    for dim in (1, -1):
        refused(said, shardd.Unimplemented, "Shard(0) or None", lambda dim=dim: st.fully_shard(
            nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(dim if p.dim() > 1 else 1)))
    refused(said, Exception, "save its state_dict()", lambda: copy.deepcopy(layer))
    parallel = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)),
                                  ColwiseParallel())
    refused(said, shardd.Unimplemented, "tensor parallelism",
            lambda: st.fully_shard(parallel))
    for name in ("set_all_reduce_hook", "set_custom_all_gather"):
        refused(said, shardd.Unimplemented, "none of your code",
                lambda name=name: getattr(layer, name)(print))
    refused(said, RuntimeError, "Couldn't swap", lambda: layer.to(BF16))
    api.close()
    return said


@alone
def what_of_assignment_and_parts_is_refused(rank):
    said, api = [], Shardd("parts")
    layer = st.fully_shard(nn.Linear(4, 4))
    state = {"weight": torch.ones(4, 4, dtype=BF16), "bias": torch.ones(4)}
    refused(said, shardd.InvalidArgument, "is torch.bfloat16",
            lambda: layer.load_state_dict(state, assign=True))
    model = seeded(*[lambda: nn.Linear(4, 4)] * 2)
    shard(st, *model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for call in (optimizer.state_dict, lambda: optimizer.load_state_dict({}),
                 lambda: optimizer.state[model[0].weight], lambda: bool(optimizer.state)):
        refused(said, shardd.Unimplemented, "over several models", call)
    refused(said, shardd.Unimplemented, "build a new one",
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
    refused(said, shardd.InvalidArgument, "belong to several models",
            lambda: st.AdamW(model.parameters()))
    api.close()
    return said


@alone
def what_fsdp2_refuses_and_this_does_not(rank):
    """A scalar, a part before the model, a list without a model, a mesh without names, a model that
    is still on the meta device."""
    said, api = [], Shardd("allowed")
    model = nn.Linear(4, 4)
    model.scalar = nn.Parameter(torch.tensor(1.0))
    st.fully_shard(model, mesh=init_device_mesh("cpu", (2, 1)))
    model(torch.ones(2, 4)).sum().backward()
    api.close()
    api = Shardd("allowed-part")
    model = seeded(*[lambda: nn.Linear(4, 4)] * 2)
    shard(st, *model, model)
    if not torch.equal(model[1](model[0](torch.ones(2, 4))), model(torch.ones(2, 4))):
        said.append("a part before the model")
    api.close()
    api = Shardd("allowed-meta")
    with torch.device("meta"):
        model = seeded(lambda: nn.Linear(4, 4))
    st.fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    if not float(gradients(model)["grad 0.weight"].abs().sum()):
        said.append("no gradient")
    api.close()
    return said


@alone
def backward_without_the_parameters_it_needs(rank):
    """After set_unshard_in_backward(False), where FSDP2 computes with what was freed."""
    said, api = [], Shardd("needed")
    model = seeded(*[lambda: nn.Linear(4, 4)] * 2)
    shard(st, *model, model)
    model[1].set_unshard_in_backward(False)
    loss = model(torch.ones(2, 4)).sum()
    refused(said, shardd.FailedPrecondition, "'weight' of unit '1'", loss.backward)
    model[1].set_unshard_in_backward(True)
    model.zero_grad()
    found = backward(model, model(torch.ones(2, 4)).sum())
    if not torch.equal(found["grad 1.bias"], torch.full((4,), 2.0)):
        said.append(f"afterwards: {found}")
    api.close()
    return said


# -------------------------------------------------------------------------------- the page


KINDS = ("equal", "different", "not there", "internal")


def rows():
    """Of the tables: (file, PyTorch's test, behaviour, kind, what our side has)."""
    found, file = [], ""
    for line in PAGE.read_text().splitlines():
        heading = re.match(r"### `(test_fully_shard_\w+)\.py`", line)
        file = heading.group(1) if heading else file
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`test_"):
            found.append((file, *cells))
    return found


@functools.cache
def names_in(path):
    return set(re.findall(r"(?:def|class) (\w+)|CASES\[\"(\w+)\"\]|\"(\w+)_between_units\"",
                          path.read_text())) if path.exists() else None


def is_there(reference):
    """@reference: file::function, with OneRank or a class before it or not."""
    name, _, function = reference.partition("::")
    path = HERE / f"{name}.py"
    if not path.exists():
        return False
    last = function.rpartition(".")[2].rpartition("::")[2]
    known = {n for triple in names_in(path) for n in triple if n}
    generated = last in CASES and name == "test_parity_values"
    return last in known or generated


@alone
def the_page_names_tests_and_counts_them(rank):
    found, said = rows(), []
    for file, test, _, kind, there in found:
        if kind not in KINDS:
            said.append(f"{file} {test}: {kind!r}")
        references = re.findall(r"`(test_\w+::[\w.]+)`", there)
        if kind == "equal" and not references:
            said.append(f"{file} {test} is equal, and no test of ours is named")
        said += [f"{file} {test}: no {r}" for r in references if not is_there(r)]
        if kind in ("different", "not there") and len(re.sub(r"`[^`]*`", "", there)) < 10:
            said.append(f"{file} {test} is {kind}, and nothing says why")
    counts = {kind: sum(row[3] == kind for row in found) for kind in KINDS}
    counted = len(found) - counts["internal"]
    line = (f"{len(found)} behaviours of {len({row[:2] for row in found})} tests: "
            f"{counts['equal']} equal, {counts['different']} deliberately different, "
            f"{counts['not there']} not there, {counts['internal']} internal to PyTorch; "
            f"{100 * counts['equal'] // max(1, counted)} % of the {counted} others are equal.")
    if line not in " ".join(PAGE.read_text().split()):
        said.append("the page does not say: " + line)
    return said


def trial(name, rank):
    run = CASES[name][1]
    return run(name, rank)


def main():
    return fsdp.report(*parity.plans(CASES, trial))


if __name__ == "__main__":
    sys.exit(main())
