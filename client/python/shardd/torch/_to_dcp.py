"""A checkpoint of the daemon becomes a distributed checkpoint of PyTorch
(shardd.torch.checkpoint)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import torch

from .. import _ctl
from ..errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from ._converted import BLOB, OWN, Converted, check_aliases, listed
from ._converted import Path as Path_
from ._dcp import Source, Tensor, key_of, write
from ._names import path_of
from ._saved import STATE, Array, Saved, load

_Groups = Union[Mapping[str, Any], Sequence[Mapping[str, Any]], Path_]

_STEPS_MAX = 1 << 24  # PyTorch counts in float32
_PIECE, _FILE = 64 << 20, 256 << 20


def _prefix(key: str) -> tuple[str, ...]:
    return tuple(key.split(".")) if key else ()


def _groups_of(given: _Groups) -> list[dict[str, Any]]:
    """Parameter groups as get_optimizer_state_dict has them."""
    found: Any = _read_groups(Path(given)) if isinstance(given, (str, os.PathLike)) else given
    found = found.get("param_groups") if isinstance(found, Mapping) else found
    if not isinstance(found, Sequence) or not found or not all(
            isinstance(g, Mapping) and "lr" in g for g in found):
        raise InvalidArgument(
            "the optimizer's settings are not a list of parameter groups that have lr, nor a "
            "mapping with one as param_groups: give what get_optimizer_state_dict(model, "
            "optimizer) returns", "optimizer")
    groups = [dict(g) for g in found]
    if len(groups) > 1 and not all("params" in g for g in groups):
        raise InvalidArgument("there are several parameter groups, and one of them has no params: "
                              "list the names of its parameters", "optimizer")
    return groups


def _read_groups(path: Path) -> Any:
    if path.is_dir():
        return _groups_in(Source(path))
    if not path.exists():
        raise NotFound(f"there is no '{path}'", "optimizer")
    if path.suffix != ".json":
        return _read_torch(path)
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgument(f"'{path}' is no JSON: {error}", "optimizer") from None
    groups = found.get("param_groups", []) if isinstance(found, dict) else found
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and isinstance(group.get("betas"), list):
            group["betas"] = tuple(group["betas"])  # JSON has no tuples
    return groups


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds
        raise InvalidArgument(f"'{path}' is no file of torch.save with plain values: {error}",
                              "optimizer") from error


def _groups_in(source: Source) -> list[dict[str, Any]]:
    """Those of a distributed checkpoint."""
    found: dict[int, dict[str, Any]] = {}
    for key in (*source.others, *source.tensors):
        path = source.path_of(key)
        if len(path) > 2 and path[-3] == "param_groups" and isinstance(path[-2], int):
            value = source.tensor(key) if key in source.tensors else source.value(key)
            found.setdefault(path[-2], {})[str(path[-1])] = value
    if not found:
        raise NotFound(f"'{source.path}' has no param_groups")
    return [found[i] for i in sorted(found)]


class _Out:
    """What a distributed checkpoint gets of a checkpoint."""

    def __init__(self, saved: Saved, root: str, aliases: dict[str, str], model: str,
                 optim: str) -> None:
        self._model, self._optim = _prefix(model), _prefix(optim)
        self.entries: dict[tuple[Any, ...], Any] = {}
        self._keys: set[str] = set()
        self.params: dict[str, Array] = {}
        self.state: dict[str, dict[str, Array]] = {}
        self.left_out: list[str] = []
        self._blobs = [a for a in saved.arrays if a.kind == "blob"]
        buffers: dict[str, Array] = {}
        for a in saved.arrays:
            self._sort(a, path_of(a.unit, a.tensor, root), buffers)
        for name, array in (*self.params.items(), *buffers.items()):
            self._put((*self._model, name), _tensor(array))
        for new, old in aliases.items():
            if old not in self.params:
                raise NotFound(f"'{new}' is given as another name of '{old}', which is no "
                               "parameter of the checkpoint")
            self._put((*self._model, new), _tensor(self.params[old]))

    def _sort(self, a: Array, name: str, buffers: dict[str, Array]) -> None:
        if a.kind == "param":
            if name in self.params:
                raise FailedPrecondition(
                    f"two tensors of the checkpoint have the name '{name}' in a model (one of "
                    f"unit '{a.unit}'): it is of several models, or another unit is the root")
            self.params[name] = a
        elif a.kind in STATE:
            self.state.setdefault(name, {})[a.kind] = a
        elif a.kind == "buffer" and a.tensor.startswith(OWN):
            self.left_out.append(f"{a.key}: of the client library")
        elif a.kind == "buffer" and name not in buffers:
            buffers[name] = a
        elif a.kind == "buffer":
            self.left_out.append(f"{a.key}: there is rank {buffers[name].rank}'s")

    def _put(self, path: tuple[Any, ...], entry: Any) -> None:
        if key_of(path) in self._keys:
            raise InvalidArgument(f"the new checkpoint would have '{key_of(path)}' twice",
                                  "model_key")
        self._keys.add(key_of(path))
        self.entries[path] = entry

    def put_blobs(self) -> None:
        for a in self._blobs:
            self._put((*BLOB, str(a.rank)), bytes(a.read(0, a.elements).tolist()))

    def put_optimizer(self, groups: list[dict[str, Any]]) -> None:
        if len(groups) == 1 and "params" not in groups[0]:
            groups[0]["params"] = list(self.params)
        of = _group_by_name(groups)
        unknown, ungrouped = of.keys() - self.params.keys(), self.state.keys() - of.keys()
        if unknown or ungrouped:
            raise InvalidArgument(
                "the optimizer's groups are not those of the checkpoint: "
                + (f"it has no parameters {listed(unknown)}" if unknown else
                   f"{listed(ungrouped)} have optimizer state and are in no group"), "optimizer")
        for name, arrays in self.state.items():
            steps = self.params[name].steps
            if "momentum_buffer" in arrays and of[name].get("momentum") == 0:
                # its unit has others that have some
                self.left_out.append(f"{arrays['momentum_buffer'].key}: it has no momentum")
                continue
            _check_group(name, of[name], arrays, steps)
            for kind in STATE:
                if kind in arrays:
                    self._put((*self._optim, "state", name, kind), _tensor(arrays[kind]))
            if "exp_avg" in arrays:
                self._put((*self._optim, "state", name, "step"), _steps(steps))
        for i, group in enumerate(groups):
            for setting, value in group.items():
                self._put((*self._optim, "param_groups", i, setting),
                          _whole(value) if isinstance(value, torch.Tensor) else value)


def _tensor(a: Array) -> Tensor:
    return Tensor(a.dtype, a.shape, a.read)


def _whole(value: torch.Tensor) -> Tensor:
    flat = value.detach().cpu().reshape(-1)
    return Tensor(value.dtype, tuple(value.shape), lambda first, n: flat[first:first + n].clone())


def _steps(steps: int) -> Tensor:
    return _whole(torch.tensor(float(steps), dtype=torch.float32))


def _group_by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group["params"]:
            if not isinstance(name, str):
                raise InvalidArgument(
                    f"params of a parameter group has {name!r}, which is no name: give what "
                    "get_optimizer_state_dict(model, optimizer) returns, not "
                    "optimizer.state_dict()", "optimizer")
            if name in found:
                raise InvalidArgument(f"'{name}' is in two parameter groups", "optimizer")
            found[name] = group
    return found


def _check_group(name: str, group: dict[str, Any], arrays: dict[str, Array], steps: int) -> None:
    """InvalidArgument: @group is of another optimizer than the one that made @arrays."""
    wanted = (("momentum_buffer",) if group.get("momentum") else
              STATE[:3] if group.get("amsgrad") else STATE[:2] if "betas" in group else ())
    if tuple(k for k in STATE if k in arrays) != wanted:
        raise InvalidArgument(
            f"the checkpoint has {', '.join(arrays)} of '{name}', and the optimizer's group "
            f"({', '.join(group)}) is of one that has {', '.join(wanted) or 'no state'}",
            "optimizer")
    if steps >= _STEPS_MAX:
        raise Unimplemented(f"'{name}' was stepped {steps} times; PyTorch counts up to "
                            f"{_STEPS_MAX - 1}")
    if not steps and group.get("dampening"):
        raise Unimplemented(
            f"'{name}' was never stepped, and with dampening PyTorch tells that by the absence of "
            "a momentum_buffer, which FSDP2's state dicts always have")


def _fresh(dst: Path) -> Path:
    if os.path.lexists(dst):
        raise AlreadyExists(f"there is '{dst}' already: remove it, or name another folder", "dst")
    if not dst.parent.is_dir():
        raise NotFound(f"there is no folder '{dst.parent}'", "dst")
    made = dst.parent / f".converting-{dst.name}-{secrets.token_hex(4)}"
    made.mkdir()
    return made


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _written(dst: Path, entries: dict[tuple[Any, ...], Any], piece: int, file: int) -> None:
    """@dst is there when all of it is on the disk."""
    new = _fresh(dst)
    try:
        write(new, dst, entries, piece, file)
        _sync(new)
        if os.path.lexists(dst):
            raise AlreadyExists(f"there is '{dst}' now: it was made meanwhile", "dst")
        os.rename(new, dst)
        _sync(dst.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def to_dcp(src: Path_, dst: Path_, step: int | None = None, *, optimizer: _Groups | None = None,
           without_optimizer: bool = False, root: str = "root",
           aliases: Mapping[str, str] | None = None, model_key: str = "model",
           optim_key: str = "optim", shardctl: Path_ | None = None,
           piece_bytes: int = _PIECE, file_bytes: int = _FILE) -> Converted:
    """Write the checkpoint of @step, or the newest one, in the folder of checkpoints @src as the
    distributed checkpoint @dst.

    Parameters are named as in the model: ``UNIT.TENSOR``, those of unit @root by their own names.
    Each of the settings of the parameter groups (lr, betas...) has to come from @optimizer, since
    the checkpoint has none: what ``get_optimizer_state_dict(model, optimizer)`` returns, its
    param_groups, or a file: .json with such groups, one of torch.save, or the folder of another
    distributed checkpoint. A single group may lack params: it is all parameters.
    @without_optimizer: write the model alone. @aliases: other names of tied parameters, which
    are in the checkpoint once: ``{"lm_head.weight": "wte.weight"}``. @model_key, @optim_key: where
    the program that loads it has the model's and the optimizer's state, "" for the top, "app.model"
    for nested dictionaries. Blobs become ``shardd.blob.RANK``.

    The checksums are verified first. @dst is whole and on the disk when it has its name.
    Memory: one file, @file_bytes, and the largest row of a tensor. DataLoss: the
    checkpoint is damaged. AlreadyExists: there is @dst.
    """
    target = Path(os.path.abspath(dst))
    if os.path.lexists(target):
        raise AlreadyExists(f"there is '{target}' already: remove it, or name another folder",
                            "dst")
    groups = _groups_of(optimizer) if optimizer is not None else None
    if groups is not None and without_optimizer:
        raise InvalidArgument("the optimizer's settings are given, and it is left out: give one of "
                              "both", "optimizer")
    saved = load(src, step, _ctl.find(shardctl))
    out = _Out(saved, root, check_aliases(aliases or {}), model_key, optim_key)
    if groups is not None:
        out.put_optimizer(groups)
    elif not without_optimizer and out.state:
        raise InvalidArgument(
            "the checkpoint has the state of an optimizer, but not its settings (lr, ...), which "
            "a distributed checkpoint has as param_groups: give them (optimizer=, "
            "--optimizer-from), or convert the model alone (without_optimizer=True, "
            "--no-optimizer)", "optimizer")
    out.put_blobs()
    _written(target, out.entries, piece_bytes, file_bytes)
    left_out = [*out.left_out, *(f"{a.key}: without the optimizer" for one in
                                 (out.state if groups is None else {}) for a in
                                 out.state[one].values())]
    return Converted(str(target), saved.step, len(out.params), tuple(left_out),
                     () if groups or out.state else ("the state of an optimizer",))


__all__ = ["to_dcp"]
