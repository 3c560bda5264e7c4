"""Bases: frozen parameters that are loaded once on a machine, for all jobs that name the base.

::

    shardd.load_base("llama", ["model.safetensors"])   # or: python -m shardd.load NAME FILE...
    with shardd.read_base("llama") as base:
        print(base["model.norm.weight"].numpy())

A base is a job of lifetime BASE. Its only rank loads it. After the first commit it is read-only.
Its memory is charged once, to its owner. ``shardctl job delete`` deletes it. The manual is
docs/adapters.md.
"""

from __future__ import annotations

import ctypes as C
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from . import _abi, _library
from .client import Client
from .errors import FailedPrecondition, InUse, InvalidArgument, NotFound
from .memory import Dtype, Memory, _Mapped
from .specs import Lifetime, TensorSpec, UnitSpec

_DTYPES = {"F32": Dtype.FP32, "BF16": Dtype.BF16, "F16": Dtype.FP16}
_HEADER_BYTES = 100 << 20  # the limit of safetensors itself
_UNIT_BYTES = 32 << 20     # while it is loaded, a unit needs two or three times as much
_LINE = 64                 # tensors whose size is a multiple of this begin at multiples


@dataclass(frozen=True)
class BaseTensor:
    """A tensor to load. ``read``: a function that copies its elements, row-major, to an address."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    read: Callable[[int], None]

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        n = self.dtype.itemsize
        for extent in self.shape:
            n *= extent
        return n


# ------------------------------------------------------------------------- files


def _bad(path: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"'{path}' is no safetensors file: {why}", "files")


def _header(path: str, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the file's header, and the offset of the data."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 0 < length <= min(size - 8, _HEADER_BYTES):
        raise _bad(path, f"its header would have {length} bytes, and it has {size} in all")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise _bad(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _bad(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _extent(path: str, name: str, said: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (first, end) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _bad(path, f"tensor '{name}' has no dtype, shape and data_offsets") from None
    if not isinstance(dtype, str) or any(
            not isinstance(n, int) or n < 0 for n in (*shape, first, end)):
        raise _bad(path, f"tensor '{name}' has a negative number, or none")
    return dtype, shape, first, end


def _reader(data: mmap.mmap, first: int, nbytes: int) -> Callable[[int], None]:
    def read(address: int) -> None:
        C.memmove(address, data[first:first + nbytes], nbytes)

    return read


def _of_file(path: str, skip: Sequence[str]) -> Iterator[BaseTensor]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header, begin = _header(path, file, size)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for name, said in header.items():
        if name in skip:
            continue
        dtype, shape, first, end = _extent(path, name, said)
        if dtype not in _DTYPES:
            raise InvalidArgument(
                f"tensor '{name}' of '{path}' is {dtype}: a base has F32, BF16 and F16; name it in "
                "skip to leave it out", "files")
        tensor = BaseTensor(name, _DTYPES[dtype], shape, _reader(data, begin + first, end - first))
        if end - first != tensor.nbytes or begin + end > size:
            raise _bad(path, f"tensor '{name}' has {end - first} bytes in the file, where its "
                             f"shape has {tensor.nbytes}, or is beyond its end: it is cut off, or "
                             "damaged")
        yield tensor


def _paths(given: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    """Replace each folder by the safetensors files in it."""
    for path in [os.fspath(one) for one in given]:
        if not os.path.isdir(path):
            yield path
            continue
        inside = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
        if not inside:
            raise InvalidArgument(f"the folder '{path}' has no *.safetensors", "files")
        yield from (os.path.join(path, name) for name in inside)


# ------------------------------------------------------------------------- units


def _alignment(tensor: BaseTensor) -> int:
    """The largest power of two, at most a line, that divides the tensor's size."""
    return min(_LINE, tensor.nbytes & -tensor.nbytes) if tensor.nbytes else _LINE


