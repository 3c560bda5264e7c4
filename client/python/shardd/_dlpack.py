"""A producer of DLPack capsules in plain Python.

The managed tensor and all it points to live in ``_lent`` until the consumer calls the
deleter; as long keeps it @owner alive, by which shardd.memory knows that somebody looks.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

_READ_ONLY = 1


class _Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("device_type", C.c_int32), ("device_id", C.c_int32),
                ("ndim", C.c_int32), ("code", C.c_uint8), ("bits", C.c_uint8),
                ("lanes", C.c_uint16), ("shape", C.POINTER(C.c_int64)),
                ("strides", C.POINTER(C.c_int64)), ("byte_offset", C.c_uint64)]


class _Managed(C.Structure):
    _fields_ = [("tensor", _Tensor), ("context", C.c_void_p), ("deleter", C.c_void_p)]


class _Versioned(C.Structure):
    _fields_ = [("major", C.c_uint32), ("minor", C.c_uint32), ("context", C.c_void_p),
                ("deleter", C.c_void_p), ("flags", C.c_uint64), ("tensor", _Tensor)]


_lent: dict[int, tuple[Any, ...]] = {}
_api = C.pythonapi
_new = C.PYFUNCTYPE(C.py_object, C.c_void_p, C.c_char_p, C.c_void_p)(("PyCapsule_New", _api))
# As a bare address: the capsule is being destroyed, a new reference would revive it.
_valid = C.PYFUNCTYPE(C.c_int, C.c_void_p, C.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = C.PYFUNCTYPE(C.c_void_p, C.c_void_p, C.c_char_p)(("PyCapsule_GetPointer", _api))


def _delete(managed: int) -> None:
    _lent.pop(managed, None)


def _unused(capsule: int) -> None:
    """The capsule ends and nobody took it: a consumer would have renamed it."""
    for name in (b"dltensor", b"dltensor_versioned"):
        if _valid(capsule, name):
            _lent.pop(_pointer(capsule, name), None)


_deleter, _destructor = (C.CFUNCTYPE(None, C.c_void_p)(f) for f in (_delete, _unused))
# Consumers may free tensors while the interpreter ends: these two must outlive everything.
for _kept in (_deleter, _destructor):
    _api.Py_IncRef(C.py_object(_kept))


def capsule(address: int, shape: Sequence[int], dtype: tuple[int, int], device: tuple[int, int],
            owner: Any, versioned: bool, writable: bool) -> Any:
    """A capsule of the elements at @address. @dtype: DLPack's (code, bits). @device: its (type,
    number)."""
    n = len(shape)
    extents, strides, step = (C.c_int64 * max(1, n))(*shape), (C.c_int64 * max(1, n))(), 1
    for i in reversed(range(n)):
        strides[i] = step
        step *= max(1, shape[i])
    code, bits = dtype
    tensor = _Tensor(address, *device, n, code, bits, 1, extents, strides, 0)
    deleter = C.cast(_deleter, C.c_void_p)
    managed: Any
    if versioned:
        managed = _Versioned(1, 0, None, deleter, 0 if writable else _READ_ONLY, tensor)
    else:
        managed = _Managed(tensor, None, deleter)
    at = C.addressof(managed)
    _lent[at] = (managed, extents, strides, owner)
    return _new(at, b"dltensor_versioned" if versioned else b"dltensor",
                C.cast(_destructor, C.c_void_p))
