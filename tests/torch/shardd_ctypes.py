"""As much of libshardd's C interface as these tests need, through ctypes.

    client = Client(socket, job, rank, world)
    unit = client.register("block", {"weight": (3, 5)}, optimizer=Optimizer(kind=ADAMW, lr=0.1))
    unit.initialise({"weight": tensor})
    tensors = unit.gather()     # views of what the daemon gathered
    unit.reduce({"weight": gradient})
    client.step()
"""

import ctypes as C
import os
import subprocess
import tempfile

import torch

HERE = os.path.dirname(os.path.abspath(__file__))

FP32, BF16, FP16 = 1, 2, 3
TYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}
SGD, ADAMW, ADAM = 1, 2, 3
AT_STEP, IN_BACKWARD = 1, 2
FLAT, DIM0 = 1, 2
SHARD, REPLICATE = 1, 2
FAIRSCALE, FSDP2, DDP = 1, 4, 5
WORLD = 0


class Error(C.Structure):
    _fields_ = [("code", C.c_int), ("native", C.c_int), ("domain", C.c_char * 16),
                ("field", C.c_char * 96), ("text", C.c_char * 512)]


class Options(C.Structure):
    _fields_ = [("size", C.c_size_t), ("socket", C.c_char_p), ("name", C.c_char_p),
                ("connect_timeout_ms", C.c_uint32), ("handover", C.c_int),
                ("device", C.c_char_p)]


class Job(C.Structure):
    _fields_ = [("size", C.c_size_t), ("name", C.c_char_p), ("world_size", C.c_uint32),
                ("rank", C.c_uint32), ("lifetime", C.c_int), ("quota_bytes", C.c_uint64),
                ("ttl_s", C.c_uint32), ("op_timeout_ms", C.c_uint32), ("allow_torn", C.c_bool)]


class Tensor(C.Structure):
    _fields_ = [("name", C.c_char_p), ("shape", C.POINTER(C.c_uint64)), ("dims", C.c_uint32),
                ("init", C.c_int), ("a", C.c_double), ("b", C.c_double), ("frozen", C.c_bool),
                ("alias_of", C.c_char_p), ("alias_unit", C.c_char_p),
                ("has_weight_decay", C.c_bool), ("weight_decay", C.c_double),
                ("has_lr_factor", C.c_bool), ("lr_factor", C.c_double),
                ("strides", C.POINTER(C.c_uint64))]


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
                ("force_sum", C.c_bool), ("buffers", C.c_void_p), ("n_buffers", C.c_size_t),
                ("reshard", C.c_int), ("guarded", C.c_bool), ("div_mode", C.c_int)]


class UnitInfo(C.Structure):
    _fields_ = [("unit", C.c_uint32), ("elements", C.c_uint64), ("shard_elements", C.c_uint64),
                ("initialised", C.c_bool), ("optimizer_steps", C.c_uint64),
                ("gradient_elements", C.c_uint64), ("packed_elements", C.c_uint64)]


class Place(C.Structure):
    _fields_ = [("unit", C.c_uint32), ("offset", C.c_uint64), ("elements", C.c_uint64),
                ("shard_offset", C.c_uint64), ("shard_elements", C.c_uint64)]


class DdpSpec(C.Structure):
    _fields_ = [("size", C.c_size_t), ("group", C.c_uint32), ("units", C.POINTER(C.c_uint32)),
                ("n_units", C.c_size_t), ("sparse", C.c_void_p), ("n_sparse", C.c_size_t),
                ("bucket_bytes", C.c_uint64), ("first_bucket_bytes", C.c_uint64),
                ("find_unused", C.c_bool), ("static_graph", C.c_bool),
                ("bucket_limits", C.c_void_p), ("n_bucket_limits", C.c_size_t)]


class DdpView(C.Structure):
    _fields_ = [("unit", C.c_uint32), ("tensor", C.c_uint32), ("bucket", C.c_uint32),
                ("data", C.c_void_p), ("elements", C.c_uint64)]


