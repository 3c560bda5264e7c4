"""PyTorch's distributed checkpoints (torch.distributed.checkpoint, DCP), a tensor at a time, by its
own reader and writer, without a process group."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import torch
import torch.distributed._shard.sharded_tensor.metadata  # one of those in _PLAIN
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ..errors import DataLoss, NotFound

_Path = Union[str, "os.PathLike[str]"]

# ------------------------------------------------------------------------- its pickle

_METADATA = "torch.distributed.checkpoint.metadata"
_FORMER = "torch.distributed._shard.sharded_tensor.metadata"  # before PyTorch 2.4
_PLAIN = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_FORMER, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *((module, name) for module in ("pathlib", "pathlib._local")
      for name in ("PosixPath", "PurePosixPath", "Path")),
}


class _Unpickler(pickle.Unpickler):
    """Of what ``.metadata`` consists of and of nothing else: a pickle may name any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return Path if "pathlib" in module else getattr(sys.modules[module], name)
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise DataLoss(f"'.metadata' is not that of a distributed checkpoint: it refers to "
                       f"{module}.{name}, which is run when it is read; it was not")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        try:
            with open(path, "rb") as file:
                found = _Unpickler(file).load()
        except FileNotFoundError:
            raise NotFound(f"'{self.path}' is no distributed checkpoint: it has no file .metadata, "
                           "which is written last, so perhaps it is not whole") from None
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError,
                IndexError, KeyError, ImportError, MemoryError) as error:
            raise DataLoss(f"'{path}' is damaged: {error}") from error
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise DataLoss(f"'{path}' is damaged: it has no metadata of tensors")
        return found


# ------------------------------------------------------------------------------ reading


class _Planner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals([bytes]):  # how an empty one is written
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class Source:
    """A checkpoint that ``torch.distributed.checkpoint.save`` has written. ``tensors``: what there
    is, by key; ``others``: keys of what is no tensor."""

    def __init__(self, path: _Path) -> None:
        self.path = os.fspath(path)
        self._reader = _Reader(self.path)
        self._metadata = self._reader.read_metadata()
        self._check_files()
        self._reader.set_up_storage_reader(self._metadata, True)
        said = self._metadata.state_dict_metadata
        self.tensors = {k: v for k, v in said.items() if isinstance(v, TensorStorageMetadata)}
        self.others = {k for k, v in said.items() if isinstance(v, BytesStorageMetadata)}

    def _check_files(self) -> None:
        names = {getattr(i, "relative_path", None) for i in self._metadata.storage_data.values()}
        for name in names:
            if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
                raise DataLoss(f"'{self.path}/.metadata' refers to a file {name!r} outside of the "
                               "folder")
        missing = {n for n in names if not os.path.isfile(os.path.join(self.path, str(n)))}
        if missing:
            raise DataLoss(f"'{self.path}' has no file '{min(map(str, missing))}', which .metadata "
                           "says it has")

    def tensor(self, key: str) -> torch.Tensor:
        """All of it. DataLoss: it is not there, or damaged."""
        said = self.tensors[key]
        _check_chunks(key, said)
        found = torch.empty(said.size, dtype=said.properties.dtype)
        self._read(key, {key: found})
        return found

    def value(self, key: str) -> Any:
        """What is no tensor: numbers, texts, and lists of them."""
        state: dict[str, Any] = {key: None}
        self._read(key, state)
        return state[key]

    def _read(self, key: str, state: dict[str, Any]) -> None:
        planner = _Planner()
        planner.set_up_planner(state, self._metadata, True)
        try:
            plan: LoadPlan = self._reader.prepare_local_plan(planner.create_local_plan())
            [plan] = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # of PyTorch's readers, which raise of many kinds
            raise DataLoss(f"'{key}' in '{self.path}' cannot be read: {_first(error)}") from error

    def path_of(self, key: str) -> tuple[Any, ...]:
        """The keys of the nested dictionaries that it was in."""
        data = self._metadata.planner_data
        found = data.get(key) if isinstance(data, dict) else None
        return tuple(found) if isinstance(found, (tuple, list)) else (key,)


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _check_chunks(key: str, said: TensorStorageMetadata) -> None:
    """DataLoss: some of the tensor is in no chunk, or in two."""
    chunks = [c for c in said.chunks if 0 not in c.sizes]
    inside = all(len(c.offsets) == len(c.sizes) == len(said.size) and
                 all(0 <= o <= o + n <= whole for o, n, whole in
                     zip(c.offsets, c.sizes, said.size)) for c in chunks)
    if not inside or sum(c.sizes.numel() for c in chunks) != said.size.numel() or _overlap(chunks):
        raise DataLoss(f"the pieces of '{key}' are not all of it, once")


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """@chunks: sorted by their first dimension, each is compared with those that begin before it
    ends."""
    if not chunks or not chunks[0].sizes:
        return len(chunks) > 1
    chunks = sorted(chunks, key=lambda c: c.offsets[0])
    for i, c in enumerate(chunks):
        for other in chunks[i + 1:]:
            if other.offsets[0] >= c.offsets[0] + c.sizes[0]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in
                   zip(c.offsets, c.sizes, other.offsets, other.sizes)):
                return True
    return False


