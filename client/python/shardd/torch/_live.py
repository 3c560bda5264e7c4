"""A plain module whose parameters are those of the newest generation of a publication."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn

from .._watch import Watch
from ..client import Client
from ..errors import (
    DaemonRestarted,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
)
from ..live import Generation, declare_publication, publish
from ..live import Live as Reader
from ..memory import Dtype, Memory, _Mapped
from ._types import TORCH_DTYPES

_Slot = tuple[dict[str, Any], str]  # a module's _parameters, and the attribute
_Bound = list[tuple[dict[str, Any], str, nn.Parameter]]
LOOK_S = 0.01  # between requests for a newer generation
MOST_BUFFERS = 16  # of a publication


class _Place:
    """One parameter of the module: all names of it, and where it is installed."""

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


def _check_buffers(module: nn.Module) -> None:
    for name, value in module.named_buffers():
        if value.device.type != "cpu":
            raise InvalidArgument(
                f"buffer '{name}' is on {value.device}: generations have no buffers, and are in "
                "host memory. Build the module on the CPU, or give its buffers values before",
                "module")


class Live:
    """A module whose parameters are the newest generation of a publication, read-only and not
    copied.

    ::

        live = shardd.torch.Live(model, "train", "engine")
        while True:
            with live.generation() as weights, torch.no_grad():
                model.generate(...)                 # every token from weights.number

    A generation stays until the next block, or :meth:`swap`, :meth:`release` or :meth:`close`; the
    trainers do not wait for it. The parameters stay the same objects at the same addresses, and
    show the next generation: so does what is kept of them; clone it. Not for several threads at
    once.
    """

    def __init__(self, module: nn.Module, job: str | None = None, publication: str | None = None,
                 socket: str | None = None, *, wait: float = 60, prefix: str = "",
                 strict: bool = True, request: bool | None = None, model: int = 1,
                 **options: Any) -> None:
        """Connect, wait for a generation, and bind @module to it.

        @module: a plain model, as its trainers build it before they wrap it, or built for the names
        of the publication; it may be on the meta device. Its parameters get the types of the
        publication. Its buffers (running statistics) stay its own. @job: None: $SHARDD_JOB.
        @publication: None: one by the name "live" of all parameters in the types of the job, which
        this declares if it is not there. @wait: seconds for the first generation. @prefix: of the
        published names that @module's parameters are behind. @strict: false: what only one of both
        has is no error, and such parameters stay the module's own. @request: ask the daemon for a
        generation of the last commit at each swap; None: if @publication is None. @model: without
        @publication: which of the trainers' models, in the order of their wrapping. @options: of
        :class:`shardd.Client`.

        InvalidArgument: a tensor does not fit, which the text names. NotFound: there is no such
        job, publication or tensor. DeadlineExceeded: there is no generation.
        """
        job = job or os.environ.get("SHARDD_JOB")
        if not job:
            raise InvalidArgument("no job is named: name the job, or set SHARDD_JOB", "job")
        if publication is not None and model != 1:
            raise InvalidArgument("a publication says itself which model it is of", "model")
        _check_buffers(module)
        self.module, self.job = module, job
        self.publication = publication or (f"live-{model}" if model != 1 else "live")
        self._request = publication is None if request is None else request
        self._prefix, self._strict = prefix, strict
        self._parameters = _places(module)
        self._bound: dict[int, tuple[dict[str, Any], _Bound]] = {}
        self._layout = 0
        self._mapped: list[_Mapped] = []  # all that parameters were of: they end with the client
        self._generation: Generation | None = None
        self._depth = 0
        self._watches: list[Watch] = []
        self._socket, self._options = socket, options
        if publication is None:
            self._declare(model, wait)
        self._reader = Reader(job, self.publication, socket, fixed=True, **options)
        try:
            self.swap(wait)
        except BaseException:
            with contextlib.suppress(InUse):
                self.close()
            raise

    def _declare(self, model: int, wait: float) -> None:
        declaration = {"name": self.publication, "model": model}
        until = time.monotonic() + wait
        with Client(self._socket, **self._options) as client:
            while True:
                try:
                    declare_publication(declaration, self.job, client)
                    return
                except InvalidArgument as error:
                    early = error.field == "model" or "nothing is published" in error.text
                    if not early or time.monotonic() > until:
                        raise  # else the trainers have not registered it yet
                time.sleep(LOOK_S)

    # --------------------------------------------------------------- generations

    @property
    def number(self) -> int:
        """Of the generation that the module has; 0: it has none."""
        return self._generation.number if self._generation else 0

    @property
    def step(self) -> int | None:
        """The committed step that it is of; None: it has none."""
        return self._generation.step if self._generation else None

    @property
    def newest(self) -> int:
        """The number of the newest generation that there is; 0: there is none."""
        for job in self._reader._client.status(self.job)["jobs"]:
            for one in job["publications"]:
                if one["name"] == self.publication:
                    return max((int(g["number"]) for g in one["generations"]
                                if g["state"].endswith("READY")), default=0)
        raise NotFound(f"job '{self.job}' has no publication '{self.publication}'")

    def swap(self, wait: float = 0, newer_than: int | None = None) -> Generation:
        """Bind the module to the newest generation. Return: it.

        @wait: seconds to wait for one with a number above @newer_than (None: that of the one that
        it has); 0: what is there is taken, which may be the same one. DeadlineExceeded: it has what
        it had. NotFound: the publication was dropped. FailedPrecondition: inside a block of
        :meth:`generation`. InUse: something looks at memory of ``weights[name]``.
        """
        if self._depth:
            raise FailedPrecondition(f"generation {self.number} of '{self.publication}' is in use "
                                     "by a block: swap after its end")
        least = self.number if newer_than is None else newer_than
        until = time.monotonic() + wait
        while True:
            left = until - time.monotonic()
            waits = wait and self.number <= least
            found = self._newest(max(left, 0.001) if waits else 0, least)
            if found is not self._generation:
                self._take(found)
            if not wait or found.number > least:
                return found
            if left <= 0:
                raise DeadlineExceeded(f"timed out waiting for a generation of "
                                       f"'{self.publication}' above {least}")

    def _newest(self, wait: float, least: int) -> Generation:
        if not self._request:
            return self._reader.acquire(wait)
        try:
            number = publish(self.publication, self.job, self._reader._client, wait)
        except DaemonRestarted:  # it is the same to ask twice
            number = publish(self.publication, self.job, self._reader._client, wait)
        if wait and number <= least:
            time.sleep(min(wait, LOOK_S))
        return self._reader.acquire()

    @contextlib.contextmanager
    def generation(self, wait: float = 0) -> Iterator[Generation]:
        """:meth:`swap`, and have the module stay at that generation for the length of a ``with``
        block. A block inside it has the same one."""
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
        """A descriptor for ``select`` and event loops, which is readable when there is a newer
        generation: that of :meth:`shardd.Live.fileno`."""
        return self._reader.fileno()

    def on_new(self, callback: Callable[[int, int], object]) -> Watch:
        """Call @callback(number, step) for each new generation, on a thread of its own, which has
        its own connection; for those that are made while the callback runs, once with the newest.
        Return: ``stop()`` ends it; so does :meth:`close`."""
        watch = Watch(self.job, self.publication, callback, self._socket, self.number,
                      **self._options)
        self._watches.append(watch)
        return watch

    # ------------------------------------------------------------------- binding

    def _take(self, found: Generation) -> None:
        """Install the tensors of @found. What the module has is of it, or its own."""
        if self._generation is None or found.moved or found.layout != self._generation.layout:
            try:
                bound = self._bound_of(found)
            except BaseException:
                self._restore()
                self._reader.release()
                raise
            for parameters, attribute, value in bound:
                parameters[attribute] = value
        self._generation = found

    def _bound_of(self, found: Generation) -> _Bound:
        """Made once for each buffer of a layout, of which there are few: it has one dict of places,
        which is kept here, so that no other one has its id."""
        places = found._places
        if id(places) in self._bound:
            return self._bound[id(places)][1]
        wanted = self._wanted(places)  # before anything looks at memory
        if found.layout != self._layout or len(self._bound) == MOST_BUFFERS:
            self._bound.clear()
            self._layout = found.layout
        base = min((p[0] for p in places.values() if p[1]), default=0)
        end = max((p[0] + p[1] for p in places.values() if p[1]), default=0)
        mapped = _Mapped(base, end - base, f"memory of '{self.publication}'")
        self._reader._client.lent(Memory(mapped, 0, (), Dtype.UINT8, False))
        self._mapped.append(mapped)
        bound = [(*slot, value) for one, place in wanted
                 for value in [one.own if place is None else _view(place, base, mapped.look())]
                 for slot in one.slots]
        self._bound[id(places)] = places, bound
        return bound

    def _wanted(self, places: dict[str, Any]) -> list[tuple[_Place, Any]]:
        """Which tensor each parameter gets; None: it stays the module's own."""
        wanted: list[tuple[_Place, Any]] = []
        used: set[str] = set()
        for one in self._parameters:
            names = [n for n in (self._prefix + name for name in one.names) if n in places]
            used.update(names)
            if names:
                self._check(one, names, places)
            elif self._strict:
                raise NotFound(f"publication '{self.publication}' of job '{self.job}' has no "
                               f"tensor '{self._prefix}{one.names[0]}', a parameter of the module")
            wanted.append((one, places[names[0]] if names else None))
        extra = next((n for n in places if n.startswith(self._prefix) and n not in used), None)
        if self._strict and extra is not None:
            raise NotFound(f"the module has no parameter '{extra[len(self._prefix):]}', but "
                           f"publication '{self.publication}' has a tensor '{extra}': publish only "
                           "what the module has, or bind it with strict=False")
        return wanted

    def _check(self, one: _Place, names: list[str], places: dict[str, Any]) -> None:
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
        if one.own.device.type not in ("cpu", "meta"):
            raise InvalidArgument(f"'{names[0]}' is on {one.own.device} in the module: generations "
                                  "are in host memory", "module")

    def _restore(self) -> None:
        self._generation = None
        for one in self._parameters:
            for parameters, attribute in one.slots:
                parameters[attribute] = one.own

    # ----------------------------------------------------------------------- end

    def release(self) -> None:
        """Give the generation back: the module has its own parameters again, until the next
        swap. Nothing happens if it has none."""
        if self._depth:
            raise FailedPrecondition(f"generation {self.number} of '{self.publication}' is in use "
                                     "by a block: release it after its end")
        if self._generation is not None:
            self._restore()
            self._reader.release()

    def close(self) -> None:
        """End: the module has its own parameters again. InUse: something still looks at memory of a
        generation, which stays mapped until another close or the end of the process."""
        for watch in self._watches:
            watch.stop()
        self._depth = 0
        self._restore()
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


def _view(place: tuple[int, int, tuple[int, ...], Any], base: int, memory: Any) -> nn.Parameter:
    address, nbytes, shape, dtype = place
    kind = TORCH_DTYPES[dtype]
    if nbytes:
        seen = torch.frombuffer(memory, dtype=kind, count=nbytes // kind.itemsize,
                                offset=address - base).view(shape)
    else:
        seen = torch.empty(shape, dtype=kind)
    return nn.Parameter(seen, requires_grad=False)


__all__ = ["Live"]