class Failed(Exception):
    pass


STRUCTS = {"error": Error, "options": Options, "job": Job, "tensor": Tensor,
           "optimizer": Optimizer, "unit_spec": UnitSpec, "unit_info": UnitInfo,
           "tensor_place": Place, "ddp_spec": DdpSpec, "ddp_view": DdpView}


def other_sizes():
    """Structs above that are not as large as those of shardd.h, by the C compiler."""
    lines = ["#include <shardd/shardd.h>", "#include <stdio.h>", "int main(void) {"]
    lines += ['printf("%%zu\\n", sizeof(struct shardd_%s));' % name for name in STRUCTS]
    include = os.path.join(HERE, "..", "..", "client", "include")
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "sizes")
        subprocess.run(["cc", "-I" + include, "-xc", "-", "-o", program], check=True,
                       input="\n".join(lines + ["}"]), text=True)
        sizes = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [name for name, size in zip(STRUCTS, sizes.split())
            if C.sizeof(STRUCTS[name]) != int(size)]


class Library:
    """Calls by name without "shardd_"; a negative result is an exception."""

    def __init__(self):
        self.lib = C.CDLL(os.path.join(os.environ["SHARDD_LIB_DIR"], "libshardd.so"))

    def call(self, name, *arguments):
        error = Error()
        function = getattr(self.lib, "shardd_" + name)
        function.restype = C.c_int
        if function(*arguments, C.byref(error)) < 0:
            raise Failed("%s: %s" % (name, error.text.decode()))


class Client:
    def __init__(self, socket, job, rank, world):
        self.library = Library()
        self.handle = C.c_void_p()
        self.rank, self.world = rank, world
        options = Options(C.sizeof(Options), socket.encode(), b"test")
        self.call0("connect", C.byref(options), C.byref(self.handle))
        self.call("join", C.byref(Job(C.sizeof(Job), job.encode(), world, rank, 1, 0, 0, 50000)),
                  None)

    def call0(self, name, *arguments):
        self.library.call(name, *arguments)

    def call(self, name, *arguments):
        self.library.call(name, self.handle, *arguments)

    def register(self, name, shapes, **settings):
        return Unit(self, name, shapes, **settings)

    def step(self):
        self.call("step", C.c_uint32(WORLD), None)

    def barrier(self):
        self.call("barrier", C.c_uint32(WORLD))

    def leave(self):
        self.call("leave")
        self.library.lib.shardd_close(self.handle)


def view(address, dtype, elements):
    """A tensor of that memory."""
    size = torch.empty(0, dtype=dtype).element_size() * elements
    return torch.frombuffer((C.c_char * size).from_address(address), dtype=dtype)


