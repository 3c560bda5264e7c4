#!/usr/bin/env python3
"""Units by policy, meshes and replicas of shards (HSDP), against PyTorch's own.

Prints one line of TAP a case; arguments choose by a part of the name.
"""

import functools
import os
import sys
import tempfile
import warnings

import fsdp
import golden
import test_fully_shard as cases
import torch
import transformer
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    register_fsdp_forward_method,
    wrap,
)
from torch.distributed.tensor import Shard

import shardd
import shardd.torch as st

CASES = {}  # name: (ranks, function)


def case(ranks):
    def decorate(function):
        CASES[function.__name__] = ranks, function
        return function

    return decorate


def expect(said, kind, text, function):
    try:
        function()
        said.append(f"nothing was raised instead of {text}")
    except kind as error:
        if text not in str(error):
            said.append(f"{text!r} is not in {error}")


# ----------------------------------------------------------------------- policies


class Nested(nn.Module):
    """Blocks in blocks, containers, a leaf of its own, something without parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(6, 10)
        self.stages = nn.ModuleList(
            nn.Sequential(transformer.Block(), nn.Tanh(), nn.Linear(18, 18 + i)) for i in range(3))
        self.named = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.LayerNorm(7)})
        self.head = nn.Sequential(nn.Sequential(nn.Linear(30, 30), nn.ReLU()), nn.Linear(30, 2))


def by_fsdp1(policy):
    model = FullyShardedDataParallel(Nested(), auto_wrap_policy=policy,
                                     device_id=torch.device("cpu"))
    return {".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
            for name, m in model.named_modules() if isinstance(m, FullyShardedDataParallel)}


def by_shardd(policy, **options):
    model = st.fully_shard(Nested(), policy=policy, **options)
    return {name for name, m in model.named_modules() if isinstance(m, st.ShardedModule)}


def is_linear(module):
    return isinstance(module, nn.Linear) and module.out_features > 18


POLICIES = {
    "classes": wrap.ModuleWrapPolicy({transformer.Block, nn.LayerNorm}),
    "nested classes": wrap.ModuleWrapPolicy([nn.Linear, nn.Sequential]),
    "a predicate": wrap.CustomPolicy(is_linear),
    "a function of classes": functools.partial(wrap.transformer_auto_wrap_policy,
                                               transformer_layer_cls={transformer.Block}),
    "a function with a predicate": functools.partial(wrap.lambda_auto_wrap_policy,
                                                     lambda_fn=is_linear),
    **{f"size {n}": functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=n)
       for n in (1, 100, 900, 1500, 3000, 5000, 10**6)},
    "size with leaves": functools.partial(
        wrap.size_based_auto_wrap_policy, min_num_params=900,
        force_leaf_modules={nn.Sequential}, exclude_wrap_modules={nn.Linear}),
}


@case(1)
def policies_choose_as_fsdp1_does(rank):
    said, seen = [], set()
    for name, policy in POLICIES.items():
        # FSDP1 warns of a unit that is a container, and never gathers it.
        theirs, ours = by_fsdp1(policy) - {"stages", "named"}, by_shardd(policy)
        seen.add(frozenset(theirs))
        if theirs != ours:
            said.append(f"{name}: FSDP1 {sorted(theirs)}, here {sorted(ours)}")
    if len(seen) < 8:
        said.append("the policies choose too much alike to tell anything")
    return said


@case(1)
def policies_in_plain_words(rank):
    said = []
    blocks = {"", *(f"stages.{i}.0" for i in range(3))}
    for policy in (transformer.Block, {transformer.Block}, [transformer.Block, nn.Conv2d],
                   lambda m: isinstance(m, transformer.Block)):
        if by_shardd(policy) != blocks:
            said.append(f"{policy}: {by_shardd(policy)}")
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = st.fully_shard(Nested(), reshard_after_forward=False, policy=lambda m: (
        {"mp_policy": bf16} if isinstance(m, transformer.Block) else is_linear(m)))
    units = {n: m._unit() for n, m in model.named_modules() if isinstance(m, st.ShardedModule)}
    if units["stages.0.0"].mp_policy is not bf16 or units["named.a"].mp_policy is not None or \
            any(u.reshard_after_forward is not False for u in units.values()):
        said.append("arguments of units are not those that were given")
    if units["stages.1.0"].parent is not units[""]:
        said.append("a unit has no parent")
    model = Nested()
    st.fully_shard(model.stages[0][0])
    st.fully_shard(model, policy=transformer.Block)  # what is wrapped stays as it is
    expect(said, shardd.InvalidArgument, "policy is 7", lambda: st.fully_shard(Nested(), policy=7))
    expect(said, shardd.InvalidArgument, "policy returned 'yes'",
           lambda: st.fully_shard(Nested(), policy=lambda m: "yes"))
    tied = Nested()
    tied.stages[0][2].weight = nn.Parameter(torch.zeros(18, 18))
    tied.stages[1][0].out.weight = tied.stages[0][2].weight
    expect(said, shardd.InvalidArgument, "tied",
           lambda: st.fully_shard(tied, policy=transformer.Block))
    return said


@case(2)
def training_by_policy(rank):
    """The same units by a policy and by hand: the same numbers as FSDP2."""
    def loop(api, wrapped):
        return cases.loop(api, wrapped, cases.gpt_loss(rank), rank)

    theirs = loop(Fsdp2(), cases.gpt(Fsdp2()))
    api = Shardd("policy")
    try:
        return differences(loop(api, st.fully_shard(transformer.make(),
                                                    policy={transformer.Block})), theirs)
    finally:
        api.close()


# -------------------------------------------------------------------------- meshes


def _hsdp(api, rank, mesh, **options):
    torch.manual_seed(3)
    return cases.loop(api, cases.gpt(api, mesh=mesh, **options), cases.gpt_loss(rank), rank)


def _against_fsdp2(rank, mesh, ours, job, bound=0.0):
    with golden.folded():
        theirs = _hsdp(Fsdp2(), rank, mesh)
    api = Shardd(job)
    try:
        return differences(_hsdp(api, rank, ours), theirs, bound)
    finally:
        api.close()


@case(4)
def replicas_of_shards(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _against_fsdp2(rank, mesh, mesh, "hsdp")


@case(4)
def replicas_of_shards_in_plain_numbers(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return _against_fsdp2(rank, mesh, ((0, 1), (2, 3)), "hsdp-plain")


@case(4)
def four_replicas_of_one(rank):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    return _against_fsdp2(rank, mesh, mesh, "hsdp-one")


@case(4)
def a_mesh_of_one_dimension(rank):
    mesh = init_device_mesh("cpu", (4,))
    return _against_fsdp2(rank, mesh, mesh, "mesh")


@case(4)
def two_models_on_parts_of_the_ranks(rank):
    """Each half of the ranks trains a model of its own."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    mine = (0, 1) if rank < 2 else (2, 3)
    return _against_fsdp2(rank, both["data"], mine, "halves")


