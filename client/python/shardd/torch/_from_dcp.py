"""A distributed checkpoint of PyTorch becomes one of the daemon (shardd.torch.checkpoint)."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import _ctl
from ..client import Client
from ..errors import FailedPrecondition, InvalidArgument, NotFound
from ._converted import BLOB, OWN, Converted, check_aliases, listed
from ._converted import Path as Path_
from ._dcp import Source, key_of
from ._names import module_of, path_of
from ._saved import NAMES, STATE, Array, New, Saved, load, make


@dataclass
class _In:
    """What a distributed checkpoint has: keys of the model's tensors by name, and of the
    optimizer's state by the parameter's name and the array's."""

    source: Source
    model: dict[str, str] = field(default_factory=dict)
    state: dict[str, dict[str, str]] = field(default_factory=dict)
    blobs: dict[int, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.source.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        return self.source.tensors[key].properties.dtype


def _behind(key: str, prefix: str) -> str | None:
    """What is behind the @prefix in @key; None: something else is before it."""
    if not prefix:
        return key
    return key[len(prefix) + 1:] if key.startswith(prefix + ".") else None


def _read_keys(source: Source, model_key: str, optim_key: str, leave_out: Sequence[str],
               without_optimizer: bool) -> _In:
    found, extra = _In(source), []
    used = dict.fromkeys(leave_out, False)
    for key in sorted((*source.tensors, *source.others)):
        patterns = [p for p in leave_out if fnmatch.fnmatchcase(key, p)]
        if patterns:
            used.update(dict.fromkeys(patterns, True))
            found.left_out.append(f"{key}: as was asked for")
        elif not _read_key(found, key, model_key, optim_key, without_optimizer):
            extra.append(key)
    if not all(used.values()):
        raise NotFound("nothing of the checkpoint is left out by "
                       + listed(p for p in leave_out if not used[p]), "leave_out")
    if extra:
        raise FailedPrecondition(
            f"a checkpoint of the daemon has no place for {listed(extra)}: leave them out "
            "(leave_out=, --leave-out), or say where the model and the optimizer are (model_key "
            f"'{model_key}', optim_key '{optim_key}')")
    return found


def _read_key(found: _In, key: str, model_key: str, optim_key: str,
              without_optimizer: bool) -> bool:
    """Return: whether there is a place for it."""
    source = found.source
    blob = _behind(key, key_of(BLOB))
    if blob is not None and blob.isdigit() and key in source.others:
        found.blobs[int(blob)] = key
        return True
    inner = _behind(key, optim_key)
    if inner is not None and inner.startswith(("state.", "param_groups.")):
        if without_optimizer:
            found.left_out.append(f"{key}: without the optimizer")
            return True
        return _read_optimizer(found, key, inner)
    name = _behind(key, model_key)
    if name is None or key not in source.tensors:
        return False
    found.model[name] = key
    return True


def _read_optimizer(found: _In, key: str, inner: str) -> bool:
    what, _, rest = inner.partition(".")
    if what == "param_groups":
        found.left_out.append(f"{key}: a setting is the program's")
        return True
    name, _, array = rest.rpartition(".")
    if name.isdigit():
        raise FailedPrecondition(
            f"'{key}' is of a parameter by number: save the optimizer as "
            "get_optimizer_state_dict(model, optimizer) gives it, by names, or leave it out "
            "(without_optimizer=True, --no-optimizer)")
    if key in found.source.others:  # SGD before its first step
        return array == "momentum_buffer" and found.source.value(key) is None
    if array != "step" and array not in STATE:
        return False
    found.state.setdefault(name, {})[array] = key
    return True


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the model goes. ``like``: what its shape and type have to be; None: any.
    ``kinds``: of its optimizer's state, None: what there is."""

    unit: str
    tensor: str
    like: Array | None = None
    kinds: tuple[str, ...] | None = None
    buffer_of: tuple[int, ...] = ()  # a buffer, of these ranks


def _places_like(saved: Saved, root: str) -> dict[str, _Place]:
    """Those of another checkpoint."""
    kinds: dict[str, list[str]] = {}
    params: dict[str, Array] = {}
    buffers: dict[str, list[Array]] = {}
    for a in saved.arrays:
        name = path_of(a.unit, a.tensor, root)
        if a.kind == "param":
            if name in params:
                raise FailedPrecondition(f"two tensors of the checkpoint given as like have the "
                                         f"name '{name}' in a model")
            params[name] = a
        elif a.kind in STATE:
            kinds.setdefault(name, []).append(a.kind)
        elif a.kind == "buffer" and not a.tensor.startswith(OWN):
            buffers.setdefault(name, []).append(a)
    places = {n: _Place(a.unit, a.tensor, a, tuple(kinds.get(n, ()))) for n, a in params.items()}
    places.update({n: _Place(b[0].unit, b[0].tensor, b[0], (), tuple(a.rank for a in b))
                   for n, b in buffers.items()})
    return places


def _best(name: str, dtype: torch.dtype, modules: Mapping[str, Mapping[str, str]],
          root: str) -> tuple[str, str] | None:
    """The (unit, tensor) of parameter @name. @modules: path -> bucket -> unit."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        buckets = modules.get(path or root)
        if buckets:
            bucket = str(dtype).rpartition(".")[2]
            unit = buckets.get(bucket) or buckets.get("")
            if unit is not None:
                return unit, name[len(path) + 1:] if path else name
    return None


def _places_in(units: Iterable[str], found: _In, names: Iterable[str],
               root: str) -> dict[str, _Place]:
    """In units of these names: of the innermost one that has a tensor."""
    modules: dict[str, dict[str, str]] = {}
    for unit in units:
        modules.setdefault(module_of(unit), {})[unit.partition("#")[2]] = unit
    places, homeless = {}, []
    for name in names:
        best = _best(name, found.dtype(found.model[name]), modules, root)
        if best is None:
            homeless.append(name)
        else:
            places[name] = _Place(*best)
    if homeless:
        raise FailedPrecondition(f"no unit has {listed(homeless)}: they are of another model, or "
                                 "leave them out (leave_out=, --leave-out)")
    return places


def _units_matching(patterns: Sequence[str], names: Iterable[str], root: str) -> set[str]:
    """The modules of @names that match one of @patterns, whose * is one part of a path."""
    paths = {tuple(n.split(".")[:i]) for n in names for i in range(1, n.count(".") + 1)}
    found = {root}
    for pattern in patterns:
        parts = pattern.split(".")
        matching = {".".join(p) for p in paths if len(p) == len(parts) and
                    all(fnmatch.fnmatchcase(a, b) for a, b in zip(p, parts))}
        if not matching:
            raise NotFound(f"no module of the checkpoint is '{pattern}'", "units")
        found |= matching
    return found


def _job_units(job: str, socket: str | None) -> dict[str, dict[str, Any]]:
    with Client(socket, name="checkpoint convert") as client:
        jobs = client.status(job)["jobs"]
    live = [j for j in jobs if j["name"] == job]
    units = {u["name"]: u for u in live[0].get("units", [])} if live else {}
    if not units:
        raise NotFound(f"job '{job}' has no units that can be seen: its trainers register them, "
                       "and a private job shows them to its owner alone")
    return units


def _check_job_units(units: Mapping[str, Mapping[str, Any]], found: _In,
                     places: Mapping[str, _Place]) -> None:
    """FailedPrecondition: a unit of the job has another size or type."""
    elements = dict.fromkeys(units, 0)
    types: dict[str, set[torch.dtype]] = {}
    for name, place in places.items():
        key = found.model[name]
        elements[place.unit] += torch.Size(found.shape(key)).numel()
        types.setdefault(place.unit, set()).add(found.dtype(key))
    for unit, said in units.items():
        if not elements[unit] or elements[unit] > int(said["elements"]):  # of the job with padding
            raise FailedPrecondition(f"unit '{unit}' of the job has room for {said['elements']} "
                                     f"elements, and {elements[unit]} in the checkpoint")
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(
            said.get("storage_dtype", ""))
        if dtype is not None and types[unit] != {dtype}:
            raise FailedPrecondition(
                f"unit '{unit}' of the job is stored in {dtype}, and in the checkpoint it has "
                f"{', '.join(map(str, types[unit]))}")


class _Made:
    """The arrays of the new checkpoint."""

    def __init__(self, found: _In, aliases: dict[str, str], unstepped: bool) -> None:
        self._found, self._aliases, self._unstepped = found, aliases, unstepped
        self.news: list[New] = []
        self.steps: set[int] = set()
        self.zeros: list[str] = []
        self._given: int | None = None
        self._used: set[str] = set()

    def put(self, name: str, place: _Place, given: int | None) -> None:
        self._given = given
        key = self._found.model[name]
        shape, dtype = self._found.shape(key), self._found.dtype(key)
        if place.like is not None and (shape != place.like.shape or dtype != place.like.dtype):
            raise FailedPrecondition(
                f"'{name}' is {_said(dtype, shape)}, and in the checkpoint given as like it is "
                f"{_said(place.like.dtype, place.like.shape)}")
        if dtype not in (NAMES if place.buffer_of else _PARAMETERS):
            raise FailedPrecondition(
                f"'{name}' is {_said(dtype, shape)}, which no parameter is: leave it out "
                "(leave_out=, --leave-out)")
        for rank in place.buffer_of:
            self._add("buffer", place, dtype, shape, key, rank=rank)
        if not place.buffer_of:
            steps, state = self._state(name, place, shape)
            self._add("param", place, dtype, shape, key, steps)
            for array, at in state.items():
                self._add(array, place, torch.float32, shape, at)

    def _add(self, kind: str, place: _Place, dtype: torch.dtype, shape: tuple[int, ...],
             key: str | None, steps: int = 0, rank: int = 0) -> None:
        def values() -> torch.Tensor:
            if key is None:
                return torch.zeros(shape, dtype=dtype)
            return self._found.source.tensor(key)

        self.news.append(New(Array(kind, place.unit, place.tensor, dtype, shape, steps, rank),
                             values))

    def _state(self, name: str, place: _Place,
               shape: tuple[int, ...]) -> tuple[int, dict[str, str | None]]:
        """The steps, and keys by kind; None: zeros."""
        names = [name, *(n for n, old in self._aliases.items() if old == name)]
        named = next((n for n in names if n in self._found.state), name)
        keys: dict[str, str | None] = dict(self._found.state.get(named, {}))
        self._used.add(named)
        step = keys.pop("step", None)
        if not keys and step is None:
            return 0, self._missing(name, place)
        self._check_complete(name, place, keys, step)
        for key in keys.values():
            assert key is not None
            if (self._found.dtype(key), self._found.shape(key)) != (torch.float32, shape):
                raise FailedPrecondition(
                    f"'{key}' is {_said(self._found.dtype(key), self._found.shape(key))}; the "
                    f"daemon keeps the state of '{name}' as {_said(torch.float32, shape)}")
        return self._count(name, step), keys

    def _missing(self, name: str, place: _Place) -> dict[str, str | None]:
        if not place.kinds:
            return {}
        if not self._unstepped:
            raise FailedPrecondition(
                f"the checkpoint has no optimizer state of '{name}', of which there is "
                f"{', '.join(place.kinds)} where the new one is to go: it was never stepped, or "
                "saved without; allow_unstepped=True (--allow-unstepped) gives it zeros")
        self.zeros.append(name)
        return dict.fromkeys(place.kinds)

    def _check_complete(self, name: str, place: _Place, keys: Mapping[str, Any],
                        step: str | None) -> None:
        kinds = tuple(k for k in STATE if k in keys)
        wanted = place.kinds if place.kinds is not None else (
            ("momentum_buffer",) if kinds == ("momentum_buffer",) else
            STATE[:3] if "max_exp_avg_sq" in kinds else STATE[:2])
        missing = [k for k in wanted if k not in kinds]
        if "exp_avg" in wanted and step is None:
            missing.append("step")
        if missing:
            raise FailedPrecondition(f"the checkpoint has no {', '.join(missing)} of '{name}', and "
                                     f"it has {', '.join((*kinds, *(['step'] if step else [])))}")
        if kinds != wanted:
            raise FailedPrecondition(
                f"the checkpoint has {', '.join(k for k in kinds if k not in wanted)} of '{name}', "
                f"for which there is no place: there is {', '.join(wanted) or 'none'}; "
                "without_optimizer=True (--no-optimizer) leaves all of it out")

    def _count(self, name: str, step: str | None) -> int:
        if step is None:  # SGD does not count
            if not self._given:
                raise InvalidArgument(
                    "the checkpoint does not say after how many steps it was made: say it "
                    "(step=, --step), as a number from 1", "step")
            return self._given
        value = self._found.source.tensor(step)
        if value.numel() != 1 or value.item() < 0 or value.item() != int(value.item()):
            raise FailedPrecondition(f"'{step}' is no number of steps: {value}")
        self.steps.add(int(value.item()))
        return int(value.item())

    def put_blobs(self) -> None:
        for rank, key in self._found.blobs.items():
            blob = self._found.source.value(key)
            if not isinstance(blob, bytes):
                raise FailedPrecondition(f"'{key}' is no blob: {type(blob).__name__}")
            held = torch.tensor(list(blob), dtype=torch.uint8)
            self.news.append(New(Array("blob", "", "", torch.uint8, (len(blob),), 0, rank),
                                 lambda held=held: held))  # type: ignore[misc]

    def check_used(self) -> None:
        unused = self._found.state.keys() - self._used
        if unused:
            raise FailedPrecondition(f"the checkpoint has optimizer state of {listed(unused)}, "
                                     "which are no parameters of its model")


_PARAMETERS = (torch.float32, torch.bfloat16, torch.float16)


def _said(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).rpartition('.')[2]} {list(shape)}"


def _take_aliases(found: _In, aliases: dict[str, str]) -> None:
    """Other names of tied parameters go, if they have the same bits."""
    for new, old in aliases.items():
        for name in (new, old):
            if name not in found.model:
                raise NotFound(f"'{new}' is given as another name of '{old}': the checkpoint has "
                               f"no '{name}'", "aliases")
        a, b = (found.source.tensor(found.model[n]) for n in (new, old))
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bits(a), _bits(b)):
            raise FailedPrecondition(f"'{new}' and '{old}' differ: they are not tied")
        found.left_out.append(f"{found.model.pop(new)}: the same as '{old}'")


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


def _check_names(found: _In, places: Mapping[str, _Place]) -> None:
    missing, extra = places.keys() - found.model.keys(), found.model.keys() - places.keys()
    if missing or extra:
        raise FailedPrecondition(
            (f"the checkpoint has no {listed(missing)}, which the one given as like has"
             if missing else "") + ("; " if missing and extra else "") +
            (f"it has {listed(extra)}, which the other one has not: leave them out (leave_out=, "
             "--leave-out), or say of which parameters they are other names (aliases=, --alias)"
             if extra else ""))


def _places(found: _In, like: Path_ | None, like_job: str | None, units: Sequence[str],
            root: str, shardctl: str, socket: str | None) -> dict[str, _Place]:
    if like is not None:
        places = _places_like(load(like, None, shardctl), root)
        _check_names(found, places)
        return places
    if like_job is not None:
        live = _job_units(like_job, socket)
        places = _places_in(live, found, found.model, root)
        _check_job_units(live, found, places)
        return places
    return _places_in(_units_matching(units, found.model, root), found, found.model, root)


def _lacks(found: _In, made: _Made) -> Iterator[str]:
    yield "the number of ranks and their epoch"
    if not found.blobs:
        yield "blobs of ranks (the state of shardd.torch.resilient)"
    if not found.state:
        yield "the state of an optimizer"
    for name in made.zeros:
        yield f"optimizer state of '{name}': zeros, never stepped"


def from_dcp(src: Path_, dst: Path_, step: int | None = None, *, like: Path_ | None = None,
             like_job: str | None = None, units: Sequence[str] = (), root: str = "root",
             aliases: Mapping[str, str] | None = None, leave_out: Sequence[str] = (),
             allow_unstepped: bool = False, without_optimizer: bool = False,
             model_key: str = "model", optim_key: str = "optim", job: str = "imported",
             shardctl: Path_ | None = None, socket: str | None = None) -> Converted:
    """Make a checkpoint in the folder of checkpoints @dst, which must exist, of the distributed
    checkpoint @src, which FSDP2, DistributedDataParallel or a plain program has saved from any
    number of ranks. A job whose units and tensors have those names loads it.

    Where tensors go: with @like as in that folder's newest checkpoint, with names, shapes, types
    and arrays compared; with @like_job into the units of that job, by its status; else into the
    units that @units names (``blocks.*``: a * is one part of a name), and all others into @root.
    @step: of the new checkpoint; None: the optimizer's, of the parameter with most steps. SGD
    counts none: then it must be given.

    What has no place is refused with its name. @leave_out: patterns of keys (``model.bn.*``)
    that are left out. @aliases: other names of tied parameters, as in :func:`to_dcp`; their bits
    are compared. @allow_unstepped: parameters without optimizer state, where there has to be
    some, get zeros. @without_optimizer: parameters alone. @job: the name in the index.

    The checkpoint has its name when all of it is on the disk. Memory: the largest tensor, and the
    largest piece in which it was saved. Only convert folders that you trust: they are
    pickles. NotFound, DataLoss: @src is not whole. FailedPrecondition: it does not fit.
    """
    if sum((like is not None, like_job is not None, bool(units))) > 1:
        raise InvalidArgument("give one of like, like_job and units", "like")
    program = _ctl.find(shardctl)
    other = check_aliases(aliases or {})
    found = _read_keys(Source(src), model_key, optim_key, leave_out, without_optimizer)
    if not found.model:
        raise NotFound(f"'{src}' has no tensors of a model at '{model_key}': say where they are "
                       "(model_key=, --model-key)", "model_key")
    _take_aliases(found, other)
    places = _places(found, like, like_job, units, root, program, socket)
    made = _Made(found, other, allow_unstepped)
    for name, place in places.items():
        made.put(name, replace(place, kinds=()) if without_optimizer else place, step)
    made.check_used()
    made.put_blobs()
    number = step if step is not None else max(made.steps, default=None)
    if number is None:
        raise InvalidArgument("the checkpoint does not say after how many steps it was made: say "
                              "it (step=, --step)", "step")
    make(dst, number, job, made.news, program)
    path = os.path.join(os.path.abspath(dst), f"step-{number:012d}")
    return Converted(path, number, len(places), tuple(found.left_out),
                     tuple(_lacks(found, made)))


__all__ = ["from_dcp"]