# ------------------------------------------------------------------------------ writing


@dataclass(frozen=True)
class Tensor:
    """What is written. ``read``: a flat range of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]


Entries = Mapping[tuple[Any, ...], Any]  # by path; a Tensor, or a value


def key_of(path: tuple[Any, ...]) -> str:
    """The key of what is at @path in nested dictionaries."""
    return ".".join(map(str, path))


class _Writer(FileSystemWriter):
    """It goes by the name that the folder is to have."""

    def __init__(self, path: _Path, named: _Path) -> None:
        super().__init__(path, sync_files=True)
        self._named = Path(named)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._named, save_id=self.save_id)


class _Data(SavePlanner):
    """What the writer asks for the data."""

    def __init__(self, entries: dict[str, Any]) -> None:
        self._entries = entries

    def resolve_data(self, write_item: WriteItem) -> Any:
        entry = self._entries[write_item.index.fqn]
        if not isinstance(entry, Tensor):
            buffer = io.BytesIO()
            torch.save(entry, buffer)
            return buffer
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        first = chunk.offsets[0] * torch.Size(entry.shape[1:]).numel() if entry.shape else 0
        return entry.read(first, chunk.sizes.numel()).view(chunk.sizes)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """The plan is made by :func:`_plans`."""

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


def _items(key: str, entry: Any, most: int) -> Iterator[tuple[WriteItem, int]]:
    """With their bytes. @most: bytes of a piece, if it has several rows."""
    if not isinstance(entry, Tensor):
        yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), 0
        return
    size, width = torch.Size(entry.shape), entry.dtype.itemsize
    row = size[1:].numel() * width if size else width
    rows = max(1, most // max(1, row))
    whole = not size or size[0] <= rows
    for first in range(0, 1 if whole else size[0], rows):
        sizes = size if whole else torch.Size((min(rows, size[0] - first), *size[1:]))
        offsets = torch.Size((first, *[0] * (len(size) - 1)) if size else ())
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes),
                               TensorProperties(dtype=entry.dtype), size)
        yield WriteItem(MetadataIndex(key, offsets),
                        WriteItemType.TENSOR if whole else WriteItemType.SHARD,
                        tensor_data=data), sizes.numel() * width


def _plans(entries: dict[str, Any], piece_bytes: int, file_bytes: int) -> list[SavePlan]:
    """One a file, as if that many ranks wrote."""
    plans: list[list[WriteItem]] = [[]]
    filled = 0
    for key, entry in entries.items():
        for item, nbytes in _items(key, entry, piece_bytes):
            if plans[-1] and filled + nbytes > file_bytes:
                plans.append([])
                filled = 0
            plans[-1].append(item)
            filled += nbytes
    return [SavePlan(items) for items in plans]


def write(folder: _Path, named: _Path, entries: Entries, piece_bytes: int, file_bytes: int) -> None:
    """Write a checkpoint into the new folder @folder, which gets the name @named. What is in memory
    is what goes into one file: @file_bytes, or the largest row. Files are synced."""
    by_key = {key_of(path): entry for path, entry in entries.items()}
    writer, data = _Writer(folder, named), _Data(by_key)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(p) for p in _plans(by_key, piece_bytes, file_bytes)]
    plans, metadata = data.create_global_plan(plans)
    metadata.planner_data = {key_of(path): path for path in entries}
    results = [writer.write_data(data.finish_plan(plan), data).wait()
               for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)


__all__ = ["Entries", "Source", "Tensor", "key_of", "write"]
