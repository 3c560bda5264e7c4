"""Optimizers over the daemon, with the interface of torch.optim.

AdamW, Adam and SGD run in the daemon, on the shards, where their state lives. :class:`Sharded`
runs any optimizer of torch.optim on this rank's shard.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, Callable

import torch
from torch import nn

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..specs import OptimizerKind, OptimizerProfile, OptimizerSpec, OptimizerWhen
from . import _device, _inner_state, _optim_state
from ._guard import Guard
from ._session import rank_if_any, session, tensor_at
from ._tree import Tree, tree_of, units_of
from ._unit import Parameter, ShardedUnit


def _check(groups: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Every group by the id of its parameters. InvalidArgument: not a sharded parameter."""
    found = {}
    for group in groups:
        for p in group["params"]:
            if not isinstance(p, Guard):
                raise InvalidArgument(
                    f"a parameter of shape {list(p.shape)} is not sharded: call fully_shard first "
                    "and build the optimizer with model.parameters() afterwards; for ignored "
                    "parameters use an optimizer of torch.optim of their own", "params")
            found[id(p)] = group
    return found


def _tree(groups: list[dict[str, Any]], optimizer: Any, settings: Any) -> Tree:
    """The one model that the parameters are of, registered with this optimizer."""
    by_id = _check(groups)
    units = {id(p._unit): p._unit for g in groups for p in g["params"]}
    roots = {id(_root(u)): _root(u) for u in units.values()}
    if len(roots) != 1:
        raise InvalidArgument("the parameters are of several models: an optimizer steps one, build "
                              "one for each", "params")
    [root] = roots.values()
    if root.tree is not None:
        raise FailedPrecondition(
            "the model has been used, or has an optimizer already: build the optimizer after "
            "fully_shard and before the first forward, so that the daemon keeps its state")
    for unit in units_of(root.module):
        for p in unit.trained:
            if id(p.guard) not in by_id:
                raise InvalidArgument(
                    f"the optimizer has no parameter '{p.name}' of {type(unit.module).__name__}: "
                    "it is to have all that are trained; set requires_grad=False before "
                    "fully_shard for those that are not", "params")
    tree = tree_of(root, settings)
    tree.optimizer = optimizer
    return tree


def _root(unit: ShardedUnit) -> ShardedUnit:
    while unit.parent is not None:
        unit = unit.parent
    return unit


class _Sharded(torch.optim.Optimizer):
    """What all optimizers here have in common."""

    _model: Tree

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients there are (collective, if there are any that were reduced)."""
        self._model.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: what is trained is known to the daemon by then."""
        if hasattr(self, "_model"):
            raise FailedPrecondition("add_param_group after the optimizer was built: the daemon "
                                     "has the optimizer's state by now; give all groups at once")
        super().add_param_group(param_group)


class _Elsewhere(dict[Any, Any]):
    """``optimizer.state``, which the daemon has: of a parameter the names of what is there. Not
    empty to who asks: torch.distributed's get_optimizer_state_dict would step an optimizer that
    has none."""

    def __init__(self, optimizer: _InDaemon) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __bool__(self) -> bool:
        return True

    def __missing__(self, parameter: Any) -> dict[str, None]:
        return dict.fromkeys(_optim_state.names(self._optimizer, parameter))


