"""A registered unit and its ops."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _abi, _library
from ._session import Session
from .buffer import Buffer
from .errors import FailedPrecondition, InvalidArgument
from .memory import Dtype, Memory
from .specs import UnitSpec
from .ticket import Ticket


@dataclass(frozen=True)
class Place:
    """Where a tensor is, in elements: in what gather and summon hand out, in a gradient buffer
    (if it is trained), and in this rank's shard."""

    offset: int
    elements: int
    shard_offset: int
    shard_elements: int


# Where init takes the values from.
FROM_SEED, FROM_ROOT, FROM_OWN = 1, 2, 3


def reduce_options(unused: Sequence[int], more: bool = False) -> dict[str, Any]:
    """Options of reduce. @unused: numbers of tensors, ascending."""
    return {"unused": (C.c_uint32 * max(1, len(unused)))(*unused), "n_unused": len(unused),
            "more": more}


class Unit:
    """A unit as this client registered it.

    ``id``: its number. ``elements``: of what gather hands out. ``gradient_elements``: of a
    gradient buffer. ``packed_elements``: of what init_broadcast takes. ``initialised``: it has
    parameters from an earlier life of the job. ``places``: tensor name -> :class:`Place`.

    Memory that is handed out belongs to the daemon. :meth:`release`, :meth:`reduce`,
    :meth:`accumulate` and :meth:`give_back` give it back. While something uses it they raise
    :class:`shardd.InUse` and do nothing.
    """

    def __init__(self, client: Session, spec: UnitSpec, info: _abi.UnitInfo) -> None:
        self.client, self.spec, self.id = client, spec, int(info.unit)
        self.elements, self.shard_elements = int(info.elements), int(info.shard_elements)
        self.gradient_elements = int(info.gradient_elements)
        self.packed_elements = int(info.packed_elements)
        self.initialised, self.optimizer_steps = bool(info.initialised), int(info.optimizer_steps)
        self.places = self._find_places()
        self._lent: dict[str, Memory] = {}

    def _find_places(self) -> dict[str, Place]:
        n = len(self.spec.tensors)
        places = (_abi.TensorPlace * max(1, n))()
        _library.call("tensor_places", self.client.handle, self.id, places, n)
        return {t.name: Place(p.offset, p.elements, p.shard_offset, p.shard_elements)
                for t, p in zip(self.spec.tensors, places)}

    # ------------------------------------------------------------- memory

    def _lend(self, kind: str, r: _abi.Result, elements: int, dtype: Dtype,
              writable: bool) -> Memory:
        """The memory of @kind that is already lent, if it is the same, else a new one."""
        before = self._lent.get(kind)
        if before is not None and not before.released and before.address == r.data:
            before._mapped.stream = r.stream
            return before
        mapped = self.client.mapped(r, f"{kind} of unit '{self.spec.name}'")
        memory = self.client.lent(Memory(mapped, 0, (elements,), dtype, writable))
        self._lent[kind] = memory
        return memory

    def _end(self, kind: str) -> None:
        memory = self._lent.get(kind)
        if memory is not None:
            memory._mapped.end()
            del self._lent[kind]

    def tensor(self, memory: Memory, name: str) -> Memory:
        """The part of gathered, summoned or gradient memory that tensor @name is."""
        place = self.places[name]
        shape = next(t.shape for t in self.spec.tensors if t.name == name)
        return memory.part(place.offset, shape)

    # ---------------------------------------------------------- parameters

    def gather_submit(self) -> Ticket[Memory]:
        """As gather, with a ticket."""
        return self.client.submit("gather", self.id, finish=lambda r: self._lend(
            "gathered parameters", r, self.elements, self.spec.computes, False))

    def gather(self) -> Memory:
        """The full parameters, read-only, shared by all ranks of the node.

        Gathers are counted: the same number of releases gives the memory back. Does not wait for
        other ranks.
        """
        return self.gather_submit().wait()

    def release(self) -> int:
        """Drop one reference. Return: how many are left. InUse: it is the last one, and something
        still uses the memory."""
        memory = self._lent.get("gathered parameters")
        self._end("gathered parameters")
        left = self.client.submit("release", self.id, finish=lambda r: int(r.references)).wait()
        if left and memory is not None:
            memory._mapped = memory._mapped.lent_again()
            self._lent["gathered parameters"] = self.client.lent(memory)
        return left

    def summon(self) -> Memory:
        """Return the parameters as they are stored, in ``storage_dtype``, in writable memory of
        this rank (collective)."""
        return self.client.submit("summon", self.id, finish=lambda r: self._lend(
            "summoned parameters", r, self.elements, self.spec.storage_dtype, True)).wait()

    def summon_state(self, state: int) -> tuple[Memory, int]:
        """As summon, for array @state of the optimizer's state: Adam, AdamW: 1 exp_avg,
        2 exp_avg_sq, 3 max_exp_avg_sq; SGD: 1 momentum. Same layout; frozen elements are 0
        (collective). Return: the array and how many steps the unit has had. InvalidArgument:
        no such array."""
        return self.client.submit("summon", self.id, state, finish=lambda r: (self._lend(
            "summoned parameters", r, self.elements, Dtype.FP32, True),
            int(r.optimizer_steps))).wait()

    def steps(self) -> dict[str, int]:
        """How many steps each tensor had had at the last summon: fewer than the unit where no
        rank had used it. InvalidArgument: the unit was not summoned."""
        n = len(self.spec.tensors)
        counts = (C.c_uint64 * max(1, n))()
        _library.call("unit_steps", self.client.handle, self.id, counts, n)
        return {t.name: int(count) for t, count in zip(self.spec.tensors, counts)}

    def give_back(self, write: bool = False, optimizer_steps: int | None = None,
                  steps: Mapping[str, int] | None = None) -> None:
        """End a summon (collective). @write: each rank's own shard of it becomes the
        parameters, or the state; then @optimizer_steps, if given, is how many the unit has had,
        and @steps those of tensors that have had fewer."""
        options = self.return_options(write, optimizer_steps, steps)
        self._end("summoned parameters")
        self.client.do("return", self.id, **options)

    def return_options(self, write: bool, optimizer_steps: int | None = None,
                       steps: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Options of return."""
        options: dict[str, Any] = {"write": write}
        if optimizer_steps is not None:
            options["optimizer_steps"] = C.pointer(C.c_uint64(optimizer_steps))
        if steps is not None:
            for name in steps:
                self._number(name)
            if optimizer_steps is None:
                raise InvalidArgument("steps is given without optimizer_steps: give both", "steps")
            counts = [steps.get(t.name, optimizer_steps) for t in self.spec.tensors]
            options["tensor_steps"] = (C.c_uint64 * len(counts))(*counts)
            options["n_tensors"] = len(counts)
        return options

    def init_seed(self, seed: int) -> None:
        """Initialise every tensor by its ``init`` (collective), independent of the world size."""
        self.client.do("init", self.id, FROM_SEED, seed=seed)
        self.initialised = True

    def init_broadcast(self, root: int, buffer: Buffer | None) -> None:
        """Initialise from @root's @buffer (collective): packed_elements in fp32, tensor after
        tensor; None on the other ranks."""
        self.client.do("init", self.id, FROM_ROOT, root=root, buffer=buffer.id if buffer else 0)
        self.initialised = True

    def init_own(self, buffer: Buffer) -> None:
        """Initialise each rank's shard from such a @buffer of that rank (collective)."""
        self.client.do("init", self.id, FROM_OWN, buffer=buffer.id)
        self.initialised = True

    # ----------------------------------------------------------- gradients

    def gradient(self) -> Memory:
        """This rank's writable buffer for the full gradients. Its contents are undefined: write all
        of it. It stays the same until it is reduced or accumulated."""
        return self.client.submit("gradient", self.id, finish=lambda r: self._lend(
            "gradient buffer", r, self.gradient_elements, self.spec.gradients, True)).wait()

    def _reduce(self, op: str, **options: Any) -> Ticket[None]:
        self._end("gradient buffer")
        return self.client.submit(op, self.id, finish=lambda r: None, **options)

    def _number(self, name: str) -> int:
        for number, tensor in enumerate(self.spec.tensors):
            if tensor.name == name:
                return number
        raise InvalidArgument(f"unit '{self.spec.name}' has no tensor '{name}'", "tensor")

    def reduce_submit(self, more: bool = False, unused: Sequence[str] = ()) -> Ticket[None]:
        """As reduce, with a ticket."""
        numbers = sorted(map(self._number, unused))
        return self._reduce("reduce", **reduce_options(numbers, more))

    def reduce(self, more: bool = False, unused: Sequence[str] = ()) -> None:
        """Reduce all ranks' gradient buffers, and what they have accumulated (collective).

        @more: more reduces follow before the step. @unused: names of tensors that this rank has not
        used and for which it has written zeros; these count if another rank has used them.
        """
        self.reduce_submit(more, unused).wait()

    def unused(self) -> list[str]:
        """The tensors that no rank had used in the last reduce that was waited for: the step skips
        them and their optimizer state."""
        n = len(self.spec.tensors)
        flags = (C.c_bool * max(1, n))()
        _library.call("unit_unused", self.client.handle, self.id, flags, n)
        return [t.name for t, unused in zip(self.spec.tensors, flags) if unused]

    def reduce_unused(self) -> bool:
        """As reduce, for a rank that has not used the unit and has filled its buffer with zeros.
        Return: True if no rank has used it: then the step skips it."""
        self._end("gradient buffer")
        return self.client.submit("reduce", self.id, unit_unused=True,
                                  finish=lambda r: bool(r.skipped)).wait()

    def reduce_deferred(self) -> None:
        """Reduce inside each replica only; the next reduce adds the sums before the all-reduce."""
        self._reduce("reduce", deferred=True).wait()

    def accumulate(self) -> None:
        """Add this rank's gradient buffer to what it has accumulated; no communication."""
        self._reduce("accumulate").wait()

    def set_factors(self, pre_divide: float = 0, post_divide: float = 0, divide_factor: float = 0,
                    force_sum: bool = False) -> None:
        """Set the factors by which reductions divide from now on (collective); 0: the default."""
        self.client.do("set_factors", self.id, pre_divide, post_divide, divide_factor, force_sum)

    # ------------------------------------------------------------- buffers

    def buffers(self) -> dict[str, Memory]:
        """This rank's own buffers, by name; they stay with the job."""
        def finish(r: Any) -> dict[str, Memory]:
            n = len(self.spec.buffers)
            places = (_abi.BufferPlace * max(1, n))()
            _library.call("buffer_places", self.client.handle, self.id, places, n)
            mapped = self.client.mapped(r, f"buffers of unit '{self.spec.name}'")
            every = {b.name: Memory(mapped, p.offset, b.shape, b.dtype, True)
                     for b, p in zip(self.spec.buffers, places)}
            for memory in every.values():
                self.client.lent(memory)
            return every

        if not self.spec.buffers:
            raise FailedPrecondition(f"unit '{self.spec.name}' has no buffers")
        return self.client.submit("unit_buffers", self.id, finish=finish).wait()

    def broadcast_buffers(self, root: int = 0) -> None:
        """Copy @root's buffers to all ranks (collective)."""
        self.client.do("broadcast_buffers", self.id, self.spec.group, root)

    # ------------------------------------------------------ shards (BY_TRAINER)

    def pieces(self) -> list[tuple[str, int, int, int]]:
        """The pieces of next_shard's shard: (tensor, first element, elements, at)."""
        n = C.c_size_t()
        _library.call("shard_pieces", self.client.handle, self.id, None, 0, C.byref(n))
        pieces = (_abi.ShardPiece * max(1, n.value))()
        _library.call("shard_pieces", self.client.handle, self.id, pieces, n.value, C.byref(n))
        return [(self.spec.tensors[p.tensor].name, p.first, p.elements, p.at)
                for p in pieces[:n.value]]

    def shard_done(self) -> None:
        """Return the changed parameters of the shard; its memory becomes invalid."""
        self._end("shard")
        self.client.do("shard_done", self.id)

    def __repr__(self) -> str:
        out = ", ".join(kind for kind, m in self._lent.items() if not m.released)
        return (f"<shardd.Unit {self.spec.name!r} {self.elements} elements "
                f"{self.spec.computes.name}{', lent: ' + out if out else ''}>")
