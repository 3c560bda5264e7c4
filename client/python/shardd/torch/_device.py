"""Where PyTorch computes: all that this package knows of torch.cuda.

A rank's memory is the host's or a GPU's. Tensors over it are made here, and on a GPU every op is
ordered with PyTorch's current stream: of the thread that submits it, in backward autograd's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from .. import _device
from ..client import Client
from ..errors import FailedPrecondition, InvalidArgument
from ..memory import Memory

HOST = torch.device("cpu")

here = HOST  # of this process's session


# --------------------------------------------------------------------- which device


def _usable() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


def _uuid(device: torch.device) -> str:
    number = device.index if device.index is not None else torch.cuda.current_device()
    return _device.uuid(number)


def wanted(devices: Iterable[torch.device]) -> str | None:
    """The device to ask the daemon for; None: $SHARDD_DEVICE, the GPU of this thread's
    CUDA context, or the daemon's choice. @devices: of a model's parameters."""
    if os.environ.get("SHARDD_DEVICE"):
        return None
    given = {d.type: d for d in devices}
    if "cuda" in given:
        return _uuid(given["cuda"])
    if "cpu" in given:
        return "host:0"
    if _usable() and torch.cuda.is_initialized():
        return _device.uuid(torch.cuda.current_device())
    return None


def named(device: Any) -> str | None:
    """As the daemon knows it: a torch.device, or its name, with PyTorch's number of a GPU; a GPU's
    UUID; "host:0"."""
    if device is None or str(device).startswith(("GPU-", "MIG-", "host:")):
        return None if device is None else str(device)
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {device!r}, must be 'cpu', 'cuda:N' or a GPU's UUID",
                              "device")
    return "host:0" if found.type == "cpu" else _uuid(found)


def not_there(error: InvalidArgument) -> FailedPrecondition:
    """The daemon does not have the device that it was asked for."""
    return FailedPrecondition(
        f"{error.text}; call model.to() with one of its devices before fully_shard or replicate, "
        "or use a daemon that has the model's device (shardd --backend host or cuda); if a process "
        "computes on several, name this rank's with SHARDD_DEVICE or shardd.torch.init(device=)",
        error.field, error.domain, error.native, error.call)


def take(client: Client) -> None:
    """@client has joined: its memory is that of this process's tensors. FailedPrecondition: it is
    on a GPU, and PyTorch has none."""
    global here
    number = client.where.dlpack[1]
    if client.where is _device.HOST:
        here = HOST
        return
    if not _usable() or number >= torch.cuda.device_count():
        raise FailedPrecondition(
            f"the daemon put this rank's memory on {client.where.name} ({client.device.uuid}), and "
            f"this PyTorch ({torch.__version__}) cannot compute there: install one that is built "
            "for CUDA, or use a daemon with host memory (shardd --backend host)")
    here = torch.device("cuda", number)
    client.follow_stream(_current if client.device.streams else _waited)


def _current() -> int:
    """What this thread's work on the GPU is put on."""
    return int(torch.cuda.current_stream(here.index).cuda_stream)


def _waited() -> None:
    """The daemon does not order streams there: finish the work on the stream before an op."""
    torch.cuda.current_stream(here.index).synchronize()


def drop() -> None:
    """The session is over."""
    global here
    here = HOST


def check(client: Client, devices: Iterable[torch.device]) -> None:
    """FailedPrecondition: a model whose parameters are on @devices cannot train in the session."""
    found = {_whole(d) for d in devices if d.type != "meta"}
    if len(found) > 1:
        raise FailedPrecondition(
            f"the model's parameters are on {' and '.join(sorted(map(str, found)))}: a rank has "
            "one device; call model.to() with it before fully_shard or replicate")
    for device in found - {here}:
        raise FailedPrecondition(
            f"the model is on {device}, and the daemon put this rank's memory on "
            f"{_what(client)}: {_advice(client, device)}")


