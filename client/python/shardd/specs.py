"""What units consist of: plain records that :meth:`shardd.Client.register` takes."""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from . import _abi
from .errors import InvalidArgument
from .memory import Dtype


class Init(IntEnum):
    """How init_seed fills a tensor."""

    CONSTANT = 1
    UNIFORM = 2
    NORMAL = 3


class Lifetime(IntEnum):
    """When a job ends: when its last trainer leaves, or when it is deleted. BASE: it has one rank,
    which loads frozen parameters and commits; then they are only read (:func:`load_base`)."""

    EPHEMERAL = 1
    KEEP = 2
    BASE = 3


class Layout(IntEnum):
    """How a unit is divided into shards."""

    FLAT = 1
    DIM0 = 2


class Strategy(IntEnum):
    """Over which ranks."""

    SHARD = 1
    REPLICATE = 2
    HYBRID = 3


class Profile(IntEnum):
    """The order in which gradients are cast, divided and added (docs/protocol.md)."""

    FAIRSCALE = 1
    XLA = 2
    FSDP1_HOOK = 3
    FSDP2 = 4
    DDP = 5
    DDP_HOOK = 6
    DDP_BUCKET_VIEW = 7


class OptimizerKind(IntEnum):
    """What the daemon steps a unit with."""

    NONE = 0
    SGD = 1
    ADAMW = 2
    ADAM = 3


class OptimizerProfile(IntEnum):
    """Whose bits (docs/semantics.md)."""

    EAGER_SINGLE = 1
    FOREACH = 2
    FUSED = 3
    REFERENCE_F64 = 4


class OptimizerWhen(IntEnum):
    """At the step, in backward, or by the trainer on the mapped shards."""

    AT_STEP = 1
    IN_BACKWARD = 2
    BY_TRAINER = 3


class ReduceOp(IntEnum):
    """Of all_reduce."""

    SUM = 1
    AVG = 2
    MAX = 3
    MIN = 4


class ClipProfile(IntEnum):
    """Which clipping factor follows from a norm (docs/protocol.md)."""

    FAIRSCALE = 1
    XLA = 2
    TORCH = 3


@dataclass
class TensorSpec:
    """A parameter of a unit. ``shape``: row-major, () for a scalar.

    ``init``, ``a``, ``b``: for init_seed. ``frozen``: no gradient, no optimizer. ``alias_of``:
    another name of that tensor, of unit ``alias_unit`` or of this one. ``weight_decay``,
    ``lr_factor``: instead of the unit's, if given. ``strides``: a permutation of dimensions.
    """

    name: str
    shape: Sequence[int]
    init: Init = Init.CONSTANT
    a: float = 0.0
    b: float = 0.0
    frozen: bool = False
    alias_of: str | None = None
    alias_unit: str | None = None
    weight_decay: float | None = None
    lr_factor: float | None = None
    strides: Sequence[int] | None = None

    @property
    def elements(self) -> int:
        """How many."""
        n = 1
        for extent in self.shape:
            n *= extent
        return n


@dataclass
class BufferSpec:
    """A tensor that is not a parameter (running statistics): every rank has its own, first 0."""

    name: str
    shape: Sequence[int]
    dtype: Dtype = Dtype.FP32


@dataclass
class OptimizerSpec:
    """The optimizer of a unit, run by the daemon; BY_TRAINER: with kind NONE."""

    kind: OptimizerKind = OptimizerKind.NONE
    lr: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    profile: OptimizerProfile = OptimizerProfile.EAGER_SINGLE
    when: OptimizerWhen = OptimizerWhen.AT_STEP
    amsgrad: bool = False
    maximize: bool = False
    dampening: float = 0.0

    def fill(self, o: Any) -> None:
        """Write it into a struct shardd_optimizer."""
        o.kind, o.lr, o.weight_decay = self.kind, self.lr, self.weight_decay
        o.momentum, o.nesterov, o.dampening = self.momentum, self.nesterov, self.dampening
        if self.kind in (OptimizerKind.ADAM, OptimizerKind.ADAMW):
            o.beta1, o.beta2, o.eps, o.complete = *self.betas, self.eps, True
        o.profile, o.when = self.profile, self.when
        o.amsgrad, o.maximize = self.amsgrad, self.maximize


