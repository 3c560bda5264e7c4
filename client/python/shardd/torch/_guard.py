"""The stand-in for a parameter while its values are in the daemon.

It is a tensor with shape and dtype but without memory. It can be a module's parameter and be passed
to an optimizer. An operation on it is one on this rank's rows, which are fetched for it and written
back (_values.py); what autograd would have to know of raises an error.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import FailedPrecondition, Unimplemented
from . import _device
from ._values import Source, View, shows

_HARMLESS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_applied: ContextVar[bool] = ContextVar("applied", default=False)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def explain(name: str, kind: str, function: str, why: str = "") -> str:
    """Why @function cannot be called on this @kind ("parameter", "gradient"). @why: of a gradient,
    why it cannot be read."""
    if kind == "gradient":
        return (f"the gradient of '{name}' cannot be used here ({function}): "
                f"{why or 'it is in the daemon'}. To clip use shardd.torch.clip_grad_norm_, to "
                "scale shardd.torch.GradScaler")
    if why:
        return f"parameter '{name}' is sharded, and {function} is not possible: {why}"
    return (f"parameter '{name}' is sharded: its values are in the daemon, and here only during "
            f"forward and backward ({function}); elsewhere use "
            "shardd.torch.summon_full_params(model), or model.state_dict(). If another module uses "
            "it too, wrap a module that contains both")


_AUTOGRAD = ("gradients are those of forward, which gathers the parameter. Outside of it compute "
             "with it in torch.no_grad() or with p.detach(); if another module uses it too, or a "
             "term of the loss, do so in the forward of a wrapped module that contains both")
_CONVERT = ("its data cannot be replaced, and its type and device cannot be changed after "
            "fully_shard; call .to() before it, use mp_policy for the type in which forward "
            "computes, and p.copy_() or shardd.torch.summon_full_params(model) for other values")


def _tensors(values: Any) -> list[Any]:
    """Those of arguments, in their order, also in lists."""
    every = [x for v in values for x in (v if isinstance(v, (list, tuple)) else (v,))]
    return [x for x in every if isinstance(x, torch.Tensor)]


def _replaced(value: Any, by: dict[int, Any]) -> Any:
    """@value, with others in the place of the guards in it."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(v, by) for v in value)
    return by.get(id(value), value)


