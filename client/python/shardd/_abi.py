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
                ("connect_timeout_ms", C.c_uint32), ("handover", C.c_int), ("device", C.c_char_p),
                ("on_stall", C.c_void_p), ("stall_data", C.c_void_p), ("stall_ms", C.c_uint32),
                ("reconnect_ms", C.c_uint32), ("on_connection", C.c_void_p),
                ("connection_data", C.c_void_p)]


class ConnectionEvent(C.Structure):
    _fields_ = [("size", C.c_size_t), ("state", C.c_int), ("attempt", C.c_uint32),
                ("elapsed_ms", C.c_uint32), ("text", C.c_char_p)]


OnConnection = C.CFUNCTYPE(None, C.c_void_p, C.POINTER(ConnectionEvent))


class Device(C.Structure):
    _fields_ = [("id", C.c_char * 32), ("backend", C.c_char * 16), ("uuid", C.c_char * 48),
                ("streams", C.c_bool)]


class Info(C.Structure):
    _fields_ = [("size", C.c_size_t), ("session", C.c_uint64), ("daemon_version", C.c_char_p),
                ("instance", C.c_char_p), ("daemon_started", C.c_uint64), ("draining", C.c_bool),
                ("device", Device)]


class Checkpoints(C.Structure):
    _fields_ = [("size", C.c_size_t), ("path", C.c_char_p), ("every_steps", C.c_uint64),
                ("every_s", C.c_uint64), ("keep", C.c_uint32), ("bytes_per_s", C.c_uint64)]


class Job(C.Structure):
    _fields_ = [("size", C.c_size_t), ("name", C.c_char_p), ("world_size", C.c_uint32),
                ("rank", C.c_uint32), ("lifetime", C.c_int), ("quota_bytes", C.c_uint64),
                ("ttl_s", C.c_uint32), ("op_timeout_ms", C.c_uint32), ("allow_torn", C.c_bool),
                ("is_private", C.c_bool), ("on_existing", C.c_int), ("run", C.c_char_p),
                ("resume", C.c_int), ("min_ranks", C.c_uint32), ("max_ranks", C.c_uint32),
                ("join_grace_ms", C.c_uint32), ("checkpoints", C.POINTER(Checkpoints)),
                ("local_rank", C.c_uint32), ("local_world_size", C.c_uint32),
                ("priority", C.c_int32), ("wait_for_memory_ms", C.c_uint32)]


class Loaded(C.Structure):
    _fields_ = [("size", C.c_size_t), ("step", C.c_uint64), ("bytes", C.c_uint64),
                ("world_size", C.c_uint32), ("blobs_left_out", C.c_uint32),
                ("buffers_left_out", C.c_uint32), ("buffers_missing", C.c_uint32)]


class Membership(C.Structure):
    _fields_ = [("epoch", C.c_uint64), ("world_size", C.c_uint32), ("rank", C.c_uint32),
                ("resumed", C.c_bool), ("has_commit", C.c_bool), ("torn", C.c_bool),
                ("step", C.c_uint64), ("blob", C.c_void_p), ("blob_bytes", C.c_size_t),
                ("created", C.c_bool), ("has_step", C.c_bool), ("committed_step", C.c_uint64),
                ("blob_step", C.c_uint64)]


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
                ("complete", C.c_bool), ("dampening", C.c_double)]


class UnitSpec(C.Structure):
    _fields_ = [("size", C.c_size_t), ("name", C.c_char_p), ("tensors", C.POINTER(Tensor)),
                ("n_tensors", C.c_size_t), ("group", C.c_uint32), ("storage_dtype", C.c_int),
                ("compute_dtype", C.c_int),
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
                ("gradient_offset", C.c_uint64), ("optimizer_steps", C.c_uint64),
                ("ddp", C.c_uint32), ("tensors", C.c_uint32), ("last", C.c_uint32),
                ("surrogates", C.c_uint64), ("reserved", C.c_uint64 * 8)]


class StepSettings(C.Structure):
    _fields_ = [("lr", C.c_double), ("lr_fp32", C.c_bool), ("weight_decay", C.c_double),
                ("momentum", C.c_double), ("dampening", C.c_double), ("nesterov", C.c_bool),
                ("beta1", C.c_double), ("beta2", C.c_double), ("eps", C.c_double),
                ("maximize", C.c_bool), ("units", C.POINTER(C.c_uint32)),
                ("tensors", C.POINTER(C.c_uint32)), ("n", C.c_size_t)]