def _groups(tensors: Iterable[BaseTensor]) -> Iterator[list[BaseTensor]]:
    """Group the tensors into units of one type each. In a unit, tensors whose size is not a
    multiple of a line come last, so that all others begin at a multiple of a line."""
    by_dtype: dict[Dtype, list[BaseTensor]] = {}
    for tensor in tensors:
        group = by_dtype.setdefault(tensor.dtype, [])
        if group and sum(t.nbytes for t in group) + tensor.nbytes > _UNIT_BYTES:
            yield sorted(group, key=lambda t: -_alignment(t))
            group = by_dtype[tensor.dtype] = []
        group.append(tensor)
    for group in by_dtype.values():
        yield sorted(group, key=lambda t: -_alignment(t))


def _check(tensors: Sequence[BaseTensor]) -> None:
    seen: set[str] = set()
    for t in tensors:
        if t.name in seen:
            raise InvalidArgument(f"tensor '{t.name}' is there twice", "tensors")
        seen.add(t.name)
        if not t.nbytes:
            raise InvalidArgument(f"tensor '{t.name}' has shape {list(t.shape)}, no elements",
                                  "tensors")
    if not seen:
        raise InvalidArgument("a base needs at least one tensor", "tensors")


def _write(client: Client, groups: list[list[BaseTensor]]) -> None:
    """Register the units and write their values."""
    # the unit "root" and its #parts: their tensors have their own names alone
    units = client.register([
        UnitSpec(f"root#{i}" if i else "root",
                 [TensorSpec(t.name, t.shape, frozen=True) for t in group],
                 storage_dtype=group[0].dtype) for i, group in enumerate(groups)])
    for unit, group in zip(units, groups):
        unit.init_seed(0)
        memory = unit.summon()
        for tensor in group:
            tensor.read(unit.tensor(memory, tensor.name).address)
        unit.give_back(write=True)


def load_tensors(name: str, tensors: Sequence[BaseTensor], socket: str | None = None,
                 replace: bool = False, ttl: int = 0, quota_bytes: int = 0, private: bool = False,
                 **options: Any) -> int:
    """As :func:`load_base`, for @tensors."""
    _check(tensors)
    groups = list(_groups(tensors))
    with Client(socket, name=f"loads base {name}"[:64], **options) as client:
        def join(on_existing: str) -> bool:
            return client.join(name, 1, 0, Lifetime.BASE, quota_bytes, ttl, private=private,
                               on_existing=on_existing, local=(0, 1)).created

        if not join("fresh" if replace else "resume") and not replace:
            client.leave()  # a loader died and left this job: its tensors may have been others
            join("fresh")
        _write(client, groups)
        client.commit(1)
        client.leave()
    return sum(t.nbytes for t in tensors)


def load_base(name: str, files: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
              socket: str | None = None, replace: bool = False, skip: Sequence[str] = (),
              ttl: int = 0, quota_bytes: int = 0, private: bool = False, **options: Any) -> int:
    """Load the base @name from safetensors files into the daemon's memory, once, in their types.

    @files: paths; a folder stands for all safetensors files in it. @replace: replace a base of that
    name if nobody uses it. @skip: names of tensors to leave out. @ttl: seconds that the base is
    kept after its last mapping ends; 0: the daemon's job_ttl_s. @quota_bytes, @private: as for
    :meth:`Client.join`. @options: of :class:`Client`. Return: the size of its tensors in bytes.

    FailedPrecondition: a base of that name exists. InvalidArgument: a file is not a safetensors
    file, or has other types. ResourceExhausted: there is not enough memory.
    """
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    tensors = [t for path in _paths(given) for t in _of_file(path, skip)]
    return load_tensors(name, tensors, socket, replace, ttl, quota_bytes, private, **options)


# ------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Mapped:
    """A tensor of a base, and its address. ``unit``, ``tensor``: as registered. ``strides``: in
    elements; None: row-major."""

    unit: str
    tensor: str
    dtype: Dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    elements: int
    frozen: bool
    address: int

    @property
    def name(self) -> str:
        """The unit's name, a dot and the tensor's name; for the unit "root" only the tensor's
        name."""
        unit = self.unit.partition("#")[0]
        return self.tensor if unit == "root" else f"{unit}.{self.tensor}"


def _mapped(t: Any) -> Mapped:
    strides = tuple(t.strides[:t.dims]) if t.strides else None
    return Mapped(t.unit.decode(), t.name.decode(), Dtype(t.dtype), tuple(t.shape[:t.dims]),
                  strides, int(t.elements), bool(t.frozen), t.data or 0)


