"""The daemon's checkpoints, read and made in Python (docs/checkpoints.md describes the format). The
checksums are shardctl's work: it verifies what is read here, and makes what is written."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from .. import _ctl
from ..errors import DataLoss, Unimplemented

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
         "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in TYPES.items()}
# Of an optimizer's state, in the order of the index, and all kinds of arrays.
STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
KINDS = ("param", *STATE, "buffer", "blob")


@dataclass(frozen=True)
class Array:
    """All of a parameter, of one array of its optimizer state, of a buffer of a rank, or a blob.
    ``steps``: of a parameter. ``places``: (first element, elements, file, offset in it)."""

    kind: str
    unit: str
    tensor: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    steps: int
    rank: int
    places: tuple[tuple[int, int, Path, int], ...] = ()

    @property
    def key(self) -> str:
        """Its name in a safetensors file."""
        if self.kind == "blob":
            return f"blob/{self.rank}"
        rank = f"{self.rank}/" if self.kind == "buffer" else ""
        return f"{self.kind}/{rank}{_escaped(self.unit, '%/@')}/{_escaped(self.tensor, '%@')}"

    @property
    def elements(self) -> int:
        """Of the whole array."""
        return elements_of(self.shape)

    def read(self, first: int, elements: int) -> torch.Tensor:
        """A flat copy of a range of it. DataLoss: a file is too short."""
        found = torch.empty(elements, dtype=self.dtype)
        memory, width = memory_of(found), self.dtype.itemsize
        for begin, n, path, offset in self.places:
            lo, hi = max(first, begin), min(first + elements, begin + n)
            if lo >= hi:
                continue
            part = memory[(lo - first) * width:(hi - first) * width]
            with open(path, "rb", buffering=0) as file:
                file.seek(offset + (lo - begin) * width)
                _fill(file, part, path)
        return found


@dataclass(frozen=True)
class Saved:
    """A checkpoint that shardctl has verified."""

    job: str
    step: int
    world_size: int
    arrays: tuple[Array, ...]


def elements_of(shape: Sequence[int]) -> int:
    """The product."""
    n = 1
    for extent in shape:
        n *= extent
    return n


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, as long as it lives."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _escaped(name: str, special: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in special else c for c in name)


def _fill(file: Any, part: memoryview, path: Path) -> None:
    while len(part):
        n = file.readinto(part)
        if not n:
            raise DataLoss(f"'{path}' is too short: it was cut since it was verified")
        part = part[n:]


# ------------------------------------------------------------------------------- reading


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Of a safetensors file, and where its data begins."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _arrays(folder: Path, pieces: list[dict[str, Any]]) -> Iterator[Array]:
    headers = {name: _header(folder / name) for name in {p["file"] for p in pieces}}
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for p in pieces:
        found.setdefault((p["array"], p["unit"], p["tensor"], p.get("rank", 0)), []).append(p)
    for (kind, unit, tensor, rank), parts in found.items():
        places = []
        for p in sorted(parts, key=lambda p: int(p["begin"])):
            header, data_at = headers[p["file"]]
            places.append((p["begin"], p["elements"], folder / p["file"],
                           data_at + header[p["key"]]["data_offsets"][0]))
        yield Array(kind, unit, tensor, TYPES[parts[0]["dtype"]], tuple(parts[0]["shape"]),
                    parts[0].get("steps", 0), rank, tuple(places))


def load(folder: str | os.PathLike[str], step: int | None, shardctl: str) -> Saved:
    """The checkpoint of @step, or the newest one, in the folder of checkpoints @folder: all of it
    is read once, and its checksums are compared. DataLoss: it is damaged."""
    which = [] if step is None else ["--step", str(step)]
    said = _ctl.run(shardctl, "checkpoint", "verify", *which, "--", os.fspath(folder))
    path = Path(folder, f"step-{said['step']:012d}")
    index = json.loads((path / "index.json").read_bytes())["checkpoint"]
    unknown = {p["array"] for p in index["pieces"]} - set(KINDS)
    if index["version"] != 1 or unknown:
        raise Unimplemented(f"the checkpoint is of a newer version (version {index['version']}, "
                            f"arrays {sorted(unknown)}): use the package of that version")
    return Saved(index["job"], index["step"], index["world_size"],
                 tuple(_arrays(path, index["pieces"])))


# ------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class New:
    """An array of a checkpoint that is made, and what gives its values, once; contiguous."""

    array: Array
    values: Callable[[], torch.Tensor]


def _place(new: New) -> tuple[Any, ...]:
    """Where a checkpoint has it: the largest types first, then in the order of the index."""
    a = new.array
    return (-a.dtype.itemsize, a.unit.encode(), a.tensor.encode(), KINDS.index(a.kind), a.rank)


def _head(news: list[New]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {
        "steps/" + n.array.key.partition("/")[2]: str(n.array.steps)
        for n in news if n.array.kind == "param"}}
    at = 0
    for n in news:
        end = at + n.array.elements * n.array.dtype.itemsize
        header[n.array.key] = {"dtype": NAMES[n.array.dtype], "shape": list(n.array.shape),
                               "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


def _feed(pipe: IO[bytes], news: list[New]) -> None:
    pipe.write(_head(news))
    for n in news:
        values = n.values()
        assert values.dtype == n.array.dtype and values.numel() == n.array.elements
        if values.nbytes:
            pipe.write(memory_of(values))
        del values  # before the next one is there
    pipe.flush()


def make(folder: str | os.PathLike[str], step: int, job: str, news: list[New],
         shardctl: str) -> Any:
    """Make the checkpoint of @step in @folder; it has its name when all of it is on the disk. One
    of @news is in memory at a time. Return: what shardctl says of it."""
    # What has no data comes first: then the pipe is not whole before the last one is there.
    news = sorted(news, key=lambda n: (n.array.elements > 0, _place(n)))
    process = subprocess.Popen(
        [shardctl, "--json", "checkpoint", "import", "--step", str(step), f"--job={job}", "--",
         "-", os.fspath(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)
    assert process.stdin is not None
    try:
        _feed(process.stdin, news)
    except BrokenPipeError:
        pass  # it has ended, and says why
    except BaseException:
        _end(process)  # it finds the pipe too short, and removes what there is
        raise
    out, said = _end(process)
    if process.returncode:
        raise _ctl.failure(said.decode(errors="replace"), process.returncode)
    return json.loads(out)


def _end(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    with process.stdout, process.stderr:
        out, said = process.stdout.read(), process.stderr.read()
    process.wait()
    return out, said


__all__ = ["NAMES", "STATE", "TYPES", "Array", "New", "Saved", "elements_of", "load", "make"]