class Guard(torch.Tensor):
    """See above. ``_is_param``: counts as torch.nn.Parameter."""

    _name: str
    _kind: str
    _unit: Any
    _is_param: bool
    _where: torch.device | None
    _why: str  # of a gradient: why it cannot be read
    _local: torch.Tensor | None  # of a gradient: this rank's rows, if only those can be had
    _gradient: Any  # of a parameter: what gives and takes p.grad
    _accumulated: dict[int, Any]  # of a parameter: hooks of its reduced gradient

    _source: Source | None  # of a parameter; None: they cannot be had

    @staticmethod
    def make(name: str, kind: str, shape: Sequence[int], dtype: torch.dtype,
             requires_grad: bool = False, unit: Any = None,
             where: torch.device | None = None) -> Guard:
        """@unit: the ShardedUnit of a parameter, by which optimizers find it. @where: its device;
        None: that of the session."""
        guard: Guard = torch.Tensor._make_wrapper_subclass(
            Guard, tuple(shape), dtype=dtype, device=torch.device("cpu"),
            requires_grad=requires_grad)
        guard._name, guard._kind, guard._unit, guard._where = name, kind, unit, where
        guard._is_param = kind == "parameter"
        guard._why, guard._local, guard._gradient = "", None, None
        guard._source = None
        guard._accumulated = OrderedDict()
        return guard

    @staticmethod
    @contextlib.contextmanager
    def in_apply() -> Iterator[None]:
        """Inside, empty_like of a parameter is to_empty() of a module: the parameter stays what it
        is, and gets memory if it is on the meta device."""
        token = _applied.set(True)
        try:
            yield
        finally:
            _applied.reset(token)

    @classmethod
    def __torch_function__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Before another class that has operations of its own (DTensor) sees a guard: it is asked
        first if it comes first, and would not know it."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = _tensors((*args, *kwargs.values())) if len(args) > 1 or kwargs else ()
            first = next((t for t in found if type(t) not in _PLAIN), None)
            if first is None or isinstance(first, Guard):
                return func(*args, **kwargs)
            if isinstance(kwargs.get("out"), Guard):
                raise FailedPrecondition(explain(kwargs["out"]._name, "parameter", str(func),
                                                 "it cannot be an out= argument; use p.copy_()"))
            by = {id(g): g._value(str(func)) for g in found if isinstance(g, Guard)}
            return func(*_replaced(tuple(args), by),
                        **{k: _replaced(v, by) for k, v in kwargs.items()})

    def _value(self, function: str) -> Any:
        """To read, for @function."""
        if self._kind == "gradient" or self._source is None:
            raise FailedPrecondition(explain(self._name, self._kind, function, self._why))
        if self.requires_grad and torch.is_grad_enabled():
            raise FailedPrecondition(explain(self._name, self._kind, function, _AUTOGRAD))
        return self._source.take()[0]

    def _seen_as(self, shape: Any, dtype: torch.dtype, values: Any) -> Guard:
        """Another one of @values, which is no parameter."""
        made = Guard.make(self._name, self._kind, shape, dtype, where=self._where)
        made._is_param, made._unit, made._why, made._source = False, self._unit, self._why, values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        guards = {id(t): t for t in _tensors((*args, *kwargs.values())) if isinstance(t, Guard)}
        first = max(guards.values(), key=lambda a: a._kind == "gradient")
        if func is torch.ops.aten.empty_like.default and _applied.get() and first._is_param:
            first._unit.materialise(first, kwargs.get("device"))
            return first
        if func in _HARMLESS:
            return first._seen_as(first.shape, first.dtype, first._source)
        for guard in guards.values():
            if guard._kind == "gradient" or guard._source is None:
                raise FailedPrecondition(
                    explain(guard._name, guard._kind, str(func), guard._why))
            if guard.requires_grad and torch.is_grad_enabled():
                raise FailedPrecondition(
                    explain(guard._name, guard._kind, str(func), _AUTOGRAD))
        return _computed(func, guards, args, kwargs)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the values are when they are gathered: inputs belong there."""
        return self._where if self._where is not None else _device.here

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Of CUDA's?"""
        return self.device.type == "cuda"

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """Of a parameter: this rank's rows of the reduced gradient; None: there is none."""
        return self._gradient.get() if self._gradient is not None else None

    @grad.setter
    def grad(self, value: Any) -> None:
        if self._gradient is not None:
            self._gradient.set(value)
        elif value is not None:
            raise FailedPrecondition(
                f"the gradient of '{self._name}' is set before the first backward: the daemon has "
                "a gradient from backward to the step")

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def to_local(self) -> torch.Tensor:
        """This rank's rows. What is written to them is written to the parameter, and what is
        written to those of a gradient is what the optimizer uses."""
        if self._kind == "gradient":
            if self._local is None:
                raise FailedPrecondition(explain(self._name, self._kind, "to_local", self._why))
            return self._local
        self._value("to_local")
        assert self._source is not None
        rows = View(self._name, self._source, _local)
        shown = rows.take()[0]
        return self._seen_as(shown.shape, shown.dtype, rows)

    def full_tensor(self) -> torch.Tensor:
        """A copy of the whole parameter (collective)."""
        found: torch.Tensor = _whole(self._value("full_tensor"))
        return found

    @property
    def device_mesh(self) -> Any:
        """The mesh that shares it, as of a DTensor."""
        return self._value("device_mesh").device_mesh

    @property
    def placements(self) -> Any:
        """How the mesh shares it, as of a DTensor."""
        return self._value("placements").placements

    @property
    def data(self) -> Any:  # type: ignore[override]
        """As stiff as the guard itself."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        if isinstance(value, Guard):  # a .to() that changes nothing
            return
        raise FailedPrecondition(explain(self._name, self._kind, "data = ...", _CONVERT))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As a tensor's; "cpu:0" is "cpu"."""
        if not kwargs.keys() - {"device", "dtype", "non_blocking"} and not any(
                isinstance(a, torch.Tensor) for a in args):
            where, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
            here = self.device
            if dtype in (None, self.dtype) and (where is None or (
                    where.type == here.type and (where.index or 0) == (here.index or 0))):
                return self
        return super().to(*args, **kwargs)

    def register_hook(self, hook: Any) -> Any:
        """Unimplemented: autograd computes the gradient of the gathered parameter, and FSDP2 never
        calls such a hook."""
        raise Unimplemented(
            f"register_hook of the sharded parameter '{self._name}': autograd never computes the "
            "gradient of a shard, so the hook would not be called; use "
            "register_post_accumulate_grad_hook, which gets the parameter with its reduced "
            "gradient")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """@hook(parameter) is called at the end of every backward that has reduced the parameter's
        gradient, which is then its p.grad. Return: a handle that removes it."""
        handle = RemovableHandle(self._accumulated)
        self._accumulated[handle.id] = hook
        return handle

    def accumulated(self) -> None:
        """The gradient was reduced: call the hooks."""
        for hook in list(self._accumulated.values()):
            hook(self)

    def __deepcopy__(self, memo: Any) -> Any:
        raise FailedPrecondition(explain(self._name, self._kind, "copy.deepcopy",
                                         "use p.detach().clone(), or the model's state_dict()"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FailedPrecondition(explain(self._name, self._kind, "pickle"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<sharded {self._kind} '{self._name}' {list(self.shape)} {self.dtype}>"


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The arguments of @func that it writes to, by their ids."""
    found: set[int] = set()
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found.update(id(t) for t in _tensors([value]))
    return found


def _is_view(func: Any) -> bool:
    """Does it return what has the memory of an argument, and write nothing?"""
    return any(r.alias_info is not None and not r.alias_info.is_write
               for r in func._schema.returns)


def _computed(func: Any, guards: dict[int, Guard], args: Any, kwargs: Any) -> Any:
    """@func of the values of @guards, which may be had, and which get what it writes."""
    name = next(iter(guards.values()))._name
    if _is_view(func):
        return _viewed(func, next(iter(guards.values())), args, kwargs)
    written = [g for g in guards.values() if id(g) in _written(func, args, kwargs)]
    if len({(id(g._unit), g._name) for g in written}) < len(written):
        raise FailedPrecondition(explain(name, "parameter", str(func), "it would be written to "
                                         "twice in one operation; write to it once"))
    for guard in written:
        assert guard._source is not None
        guard._source.check_write()
    taken = {}
    for key, guard in guards.items():
        assert guard._source is not None
        taken[key] = guard._source.take()
    shapes = {id(g): taken[id(g)][0].shape for g in written}
    for guard in written:
        if not shows(*taken[id(guard)]):
            raise FailedPrecondition(explain(
                name, "parameter", str(func), "this view of it is not a part of this rank's rows, "
                "so the write would be lost; use shardd.torch.summon_full_params(model)"))
    by = {key: value for key, (value, _) in taken.items()}
    with torch.no_grad():
        result = func(*_replaced(tuple(args), by),
                      **{k: _replaced(v, by) for k, v in kwargs.items()})
    for guard in written:
        value, rows = taken[id(guard)]
        if value.shape != shapes[id(guard)] or not shows(value, rows):
            raise FailedPrecondition(explain(
                name, "parameter", str(func), "it would give the parameter other memory or another "
                "shape; use shardd.torch.summon_full_params(model)"))
        assert guard._source is not None
        guard._source.put(rows)
    back = {id(value): guards[key] for key, (value, _) in taken.items()}
    return _replaced(result, back)


def _viewed(func: Any, guard: Guard, args: Any, kwargs: Any) -> Any:
    if len(func._schema.returns) != 1 or str(func._schema.returns[0].type) != "Tensor":
        raise FailedPrecondition(explain(
            guard._name, "parameter", str(func), "only views that are one tensor are supported; "
            "use p.detach().clone()"))

    def apply(value: Any) -> Any:
        by = {id(guard): value}
        return func(*_replaced(tuple(args), by), **kwargs)

    assert guard._source is not None
    view = View(guard._name, guard._source, apply)
    with torch.no_grad():
        shown = view.take()[0]
    return guard._seen_as(shown.shape, shown.dtype, view)
