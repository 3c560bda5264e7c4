"""The structs and functions of shardd.h for ctypes.

tests/python/test_abi.py compares sizes and offsets with what the C compiler says.
"""

from __future__ import annotations

import ctypes as C
from typing import Any


class Error(C.Structure):
    _fields_ = [("code", C.c_int), ("native", C.c_int), ("domain", C.c_char * 16),
                ("field", C.c_char * 96), ("text", C.c_char * 512)]


class Options(C.Structure):
    _fields_ = [("size", C.c_size_t), ("socket", C.c_char_p), ("name", C.c_char_p),
                ("connect_timeout_ms", C.c_uint32), ("handover", C.c_int), ("device", C.c_char_p)]


class Job(C.Structure):
    _fields_ = [("size", C.c_size_t), ("name", C.c_char_p), ("world_size", C.c_uint32),
                ("rank", C.c_uint32), ("lifetime", C.c_int), ("quota_bytes", C.c_uint64),
                ("ttl_s", C.c_uint32), ("op_timeout_ms", C.c_uint32), ("allow_torn", C.c_bool),
                ("is_private", C.c_bool)]


class Membership(C.Structure):
    _fields_ = [("epoch", C.c_uint64), ("world_size", C.c_uint32), ("rank", C.c_uint32),
                ("resumed", C.c_bool), ("has_commit", C.c_bool), ("torn", C.c_bool),
                ("step", C.c_uint64), ("blob", C.c_void_p), ("blob_bytes", C.c_size_t),
                ("created", C.c_bool)]


class Device(C.Structure):
    _fields_ = [("id", C.c_char * 32), ("backend", C.c_char * 16), ("uuid", C.c_char * 48),
                ("streams", C.c_bool)]


class Tensor(C.Structure):
    _fields_ = [("name", C.c_char_p), ("shape", C.POINTER(C.c_uint64)), ("dims", C.c_uint32),
                ("init", C.c_int), ("a", C.c_double), ("b", C.c_double), ("frozen", C.c_bool),
                ("alias_of", C.c_char_p), ("alias_unit", C.c_char_p),
                ("has_weight_decay", C.c_bool), ("weight_decay", C.c_double),
                ("has_lr_factor", C.c_bool), ("lr_factor", C.c_double),
                ("strides", C.POINTER(C.c_uint64))]


class Buffer(C.Structure):
    _fields_ = [("name", C.c_char_p), ("shape", C.POINTER(C.c_uint64)), ("dims", C.c_uint32),
                ("dtype", C.c_int)]


class Optimizer(C.Structure):
    _fields_ = [("kind", C.c_int), ("lr", C.c_double), ("weight_decay", C.c_double),
                ("momentum", C.c_double), ("nesterov", C.c_bool), ("beta1", C.c_double),
                ("beta2", C.c_double), ("eps", C.c_double), ("profile", C.c_int),
                ("when", C.c_int), ("amsgrad", C.c_bool), ("maximize", C.c_bool),
                ("dampening", C.c_double)]


class UnitSpec(C.Structure):
    _fields_ = [("size", C.c_size_t), ("name", C.c_char_p), ("tensors", C.POINTER(Tensor)),
                ("n_tensors", C.c_size_t), ("group", C.c_uint32), ("compute_dtype", C.c_int),
                ("gradient_dtype", C.c_int), ("shard_multiple", C.c_uint32),
                ("pre_divide", C.c_double), ("post_divide", C.c_double),
                ("optimizer", Optimizer), ("layout", C.c_int), ("strategy", C.c_int),
                ("shard_ranks", C.c_uint32), ("reduce_dtype", C.c_int),
                ("reduce_profile", C.c_int), ("divide_factor", C.c_double),
                ("force_sum", C.c_bool), ("buffers", C.POINTER(Buffer)), ("n_buffers", C.c_size_t),
                ("reshard", C.c_int), ("guarded", C.c_bool), ("div_mode", C.c_int)]


class UnitInfo(C.Structure):
    _fields_ = [("unit", C.c_uint32), ("elements", C.c_uint64), ("shard_elements", C.c_uint64),
                ("initialised", C.c_bool), ("optimizer_steps", C.c_uint64),
                ("gradient_elements", C.c_uint64), ("packed_elements", C.c_uint64)]


class TensorPlace(C.Structure):
    _fields_ = [("unit", C.c_uint32), ("offset", C.c_uint64), ("elements", C.c_uint64),
                ("shard_offset", C.c_uint64), ("shard_elements", C.c_uint64)]


class BufferPlace(C.Structure):
    _fields_ = [("offset", C.c_uint64), ("bytes", C.c_uint64)]


