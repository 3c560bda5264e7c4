"""Code that the engines share: find the generation that an update requests, the same one on all
ranks of an engine, and use it as tensors. Nothing here needs an engine, and PyTorch is imported
only by the functions that use tensors."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..delta import Delta
from ..errors import (
    Aborted,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SharddError,
    Unavailable,
)
from ..live import Generation, Live
from ..memory import Dtype, Memory

log = logging.getLogger("vllm.shardd")

NAMES = ("checkpoint", "parameters")
_AGAIN = (Aborted, DataLoss, Unavailable)  # the daemon has ended, and the next one may be running
_PAUSE = 0.2  # between attempts to reach a daemon

# Takes this rank's answer. Returns the answers of all ranks of the engine, including this one, in
# the same order on all ranks.
Exchange = Callable[[Any], "list[Any]"]


def checked(what: str, **given: Any) -> None:
    """Check options that a user gives. @given: the options by name. InvalidArgument: @what does not
    accept one of them."""
    for name, value in given.items():
        kind: Any = {"job": str, "publication": str, "names": str, "complete": bool, "copy": bool,
                     "patches": bool, "whole": bool, "number": int, "step": int,
                     "wait": (int, float)}.get(name, (str, type(None)))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidArgument(f"{name} of {what} is {value!r}", name)
        if isinstance(value, (int, float)) and not value >= 0:
            raise InvalidArgument(f"{name} of {what} is {value!r}, must not be negative", name)
        if name in ("job", "publication") and not value:
            raise InvalidArgument(f"{name} of {what} is empty", name)
        if name == "names" and value not in NAMES:
            raise InvalidArgument(f"names of {what} is {value!r}, must be one of {NAMES}", name)


def placed(publication: str, tp_rank: int, pp_rank: int) -> str:
    """The publication of a rank: ``engine-{tp_rank}`` is ``engine-1`` for rank 1."""
    return publication.replace("{tp_rank}", str(tp_rank)).replace("{pp_rank}", str(pp_rank))


class Weights:
    """The newest generation of @publication, for one rank of an engine. ``publication`` may differ
    between ranks. Only one thread may use it at a time."""

    def __init__(self, job: str, publication: str, socket: str | None = None) -> None:
        self.job, self.publication, self._socket = job, publication, socket
        self._live: Live | None = None
        self._open()  # report a wrong name immediately

    def _open(self) -> Live:
        if self._live is None:
            self._live = Live(self.job, self.publication, self._socket)
        return self._live

    def _newest(self, left: float) -> Generation:
        """Return a newer generation than the held one, within @left seconds; 0: the newest one. If
        the daemon ends, continue with the next one. DeadlineExceeded: no newer one came."""
        until = time.monotonic() + left
        while True:
            try:
                return self._open().acquire(max(0.0, until - time.monotonic()))
            except _AGAIN:
                with contextlib.suppress(SharddError):
                    self.close()
                if time.monotonic() + _PAUSE > until:
                    raise
                time.sleep(_PAUSE)

    def at_least(self, number: int, step: int, until: float) -> Generation:
        """Return the newest generation, with at least @number and at least @step, leased until
        :meth:`release`. If the leased one satisfies this, return that one. @until: the deadline, a
        time of time.monotonic. DeadlineExceeded: there was none in time."""
        newest = self._live._held if self._live is not None else None
        asked = False
        while newest is None or newest.number < number or newest.step < step:
            left = until - time.monotonic()
            if asked and left <= 0:
                raise self._too_late(newest, number, step)
            asked = True
            try:
                newest = self._newest(max(0.0, left))
            except DeadlineExceeded:
                until = 0
            except NotFound as error:
                if "no generation yet" not in str(error):
                    self.release()
                    raise
                until = 0
        return newest

    def _too_late(self, newest: Generation | None, number: int, step: int) -> DeadlineExceeded:
        has = (f"the newest one is {newest.number}, of step {newest.step}" if newest is not None
               else "there is none at all")
        self.release()
        asked = " and ".join(f"{what} {value} or later" for what, value in
                             (("number", number), ("step", step)) if value) or "any number"
        return DeadlineExceeded(
            f"publication '{self.publication}' of job '{self.job}' got no generation of {asked} in "
            f"time; {has}")

    def acquire(self, number: int = 0, step: int = 0, wait: float = 0,
                exchange: Exchange | None = None) -> Generation:
        """As :meth:`at_least`, but return the same generation on all ranks that call this: one with
        the same number, or, if the ranks read different publications, with the same step. @wait:
        seconds. If one rank fails, all fail, and the error names that rank."""
        until = time.monotonic() + wait
        while True:
            failure: Exception | None = None
            try:
                found = self.at_least(number, step, until)
                mine: Any = (self.publication, found.number, found.step, None)
            except Exception as error:
                failure, mine = error, (self.publication, 0, 0, f"{type(error).__name__}: {error}")
            if exchange is None:
                if failure is not None:
                    raise failure
                return found
            every = exchange(mine)
            failed = [f"rank {i}: {one[3]}" for i, one in enumerate(every) if one[3]]
            if failed:
                self.release()
                raise failure or FailedPrecondition("another rank of this engine has no weights: "
                                                    + "; ".join(failed))
            if len({one[0] for one in every}) == 1:
                number = max(one[1] for one in every)
                if all(one[1] == number for one in every):
                    return found
            else:
                step = max(one[2] for one in every)
                if all(one[2] == step for one in every):
                    return found

    def release(self) -> None:
        """Give the generation back, if there is one. InUse: something still uses its memory."""
        if self._live is not None and self._live._held is not None:
            self._live.release()

    def close(self) -> None:
        """Close the reader. Calling this twice is allowed."""
        live, self._live = self._live, None
        if live is not None:
            live.close()


def tensor_of(memory: Memory) -> Any:
    """A tensor of @memory, without a copy, in its type. For e4m3 DLPack gives bytes, which a loader
    would convert as integers: view them as float8_e4m3fn."""
    import torch

    seen = torch.utils.dlpack.from_dlpack(memory)
    return seen.view(torch.float8_e4m3fn) if memory.dtype is Dtype.E4M3 else seen


def bits(tensor: Any) -> Any:
    """Return @tensor; for e4m3, for which PyTorch has few operations, its bytes."""
    import torch

    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def tensors(generation: Generation, copy: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) for each tensor of a generation: views of its read-only memory, or
    copies with @copy."""
    for name in generation:
        seen = tensor_of(generation[name])
        yield name, seen.clone() if copy else seen