class Unit:
    """@shapes: name -> shape. @frozen: names. @tied: name -> the name it stands for."""

    def __init__(self, client, name, shapes, frozen=(), tied=None, optimizer=None, **settings):
        self.client, self.shapes, self.tied = client, shapes, dict(tied or {})
        self.frozen = set(frozen)
        self.compute = settings.get("compute_dtype", FP32)
        self.gradient = settings.get("gradient_dtype", self.compute)
        tensors = (Tensor * (len(shapes) + len(self.tied)))()
        every = dict(shapes, **{a: shapes[b] for a, b in self.tied.items()})
        for tensor, (key, shape) in zip(tensors, every.items()):
            tensor.name, tensor.dims = key.encode(), len(shape)
            tensor.shape = (C.c_uint64 * max(1, len(shape)))(*shape)
            tensor.frozen = key in self.frozen
            if key in self.tied:
                tensor.alias_of = self.tied[key].encode()
        spec = UnitSpec(C.sizeof(UnitSpec), name.encode(), tensors, len(tensors), **settings)
        if optimizer:
            spec.optimizer = optimizer
        self.info = UnitInfo()
        client.call("register", C.byref(spec), C.c_size_t(1), C.byref(self.info))
        self.id = C.c_uint32(self.info.unit)
        self.place(list(every))

    def place(self, names):
        """Where each tensor is in what gather hands out and in a gradient buffer."""
        places = (Place * len(names))()
        self.client.call("tensor_places", self.id, places, C.c_size_t(len(names)))
        self.at = {name: place.offset for name, place in zip(names, places)}
        for alias, name in self.tied.items():
            assert self.at[alias] == self.at[name]

    def numel(self, key):
        return torch.Size(self.shapes[key]).numel()

    def initialise(self, values):
        """All parameters from rank 0's @values; the optimizer's state becomes zero."""
        buffer, data = C.c_uint64(), C.c_void_p()
        if self.client.rank:
            return self.client.call("init_broadcast", self.id, C.c_uint32(0), buffer)
        flat = torch.cat([values[key].flatten() for key in self.shapes])
        size = C.c_uint64(4 * flat.numel())
        self.client.call("alloc", size, C.byref(buffer), C.byref(data))
        view(data.value, torch.float32, flat.numel())[:] = flat
        self.client.call("init_broadcast", self.id, C.c_uint32(0), buffer)
        self.client.call("free", buffer)

    def gather(self):
        data = C.c_void_p()
        self.client.call("gather", self.id, C.byref(data))
        flat = view(data.value, TYPES[self.compute], self.info.elements)
        return {key: flat[self.at[key]:self.at[key] + self.numel(key)].view(shape)
                for key, shape in self.shapes.items()}

    def master(self):
        """Copies of the parameters as the daemon keeps them, in fp32 (collective)."""
        data = C.c_void_p()
        self.client.call("summon", self.id, C.byref(data))
        flat = view(data.value, torch.float32, self.info.elements)
        values = {key: flat[self.at[key]:self.at[key] + self.numel(key)].clone().view(shape)
                  for key, shape in self.shapes.items()}
        self.client.call("return", self.id, C.c_bool(False))
        return values

    def release(self):
        self.client.call("release", self.id)

    def reduce(self, gradients):
        data = C.c_void_p()
        self.client.call("gradient", self.id, C.byref(data))
        flat = view(data.value, TYPES[self.gradient], self.info.gradient_elements).zero_()
        for key in self.shapes:
            if key not in self.frozen:
                flat[self.at[key]:self.at[key] + self.numel(key)] = gradients[key].flatten()
        self.client.call("reduce", self.id)


class Ddp:
    """Units whose gradients are reduced in buckets, small enough that there are several."""

    def __init__(self, client, units):
        self.client, self.units = client, {unit.info.unit: unit for unit in units}
        ids = (C.c_uint32 * len(self.units))(*self.units)
        spec = DdpSpec(C.sizeof(DdpSpec), WORLD, ids, len(ids), bucket_bytes=20000,
                       first_bucket_bytes=4000)
        self.id, n = C.c_uint32(), C.c_uint32()
        client.call("ddp_create", C.byref(spec), C.byref(self.id), C.byref(n))
        self.views = (DdpView * n.value)()

    def buckets(self):
        """How many there are; one in the first pass."""
        return 1 + max(v.bucket for v in self.views)

    def reduce(self, gradients):
        """Those of all units, ready one after the other, the last first."""
        n = C.c_uint32(len(self.views))
        self.client.call("ddp_forward", self.id, self.views, n)
        self.client.call("ddp_backward", self.id, None, C.c_size_t(0), None, C.c_size_t(0))
        for i in reversed(range(len(self.views))):
            at, unit = self.views[i], self.units[self.views[i].unit]
            g = gradients[list(unit.shapes)[at.tensor]].flatten()
            assert g.numel() == at.elements
            view(at.data, TYPES[unit.gradient], at.elements)[:] = g
            self.client.call("ddp_ready", self.id, C.byref(C.c_uint32(i)), C.c_size_t(1))
        self.client.call("ddp_finish", self.id, None, C.c_uint32(0))