class ShardPiece(C.Structure):
    _fields_ = [("tensor", C.c_uint32), ("first", C.c_uint64), ("elements", C.c_uint64),
                ("at", C.c_uint64)]


class BaseTensor(C.Structure):
    _fields_ = [("unit", C.c_char_p), ("name", C.c_char_p), ("shape", C.POINTER(C.c_uint64)),
                ("strides", C.POINTER(C.c_uint64)), ("dims", C.c_uint32), ("frozen", C.c_bool),
                ("elements", C.c_uint64), ("dtype", C.c_int), ("data", C.c_void_p)]


class Base(C.Structure):
    _fields_ = [("tensors", C.POINTER(BaseTensor)), ("n_tensors", C.c_size_t)]


class PublishedTensor(C.Structure):
    _fields_ = [("name", C.c_char_p), ("dtype", C.c_int), ("dims", C.c_uint32),
                ("shape", C.POINTER(C.c_uint64)), ("bytes", C.c_uint64), ("data", C.c_void_p)]


class Generation(C.Structure):
    _fields_ = [("number", C.c_uint64), ("step", C.c_uint64), ("checksum", C.c_uint32),
                ("tensors", C.POINTER(PublishedTensor)), ("n_tensors", C.c_size_t),
                ("moved", C.c_bool), ("layout", C.c_uint64), ("uuid", C.c_char_p)]


class Delta(C.Structure):
    _fields_ = [("base", C.c_uint64), ("number", C.c_uint64), ("changed", C.c_uint64),
                ("elements", C.c_uint64), ("bytes", C.c_uint64), ("data", C.c_void_p)]


class FetchOptions(C.Structure):
    _fields_ = [("size", C.c_size_t), ("newer_than", C.c_uint64), ("wait_ms", C.c_uint32),
                ("bytes_per_second", C.c_uint64), ("buffer", C.c_void_p),
                ("buffer_bytes", C.c_uint64)]


class RegionPart(C.Structure):
    _fields_ = [("name", C.c_char_p), ("offset", C.c_uint64), ("bytes", C.c_uint64)]


class RegionFault(C.Structure):
    _fields_ = [("expected", C.c_int32), ("happened", C.c_int32), ("text", C.c_char * 888)]


class RegionOptions(C.Structure):
    _fields_ = [("size", C.c_size_t), ("unit", C.c_char_p), ("bytes", C.c_uint64),
                ("parts", C.POINTER(RegionPart)), ("n_parts", C.c_size_t),
                ("fault", C.POINTER(RegionFault))]


_u32, _u64, _int, _size = C.c_uint32, C.c_uint64, C.c_int, C.c_size_t
_bool, _double, _text, _p = C.c_bool, C.c_double, C.c_char_p, C.c_void_p
_ticket, _units, _err = C.POINTER(C.c_uint64), C.POINTER(C.c_uint32), C.POINTER(Error)

# Arguments of functions that return 0 or a negative code and take an error last.
CALLS: dict[str, tuple[object, ...]] = {
    "connect": (C.POINTER(Options), C.POINTER(_p)),
    "status": (_p, _text, C.POINTER(_p)),
    "blame": (_p, C.c_char_p, C.c_size_t),
    "join": (_p, C.POINTER(Job), C.POINTER(Membership)),
    "set_stream": (_p, _p),
    "copy": (_p, _int, _p, _p, _size),
    "leave": (_p,),
    "load_checkpoint": (_p, _text, _text, _p, _p),
    "group_create": (_p, _text, _units, _size, _units),
    "register": (_p, C.POINTER(UnitSpec), _size, C.POINTER(UnitInfo)),
    "tensor_places": (_p, _u32, C.POINTER(TensorPlace), _size),
    "buffer_places": (_p, _u32, C.POINTER(BufferPlace), _size),
    "shard_pieces": (_p, _u32, C.POINTER(ShardPiece), _size, C.POINTER(_size)),
    "publication_declare": (_p, _text, _text, C.POINTER(_u64)),
    "publication_drop": (_p, _text, _text),
    "publication_publish": (_p, _text, _text, _u32, C.POINTER(_u64)),
    "base_open": (_p, _text, C.POINTER(C.POINTER(Base))),
    "live_open": (_p, _text, _text, _u32, C.POINTER(_p)),
    "publication_fetch": (_p, _text, _text, C.POINTER(FetchOptions), C.POINTER(_p),
                          C.POINTER(Generation)),
    "live_acquire": (_p, _u32, C.POINTER(Generation)),
    "live_acquire_newer": (_p, _u64, _u32, C.POINTER(Generation)),
    "live_release": (_p,),
    "live_fd": (_p, C.POINTER(_int)),
    "live_delta": (_p, _u64, C.POINTER(Delta)),
    "delta_apply": (_p, _u64, C.POINTER(PublishedTensor), _size, C.POINTER(_p), _u32),
    "delta_values": (_p, _u64, C.POINTER(PublishedTensor), _size, _u32, _p, _p, _u64,
                     C.POINTER(_u64)),
    "region_new": (C.POINTER(RegionOptions), C.POINTER(_p), C.POINTER(_p)),
    "unit_unused": (_p, _u32, C.POINTER(_bool), _size),
    "unit_steps": (_p, _u32, C.POINTER(_u64), _size),
    "get_info": (_p, C.POINTER(Info)),
    "wait": (_p, _u64, _int, C.POINTER(Result)),
}