class Held:
    """Which generation a model has, so that a delta can be applied to it. ``unlike``: the result of
    a check: why no delta can be applied; "": deltas can be applied; None: not checked yet."""

    def __init__(self) -> None:
        self.number = 0
        self.unlike: str | None = None
        self._seen: Any = None

    def forget(self) -> None:
        """Forget the generation: the model is about to change."""
        self.number, self._seen = 0, None

    def note(self, model: Any, number: int) -> None:
        """The model now has generation @number."""
        self.number, self._seen = number, _samples(model)

    def changes(self, model: Any, generation: Generation, loads: bool) -> list[Change] | None:
        """Return the changes from the model's generation to @generation. None: there is no delta,
        it is damaged, or something else has changed the model meanwhile. @loads: as in
        :func:`_used_names`."""
        import torch

        if not self.number or not torch.equal(self._seen, _samples(model)):
            return None
        if generation.number == self.number:
            return []
        try:
            return _changes(model, generation, generation.delta(self.number), loads)
        except NotFound:
            return None
        except SharddError as error:
            log.warning("the delta to generation %d cannot be read (%s): all of it is loaded",
                        generation.number, error)
            return None


def _changes(model: Any, generation: Generation, delta: Delta, loads: bool) -> list[Change]:
    import torch

    owners = {place[0]: str(place[-1]) if len(place) > 3 else place[0] for place in delta.places}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for name in _used_names(parameters, owners, loads):
        indices, values = delta.values(name)
        if indices:
            like = tensor_of(generation[name])
            found.append(Change(name, tuple(like.shape),
                                torch.frombuffer(indices, dtype=torch.int64),
                                torch.frombuffer(values, dtype=torch.uint8).view(like.dtype)))
    return found


