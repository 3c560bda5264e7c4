"""Optimizers over the daemon, with the interface of torch.optim.

AdamW, Adam and SGD run in the daemon, on the shards, where their state lives. (Any optimizer of
torch.optim, on this rank's shard: _sharded.py.)
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, replace
from typing import Any, Callable

import torch

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..specs import (
    OptimizerKind,
    OptimizerProfile,
    OptimizerSpec,
    OptimizerWhen,
    StepSettings,
)
from . import _device, _optim_state, _rows, _types
from ._guard import Guard
from ._session import rank_if_any, session
from ._tree import Tree, built, tree_of, units_of
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
                    "parameters use a separate optimizer of torch.optim", "params")
            found[id(p)] = group
    return found


def _tree(groups: list[dict[str, Any]], optimizer: Any, settings: Any) -> Tree:
    """The one model that the parameters are of, registered with this optimizer."""
    by_id = _check(groups)
    units = {id(p._unit): p._unit for g in groups for p in g["params"]}
    roots = {id(_root(u)): _root(u) for u in units.values()}
    if len(roots) != 1:
        raise InvalidArgument("the parameters belong to several models: build one optimizer for "
                              "each model", "params")
    [root] = roots.values()
    before = built(root)
    if before is not None and not (before.by_trainer and optimizer.may_be_late):
        raise FailedPrecondition(
            "the model has already been used or already has an optimizer whose state the daemon "
            "keeps: build the optimizer after fully_shard and before the first forward; later only "
            "one of torch.optim, or shardd.torch.Sharded, after none or after another such one")
    for unit in units_of(root.module):
        if before is None:
            unit.take_trained()
        for p in unit.trained:
            if id(p.guard) not in by_id:
                raise InvalidArgument(
                    f"the optimizer has no parameter '{p.name}' of {type(unit.module).__name__}: "
                    "it must have all trained parameters; set requires_grad=False before "
                    "fully_shard for those that are not trained", "params")
    for unit in units_of(root.module):
        settings(unit)  # nothing is registered if it raises
    tree = tree_of(root, settings)
    if before is not None:
        tree.take_unfrozen(optimizer)
    tree.finish()
    tree.optimizer = optimizer
    tree.by_trainer = optimizer.may_be_late
    return tree


def check_groups(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> None:
    """FailedPrecondition: the program has taken some of @params out of the groups, or put others
    into them."""
    now = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if now != {id(p) for p in params}:
        raise FailedPrecondition(
            f"the parameters in param_groups are not those that this {type(optimizer).__name__} "
            "was built with: use add_param_group, requires_grad_(False), or build another "
            "optimizer")


def _root(unit: ShardedUnit) -> ShardedUnit:
    while unit.parent is not None:
        unit = unit.parent
    return unit


class State:
    """What an optimizer here has as ``state``."""

    def replace(self, other: Mapping[Any, Any]) -> None:
        """The program has set ``optimizer.state`` to @other."""
        raise NotImplementedError


class _Sharded(torch.optim.Optimizer):
    """What all optimizers here have in common."""

    _model: Tree
    in_backward = False
    adds_up = False  # no reduction is the last before the step but the one that it makes itself
    steps_here = False  # in backward, in this process
    may_be_late = False  # built when the units are registered
    _skip_if_found = False  # set by a GradScaler, for its step; the next one: by its unscale_
    _found_inf = False

    @property
    def state(self) -> Any:  # type: ignore[override]
        """As torch.optim's."""
        return self.__dict__["_state"]

    @state.setter
    def state(self, value: Any) -> None:
        now = self.__dict__.get("_state")
        if isinstance(now, State) and not isinstance(value, State):
            now.replace(value)
        else:
            self.__dict__["_state"] = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients there are (collective, if there are any that were reduced). With
        @set_to_none False what had one has one of zeros in later steps, also if it is not used."""
        self._model.zero_grad(set_to_none)

    def finish(self) -> None:
        """Make a step that was put off (collective)."""

    def forget(self) -> None:
        """The daemon has dropped what this session held."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: what is trained is known to the daemon by then."""
        if hasattr(self, "_model"):
            raise FailedPrecondition("add_param_group was called after the optimizer was built, "
                                     "when the daemon already has its state: give all groups at "
                                     "once")
        super().add_param_group(param_group)

    def check_unfrozen(self, fresh: list[Parameter]) -> None:
        """FailedPrecondition: it cannot step @fresh, parameters that were frozen until now."""
        raise FailedPrecondition(
            f"requires_grad of '{fresh[0].name}' is True, and was False when this "
            f"{type(self).__name__} was built, which keeps its state by this rank's elements: "
            "build the optimizer again, or give each optimizer some of the parameters")

    def keeps_the_same(self, p: Parameter, other: Parameter) -> bool:
        """Has the daemon the same memory for the state of @p as @other needs?"""
        return True

    def took_unfrozen(self) -> None:
        """Parameters that were frozen are trained from here on."""

    def _named(self, names: Mapping[int, str], full: bool,
               wanted: bool) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        """Its state by the id of a parameter, and the groups by @names (collective)."""
        raise NotImplementedError

    def _numbered(self) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        """Its state by the number of a parameter, whole tensors, and the groups (collective)."""
        raise NotImplementedError

    def _load(self, state: Mapping[str, Any]) -> None:
        """Everything of @state (collective)."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The state dict that torch.optim has for a plain model: whole tensors, on every rank
        (collective). torch.optim's optimizer of the same name can load it, too."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state, groups = self._numbered()
        made: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": groups}
        for post in self._optimizer_state_dict_post_hooks.values():
            made = post(self, made) or made
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What :meth:`state_dict` gave, torch.optim's of a plain model, or one by names as
        :func:`optimizer_state_dict` gives (collective). If it differs between ranks,
        each rank's own rows count.

        InvalidArgument: it has other parameters, here or on another rank. Unimplemented: settings
        that need other memory than this optimizer has. Nothing has changed then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, dict(state_dict)) or state_dict
        self._load(state_dict)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)


_NOT_HERE = ("the daemon has the state of this {}: read it with its state_dict() or "
             "shardd.torch.optimizer_state_dict(), change it with load_state_dict(), forget it "
             "with reset_state()")


class _NotHere(Unimplemented, AttributeError):
    """hasattr() says no, anybody else is told why."""

    name = property(lambda self: Unimplemented.name, lambda self, _: None)  # not the attribute's


class _Array:
    """In the place of a tensor of the state."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise _NotHere(_NOT_HERE.format(self._kind))

    def __float__(self) -> float:
        raise _NotHere(_NOT_HERE.format(self._kind))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _NotHere(_NOT_HERE.format("optimizer"))

    def __repr__(self) -> str:
        return "in the daemon"