# The fields of every verb's options, after their size.
OPS: dict[str, list[tuple[str, Any]]] = {
    "init": [("unit", _u32), ("from", _int), ("seed", _u64), ("root", _u32), ("buffer", _u64)],
    "gather": [("unit", _u32)],
    "release": [("unit", _u32)],
    "begin_pass": [("unit", _u32), ("pass", _int)],
    "end_pass": [("unit", _u32), ("pass", _int), ("sync", _bool)],
    "set_reshard": [("units", _units), ("n_units", _size), ("reshard", _int)],
    "set_factors": [("unit", _u32), ("pre_divide", _double), ("post_divide", _double),
                    ("divide_factor", _double), ("force_sum", _bool)],
    "set_prefetch": [("unit", _u32), ("pass", _int), ("units", _units), ("n_units", _size)],
    "gradient": [("unit", _u32)],
    "alloc": [("bytes", _u64)],
    "free": [("buffer", _u64), ("units", _units), ("n_units", _size)],
    "reduce": [("unit", _u32), ("unused", _units), ("n_unused", _size), ("more", _bool),
               ("deferred", _bool), ("unit_unused", _bool)],
    "accumulate": [("unit", _u32)],
    "all_reduce": [("group", _u32), ("buffer", _u64), ("offset", _u64), ("count", _u64),
                   ("dtype", _int), ("op", _int)],
    "broadcast": [("group", _u32), ("buffer", _u64), ("offset", _u64), ("bytes", _u64),
                  ("root", _u32)],
    "barrier": [("group", _u32)],
    "nop": [],
    "clip": [("group", _u32), ("max_norm", _double), ("norm_type", _double), ("profile", _int),
             ("error_if_nonfinite", _bool), ("units", _units), ("n_units", _size),
             ("whole_job", _bool), ("by_value", _bool), ("value", _double)],
    "unscale": [("group", _u32), ("inv_scale", _double)],
    "step": [("group", _u32), ("lr", C.POINTER(_double)), ("skip_if_found", _bool),
             ("discard", _bool), ("settings", C.POINTER(StepSettings)), ("n_settings", _size),
             ("number", C.POINTER(_u64)), ("blob", _text), ("blob_bytes", _size)],
    "plan_backward": [("group", _u32), ("clip", _p), ("inv_scale", _double),
                      ("lr", C.POINTER(_double)), ("settings", C.POINTER(StepSettings)),
                      ("n_settings", _size)],
    "next_shard": [("group", _u32)],
    "shard_done": [("unit", _u32)],
    "commit": [("step", _u64), ("blob", _text), ("bytes", _size)],
    "unit_buffers": [("unit", _u32)],
    "broadcast_buffers": [("unit", _u32), ("group", _u32), ("root", _u32)],
    "summon": [("unit", _u32), ("state", _u32)],
    "return": [("unit", _u32), ("write", _bool), ("optimizer_steps", C.POINTER(_u64)),
               ("tensor_steps", C.POINTER(_u64)), ("n_tensors", _size)],
    "copy_shard": [("unit", _u32), ("tensor", _u32), ("array", _int), ("write", _bool),
                   ("buffer", _u64), ("offset", _u64), ("elements", _u64)],
    "drop_gradients": [("unit", _u32), ("tensors", _units), ("n_tensors", _size)],
    "convert": [("units", _units), ("n_units", _size), ("layout", _int),
                ("shard_multiple", _u32), ("strategy", _int), ("shard_ranks", _u32),
                ("unfreeze", _units), ("n_unfreeze", _size), ("optimizer_like", _u32)],
    "verify_model": [("group", _u32)],
    "ddp_create": [("group", _u32), ("units", _units), ("n_units", _size), ("sparse", _p),
                   ("n_sparse", _size), ("bucket_bytes", _u64), ("first_bucket_bytes", _u64),
                   ("find_unused", _bool), ("static_graph", _bool),
                   ("bucket_limits", C.POINTER(_u64)), ("n_bucket_limits", _size)],
    "ddp_forward": [("ddp", _u32), ("views", _p), ("n_views", _u32)],
    "ddp_backward": [("ddp", _u32), ("unused", _units), ("n_unused", _size), ("kept", _units),
                     ("n_kept", _size)],
    "ddp_ready": [("ddp", _u32), ("tensors", _units), ("n_tensors", _size), ("sparse", _bool),
                  ("rows", C.POINTER(C.c_int64)), ("n_rows", _size), ("buffer", _u64),
                  ("values_offset", _u64)],
    "ddp_finish": [("ddp", _u32), ("untouched", C.POINTER(C.c_uint8)), ("n_untouched", _u32)],
    "reduce_sparse": [("unit", _u32), ("tensor", _u32), ("rows", C.POINTER(C.c_int64)),
                      ("n_rows", _size), ("buffer", _u64), ("values_offset", _u64)],
    "join_uneven": [("group", _u32), ("divide_by_active", _bool), ("require_even", _bool)],
}