class Result(C.Structure):
    # Not the library's: the CUDA stream on which the op was submitted.
    stream: int | None = None
    _fields_ = [("data", C.c_void_p), ("bytes", C.c_uint64), ("buffer", C.c_uint64),
                ("total_norm", C.c_double), ("references", C.c_uint32), ("copied", C.c_bool),
                ("number", C.c_uint64), ("waited_us", C.c_uint64), ("ran_us", C.c_uint64),
                ("kept", C.c_bool), ("found_inf", C.c_bool), ("skipped", C.c_bool),
                ("has_total_norm", C.c_bool), ("unit", C.c_uint32), ("elements", C.c_uint64),
                ("gradient_offset", C.c_uint64), ("optimizer_steps", C.c_uint64)]


class Factors(C.Structure):
    _fields_ = [("size", C.c_size_t), ("pre_divide", C.c_double), ("post_divide", C.c_double),
                ("divide_factor", C.c_double), ("force_sum", C.c_bool)]


class Clip(C.Structure):
    _fields_ = [("size", C.c_size_t), ("max_norm", C.c_double), ("norm_type", C.c_double),
                ("profile", C.c_int), ("error_if_nonfinite", C.c_bool),
                ("units", C.POINTER(C.c_uint32)), ("n_units", C.c_size_t),
                ("whole_job", C.c_bool)]


class StepSettings(C.Structure):
    _fields_ = [("lr", C.c_double), ("lr_fp32", C.c_bool), ("weight_decay", C.c_double),
                ("momentum", C.c_double), ("dampening", C.c_double), ("nesterov", C.c_bool),
                ("beta1", C.c_double), ("beta2", C.c_double), ("eps", C.c_double),
                ("maximize", C.c_bool), ("units", C.POINTER(C.c_uint32)),
                ("tensors", C.POINTER(C.c_uint32)), ("n", C.c_size_t)]


class StepOptions(C.Structure):
    _fields_ = [("size", C.c_size_t), ("lr", C.POINTER(C.c_double)),
                ("skip_if_found", C.c_bool), ("discard", C.c_bool),
                ("settings", C.POINTER(StepSettings)), ("n_settings", C.c_size_t)]


class Plan(C.Structure):
    _fields_ = [("size", C.c_size_t), ("clip", C.POINTER(Clip)), ("inv_scale", C.c_double),
                ("lr", C.POINTER(C.c_double)), ("settings", C.POINTER(StepSettings)),
                ("n_settings", C.c_size_t)]


class ReduceOptions(C.Structure):
    _fields_ = [("size", C.c_size_t), ("unused", C.POINTER(C.c_uint32)),
                ("n_unused", C.c_size_t), ("more", C.c_bool)]


class ReturnOptions(C.Structure):
    _fields_ = [("size", C.c_size_t), ("write", C.c_bool),
                ("optimizer_steps", C.POINTER(C.c_uint64)),
                ("tensor_steps", C.POINTER(C.c_uint64)), ("n_tensors", C.c_size_t)]


class ShardPiece(C.Structure):
    _fields_ = [("tensor", C.c_uint32), ("first", C.c_uint64), ("elements", C.c_uint64),
                ("at", C.c_uint64)]


class ReadTensor(C.Structure):
    _fields_ = [("name", C.c_char_p), ("shape", C.POINTER(C.c_uint64)),
                ("strides", C.POINTER(C.c_uint64)), ("dims", C.c_uint32), ("frozen", C.c_bool),
                ("elements", C.c_uint64), ("data", C.c_void_p)]


class ReadUnit(C.Structure):
    _fields_ = [("name", C.c_char_p), ("initialised", C.c_bool),
                ("tensors", C.POINTER(ReadTensor)), ("n_tensors", C.c_size_t)]


class Snapshot(C.Structure):
    _fields_ = [("step", C.c_uint64), ("hold_ms", C.c_uint32), ("units", C.POINTER(ReadUnit)),
                ("n_units", C.c_size_t), ("changed", C.c_bool)]


STRUCTS = {
    "error": Error, "options": Options, "job": Job, "membership": Membership, "device": Device,
    "tensor": Tensor, "buffer": Buffer, "optimizer": Optimizer, "unit_spec": UnitSpec,
    "unit_info": UnitInfo, "tensor_place": TensorPlace, "buffer_place": BufferPlace,
    "result": Result, "factors": Factors, "clip": Clip, "step_settings": StepSettings,
    "step_options": StepOptions, "plan": Plan, "reduce_options": ReduceOptions,
    "return_options": ReturnOptions, "shard_piece": ShardPiece,
    "read_tensor": ReadTensor, "read_unit": ReadUnit, "snapshot": Snapshot,
}