class _Elsewhere(State, Mapping[Any, Any]):
    """``optimizer.state``, which the daemon has: of a parameter the names of what is there. Not
    empty to who asks: torch.distributed's get_optimizer_state_dict would step an optimizer that
    has none."""

    def __init__(self, optimizer: _InDaemon) -> None:
        self._optimizer = weakref.ref(optimizer)

    def _its(self) -> _InDaemon:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        optimizer = self._its()
        if not optimizer.has_state:
            return iter(())
        return iter([p for g in optimizer.param_groups for p in g["params"]
                     if _optim_state.names(optimizer, p)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: Any) -> bool:
        return any(p is parameter for p in self)

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        optimizer = self._its()
        return {name: _Array(type(optimizer).__name__)
                for name in _optim_state.names(optimizer, parameter)}

    def __setitem__(self, parameter: Any, value: Any) -> None:
        if not (isinstance(value, Mapping) and value and
                all(isinstance(v, _Array) for v in value.values())):
            raise Unimplemented(_NOT_HERE.format(type(self._its()).__name__))

    def __delitem__(self, parameter: Any) -> None:
        raise Unimplemented(_NOT_HERE.format(type(self._its()).__name__))

    pop = popitem = setdefault = update = __delitem__

    def clear(self) -> None:
        """As if it had never stepped (collective)."""
        self._its().reset_state()

    def replace(self, other: Mapping[Any, Any]) -> None:
        """See State: an empty one (collective)."""
        if other:
            raise Unimplemented(_NOT_HERE.format(type(self._its()).__name__))
        self.clear()


class _InDaemon(_Sharded):
    """An optimizer that the daemon runs. Subclasses: ``_spec``.

    Groups may differ in all settings, and all settings may change from step to step, except those
    that decide the daemon's memory: ``_fixed``, and whether there is a momentum.
    """

    _fixed: tuple[str, ...] = ()
    _like: Any = None  # torch.optim's
    _profile = OptimizerProfile.EAGER_SINGLE
    has_state = False  # it has stepped, or a state was loaded or found

    def __init__(self, params: Any, defaults: dict[str, Any], in_backward: bool) -> None:
        torch.optim.Optimizer.__init__(self, params, defaults)  # see _adopt.py
        self.state = _Elsewhere(self)
        self.in_backward = in_backward
        self._clip: dict[str, Any] = {}  # of the backward passes
        self.scaler: Any = None
        self.total_norm: torch.Tensor | None = None  # of the last step, if it was planned to clip
        self._by_id = _check(self.param_groups)
        self._params = [p for g in self.param_groups for p in g["params"]]
        self._mixed = False  # the daemon does not know all of it yet
        self._places: dict[int, tuple[int, int]] = {}
        self._model = _tree(self.param_groups, self, self._settings)
        self._built = [self._setting(g) for g in self.param_groups]
        self._kept = {id(g): self._memory(g) for g in self.param_groups}
        self.has_state = any(u.found for u in self._model.units)

    def plan_backward(self, max_norm: float | None = None, norm_type: float = 2.0,
                      error_if_nonfinite: bool = False, scaler: Any = None) -> None:
        """With in_backward, from the next backward on: clip all gradients so that their norm is at
        most @max_norm, and undo the scaling of @scaler, a shardd.torch.GradScaler, whose step()
        then calls this optimizer's. Units then wait for step(), which steps all or, after an
        infinity, none. Without arguments: neither. ``total_norm`` has the norm after step().

        FailedPrecondition: the optimizer does not step in backward, or a backward has begun.
        """
        if not self.in_backward:
            raise FailedPrecondition(
                "plan_backward is for an optimizer with in_backward=True: call clip_grad_norm_, or "
                "GradScaler.unscale_, between backward and the step")
        if self._model.reduced:
            raise FailedPrecondition("plan_backward was called after a backward: call it before, "
                                     "or after the step")
        if max_norm is None and (norm_type != 2.0 or error_if_nonfinite):
            raise InvalidArgument("norm_type or error_if_nonfinite is given without max_norm: give "
                                  "the norm to clip to", "max_norm")
        self._clip = {} if max_norm is None else dict(
            max_norm=float(max_norm), norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite)
        self.scaler = scaler

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's: of parameters that were frozen when the optimizer was built, which it
        steps from the forward on before which requires_grad is set."""
        if not hasattr(self, "_model"):
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        added = dict(param_group, params=params)
        ours = {id(p.guard): p for unit in self._model.units for p in unit.params}
        if _check([added]).keys() - ours.keys():
            raise InvalidArgument("a parameter of the group belongs to another model: build one "
                                  "optimizer for each model", "params")
        torch.optim.Optimizer.add_param_group(self, added)
        group = self.param_groups[-1]
        self._by_id.update(_check([group]))
        self._params += group["params"]
        self._built.append(self._setting(group))
        self._kept[id(group)] = self._memory(group)

    def check_unfrozen(self, fresh: list[Parameter]) -> None:
        """FailedPrecondition: @fresh has a parameter that is in no group. Unimplemented: its
        group's settings need other memory than its unit has."""
        for p in fresh:
            group = self._by_id.get(id(p.guard))
            if group is None:
                raise FailedPrecondition(
                    f"requires_grad of '{p.name}' is True, and the model's optimizer, which the "
                    "daemon runs, does not have it: call optimizer.add_param_group before the "
                    "forward, or freeze it again")
            trained = p.guard._unit.trained
            if trained and not self.keeps_the_same(trained[0], p):
                raise Unimplemented(
                    f"the group of '{p.name}' differs from that of '{trained[0].name}', of the "
                    "same unit, in a setting that decides the daemon's memory "
                    f"({', '.join((*self._fixed, 'momentum'))}): wrap them as separate units")

    def keeps_the_same(self, p: Parameter, other: Parameter) -> bool:
        """See _Sharded. Of what is in no group: False."""
        one, two = (self._by_id.get(id(x.guard)) for x in (p, other))
        return one is not None and two is not None and self._memory(one) == self._memory(two)

    def took_unfrozen(self) -> None:
        """The daemon has not registered their settings."""
        self._mixed = True
        self._places.clear()

    def planned(self) -> dict[str, Any]:
        """What the daemon does with the gradients of the backward that begins."""
        enabled = self.scaler is not None and self.scaler.is_enabled()
        return {**self._clip, "inv_scale": 1.0 / self.scaler.get_scale() if enabled else 0.0}

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        raise NotImplementedError

    def _when(self) -> OptimizerWhen:
        return OptimizerWhen.IN_BACKWARD if self.in_backward else OptimizerWhen.AT_STEP

    def _setting(self, group: dict[str, Any]) -> StepSettings:
        s = self._spec(group)
        return StepSettings(s.lr, s.weight_decay, s.momentum, s.dampening, s.nesterov, s.betas,
                            s.eps, s.maximize, lr_fp32=self._is_rounded(group["lr"]))

    def _is_rounded(self, lr: Any) -> bool:
        """Does PyTorch round what it computes with @lr? As it does with any tensor of float32."""
        if not isinstance(lr, torch.Tensor) or lr.dtype == torch.float64:
            return False
        if lr.dtype != torch.float32:
            raise InvalidArgument(f"lr is a tensor of {lr.dtype}, must be float32, float64 or a "
                                  "number", "lr")
        return self._profile == OptimizerProfile.EAGER_SINGLE

    def _memory(self, group: dict[str, Any]) -> dict[str, Any]:
        """What the daemon keeps for a group."""
        kept = {name: group[name] for name in self._fixed}
        if "momentum" in group:
            kept["momentum"] = bool(group["momentum"])
        return kept

    def _settings(self, unit: ShardedUnit) -> tuple[OptimizerSpec, dict[int, dict[str, Any]]]:
        """What a unit is registered with: all of its first parameter's, and each one's
        weight_decay."""
        trained = [p.guard for p in unit.trained]
        if not trained:
            return OptimizerSpec(), {}
        _types.check_daemon_steps(unit, self._like.__name__)
        first = self._by_id[id(trained[0])]
        spec, settings = self._spec(first), {}
        for p in trained:
            group, own = self._by_id[id(p)], {}
            for name, kept in self._memory(group).items():
                if kept != self._memory(first)[name]:
                    raise Unimplemented(
                        f"{name} differs between parameters of unit '{unit.name}', but the "
                        "daemon's memory is the same for all of a unit: wrap them as separate "
                        "units", name)
            if group["weight_decay"] != first["weight_decay"]:
                own["weight_decay"] = float(group["weight_decay"])
            if _but_for_rates(self._setting(group)) != _but_for_rates(self._setting(first)):
                self._mixed = True
            settings[id(p)] = own
        return spec, settings

    def keeps_momentum(self, group: dict[str, Any]) -> bool:
        """Has the daemon memory for it?"""
        return bool(self._kept[id(group)]["momentum"])

    def check_kept(self, group: dict[str, Any], other: Mapping[str, Any], where: str) -> None:
        """Unimplemented: @other's settings would need memory that @group's parameters have not."""
        kept = self._kept[id(group)]
        for name in self._fixed:
            if name in other and other[name] != kept[name]:
                raise Unimplemented(
                    f"{name} is {other[name]} {where} and was {kept[name]} when the optimizer was "
                    "built, when the daemon made its state: build it with the new value",
                    name)
        if other.get("momentum") and not kept["momentum"]:
            raise Unimplemented(
                f"momentum is {other['momentum']} {where} and was 0 when the optimizer was built: "
                "the daemon has no memory for it; build it with a momentum above 0", "momentum")

    def rates(self) -> tuple[float | None, list[StepSettings]]:
        """By what the next step is: one learning rate, where the daemon knows all the rest; or
        everything."""
        for group in self.param_groups:
            self.check_kept(group, group, "now")
        now = [self._setting(g) for g in self.param_groups]
        lr = now[0].lr
        if not self._mixed and all(replace(built, lr=lr) == s and not s.lr_fp32
                                   for built, s in zip(self._built, now)):
            return lr, []
        return None, self._by_tensor(now)

    def _by_tensor(self, now: list[StepSettings]) -> list[StepSettings]:
        """Those of the groups, equal ones as one; those of the most tensors name none."""
        found: dict[Any, tuple[StepSettings, list[int], list[int]]] = {}
        for setting, group in zip(now, self.param_groups):
            _, units, tensors = found.setdefault(astuple(setting), (setting, [], []))
            for unit, tensor in self._tensors(group):
                units.append(unit)
                tensors.append(tensor)
        rest = max(found.values(), key=lambda f: len(f[1]))
        named = [replace(s, units=units, tensors=tensors) for s, units, tensors in found.values()
                 if units and s is not rest[0]]
        return [rest[0], *named]

    def _tensors(self, group: dict[str, Any]) -> list[tuple[int, int]]:
        """What is trained of it: the daemon's numbers of units, and of tensors in them."""
        if not self._places:
            self._places = {id(p.guard): (unit.unit.id, i) for unit in self._model.units
                            if unit.unit is not None
                            for i, p in enumerate(unit.params) if p.trained}
        return [self._places[id(p)] for p in group["params"] if id(p) in self._places]

    def _numbered(self) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        numbers = _optim_state.numbered(self)
        pytorch, rows = _rows.for_pytorch(), _rows.rows_for_pytorch()
        state = {numbers[p]: s for p, s in _optim_state.read(
            self, not rows, pytorch, zeros=pytorch).items()}
        return state, _optim_state.groups(self, numbers)

    def _load(self, state: Mapping[str, Any]) -> None:
        _optim_state.load(self, state)
        self.has_state = bool(state["state"])

    def reset_state(self) -> None:
        """As if it had never stepped (collective): for a model that was loaded into a job which has
        the state of an earlier run. Settings stay."""
        numbers = _optim_state.numbered(self)
        groups = [{"params": [numbers[id(p)] for p in g["params"]]} for g in self.param_groups]
        _optim_state.load(self, {"state": {}, "param_groups": groups})
        self.has_state = False

    def _named(self, names: Mapping[int, str], full: bool,
               wanted: bool) -> tuple[dict[int, Any], list[dict[str, Any]]]:
        return _optim_state.read(self, full, True, wanted), _optim_state.groups(self, names)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all units that have a gradient (collective). Return: what @closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._model.optimizer is not self:
            raise FailedPrecondition(
                f"this {type(self).__name__} was replaced: another optimizer was built for the "
                "model's parameters later, and the two do not step the same model; to "
                "have both, give one optimizer a group for each, or build both before the first "
                "backward with some of the trained parameters each")
        self._model.check_optimizer()
        check_groups(self, self._params)
        # in backward they are the plan's
        rate, settings = (None, []) if self.in_backward else self.rates()
        self._model.release_all()
        self._model.hand_over_gradients()
        result = self._model.client.step(rate, self._model.group, settings=settings,
                                         skip_if_found=self._skip_if_found)
        self._found_inf = result.found_inf
        self.total_norm = None if result.total_norm is None else torch.tensor(
            result.total_norm, device=_device.here)
        self._model.used_up()
        self._model.knows_optimizer()
        self.has_state = True
        return loss


def _but_for_rates(setting: StepSettings) -> StepSettings:
    """Without what every parameter can be registered with, or every step says."""
    return replace(setting, lr=0.0, lr_fp32=False, weight_decay=0.0)


def _rate(lr: Any, foreach: bool | None) -> Any:
    """A number, or a tensor of one, which stays one: schedulers fill it."""
    if not isinstance(lr, torch.Tensor):
        return float(lr)
    if lr.numel() != 1:
        raise InvalidArgument(f"lr is a tensor of {lr.numel()} elements, must have one", "lr")
    if foreach:
        raise InvalidArgument("lr is a tensor, which foreach does not support: give a number "
                              "or foreach=False", "lr")
    return lr


def _refuse(**settings: Any) -> None:
    for name, value in settings.items():
        if value:
            raise Unimplemented(f"{name}={value!r}: the daemon's optimizers do not support "
                                "it", name)


class AdamW(_InDaemon):
    """torch.optim.AdamW, run by the daemon. @foreach, @fused: match that form's bits; not both.

    @in_backward: each unit is stepped as soon as its gradients are reduced; they are not kept.
    step() ends the pass. It allows one reducing backward per step, and clipping and scaling by
    plan_backward() only.
    """

    _fixed = ("amsgrad",)
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
            lr=_rate(lr, foreach), betas=tuple(betas), eps=eps, weight_decay=weight_decay,
            amsgrad=amsgrad, maximize=maximize), in_backward)

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        return OptimizerSpec(
            self._kind, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])), eps=float(group["eps"]),
            amsgrad=group["amsgrad"], maximize=group["maximize"], profile=self._profile,
            when=self._when())


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
    """torch.optim.SGD, run by the daemon; @foreach, @fused, @in_backward as for AdamW."""

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
            lr=_rate(lr, None), momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov, maximize=maximize), in_backward)

    def _spec(self, group: dict[str, Any]) -> OptimizerSpec:
        return OptimizerSpec(
            OptimizerKind.SGD, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]), dampening=float(group["dampening"]),
            nesterov=group["nesterov"], maximize=group["maximize"], profile=self._profile,
            when=self._when())


