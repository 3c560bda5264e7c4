"""A plain module whose parameters show the newest generation of a publication."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn

from .. import _library
from .._watch import Watch
from ..client import Client
from ..errors import (
    DaemonRestarted,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    SharddError,
)
from ..live import Generation, declare_publication, publish
from ..live import Live as Reader
from ..memory import Dtype, Memory, _Mapped
from . import _device
from ._names import untied
from ._types import TORCH_DTYPES

_Slot = tuple[dict[str, Any], str]  # a module's _parameters, and the attribute name
_Bound = list[tuple[dict[str, Any], str, nn.Parameter]]
LOOK_S = 0.01  # between requests for a newer generation
MOST_BUFFERS = 16  # of a publication


class _Place:
    """One parameter of the module: all its names, and where it is installed."""

    def __init__(self, own: nn.Parameter) -> None:
        self.own, self.names, self.slots = own, [], []  # type: nn.Parameter, list[str], list[_Slot]


def _places(module: nn.Module) -> list[_Place]:
    found: dict[int, _Place] = {}
    for path, owner in module.named_modules():
        for attribute, value in owner._parameters.items():
            if value is not None:
                place = found.setdefault(id(value), _Place(value))
                place.names.append(f"{path}.{attribute}" if path else attribute)
                place.slots.append((owner._parameters, attribute))
    return list(found.values())


def _check_buffers(module: nn.Module, device: torch.device | None) -> None:
    """@device: None: not known yet."""
    for name, value in module.named_buffers():
        if value.device.type == "meta":
            raise InvalidArgument(f"buffer '{name}' is on {value.device}, and generations have no "
                                  "buffers: give the buffers values before you bind the module",
                                  "module")
        if device is not None and value.device != device:
            raise InvalidArgument(f"buffer '{name}' is on {value.device}, and generations are on "
                                  f"{device}: move the buffers there before you bind the module",
                                  "module")


class Live:
    """A module whose parameters are the tensors of a publication's newest generation, read-only and
    without a copy.

    ::

        live = shardd.torch.Live(model, "train", "engine")
        while True:
            with live.generation() as weights, torch.no_grad():
                model.generate(...)                 # every token is from weights.number

    The module keeps its generation until the next block, or until :meth:`swap`, :meth:`release` or
    :meth:`close`. Trainers do not wait for it. The parameters stay the same objects at the same
    addresses, and then show the next generation. So does a reference to a parameter: clone what
    you keep. Only one thread may use this object at a time.
    """

    def __init__(self, module: nn.Module, job: str | None = None, publication: str | None = None,
                 socket: str | None = None, *, wait: float = 60, prefix: str = "",
                 strict: bool = True, request: bool | None = None, model: int = 1,
                 **options: Any) -> None:
        """Connect, wait for a generation, and bind @module to it.

        @module: a plain model, as the trainers build it before they wrap it, or built with the
        names of the publication, on the device of the generations (the host, or this process's GPU
        for generations on a GPU) or on the meta device. Its parameters get the types of the
        publication. It keeps its own buffers (running statistics). @job: its name; None:
        $SHARDD_JOB. @publication: its name; None: "live", a publication of all parameters in the
        types of the job, which this call declares if it does not exist. @wait: seconds to wait for
        the job, the publication and the first generation. @prefix: the text before the names of
        @module's parameters in the publication. @strict: False: tensors that only the module or
        only the publication has are not an error, and the module keeps its own. @request: request a
        generation of the last commit at each swap; None: only if @publication is None. @model:
        without @publication: which of the trainers' models, in the order in which they were
        wrapped. @options: of :class:`shardd.Client`.

        InvalidArgument: a tensor does not fit; the text names it. NotFound: there is no such job,
        publication or tensor. DeadlineExceeded: there is no generation.
        """
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"module is a {type(module).__name__}; it is the module to bind. "
                                  "shardd.Live reads without one", "module")
        job = job or os.environ.get("SHARDD_JOB")
        if not job:
            raise InvalidArgument("no job is named: name the job, or set SHARDD_JOB", "job")
        if publication is not None and model != 1:
            raise InvalidArgument("a publication says itself which model it is of", "model")
        _check_buffers(module, None)
        self.module, self.job = module, job
        if publication == "":
            raise InvalidArgument("the name of the publication is empty", "publication")
        self.publication = publication or (f"live-{model}" if model != 1 else "live")
        self._request = publication is None if request is None else request
        self._prefix, self._strict = prefix, strict
        self._parameters = _places(module)
        self._bound: dict[int, tuple[dict[str, Any], _Bound]] = {}
        self._layout = 0
        self._mapped: list[_Mapped] = []  # memory of parameters: ends with the client
        self._generation: Generation | None = None
        self._installed: list[tuple[dict[str, Any], str, nn.Parameter, int]] = []
        self._depth = 0
        self._watches: list[Watch] = []
        wanted = _device.wanted([one.own.device for one in self._parameters])
        if wanted is not None and not wanted.startswith("host:"):
            options.setdefault("device", wanted)  # for generations on a GPU
        self._socket, self._options = socket, options
        until = time.monotonic() + wait
        if publication is None:
            self._declare(model, until)
        self._reader = Reader(job, self.publication, socket, fixed=True,
                              wait=max(0, until - time.monotonic()), **options)
        live = weakref.ref(self)

        def refuse(called: nn.Module, _: object) -> None:  # a copy of the module has it, too
            bound = live()
            if bound is not None and called is bound.module:
                bound._check_bound()

        self._hook = module.register_forward_pre_hook(refuse)
        try:
            if wait:
                self._await(until)
            self.swap()
        except BaseException:
            with contextlib.suppress(InUse):
                self.close()
            raise

    def _declare(self, model: int, until: float) -> None:
        declaration = {"name": self.publication, "model": model}
        with Client(self._socket, **self._options) as client:
            while True:
                try:
                    declare_publication(declaration, self.job, client)
                    return
                except (InvalidArgument, NotFound) as error:
                    early = isinstance(error, NotFound) or error.field == "model" or \
                        "nothing is published" in error.text
                    if not early or time.monotonic() > until:
                        raise  # else the trainers have not created or registered it yet
                time.sleep(LOOK_S)

    def _await(self, until: float) -> None:
        """Wait for the first generation. A job may end, and begin again, meanwhile."""
        while True:
            try:
                self._newest(max(0.001, until - time.monotonic()), 0)
                return
            except NotFound:
                if time.monotonic() > until:
                    raise
            time.sleep(LOOK_S)

    # --------------------------------------------------------------- generations

    @property
    def number(self) -> int:
        """The number of the module's generation; 0: it has none."""
        return self._generation.number if self._generation else 0

    @property
    def step(self) -> int | None:
        """The committed step of the module's generation; None: it has none."""
        return self._generation.step if self._generation else None

    @property
    def newest(self) -> int:
        """The number of the newest generation of the publication; 0: there is none."""
        for job in self._reader._client.status(self.job)["jobs"]:
            for one in job["publications"]:
                if one["name"] == self.publication:
                    return max((int(g["number"]) for g in one["generations"]
                                if g["state"].endswith("READY")), default=0)
        raise NotFound(f"job '{self.job}' has no publication '{self.publication}'")

    def swap(self, wait: float = 0, newer_than: int | None = None) -> Generation:
        """Bind the module to the newest generation, and return that generation.

        @wait: seconds to wait for one with a number above @newer_than (None: above the number of
        the module's generation); 0: take the newest one, which may be the same. DeadlineExceeded:
        the module keeps its generation. NotFound: the publication was dropped, or without @wait the
        newest one, which the module then has, is not above @newer_than.
        FailedPrecondition: the call is inside a block of :meth:`generation`, or a parameter of the
        module was replaced.
        """
        if self._depth:
            raise FailedPrecondition(f"generation {self.number} of '{self.publication}' is in use "
                                     "by a block: swap after its end")
        if newer_than is not None:
            newer_than = _library.number(newer_than, "newer_than")
        if self._generation is not None:
            self._check_installed()
        least = self.number if newer_than is None else newer_than
        until = time.monotonic() + wait
        while True:
            left = until - time.monotonic()
            waits = wait and self.number <= least
            found = self._newest(max(left, 0.001) if waits else 0, least)
            if found is not self._generation:
                self._take(found)
            if found.number > least or (not wait and newer_than is None):
                return found
            if not wait:
                raise NotFound(f"the newest generation of '{self.publication}' is {found.number}, "
                               f"and none above {newer_than} is there yet")
            if left <= 0:
                raise DeadlineExceeded(f"timed out waiting for a generation of "
                                       f"'{self.publication}' above {least}")

    def _newest(self, wait: float, least: int) -> Generation:
        if not self._request:
            return self._acquire(wait)
        try:
            number = publish(self.publication, self.job, self._reader._client, wait)
        except DaemonRestarted:  # a repeated request does no harm
            number = publish(self.publication, self.job, self._reader._client, wait)
        if wait and number <= least:
            time.sleep(min(wait, LOOK_S))
        return self._acquire(0)

    def _acquire(self, wait: float) -> Generation:
        try:
            return self._reader.acquire(wait)
        except SharddError as error:
            if error.field == "generation":  # the parameters have no memory now
                self._restore()
            raise

    @contextlib.contextmanager
    def generation(self, wait: float = 0) -> Iterator[Generation]:
        """Call :meth:`swap`, and keep the module at that generation during a ``with`` block. A
        nested block has the same generation."""
        if not self._depth:
            self.swap(wait)
        found = self._generation
        assert found is not None
        self._depth += 1
        try:
            yield found
        finally:
            self._depth -= 1

    def fileno(self) -> int:
        """Return the descriptor of :meth:`shardd.Live.fileno`, for ``select`` and event loops. It
        is readable when there is a newer generation."""
        return self._reader.fileno()

    def on_new(self, callback: Callable[[int, int], object]) -> Watch:
        """Call @callback(number, step) for each new generation, on a separate thread with its own
        connection. If several generations are made while the callback runs, the next call is for
        the newest of them. Return: a watch, which ``stop()`` or :meth:`close` ends."""
        watch = Watch(self.job, self.publication, callback, self._socket, self.number,
                      **self._options)
        self._watches.append(watch)
        return watch

    # ------------------------------------------------------------------- binding

    def _take(self, found: Generation) -> None:
        """Install the tensors of @found. After an error the module has its own parameters."""
        if self._generation is None or found.moved or found.layout != self._generation.layout:
            try:
                bound = self._bound_of(found)
            except BaseException:
                self._restore()
                self._reader.release()
                raise
            for parameters, attribute, value in bound:
                parameters[attribute] = value
            own = {id(one.own) for one in self._parameters}  # which the module may change
            self._installed = [(parameters, attribute, value, value.data_ptr())
                               for parameters, attribute, value in bound if id(value) not in own]
        self._generation = found

    def _check_installed(self) -> None:
        """Check that the module still has the tensors that were installed."""
        for parameters, attribute, value, address in self._installed:
            if parameters.get(attribute) is not value or value.data_ptr() != address:
                raise FailedPrecondition(
                    f"parameter '{attribute}' of the module is another tensor than the one that "
                    f"was bound to '{self.publication}' (by to(), half(), load_state_dict with "
                    "assign, or an assignment), and would not show later generations: close this "
                    "Live, and bind the module as it is then")

    def _check_bound(self) -> None:
        if self._generation is None:
            raise FailedPrecondition(f"the module is bound to '{self.publication}' and has no "
                                     "generation now: swap first, or close the binding to use the "
                                     "module's own parameters")

    def _bound_of(self, found: Generation) -> _Bound:
        """Return the parameters for @found. They are made once for each buffer of a layout. A
        buffer has one dict of places, which is kept here, so that no other dict gets its id."""
        places = found._places
        if id(places) in self._bound:
            return self._bound[id(places)][1]
        device = _device.of(self._reader._where.dlpack)
        _check_buffers(self.module, device)
        wanted = self._wanted(places, device)  # before anything refers to the memory
        if found.layout != self._layout or len(self._bound) == MOST_BUFFERS:
            self._bound.clear()
            self._layout = found.layout
        base = min((p[0] for p in places.values() if p[1]), default=0)
        end = max((p[0] + p[1] for p in places.values() if p[1]), default=0)
        mapped = _Mapped(base, end - base, f"memory of '{self.publication}'", self._reader._where)
        self._reader._client.lent(Memory(mapped, 0, (), Dtype.UINT8, False))
        self._mapped.append(mapped)
        bound = [(*slot, value) for one, place in wanted
                 for value in [one.own if place is None else _view(place, mapped, device)]
                 for slot in one.slots]
        self._bound[id(places)] = places, bound
        return bound

    def _wanted(self, places: dict[str, Any],
                device: torch.device) -> list[tuple[_Place, Any]]:
        """Find the tensor for each parameter; None: the module keeps its own."""
        wanted: list[tuple[_Place, Any]] = []
        used: set[str] = set()
        for one in self._parameters:
            names = [n for n in (self._prefix + name for name in one.names) if n in places]
            used.update(names)
            if names:
                self._check(one, names, places, device)
            elif self._strict:
                raise NotFound(f"publication '{self.publication}' of job '{self.job}' has no "
                               f"tensor '{self._prefix}{one.names[0]}', a parameter of the module"
                               f"{untied(one.own)}")
            wanted.append((one, places[names[0]] if names else None))
        if places and not used:
            first = next(iter(places))
            raise NotFound(f"the module has none of the tensors of publication "
                           f"'{self.publication}' (the first is '{first}')"
                           f"{f', with prefix {self._prefix!r}' if self._prefix else ''}")
        extra = next((n for n in places if n.startswith(self._prefix) and n not in used), None)
        if self._strict and extra is not None:
            raise NotFound(f"the module has no parameter '{extra[len(self._prefix):]}', but "
                           f"publication '{self.publication}' has a tensor '{extra}': publish only "
                           "what the module has, or bind it with strict=False")
        return wanted

    def _check(self, one: _Place, names: list[str], places: dict[str, Any],
               device: torch.device) -> None:
        for name in names:
            shape, dtype = places[name][2:]
            if tuple(one.own.shape) != shape:
                raise InvalidArgument(
                    f"'{name}' has shape {list(one.own.shape)} in the module but {list(shape)} in "
                    f"publication '{self.publication}'", "module")
            if dtype not in TORCH_DTYPES:
                raise InvalidArgument(f"'{name}' is {dtype.name}, which no parameter can be",
                                      "module")
            if places[name][0] != places[names[0]][0]:
                raise InvalidArgument(
                    f"'{names[0]}' and '{name}' are one parameter in the module, but two tensors "
                    f"in publication '{self.publication}': name one in \"also\" of the other",
                    "module")
        if one.own.device not in (device, torch.device("meta")):
            raise InvalidArgument(f"'{names[0]}' is on {one.own.device} in the module, and "
                                  f"generations are on {device}: call module.to('{device}') "
                                  "before you bind the module", "module")

    def _restore(self) -> None:
        self._generation = None
        self._installed = []
        for one in self._parameters:
            for parameters, attribute in one.slots:
                parameters[attribute] = one.own

    # ----------------------------------------------------------------------- end

    def release(self) -> None:
        """Give the generation back. Until the next swap a call of the module raises
        FailedPrecondition. If it has no generation, this does nothing."""
        if self._depth:
            raise FailedPrecondition(f"generation {self.number} of '{self.publication}' is in use "
                                     "by a block: release it after its end")
        if self._generation is not None:
            self._restore()
            self._reader.release()

    def close(self) -> None:
        """End the binding and restore the module's own parameters. InUse: something still refers to
        the memory of a generation, which stays mapped until another close or the end of the
        process."""
        for watch in self._watches:
            watch.stop()
        self._depth = 0
        self._restore()
        self._hook.remove()
        self._bound.clear()
        for mapped in self._mapped:
            mapped.end()
        self._reader.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except InUse:
            if kind is None:
                raise

    def __repr__(self) -> str:
        return (f"<shardd.torch.Live {type(self.module).__name__} of '{self.publication}' of job "
                f"{self.job!r}, {f'generation {self.number}' if self.number else 'none'}>")


def _view(place: tuple[int, int, tuple[int, ...], Dtype], mapped: _Mapped,
          device: torch.device) -> nn.Parameter:
    address, nbytes, shape, dtype = place
    kind = TORCH_DTYPES[dtype]
    if nbytes:
        seen = _device.lent(Memory(mapped, address - mapped.address, shape, dtype, False))
    else:
        seen = torch.empty(shape, dtype=kind, device=device)
    return nn.Parameter(seen.view(kind), requires_grad=False)


__all__ = ["Live"]