class _InDaemon(_Sharded):
    """An optimizer that the daemon runs. Subclasses: ``_spec``, and which settings it has."""

    _fixed: tuple[str, ...] = ()  # settings that cannot be changed once it is built
    _like: Any = None  # torch.optim's

    def __init__(self, params: Any, defaults: dict[str, Any], in_backward: bool) -> None:
        super().__init__(params, defaults)
        self.state = _Elsewhere(self)  # type: ignore[assignment]
        self.in_backward = in_backward
        self._base = max(float(g["lr"]) for g in self.param_groups)
        self._shares = [float(g["lr"]) / self._base if self._base else 1.0
                        for g in self.param_groups]
        self._by_id = _check(self.param_groups)
        self._share = dict(zip(map(id, self.param_groups), self._shares))
        self._model = _tree(self.param_groups, self, self._settings)
        self._built = [{k: g[k] for k in self._fixed} for g in self.param_groups]
        self._skip_if_found = False
        self._found_inf = False

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        raise NotImplementedError

    def _when(self) -> OptimizerWhen:
        return OptimizerWhen.IN_BACKWARD if self.in_backward else OptimizerWhen.AT_STEP

    def _settings(self, unit: ShardedUnit) -> tuple[OptimizerSpec, dict[int, dict[str, Any]]]:
        trained = [p.guard for p in unit.trained]
        if not trained:
            return OptimizerSpec(), {}
        first = self._by_id[id(trained[0])]
        spec, settings = self._spec(first), {}
        for p in trained:
            group, own = self._by_id[id(p)], {}
            for name in self._fixed:
                if name != "weight_decay" and group[name] != first[name]:
                    raise Unimplemented(
                        f"{name} differs between parameters of unit '{unit.name}': only lr and "
                        "weight_decay may; wrap them as units of their own", name)
            if group["weight_decay"] != first["weight_decay"]:
                own["weight_decay"] = float(group["weight_decay"])
            if self._share[id(group)] != 1.0:
                own["lr_factor"] = self._share[id(group)]
            settings[id(p)] = own
        return spec, settings

    def rate(self) -> float:
        """The learning rate of this step; groups have theirs in a fixed proportion."""
        for group, built in zip(self.param_groups, self._built):
            for name, value in built.items():
                if group[name] != value:
                    raise Unimplemented(
                        f"{name} was changed from {value} to {group[name]}: the daemon takes a new "
                        "lr in every step, the other settings once (OneCycleLR: "
                        "cycle_momentum=False)", name)
        rates = [float(g["lr"]) for g in self.param_groups]
        base = max(rates)
        for rate, share in zip(rates, self._shares):
            if abs(rate - base * share) > 1e-12 * base:
                raise Unimplemented(
                    f"the learning rates {rates} are in another proportion than when the optimizer "
                    "was built: the daemon takes one for all groups and keeps their proportion",
                    "lr")
        return base

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's of a plain model: whole tensors, on every rank (collective). It can be
        loaded into torch.optim's optimizer of the same name, too."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        numbers = _optim_state.numbered(self)
        state = {numbers[p]: s for p, s in _optim_state.read(self, True, False).items()}
        made: dict[str, Any] = {"state": dict(sorted(state.items())),
                                "param_groups": _optim_state.groups(self, numbers)}
        for post in self._optimizer_state_dict_post_hooks.values():
            made = post(self, made) or made
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, torch.optim's of a plain model, or one by names as
        :func:`optimizer_state_dict` gives (collective). With what differs between ranks each
        rank's rows of its own count.

        InvalidArgument: of other parameters. Unimplemented: parameters of one unit that have had
        different numbers of steps; other settings than lr that are not this optimizer's.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        _optim_state.load(self, state_dict)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all units that have a gradient (collective). Return: what @closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rate = None if self.in_backward else self.rate()  # in backward it is the plan's
        self._model.release_all()
        result = self._model.client.step(rate, self._model.group,
                                         skip_if_found=self._skip_if_found)
        self._found_inf = result.found_inf
        self._model.stepped()
        return loss


def _number(value: Any, name: str) -> float:
    if isinstance(value, torch.Tensor):
        raise InvalidArgument(f"{name} is a tensor: give a number", name)
    return float(value)


def _refuse(**settings: Any) -> None:
    for name, value in settings.items():
        if value:
            raise Unimplemented(f"{name}={value!r}: the daemon's optimizers do not have it", name)


class AdamW(_InDaemon):
    """torch.optim.AdamW, run by the daemon. @foreach, @fused: whose bits; not both.

    @in_backward: each unit is stepped as soon as its gradients are reduced, which are never kept;
    step() ends the pass. One backward that reduces for each step, and no clipping or scaling.
    """

    _fixed = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
    _like: Any = torch.optim.AdamW
    _kind = OptimizerKind.ADAMW

    def __init__(self, params: Iterable[Any], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
                 foreach: bool | None = None, capturable: bool = False,
                 differentiable: bool = False, fused: bool | None = None,
                 in_backward: bool = False) -> None:
        """As torch.optim.AdamW; capturable and differentiable are Unimplemented."""
        _refuse(capturable=capturable, differentiable=differentiable)
        self._profile = _profile(foreach, fused)
        super().__init__(params, dict(
            lr=_number(lr, "lr"), betas=tuple(betas), eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, maximize=maximize), in_backward)

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        return OptimizerSpec(
            self._kind, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
            betas=group["betas"], eps=group["eps"], amsgrad=group["amsgrad"],
            maximize=group["maximize"], profile=self._profile, when=self._when())