def _options(verb: str, fields: list[tuple[str, Any]]) -> type[C.Structure]:
    return type(verb, (C.Structure,), {"_fields_": [("size", _size), *fields]})


OPTIONS = {verb: _options(verb, fields) for verb, fields in OPS.items()}


def options(verb: str, *values: Any, **named: Any) -> C.Structure:
    """Options of @verb: @values in the order of the fields, and @named ones. TypeError: there is
    no such field."""
    made = OPTIONS[verb]
    for name in named:
        if not hasattr(made, name):
            raise TypeError(f"{verb} has no option '{name}'")
    return made(C.sizeof(made), *values, **named)


STRUCTS: dict[str, Any] = {
    "error": Error, "options": Options, "job": Job, "membership": Membership, "device": Device,
    "tensor": Tensor, "buffer": Buffer, "optimizer": Optimizer, "unit_spec": UnitSpec,
    "unit_info": UnitInfo, "tensor_place": TensorPlace, "buffer_place": BufferPlace,
    "result": Result, "info": Info, "step_settings": StepSettings, "shard_piece": ShardPiece,
    "region_part": RegionPart, "region_fault": RegionFault, "region_options": RegionOptions,
    "base_tensor": BaseTensor, "base": Base,
    "published_tensor": PublishedTensor, "generation": Generation,
    "fetch_options": FetchOptions,
    **{verb + "_options": made for verb, made in OPTIONS.items()},
}

# The rest: arguments and what it returns.
PLAIN: dict[str, tuple[list[Any], Any]] = {
    "version": ([], _text), "close": ([_p], None), "set_timeout": ([_p, _u32], None),
    "live_close": ([_p], None), "base_close": ([_p], None),
    "fetched_free": ([_p], None),
    "region_set": ([_p, C.c_int, _p], None),
}

NO_STREAM = C.c_void_p(-1)  # SHARDD_NO_STREAM
REGION_RELEASED, REGION_GATHERED, REGION_ENDED = range(3)  # enum shardd_region_state


def declare(lib: C.CDLL) -> None:
    """Give every function its types. AttributeError: the library does not have it."""
    for name, arguments in CALLS.items():
        function = getattr(lib, "shardd_" + name)
        function.argtypes, function.restype = [*arguments, _err], _int
    for verb, options_type in OPTIONS.items():
        function = getattr(lib, "shardd_submit_" + verb)
        function.argtypes = [_p, C.POINTER(options_type), _ticket, _err]
        function.restype = _int
    for name, (given, result) in PLAIN.items():
        function = getattr(lib, "shardd_" + name)
        function.argtypes, function.restype = given, result