def _used_names(parameters: dict[str, Any], owners: dict[str, str],
                loads: bool = False) -> list[str]:
    """The names by which a model gets tensors. @owners: for each name, the name of its tensor. Of
    the names of one tensor (``also``), a model may have only one, or several for one parameter,
    or several for different parameters. @loads: the model's loader gets the tensors, and may accept
    names that no parameter has."""
    here: dict[str, set[int]] = {}  # parameters that get the tensor
    found = []
    for name, owner in owners.items():
        if name in parameters and id(parameters[name]) not in here.setdefault(owner, set()):
            here[owner].add(id(parameters[name]))
            found.append(name)
    used = set(found)
    return [name for name, owner in owners.items()
            if name in used or (name not in parameters if loads else not here.get(owner))]


class Change(NamedTuple):
    """The changed values of one tensor. ``indices``: into the flat tensor."""

    name: str
    shape: tuple[int, ...]
    indices: Any
    values: Any


def _samples(model: Any) -> Any:
    """Bits of some elements of each parameter. They differ after another load, and after the memory
    of the parameters was released for a while."""
    import torch

    found = []
    for parameter in model.parameters():
        flat = parameter.detach()
        if flat.is_contiguous() and flat.numel() and flat.is_floating_point() and not flat.is_meta:
            found.append(flat.view(-1)[::max(1, flat.numel() // 16)].float())
    if not found:
        return torch.empty(0, dtype=torch.int32)
    return torch.cat([one.to(found[0].device) for one in found]).cpu().view(torch.int32)


def patch_parameters(model: Any, changes: list[Change]) -> None:
    """Write @changes into the parameters with the same names. InvalidArgument: a change does not
    fit, and nothing was written."""
    import torch

    parameters = dict(model.named_parameters(remove_duplicate=False))
    for change in changes:
        to = parameters.get(change.name)
        if to is None or tuple(to.shape) != change.shape or not to.is_contiguous():
            raise InvalidArgument(f"the model has no plain parameter '{change.name}' of the shape "
                                  f"{list(change.shape)}", "publication")
    with torch.no_grad():
        for change in changes:
            to = parameters[change.name].detach()
            bits(to).view(-1).index_copy_(0, change.indices.to(to.device),
                                          bits(change.values.to(to.device, to.dtype)))


def _suits(name: str, tensor: Any, parameters: dict[str, Any]) -> str | None:
    if name not in parameters:
        return f"the model has no parameter '{name}'"
    to = parameters[name]
    if tuple(to.shape) != tuple(tensor.shape) or to.dtype != tensor.dtype:
        return (f"'{name}' is {to.dtype} {list(to.shape)} in the model, but {tensor.dtype} "
                f"{list(tensor.shape)} in the publication")
    return None


def copy_parameters(model: Any, generation: Generation, complete: bool) -> None:
    """Copy each tensor into the parameter with its name. @complete: all parameters must be in the
    generation. InvalidArgument: a tensor fits no parameter, or a parameter is missing, and nothing
    was copied."""
    import torch

    parameters = dict(model.named_parameters(remove_duplicate=False))
    given = dict(tensors(generation))
    first: dict[tuple[int, int], str] = {}
    owners = {name: first.setdefault((memory.address, memory.nbytes), name)
              for name, memory in generation.items()}
    used = _used_names(parameters, owners)
    wrong = [w for w in (_suits(n, given[n], parameters) for n in used) if w]
    if complete:
        there = {id(parameters[n]) for n in given if n in parameters}
        wrong += [f"the publication has no '{n}'" for n, p in parameters.items()
                  if id(p) not in there]
    if wrong:
        raise InvalidArgument(few(wrong), "publication")
    with torch.no_grad():
        for name in used:
            parameters[name].copy_(given[name])


def few(problems: list[str], most: int = 5) -> str:
    """A text with the first @most problems, and the number of the others."""
    more = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {more} more" if more > 0 else "")