class Adam(AdamW):
    """torch.optim.Adam, run by the daemon."""

    _like = torch.optim.Adam
    _kind = OptimizerKind.ADAM

    def __init__(self, params: Iterable[Any], lr: float = 1e-3,
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, amsgrad: bool = False, **options: Any) -> None:
        """As torch.optim.Adam; decoupled_weight_decay: take AdamW."""
        _refuse(decoupled_weight_decay=options.pop("decoupled_weight_decay", False))
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class SGD(_InDaemon):
    """torch.optim.SGD, run by the daemon; @foreach, @fused, @in_backward as of AdamW."""

    _fixed = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    _like = torch.optim.SGD

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, *,
                 maximize: bool = False, foreach: bool | None = None,
                 differentiable: bool = False, fused: bool | None = None,
                 in_backward: bool = False) -> None:
        """As torch.optim.SGD; differentiable is Unimplemented."""
        _refuse(differentiable=differentiable)
        self._profile = _profile(foreach, fused)
        super().__init__(params, dict(
            lr=_number(lr, "lr"), momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, maximize=maximize), in_backward)

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        return OptimizerSpec(
            OptimizerKind.SGD, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
            momentum=group["momentum"], dampening=group["dampening"],
            nesterov=group["nesterov"], maximize=group["maximize"], profile=self._profile,
            when=self._when())


def _profile(foreach: bool | None, fused: bool | None) -> OptimizerProfile:
    if foreach and fused:
        raise InvalidArgument("foreach and fused: at most one of them", "fused")
    return (OptimizerProfile.FUSED if fused else OptimizerProfile.FOREACH if foreach
            else OptimizerProfile.EAGER_SINGLE)