_u32, _u64, _int, _size = C.c_uint32, C.c_uint64, C.c_int, C.c_size_t
_bool, _double, _text, _p = C.c_bool, C.c_double, C.c_char_p, C.c_void_p
_ticket, _units, _err = C.POINTER(C.c_uint64), C.POINTER(C.c_uint32), C.POINTER(Error)

# Arguments of functions that return 0 or a negative code and take an error last.
CALLS: dict[str, tuple[object, ...]] = {
    "connect": (C.POINTER(Options), C.POINTER(_p)),
    "status": (_p, _text, C.POINTER(_p)),
    "join": (_p, C.POINTER(Job), C.POINTER(Membership)),
    "get_device": (_p, C.POINTER(Device)),
    "set_stream": (_p, _p),
    "read": (_p, _p, _p, _size),
    "write": (_p, _p, _p, _size),
    "leave": (_p,),
    "join_uneven": (_p, _u32, _bool, _units, _ticket),
    "join_even": (_p, _u32),
    "group_create": (_p, _text, _units, _size, _units),
    "register": (_p, C.POINTER(UnitSpec), _size, C.POINTER(UnitInfo)),
    "verify_model": (_p, _u32),
    "tensor_places": (_p, _u32, C.POINTER(TensorPlace), _size),
    "buffer_places": (_p, _u32, C.POINTER(BufferPlace), _size),
    "shard_pieces": (_p, _u32, C.POINTER(ShardPiece), _size, C.POINTER(_size)),
    "reader_open": (_p, _text, C.POINTER(_p)),
    "reader_hold": (_p, _u32, _u32, C.POINTER(Snapshot)),
    "reader_release": (_p,),
    "unit_unused": (_p, _u32, C.POINTER(_bool), _size),
    "unit_steps": (_p, _u32, C.POINTER(_u64), _size),
    "poll": (_p, _u64, C.POINTER(Result)),
    "wait": (_p, _u64, _int, C.POINTER(Result)),
}

# Arguments between client and ticket of every op's _submit form.
OPS: dict[str, tuple[object, ...]] = {
    "init_seed": (_u32, _u64),
    "init_broadcast": (_u32, _u32, _u64),
    "init_own": (_u32, _u64),
    "gather": (_u32,),
    "release": (_u32,),
    "gradient": (_u32,),
    "alloc": (_u64,),
    "free": (_u64,),
    "reduce": (_u32,),
    "reduce_deferred": (_u32,),
    "reduce_more": (_u32,),
    "reduce_unused": (_u32,),
    "reduce_with": (_u32, C.POINTER(ReduceOptions)),
    "accumulate": (_u32,),
    "all_reduce": (_u32, _u64, _u64, _u64, _int, _int),
    "broadcast": (_u32, _u64, _u64, _u64, _u32),
    "barrier": (_u32,),
    "clip": (_u32, C.POINTER(Clip)),
    "clip_value": (_u32, _double, _units, _size),
    "unscale": (_u32, _double),
    "step_with": (_u32, C.POINTER(StepOptions)),
    "plan_backward": (_u32, C.POINTER(Plan)),
    "next_shard": (_u32,),
    "shard_done": (_u32,),
    "set_factors": (_u32, C.POINTER(Factors)),
    "commit": (_u64, _p, _size),
    "unit_buffers": (_u32,),
    "broadcast_buffers": (_u32, _u32, _u32),
    "summon": (_u32,),
    "return": (_u32, _bool),
    "summon_state": (_u32, _u32),
    "return_with": (_u32, C.POINTER(ReturnOptions)),
}


# The rest: arguments and what it returns.
PLAIN: dict[str, tuple[list[Any], Any]] = {
    "version": ([], _text), "close": ([_p], None), "daemon_version": ([_p], _text),
    "session": ([_p], _u64), "instance": ([_p], _text), "daemon_started": ([_p], _u64),
    "draining": ([_p], _bool), "set_timeout": ([_p, _u32], None),
    "reader_close": ([_p], None), "clear_stream": ([_p], None),
}


def declare(lib: C.CDLL) -> None:
    """Give every function its types. AttributeError: the library does not have it."""
    for name, arguments in CALLS.items():
        function = getattr(lib, "shardd_" + name)
        function.argtypes, function.restype = [*arguments, _err], _int
    for name, arguments in OPS.items():
        function = getattr(lib, "shardd_" + name + "_submit")
        function.argtypes, function.restype = [_p, *arguments, _ticket, _err], _int
    for name, (given, result) in PLAIN.items():
        function = getattr(lib, "shardd_" + name)
        function.argtypes, function.restype = given, result
