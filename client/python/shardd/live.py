"""Publications: immutable generations of a job's weights, in the reader's names and types.

::

    with shardd.Client() as client:
        shardd.declare_publication(
            {"name": "engine", "type": "bf16", "every_steps": 1}, "train", client)
    with shardd.Live("train", "engine") as live:
        with live.generation(wait=60) as weights:
            print(weights.step, torch.from_dlpack(weights["model.norm.weight"]))

A generation belongs to one committed step, and does not change while it is leased. Readers map the
daemon's own memory read-only, without a copy. Trainers do not wait for readers. NumPy has no bf16:
``weights[name].numpy()`` then has the bits. On a GPU, only DLPack can access the tensors. There,
:meth:`Live.release` waits for the work on the thread's stream (:func:`shardd.Client.set_stream`),
or, without a stream, for all work of this process on the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import _abi, _library
from ._device import HOST, Gpu, Where
from .client import Client
from .delta import Delta, Place
from .errors import FailedPrecondition, InUse, InvalidArgument, NotFound, SharddError
from .memory import Dtype, Memory, _Mapped

_FIXED, _EXPLAIN = 1, 2  # enum shardd_live_flags
_LOOK_S = 0.1  # between requests for a publication that is not there yet


class Generation(Mapping[str, Memory]):
    """The tensors of one generation, by name, each a read-only :class:`Memory`. Valid until the
    generation is given back.

    ``number``: later generations have larger numbers. ``step``: the committed step. ``checksum``:
    CRC-32C of the CRC-32Cs of its blocks. ``moved``: the tensors, or their addresses, differ from
    those of the previous generation. ``layout``: generations with the same layout have the same
    names, types and shapes."""

    def __init__(self, live: Live, found: Any) -> None:
        self.number, self.step = int(found.number), int(found.step)
        self.checksum = int(found.checksum)
        self._live = live
        self.moved, self.layout = bool(found.moved), int(found.layout)
        self._places: dict[str, Any] = live._places
        self._lent: dict[str, Memory] | None = live._lasting if live.fixed else {}

    def __getitem__(self, name: str) -> Memory:
        if self._lent is None:
            raise FailedPrecondition(f"generation {self.number} of '{self._live.name}' was given "
                                     "back: its memory may be another one's")
        if name not in self._lent:
            if name not in self._places:
                raise NotFound(f"publication '{self._live.name}' has no tensor '{name}'")
            address, nbytes, shape, dtype = self._places[name]
            what = self._live.name if self._live.fixed else f"generation {self.number}"
            mapped = _Mapped(address, nbytes, f"'{name}' of {what}", self._live._where)
            self._lent[name] = self._live._client.lent(Memory(mapped, 0, shape, dtype, False))
        return self._lent[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def delta(self, base: int | None = None) -> Delta:
        """Return the changes since generation @base; None: since the one that this reader had
        before. The delta is valid while this generation is leased. NotFound: there is no such delta
        (none is declared, too much has changed, or @base is not the previous generation). Then read
        the whole generation."""
        if self._lent is None:
            raise FailedPrecondition(f"generation {self.number} of '{self._live.name}' was given "
                                     "back")
        found = _abi.Delta()
        _library.call("live_delta", self._live._open(),
                      self._live._before if base is None else base, C.byref(found))
        live = self._live
        first: dict[int, str] = {}  # by address: a further name has that of its tensor
        places: list[Place] = []
        for name, (address, nbytes, _, dtype) in self._places.items():
            owner = first.setdefault(address, name) if nbytes else name
            places.append((name, dtype, nbytes) if owner == name else (name, dtype, nbytes, owner))
        return Delta._at(int(found.data), int(found.bytes), places, lambda: live._held is self)

    def _end(self) -> InUse | None:
        """Refuse new uses. Return: the InUse error if something still uses it, or None."""
        found, lent, self._lent = None, self._lent or {}, None
        for memory in lent.values():
            try:
                memory._mapped.end()
            except InUse as error:
                found = found or error
                self._live._client.kept.append(memory._mapped)
                memory._mapped = _Mapped(0, 0, memory._mapped.what)
                memory._mapped.end()
        return found

    def __repr__(self) -> str:
        return (f"<shardd.Generation {self.number} of step {self.step}, {len(self)} tensors"
                f"{', given back' if self._lent is None else ''}>")


class Live:
    """A reader of one publication. Only one thread may use it at a time. A context manager, which
    closes the reader at the end."""

    def __init__(self, job: str | None = None, name: str = "", socket: str | None = None,
                 fixed: bool = False, *, wait: float = 0, **options: Any) -> None:
        """Connect. @job: its name; None: $SHARDD_JOB. @name: of the publication. @wait: seconds to
        wait until the job and the publication exist; :meth:`acquire` waits for a generation.
        @options: of :class:`shardd.Client`. NotFound: the job or the publication does not exist
        after @wait.

        Generations are read-only. A write to one in host memory prints a line to standard error and
        ends the process.

        @fixed: map all generations of a layout at the same addresses. Arrays and tensors then stay
        valid, and show the generation that was acquired last. Nothing may read them during
        :meth:`acquire`. After :meth:`release` their contents may change.
        """
        job = job or os.environ.get("SHARDD_JOB")
        if not job or not name:
            raise InvalidArgument("no job is named: name the job, or set SHARDD_JOB" if not job
                                  else "no publication is named", "name" if job else "job")
        self.job, self.name, self.fixed = job, name, fixed
        self._lasting: dict[str, Memory] = {}  # by name, of all generations
        self._former: list[Memory] = []  # of other layouts
        self._places: dict[str, Any] = {}
        self._known: dict[int | None, dict[str, Any]] = {}
        self._layout = 0
        self._where: Where = HOST
        self._held: Generation | None = None
        self._before = self._last = 0  # numbers of generations
        self._handle: C.c_void_p | None = None
        self._client = Client(socket, **options)
        handle = C.c_void_p()
        try:
            self._await(time.monotonic() + wait, handle)
        except BaseException:
            self._client.close()
            raise
        self._handle = handle

    def _await(self, until: float, handle: C.c_void_p) -> None:
        """Open the reader. @until: when a missing publication is an error."""
        flags = (_FIXED if self.fixed else 0) | _EXPLAIN
        while True:
            try:
                _library.call("live_open", self._client.handle, self.job.encode(),
                              self.name.encode(), flags, C.byref(handle))
                return
            except NotFound:
                if time.monotonic() >= until:
                    raise
            time.sleep(_LOOK_S)

    def acquire(self, wait: float = 0, newer_than: int | None = None) -> Generation:
        """Lease the newest generation, and give the previous one back.

        @wait: seconds to wait for a generation newer than the leased one; 0: return the newest
        one, which may be the same. @newer_than: return only a generation with a number above it.
        If the leased one has such a number, the call does not wait. InUse: something still uses
        the leased one, and nothing has changed. NotFound: there is no such generation yet, or the
        publication was dropped. DeadlineExceeded: the text says what the call waited for.
        """
        if newer_than is not None:
            _library.number(newer_than, "newer_than")
        if newer_than == 0 and self._held is not None:  # to the library 0 is None
            wait = 0
        held = self._held
        lent = [] if held is None or self.fixed else [
            memory._mapped for memory in (held._lent or {}).values()]
        found = _abi.Generation()
        try:
            for mapped in lent:
                mapped.end()
            _library.call("live_acquire_newer", self._open(), newer_than or 0,
                          _library.milliseconds(wait), C.byref(found))
        except BaseException as error:
            for mapped in lent:
                mapped.revive()
            if held is not None and getattr(error, "field", "") == "generation":
                self._held = held._lent = None  # fixed addresses have no memory now
            raise
        if held is not None and held.number == found.number:
            for mapped in lent:
                mapped.revive()
            return held
        if held is not None:
            held._lent = None
        if found.number != self._last:
            self._before, self._last = self._last, int(found.number)
        if found.moved:
            self._find(found)
            self._former += self._lasting.values()
            self._lasting = {}
        self._held = Generation(self, found)
        return self._held

    def _find(self, found: Any) -> None:
        """Find the addresses of the tensors. There are few buffers, so each is listed only once."""
        if found.layout != self._layout:
            self._known.clear()
            self._layout = found.layout
            self._find_device((found.uuid or b"").decode())
        base = found.tensors[0].data if found.n_tensors else None
        if base not in self._known:
            self._known[base] = dict(_place(t) for t in found.tensors[:found.n_tensors])
        self._places = self._known[base]

    def _find_device(self, uuid: str) -> None:
        if self._where is not HOST and not uuid:  # the next daemon has host memory
            assert isinstance(self._where, Gpu)
            self._where.close()
            self._where = HOST
        if uuid and self._where is HOST:
            client = weakref.ref(self._client)
            self._where = Gpu(lambda: _handle_of(client), f"GPU {uuid}", uuid)

    def release(self) -> None:
        """Give the generation back. InUse: something still uses its memory, which may change. The
        generation is given back anyway."""
        held, self._held = self._held, None
        if held is None:
            raise FailedPrecondition(f"no generation of '{self.name}' is leased")
        in_use = None if self.fixed else held._end()
        held._lent = None
        _library.call("live_release", self._open())
        if in_use is not None:
            raise in_use

    @contextlib.contextmanager
    def generation(self, wait: float = 0) -> Iterator[Generation]:
        """Call :meth:`acquire` for a ``with`` block, and :meth:`release` at its end. An exception
        in the block takes precedence."""
        found = self.acquire(wait)
        try:
            yield found
        except BaseException:
            with contextlib.suppress(SharddError, InUse):
                self.release()
            raise
        self.release()

    def fileno(self) -> int:
        """Return a descriptor for ``select`` and event loops. It is readable when there is a newer
        generation than the leased one, or when :meth:`acquire` would raise an error. The reader
        closes it."""
        fd = C.c_int()
        _library.call("live_fd", self._open(), C.byref(fd))
        return fd.value

    def _open(self) -> C.c_void_p:
        if self._handle is None:
            raise FailedPrecondition(f"this reader of '{self.name}' is closed")
        self._client.handle  # noqa: B018  a fork cannot use it either
        return self._handle

    def close(self) -> None:
        """Close the reader, and give its generation back. Calling this twice is allowed. InUse:
        something still uses the memory, which stays mapped until another close or the end of the
        process. With fixed addresses nothing is closed in this case."""
        for memory in [*self._lasting.values(), *self._former]:
            memory._mapped.end()
        held, self._held = self._held, None
        if held is not None:
            held._end()
        handle, self._handle = self._handle, None
        if handle is not None and not self._client.forked:
            _library.library().shardd_live_close(handle)
        if isinstance(self._where, Gpu):
            self._where.close()
        self._client.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except InUse:
            if kind is None:
                raise

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else (
            f"has generation {self._held.number}" if self._held else "has no generation")
        return f"<shardd.Live of '{self.name}' of job {self.job!r}, {state}>"


def _handle_of(client: Callable[[], Client | None]) -> C.c_void_p:
    found = client()
    if found is None:
        raise FailedPrecondition("the reader is closed")
    return found.handle


def _place(t: Any) -> tuple[str, Any]:
    return t.name.decode(), (t.data or 0, int(t.bytes), tuple(t.shape[:t.dims]), Dtype(t.dtype))


def _text(declaration: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    if isinstance(declaration, Mapping):
        return json.dumps(declaration)
    if not isinstance(declaration, (str, os.PathLike)) or str(declaration).lstrip()[:1] in "{[":
        raise InvalidArgument(
            f"declaration is a {type(declaration).__name__}, {declaration!r:.60}; it is a mapping, "
            "or the path of a JSON file", "declaration")
    with open(declaration, encoding="utf-8") as file:
        return file.read()


def declare_publication(declaration: Mapping[str, Any] | str | os.PathLike[str], job: str,
            client: Client) -> int:
    """Declare a publication of @job. @declaration: a mapping, or the path of a JSON file
    (docs/publish.md). Repeating the same declaration is allowed. Return: the size of a generation
    in bytes.

    InvalidArgument: ``field`` names the part of the declaration, the text names the tensor.
    FailedPrecondition: a publication with this name and another declaration exists.
    ResourceExhausted: the job has too many publications.
    """
    if not isinstance(job, str):
        raise InvalidArgument(f"job is a {type(job).__name__}; it is the name of a job", "job")
    nbytes = C.c_uint64()
    _library.call("publication_declare", client.handle, job.encode(), _text(declaration).encode(),
                  C.byref(nbytes))
    return nbytes.value


def publish(name: str, job: str, client: Client, timeout: float = 0) -> int:
    """Make a generation of the last committed step, unless the newest generation is of that step.
    If the parameters are ahead of the last commit, wait for the next commit. Return the number of
    the generation when it is complete. @timeout: seconds to wait for both; 0: the job's op_timeout.
    ResourceExhausted: there is no memory, or all of it is leased."""
    number = C.c_uint64()
    _library.call("publication_publish", client.handle, job.encode(), name.encode(),
                  _library.milliseconds(timeout, "timeout"), C.byref(number))
    return number.value


def drop_publication(name: str, job: str, client: Client) -> None:
    """End publication @name of @job. Mapped generations stay mapped."""
    _library.call("publication_drop", client.handle, job.encode(), name.encode())


__all__ = ["Generation", "Live", "declare_publication", "drop_publication", "publish"]