class Sharded(_Sharded):
    """Any optimizer of torch.optim, on this rank's shard: ``Sharded(torch.optim.Adagrad,
    model.parameters(), lr=0.1)``.

    Its state is in this process: it ends with it. The shard of every parameter is some of its
    rows, or a part of its elements: an optimizer that needs whole tensors is none for this. The
    parameter groups are the inner optimizer's, so that schedulers work on them.
    """

    def __init__(self, inner: type[torch.optim.Optimizer], params: Iterable[Any],
                 **options: Any) -> None:
        """@inner: a class of torch.optim's kind. @options: for it."""
        given = [p if isinstance(p, dict) else {"params": [p]} for p in params]
        groups = [dict(g, params=list(g["params"])) for g in given]
        if groups and not any("params" in p for p in given if isinstance(p, dict)):
            raise InvalidArgument("no parameters", "params")
        merged = [g for g in groups if len(g) > 1]
        plain = [p for g in groups if len(g) == 1 for p in g["params"]]
        groups = ([{"params": plain}] if plain else []) + merged
        super().__init__(groups, {})
        by_trainer = OptimizerSpec(when=OptimizerWhen.BY_TRAINER)
        self._model = _tree(self.param_groups, self, lambda unit: (
            by_trainer if unit.trained else OptimizerSpec(), {}))
        self._shards: dict[int, list[nn.Parameter]] = {}
        self._of: dict[int, nn.Parameter] = {}
        shards = []
        for group in groups:
            own = dict(group, params=[self._stand_in(p) for p in group["params"]])
            shards.append(own)
        self.guards = [list(g["params"]) for g in groups]
        self.inner = inner(shards, **options)
        self.param_groups = self.inner.param_groups

    def _stand_in(self, guard: Guard) -> nn.Parameter:
        """The inner optimizer's parameter; it gets the shard's memory in every step, and has its
        shape before, for optimizers that make their state at once."""
        unit: ShardedUnit = guard._unit
        [p] = [p for p in unit.params if p.guard is guard]
        assert unit.unit is not None
        shape = _rows(p, 0, unit.unit.places[p.name].shard_elements)
        self._of[id(guard)] = nn.Parameter(torch.zeros((), device=_device.here).expand(shape))
        return self._of[id(guard)]

    def _lend(self, unit: ShardedUnit, params: torch.Tensor, gradient: torch.Tensor) -> None:
        for index, first, n, at in unit.pieces():
            p = unit.params[index]
            stand_in, shape = self._of[id(p.guard)], _rows(p, first, n)
            stand_in.data = params[at:at + n].view(shape)
            stand_in.grad = gradient[at:at + n].view(shape) if p.reduced else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step unit by unit, in the order of their reductions (collective)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._model.release_all()
        client = self._model.client
        for _ in range(len(self._model.arrived)):
            result = client.submit("next_shard", self._model.group, finish=lambda r: (
                r.unit, r.data, r.elements, r.gradient_offset)).wait()
            unit = self._model.by_number(result[0])
            if result[2]:
                self._lend(unit, tensor_at(result[1], result[2], torch.float32),
                           tensor_at(result[1] + result[3], result[2], torch.float32))
                self.inner.step()
                self._take_back(unit)
            client.do("shard_done", result[0])
        client.step(group=self._model.group)
        self._model.stepped()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As the inner optimizer's of a plain model, whole tensors on every rank (collective)."""
        numbers = {id(p): i for i, p in enumerate(p for g in self.guards for p in g)}
        state = {numbers[p]: s for p, s in _inner_state.read(self, True).items()}
        return {"state": dict(sorted(state.items())),
                "param_groups": _inner_state.groups(self, numbers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, a plain model's, or one by names (collective)."""
        _inner_state.load(self, state_dict)

    def _take_back(self, unit: ShardedUnit) -> None:
        for p in unit.trained:
            stand_in = self._of[id(p.guard)]
            stand_in.grad = None
            stand_in.data = torch.zeros((), device=_device.here).expand(stand_in.shape)


def _rows(p: Parameter, first: int, n: int) -> tuple[int, ...]:
    """The shape of a piece: whole rows if it is some, else flat."""
    row = p.shape[1:].numel() if len(p.shape) else 1
    if len(p.shape) and row and first % row == 0 and n % row == 0:
        return (n // row, *p.shape[1:])
    return (n,)


def clip_grad_norm_(parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ on sharded gradients: of all of a model (collective).

    Return: their norm before.
    """
    guards: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    _check([{"params": guards}])
    roots = {id(_root(p._unit)): _root(p._unit) for p in guards}
    if len(roots) != 1:
        raise InvalidArgument("clip_grad_norm_ takes the parameters of one model", "parameters")
    [root] = roots.values()
    given = {id(p) for p in guards}
    tree = tree_of(root)
    if any(id(p.guard) not in given for u in tree.units for p in u.trained):
        raise Unimplemented("clip_grad_norm_ of some of a model's parameters: give all of them",
                            "parameters")
    return tree.clip(max_norm, norm_type, error_if_nonfinite)


def optimizer_state_dict(optimizer: _InDaemon | Sharded, *, full: bool = True,
                         rank0_only: bool = False) -> dict[str, Any]:
    """The state of an optimizer by the names of the model's parameters (collective), as
    torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives it of FSDP2.

    @full: whole tensors. Else each rank's rows: DTensors, as :func:`state_dict`. Also of what was
    never stepped, as zeros, so that it can be loaded into (not of Sharded, which knows of its
    state when it has stepped; nor whole momentum, since zeros would say that it is there).
    optimizer.load_state_dict takes it. @rank0_only: with @full: nothing on the other ranks, which
    only take part.
    """
    names = _optim_state.named(optimizer)
    wanted = not (full and rank0_only and rank_if_any())
    if isinstance(optimizer, Sharded):
        state, groups = _inner_state.read(optimizer, full), _inner_state.groups(optimizer, names)
    else:
        state = _optim_state.read(optimizer, full, True, wanted)
        groups = _optim_state.groups(optimizer, names)
    if not wanted:
        return {}
    return {"state": {names[p]: s for p, s in state.items()}, "param_groups": groups}


def commit(step: int, state: Any = None) -> None:
    """Make @step what a restarted trainer goes on from (collective over the job).

    @state: this rank's own, pickled, up to 64 KiB; after a join it is in
    ``shardd.torch.session().member.blob``."""
    session().commit(step, pickle.dumps(state))