def _profile(foreach: bool | None, fused: bool | None) -> OptimizerProfile:
    if foreach and fused:
        raise InvalidArgument("foreach and fused are both given: give at most one of them", "fused")
    return (OptimizerProfile.FUSED if fused else OptimizerProfile.FOREACH if foreach
            else OptimizerProfile.EAGER_SINGLE)


def clip_grad_norm_(parameters: Iterable[Any], max_norm: float, norm_type: float = 2.0,
                    error_if_nonfinite: bool = False, foreach: bool | None = None) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ on all sharded gradients of a model (collective).

    Return: their norm before clipping.
    """
    guards: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    _check([{"params": guards}])
    roots = {id(_root(p._unit)): _root(p._unit) for p in guards}
    if len(roots) != 1:
        raise InvalidArgument(f"the parameters belong to {len(roots)} models: give those of one",
                              "parameters")
    [root] = roots.values()
    given = {id(p) for p in guards}
    tree = tree_of(root)
    if any(id(p.guard) not in given for u in tree.units for p in u.trained):
        raise Unimplemented("clip_grad_norm_ got some of a model's parameters: give all of them",
                            "parameters")
    return tree.clip(max_norm, norm_type, error_if_nonfinite)


def optimizer_state_dict(optimizer: _Sharded, *, full: bool = True,
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
    state, groups = optimizer._named(names, full, wanted)
    if not wanted:
        return {}
    return {"state": {names[p]: s for p, s in state.items()}, "param_groups": groups}


def commit(step: int, state: Any = None) -> None:
    """Make @step the step from which a restarted trainer continues (collective over the job).

    @state: this rank's own, pickled, up to 64 KiB; after a join it is in
    ``shardd.torch.session().member.blob``."""
    session().commit(step, pickle.dumps(state))
