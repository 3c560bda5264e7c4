"""Read the live parameters of a job, without being a rank of it.

::

    with shardd.read("charlm") as reader:
        with reader.snapshot(timeout=60) as step:
            print(step, reader["block.weight"].numpy().mean())

A reader maps the daemon's own memory read-only: nothing is copied. Inside the block the memory
holds what was committed as ``step``. Trainers wait before they change it, but not longer than the
daemon's reader_hold_ms.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import _abi, _library
from .client import Client
from .errors import (
    Aborted,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    Overtaken,
    SharddError,
)
from .memory import Dtype, Memory, _Mapped


@dataclass(frozen=True)
class ReadTensor:
    """A tensor of the job, and where it is. ``unit``, ``tensor``: the names under which it was
    registered; ``strides``: in elements, None: row-major."""

    unit: str
    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    frozen: bool
    address: int
    dtype: Dtype = Dtype.FP32

    @property
    def name(self) -> str:
        """Both names, joined with a dot."""
        return f"{self.unit}.{self.tensor}"


def _tensor(unit: str, t: Any) -> ReadTensor:
    return ReadTensor(unit, t.name.decode(), tuple(t.shape[:t.dims]),
                      tuple(t.strides[:t.dims]) if t.strides else None, t.frozen, t.data or 0,
                      Dtype(t.dtype))


class Reader:
    """The live parameters of one job; made by :func:`read`. Not for several threads at once.

    ``tensors``: name -> :class:`ReadTensor`, as of the last snapshot; without units that are not
    initialised. A context manager: closes at the end.
    """

    def __init__(self, job: str | None = None, socket: str | None = None, **options: Any) -> None:
        """Connect. @job: None: $SHARDD_JOB. @options: of :class:`shardd.Client`. NotFound: there is
        no such job."""
        job = job or os.environ.get("SHARDD_JOB")
        if not job:
            raise InvalidArgument("no job is named: name the job to read, or set SHARDD_JOB", "job")
        self.job, self.step = job, None  # type: str, int | None
        self.tensors: Mapping[str, ReadTensor] = {}
        self._client = Client(socket, **options)
        self._lent: dict[str, Memory] = {}
        self._handle: C.c_void_p | None = None
        handle = C.c_void_p()
        try:
            _library.call("reader_open", self._client.handle, job.encode(), C.byref(handle))
        except BaseException:
            self._client.close()
            raise
        self._handle = handle

    # ------------------------------------------------------------------ snapshots

    def hold(self, timeout: float | None = None, hold: float | None = None) -> int:
        """Hold the parameters at the last commit until :meth:`release`. Return: its step.

        @timeout: seconds to wait for a commit, if parameters are past the last one; None: the
        job's op_timeout. @hold: seconds after which the trainers may continue, at most the daemon's
        reader_hold_ms; None: reader_hold_ms.
        DeadlineExceeded says what was waited for. NotFound: the job was deleted.
        """
        if self.step is not None:
            raise FailedPrecondition(f"step {self.step} of job '{self.job}' is held: release it")
        found = _abi.Snapshot()
        _library.call("reader_hold", self._open(), _ms(hold), _ms(timeout), C.byref(found))
        if found.changed:
            self.tensors = {t.name: t for t in _listed(found)}
        self.step = int(found.step)
        return self.step

    def release(self) -> None:
        """End the hold, let the trainers continue, and give back what was lent.

        Overtaken: they have already continued: discard what was read. InUse: something still uses
        the memory and will see it change; the step is released nevertheless.
        """
        if self.step is None:
            raise FailedPrecondition(f"no step of job '{self.job}' is held")
        self.step = None
        in_use = self._end_lent()
        try:
            _library.call("reader_release", self._open())
        except Aborted as error:
            raise Overtaken(error.text, error.field, error.domain, error.native,
                            error.call) from None
        if in_use is not None:
            raise in_use

    @contextlib.contextmanager
    def snapshot(self, timeout: float | None = None, hold: float | None = None) -> Iterator[int]:
        """:meth:`hold` for a ``with`` block, whose value is the step; :meth:`release` at its end.

        Overtaken at the end: discard what the block has computed. An exception of the block takes
        precedence.
        """
        step = self.hold(timeout, hold)
        try:
            yield step
        except BaseException:
            with contextlib.suppress(SharddError, InUse):
                self.release()
            raise
        self.release()

    def __getitem__(self, name: str) -> Memory:
        """The tensor "unit.tensor" in the snapshot, read-only, as it lies in memory (with
        ``strides``: flat). FailedPrecondition: no step is held. NotFound: no such tensor."""
        if self.step is None:
            raise FailedPrecondition(f"no step of job '{self.job}' is held: parameters exist only "
                                     "inside `with reader.snapshot()`")
        if name not in self._lent:
            if name not in self.tensors:
                raise NotFound(f"job '{self.job}' has no tensor '{name}'")
            t = self.tensors[name]
            elements = 1
            for extent in t.shape:
                elements *= extent
            mapped = _Mapped(t.address, elements * t.dtype.itemsize,
                             f"'{name}' of step {self.step}")
            self._lent[name] = self._client.lent(Memory(
                mapped, 0, (elements,) if t.strides else t.shape, t.dtype, False))
        return self._lent[name]

    def _end_lent(self) -> InUse | None:
        found, lent = None, list(self._lent.values())
        self._lent.clear()
        for memory in lent:
            try:
                memory._mapped.end()
            except InUse as error:
                found = found or error
                # Refuse new uses. Existing ones must not lose the memory, so the client stays open.
                self._client.kept.append(memory._mapped)
                memory._mapped = _Mapped(0, 0, memory._mapped.what)
                memory._mapped.end()
        return found

    # ------------------------------------------------------------------------ end

    def _open(self) -> C.c_void_p:
        if self._handle is None:
            raise FailedPrecondition(f"this reader of job '{self.job}' is closed")
        self._client.handle  # noqa: B018  a fork cannot use it either
        return self._handle

    def close(self) -> None:
        """Close the reader and end its hold. Calling this twice is allowed. InUse: something still
        uses its memory, which stays mapped until another close or the end of the process."""
        self.step = None
        self._end_lent()
        handle, self._handle = self._handle, None
        if handle is not None and not self._client.forked:
            _library.library().shardd_reader_close(handle)
        self._client.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except InUse:
            if kind is None:
                raise

    def __repr__(self) -> str:
        state = "closed" if self._handle is None else (
            f"holds step {self.step}" if self.step is not None else "holds nothing")
        return f"<shardd.Reader of job {self.job!r}, {len(self.tensors)} tensors, {state}>"


def _ms(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, int(seconds * 1000))


def _listed(found: Any) -> Iterator[ReadTensor]:
    for unit in found.units[:found.n_units]:
        if unit.initialised:
            for t in unit.tensors[:unit.n_tensors]:
                yield _tensor(unit.name.decode(), t)


def read(job: str | None = None, socket: str | None = None, **options: Any) -> Reader:
    """Connect and return a :class:`Reader` of @job. None: $SHARDD_JOB, $SHARDD_SOCKET."""
    return Reader(job, socket, **options)