class BaseReader(Mapping[str, Memory]):
    """The result of :func:`read_base`: the tensors of a base, by name, each a read-only
    :class:`Memory` (flat, if the tensor has ``strides``). ``tensors``: their descriptions. The
    tensors do not change, and stay mapped when the daemon ends. Only one thread may use this object
    at a time. A context manager, which closes the reader at the end."""

    def __init__(self, base: str, socket: str | None = None, **options: Any) -> None:
        if not base:
            raise InvalidArgument("no base is named", "base")
        self.base = base
        self._lent: dict[str, Memory] = {}
        self._open = False
        self._client = Client(socket, **options)
        found = C.POINTER(_abi.Base)()
        try:
            _library.call("base_open", self._client.handle, base.encode(), C.byref(found))
        except BaseException:
            self._client.close()
            raise
        try:
            listed = [_mapped(t) for t in found[0].tensors[:found[0].n_tensors]]
        finally:
            self._handle = C.cast(found, C.c_void_p)
        self.tensors: Mapping[str, Mapped] = {t.name: t for t in listed}
        self._open = True

    def __getitem__(self, name: str) -> Memory:
        if not self._open:
            raise FailedPrecondition(f"this reader of base '{self.base}' is closed")
        if name not in self.tensors:
            raise NotFound(f"base '{self.base}' has no tensor '{name}'")
        if name not in self._lent:
            t = self.tensors[name]
            mapped = _Mapped(t.address, t.elements * t.dtype.itemsize,
                             f"'{name}' of base '{self.base}'")
            self._lent[name] = self._client.lent(Memory(
                mapped, 0, (t.elements,) if t.strides else t.shape, t.dtype, False))
        return self._lent[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def close(self) -> None:
        """Unmap the base. Calling this twice is allowed. InUse: something still uses the memory.
        The base then stays mapped and open."""
        if not self._open:
            return
        for name, memory in list(self._lent.items()):
            memory._mapped.end()
            del self._lent[name]
        self._open = False
        if not self._client.forked:
            _library.library().shardd_base_close(self._handle)
        self._client.close()

    def __enter__(self) -> BaseReader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except InUse:
            if kind is None:
                raise

    def __repr__(self) -> str:
        return (f"<shardd.BaseReader of {self.base!r}, {len(self)} tensors"
                f"{'' if self._open else ', closed'}>")


def read_base(base: str, socket: str | None = None, **options: Any) -> BaseReader:
    """Map a base read-only. @base: its name. @options: of :class:`Client`. NotFound: there is no
    such job. FailedPrecondition: the job is not a base, or is not loaded yet."""
    return BaseReader(base, socket, **options)


# ---------------------------------------------------------------------- adapters


def adapter_publication(name: str, adapter: str = "default", **options: Any) -> dict[str, Any]:
    """Return the declaration of a publication (:func:`declare_publication`) of a LoRA adapter of
    peft. It publishes the parameters that the job trains, under the names of peft's own files,
    which engines accept: ``base_model.model....q_proj.lora_A.weight``. @adapter: its name in the
    model. @options: further keys of the declaration: ``type``, ``every_steps``, ``keep``..."""
    if not adapter or "." in adapter or "{" in adapter:
        raise InvalidArgument(f"adapter is {adapter!r}, must be a name without dots", "adapter")
    inside = "base_model.model.{m...}"
    rules = [
        (f"{inside}.lora_{{k}}.weight", f"{inside}.lora_{{k}}.{adapter}.weight"),
        (f"{inside}.lora_embedding_{{k}}", f"{inside}.lora_embedding_{{k}}.{adapter}"),
        (f"{inside}.{{w}}", f"{inside}.modules_to_save.{adapter}.{{w}}"),
    ]
    return {"name": name, "rules_only": True, **options,
            "rules": [{"name": to, "sources": [of], "optional": True} for to, of in rules]}


__all__ = ["BaseReader", "BaseTensor", "adapter_publication", "load_base", "load_tensors",
           "read_base"]