@dataclass
class StepSettings:
    """The optimizer's settings for one step. They replace all settings that the tensors were
    registered with, for tensor ``tensors[i]`` (by its index in the spec) of unit ``units[i]``;
    without any, for all tensors that no other settings of the step name. ``lr_fp32``: Adam and
    AdamW compute with ``lr`` in fp32, as PyTorch does with a tensor.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False
    lr_fp32: bool = False
    units: Sequence[int] = ()
    tensors: Sequence[int] = ()

    def fill(self, s: Any) -> None:
        """Write it into a struct shardd_step_settings, which keeps alive what it points to."""
        if len(self.units) != len(self.tensors):
            raise ValueError(f"settings have {len(self.units)} units and {len(self.tensors)} "
                             "tensors: give one unit for each tensor")
        s.lr, s.lr_fp32, s.weight_decay = self.lr, self.lr_fp32, self.weight_decay
        s.momentum, s.dampening, s.nesterov = self.momentum, self.dampening, self.nesterov
        s.beta1, s.beta2, s.eps, s.maximize = *self.betas, self.eps, self.maximize
        s.n = len(self.units)
        if s.n:
            s.units, s.tensors = (C.c_uint32 * s.n)(*self.units), (C.c_uint32 * s.n)(*self.tensors)


def step_settings(settings: Sequence[StepSettings]) -> Any:
    """An array of struct shardd_step_settings; None of none."""
    if not settings:
        return None
    made = (_abi.StepSettings * len(settings))()
    for one, s in zip(settings, made):
        one.fill(s)
    return made


@dataclass(frozen=True)
class Checkpoints:
    """When the daemon makes checkpoints of a job by itself, into the folder ``path``: at the first
    commit in each ``every_steps`` steps, or ``every_s`` seconds after the last one was begun; 0:
    not by that. ``keep``: how many of the newest stay; 0: all. ``bytes_per_s``: how fast they are
    written at most; 0: as fast as the disk is."""

    path: str
    every_steps: int = 0
    every_s: int = 0
    keep: int = 0
    bytes_per_s: int = 0

    def as_struct(self) -> _abi.Checkpoints:
        most = {"every_steps": 2**63, "every_s": 2**32, "keep": 2**32, "bytes_per_s": 2**63}
        for name, limit in most.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < limit:
                raise InvalidArgument(f"checkpoints.{name} is {value!r}, must be a whole number "
                                      f"from 0 to {limit - 1}", f"checkpoints.{name}")
        return _abi.Checkpoints(C.sizeof(_abi.Checkpoints),
                                os.fsencode(os.path.abspath(self.path)), self.every_steps,
                                self.every_s, self.keep, self.bytes_per_s)


@dataclass
class UnitSpec:
    """Parameters that are gathered and reduced together; fields as struct shardd_unit_spec."""

    name: str
    tensors: Sequence[TensorSpec]
    group: int = 0
    storage_dtype: Dtype = Dtype.FP32
    compute_dtype: Dtype | None = None
    gradient_dtype: Dtype | None = None
    shard_multiple: int = 0
    pre_divide: float = 0.0
    post_divide: float = 0.0
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    layout: Layout = Layout.FLAT
    strategy: Strategy = Strategy.SHARD
    shard_ranks: int = 0
    reduce_dtype: Dtype | None = None
    reduce_profile: Profile = Profile.FAIRSCALE
    divide_factor: float = 0.0
    force_sum: bool = False
    buffers: Sequence[BufferSpec] = ()

    @property
    def gradients(self) -> Dtype:
        """The type of the gradient buffer's elements."""
        return self.gradient_dtype or self.computes

    @property
    def computes(self) -> Dtype:
        """The type of the gathered parameters."""
        return self.compute_dtype or self.storage_dtype


def _shape(shape: Sequence[int]) -> Any:
    return (C.c_uint64 * max(1, len(shape)))(*shape)


def _tensor(spec: TensorSpec, t: Any) -> None:
    t.name, t.shape, t.dims = spec.name.encode(), _shape(spec.shape), len(spec.shape)
    t.init, t.a, t.b, t.frozen = spec.init, spec.a, spec.b, spec.frozen
    t.alias_of = spec.alias_of.encode() if spec.alias_of is not None else None
    t.alias_unit = spec.alias_unit.encode() if spec.alias_unit is not None else None
    if spec.weight_decay is not None:
        t.has_weight_decay, t.weight_decay = True, spec.weight_decay
    if spec.lr_factor is not None:
        t.has_lr_factor, t.lr_factor = True, spec.lr_factor
    if spec.strides is not None:
        t.strides = _shape(spec.strides)


def _buffers(specs: Sequence[BufferSpec]) -> Any:
    made = (_abi.Buffer * max(1, len(specs)))()
    for spec, b in zip(specs, made):
        b.name, b.shape = spec.name.encode(), _shape(spec.shape)
        b.dims, b.dtype = len(spec.shape), spec.dtype
    return made


def fill(spec: UnitSpec, u: Any) -> None:
    """Write @spec into a struct shardd_unit_spec, which keeps alive what it points to."""
    tensors = (_abi.Tensor * max(1, len(spec.tensors)))()
    for one, t in zip(spec.tensors, tensors):
        _tensor(one, t)
    u.size, u.name = C.sizeof(_abi.UnitSpec), spec.name.encode()
    u.tensors, u.n_tensors, u.group = tensors, len(spec.tensors), spec.group
    u.storage_dtype, u.compute_dtype = spec.storage_dtype, spec.compute_dtype or 0
    u.gradient_dtype = spec.gradient_dtype or 0
    u.shard_multiple, u.pre_divide, u.post_divide = (
        spec.shard_multiple, spec.pre_divide, spec.post_divide)
    spec.optimizer.fill(u.optimizer)
    u.layout, u.strategy, u.shard_ranks = spec.layout, spec.strategy, spec.shard_ranks
    u.reduce_dtype, u.reduce_profile = spec.reduce_dtype or 0, spec.reduce_profile
    u.divide_factor, u.force_sum = spec.divide_factor, spec.force_sum
    u.buffers, u.n_buffers = _buffers(spec.buffers), len(spec.buffers)