def check_one(devices: Iterable[torch.device], value: Any, name: str) -> None:
    """DistributedDataParallel's device_ids and output_device, the argument @name: None, or the
    one device of a model whose parameters are on @devices."""
    if value is None:
        return
    given = value if isinstance(value, (list, tuple)) else [value]
    on = {_whole(d) for d in devices if d.type != "meta"}
    if on and {_whole(torch.device("cuda", d) if isinstance(d, int) else torch.device(d))
               for d in given} == on:
        return
    where = " and ".join(map(str, on)) or "no device yet"
    raise InvalidArgument(f"{name} is {value!r}, and the model is on {where}: leave it out, a rank "
                          "computes on the device of its model", name)


def _whole(device: torch.device) -> torch.device:
    """With its number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type == "cuda" else torch.device(device.type)


def _what(client: Client) -> str:
    device = client.device
    return f"{device.id} ({device.uuid}, PyTorch's {here})" if device.uuid else device.id


def _advice(client: Client, device: torch.device) -> str:
    move = f"call model.to('{here}') before fully_shard or replicate"
    if device.type == "cpu":
        return f"{move}, or use a daemon with host memory (shardd --backend host)"
    if here.type == "cpu":
        return f"{move}, or use a daemon with GPUs (shardd --backend cuda)"
    return f"{move}, or set SHARDD_DEVICE={_uuid(device)} (shardd.torch.init(device='{device}'))"


# -------------------------------------------------------------------------- tensors


def storage_at(address: int, nbytes: int) -> Any:
    """A storage of memory that the daemon lent; whoever makes it ends it in time."""
    return torch._C._construct_storage_from_data_pointer(address, here, nbytes)


def of(dlpack: tuple[int, int]) -> torch.device:
    """PyTorch's name of DLPack's device. FailedPrecondition: this PyTorch cannot compute there."""
    if dlpack == _device.HOST.dlpack:
        return HOST
    if not _usable() or dlpack[1] >= torch.cuda.device_count():
        raise FailedPrecondition(
            f"generations are on GPU {dlpack[1]} of this process, and this PyTorch "
            f"({torch.__version__}) cannot use that GPU: install a PyTorch build with CUDA, or "
            "read a publication in host memory")
    return torch.device("cuda", dlpack[1])


def lent(memory: Memory) -> torch.Tensor:
    """A tensor of @memory, which stays in use while the tensor is there."""
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(memory)
    return found


def nothing() -> Any:
    """A storage without memory."""
    return torch._C._construct_storage_from_data_pointer(0, here, 0)


def without_memory(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor whose memory is to come."""
    return _over(torch._C._construct_storage_from_data_pointer(
        0, here, elements * dtype.itemsize), elements, dtype)


def tensor_at(address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over memory that the daemon lent; whoever makes it ends it in time."""
    return _over(storage_at(address, elements * dtype.itemsize), elements, dtype)


def _over(storage: Any, elements: int, dtype: torch.dtype) -> torch.Tensor:
    empty: Any = torch.empty(0, dtype=dtype, device=storage.device)
    seen: torch.Tensor = empty.set_(storage, 0, (elements,))
    return seen


# ---------------------------------------------------------------------------- random


def on_host() -> bool:
    """Is gathered memory the host's, which can be protected?"""
    return here.type == "cpu"


def same_random() -> contextlib.AbstractContextManager[None]:
    """Inside, PyTorch's generators may be used; afterwards they are as before."""
    return torch.random.fork_rng(devices=[] if here.type == "cpu" else [here.index])


def random_state() -> bytes | None:
    """Of the GPU's generator; None: there is no GPU."""
    return None if here.type == "cpu" else bytes(torch.cuda.get_rng_state(here).tolist())


def set_random_state(state: bytes | None) -> None:
    """What random_state gave."""
    if state is not None and here.type == "cuda":
        torch.cuda.set_rng_state(torch.tensor(list(state), dtype=torch.uint8), here)


__all__ = ["HOST", "check", "check_one", "drop", "here", "lent", "named", "not_there", "nothing",
           "of", "on_host", "random_state", "same_random", "set_random_state", "storage_at", "take",
           "tensor_at", "wanted", "without_memory"]