@case(4)
def sharded_states_on_a_mesh(rank):
    """DTensors have the mesh that was given, and FSDP2's local rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs = cases.gpt(Fsdp2(), mesh=mesh).state_dict()
    api = Shardd("mesh-states")
    said = []
    try:
        model = cases.gpt(api, mesh=mesh)
        st.AdamW(model.parameters())
        ours = st.state_dict(model, full=False)
        for name, value in theirs.items():
            other = ours[name]
            if other.device_mesh != mesh or other.placements != value.placements or \
                    not torch.equal(other.to_local(), value.to_local()):
                said.append(f"{name}: {other.placements} on {other.device_mesh}")
        st.load_state_dict(model, {k: v * 2 for k, v in theirs.items()})
        for name, value in model.state_dict().items():
            if not torch.equal(value, theirs[name].full_tensor() * 2):
                said.append(f"{name} was not loaded")
    finally:
        api.close()
    return said


@case(4)
def a_checkpoint_goes_to_other_numbers_of_shards(rank):
    """FSDP2 saves four shards of everything, replicas of two load them, and save; FSDP2 loads."""
    folders = [tempfile.mkdtemp() if rank == 0 else None for _ in range(2)]
    torch.distributed.broadcast_object_list(folders)
    theirs = cases.gpt(Fsdp2())
    optimizer = torch.optim.AdamW(theirs.parameters(), foreach=False)
    for step in range(2):
        cases.gpt_loss(rank)(theirs, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    def saved():
        return {"model": dsd.get_model_state_dict(theirs),
                "optim": dsd.get_optimizer_state_dict(theirs, optimizer)}

    def whole(state):
        every = {**state["model"], **{f"{n}.{k}": v for n, s in state["optim"]["state"].items()
                                      for k, v in s.items()}}
        return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in every.items()}

    want = whole(saved())
    dcp.save(saved(), checkpoint_id=folders[0])
    api = Shardd("other-numbers")
    said = []
    try:
        model = transformer.make()
        with torch.no_grad():
            model.places.fill_(7)
        st.fully_shard(model, policy=transformer.Block,
                       mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))
        ours = st.AdamW(model.parameters())
        for number in range(2):
            state = {"model": st.state_dict(model, full=False),
                     "optim": st.optimizer_state_dict(ours, full=False)}
            if number == 0:
                dcp.load(state, checkpoint_id=folders[0])
                st.load_state_dict(model, state["model"])
                ours.load_state_dict(state["optim"])
        said += differences([whole({"model": st.state_dict(model),
                                    "optim": st.optimizer_state_dict(ours)})], [want])
        dcp.save(state, checkpoint_id=folders[1])
    finally:
        api.close()
    for step in range(2):
        cases.gpt_loss(rank)(theirs, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = saved()
    dcp.load(state, checkpoint_id=folders[1])
    return said + differences([whole(state)], [want])


@case(2)
def other_arguments(rank):
    said = []
    api = Shardd("arguments")
    for policy in (OffloadPolicy(), CPUOffloadPolicy()):
        st.fully_shard(nn.Linear(2, 2), offload_policy=policy)
    st.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(0))
    st.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: None)
    expect(said, shardd.Unimplemented, "offload_policy is 1",
           lambda: st.fully_shard(nn.Linear(2, 2), offload_policy=1))
    expect(said, shardd.Unimplemented, "Shard(0) or None",
           lambda: st.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(1)))
    for mesh in (7, (), ((0,), (1, 2)), (0, 0), "ab", (-1, 0)):
        expect(said, shardd.InvalidArgument, "give ranks",
               lambda mesh=mesh: st.fully_shard(nn.Linear(2, 2), mesh=mesh))

    def train(*meshes):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        st.fully_shard(model[0], mesh=meshes[0])
        st.AdamW(st.fully_shard(model, mesh=meshes[-1]).parameters())

    expect(said, shardd.Unimplemented, "different meshes", lambda: train((0, 1), None))
    expect(said, shardd.InvalidArgument, "the job has 2 ranks", lambda: train((0, 1, 2)))
    expect(said, shardd.InvalidArgument, "this is rank", lambda: train((1 - rank,)))
    api.close()
    return said


@case(1)
def what_a_module_says_of_itself(rank):
    said = []
    api = Shardd("repr")
    for model in (st.fully_shard(cases.mlp(), policy=nn.Linear),
                  st.replicate(cases.mlp(), bucket_cap_mb=1e-4)):
        before = repr(model)
        st.AdamW(model.parameters())
        after, state = repr(model), "sharded"
        model(torch.ones(1, 7))
        if isinstance(model, st.ReplicatedModule):
            state = "replicated"
        for text, parts in ((before, ("not registered yet", "2 parameters")),
                            (after, (f" MiB, {state}", "unit '", "2 parameters"))):
            said += [f"{part!r} is not in {text}" for part in parts if part not in text]
    api.close()
    return said


# --------------------------------------------------------------- forms of fully_shard


def same(rank, run):
    """@run(api) gives the same with FSDP2 and here."""
    theirs, api = run(Fsdp2()), Shardd(run.__name__)
    try:
        return differences(run(api), theirs)
    finally:
        api.close()


def trained(api, model, rank):
    return cases.loop(api, model, cases.square(rank), rank)


@case(2)
def lists_of_modules(rank):
    def listed(api):
        model = cases.mlp()
        api.fully_shard([model[0], model[4]], reshard_after_forward=False)
        api.fully_shard([model[2]])
        return trained(api, api.fully_shard(model), rank)

    said = same(rank, listed)
    model = cases.mlp()
    inner = nn.Sequential(*model)
    st.fully_shard([inner, model[0]])  # a module and one in it
    if [len(u.params) for m in (inner, model[0]) for u in m._shardd_units] != [4, 2]:
        said.append("a module in another one of the list is not a unit of its own")
    expect(said, shardd.InvalidArgument, "a list with a str", lambda: st.fully_shard(["x"]))
    expect(said, shardd.InvalidArgument, "give a module", lambda: st.fully_shard("x"))
    return said


@case(2)
def numbers_of_ranks_to_reshard_to(rank):
    def numbers(api):
        model = cases.mlp()
        for layer, number in ((model[0], 2), (model[2], 1)):
            api.fully_shard(layer, reshard_after_forward=number)
        return trained(api, api.fully_shard(model), rank)

    said = same(rank, numbers)
    for wrong in (0, -1, 1.5, "2"):
        expect(said, shardd.InvalidArgument, "a number of ranks above 0",
               lambda wrong=wrong: st.fully_shard(cases.mlp(), reshard_after_forward=wrong))
    return said


@case(2)
def wrapped_by_pytorchs_checkpoint_wrapper(rank):
    def wrapped(api):
        model = cases.mlp()
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        for layer in (model[0], model[2]):
            api.fully_shard(layer)
        api.fully_shard(model)
        api.whole = lambda model: {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            for name, value in model.state_dict().items()}
        return trained(api, model, rank)

    return same(rank, wrapped)


@case(1)
def it_is_an_fsdp_module(rank):
    said = []
    model = st.fully_shard(cases.mlp(), policy=nn.Linear)
    if not all(isinstance(m, FSDPModule) for m in (model, model[0])):
        said.append(f"{type(model).__mro__}")
    if type(model[1:]) is not nn.Sequential or type(model[1:][1]) is not type(model[0]):
        said.append(f"a slice is a {type(model[1:])}")
    theirs = [n for n, f in vars(FSDPModule).items() if callable(f) and n != "__new__"
              and getattr(type(model), n) is f]
    if theirs:
        said.append(f"{theirs} are PyTorch's own")
    api = Shardd("device")
    st.AdamW(model.parameters())
    for where in ("cpu", "cpu:0", torch.device("cpu", 0)):
        if model.to(where) is not model or not isinstance(model[0].weight, nn.Parameter):
            said.append(f"to({where!r}) has changed it")
    model(torch.ones(1, 7)).sum().backward()
    register_fsdp_forward_method(model[0], "extra_repr")
    expect(said, shardd.Unimplemented, "the function of shardd.torch", model[0].extra_repr)
    api.close()
    return said


# ------------------------------------------------------------------------ running


for about in ("FSDP2-wrapped module .* returned a view", "FSDP will not all-gather",
              "FSDP is switching to use `NO_SHARD`"):
    warnings.filterwarnings("ignore", message=about)


def trial(name, rank):
    return CASES[name][1](rank)


def main():
    names = fsdp.wanted(CASES)
    return fsdp.report(*(fsdp.Plan(world, [n for n in names if CASES[n][0] == world], trial)
                         for world in (1, 2, 4)))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
