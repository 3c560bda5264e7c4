"""Training by hand over the base package: units, their gradients, and DDP's buckets, which the
package does not have.

    client = Client(socket, job, rank, world)
    unit = client.unit("block", {"weight": (3, 5)}, optimizer=shardd.OptimizerSpec(...))
    unit.initialise({"weight": tensor})
    tensors = unit.gather()     # views of what the daemon gathered
    unit.reduce({"weight": gradient})
    client.step()
"""

import ctypes as C
import os
import subprocess
import tempfile

import support
import torch

import shardd

TYPES = {shardd.Dtype.FP32: torch.float32, shardd.Dtype.BF16: torch.bfloat16}


class DdpView(C.Structure):
    _fields_ = [("unit", C.c_uint32), ("tensor", C.c_uint32), ("bucket", C.c_uint32),
                ("data", C.c_void_p), ("elements", C.c_uint64)]


STRUCTS = {"ddp_view": DdpView}


def other_sizes():
    """Structs above that are not as large as those of shardd.h, by the C compiler."""
    lines = ["#include <shardd/shardd.h>", "#include <stdio.h>", "int main(void) {"]
    lines += ['printf("%%zu\\n", sizeof(struct shardd_%s));' % name for name in STRUCTS]
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "sizes")
        subprocess.run(["cc", f"-I{support.ROOT}/client/include", "-xc", "-", "-o", program],
                       check=True, input="\n".join([*lines, "}"]), text=True)
        sizes = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [name for name, size in zip(STRUCTS, sizes.split())
            if C.sizeof(STRUCTS[name]) != int(size)]


class Client(shardd.Client):
    def __init__(self, socket, job, rank, world):
        super().__init__(socket, name="test")
        self.join(job, world, rank, shardd.Lifetime.EPHEMERAL, op_timeout=50)

    def unit(self, name, shapes, **settings):
        return Unit(self, name, shapes, **settings)


def view(address, dtype, elements):
    """A tensor of that memory."""
    return torch.frombuffer((C.c_char * (dtype.itemsize * elements)).from_address(address),
                            dtype=dtype)


class Unit:
    """@shapes: name -> shape. @frozen: names. @tied: name -> the name it stands for."""

    def __init__(self, client, name, shapes, frozen=(), tied=None, **settings):
        self.client, self.shapes, self.frozen = client, shapes, set(frozen)
        tied = dict(tied or {})
        tensors = [shardd.TensorSpec(key, shape, frozen=key in self.frozen)
                   for key, shape in shapes.items()]
        tensors += [shardd.TensorSpec(alias, shapes[key], alias_of=key)
                    for alias, key in tied.items()]
        [self.unit] = client.register([shardd.UnitSpec(name, tensors, **settings)])
        self.id, spec = self.unit.id, self.unit.spec
        self.compute, self.gradient = TYPES[spec.compute_dtype], TYPES[spec.gradients]
        self.at = {name: place.offset for name, place in self.unit.places.items()}
        for alias, key in tied.items():
            assert self.at[alias] == self.at[key]

    def part(self, flat, key):
        """The tensor @key in what gather, summon or gradient have."""
        shape = self.shapes[key]
        return flat[self.at[key]:self.at[key] + torch.Size(shape).numel()].view(shape)

    def initialise(self, values):
        """All parameters from rank 0's @values; the optimizer's state becomes zero."""
        if self.client.member.rank:
            return self.unit.init_broadcast(0, None)
        flat = torch.cat([values[key].flatten() for key in self.shapes])
        with self.client.alloc((flat.numel(),)) as buffer:
            view(buffer.memory.address, torch.float32, flat.numel())[:] = flat
            self.unit.init_broadcast(0, buffer)

    def gather(self):
        flat = view(self.unit.gather().address, self.compute, self.unit.elements)
        return {key: self.part(flat, key) for key in self.shapes}

    def release(self):
        self.unit.release()

    def master(self):
        """Copies of the parameters as the daemon keeps them, in fp32 (collective)."""
        flat = view(self.unit.summon().address, torch.float32, self.unit.elements)
        values = {key: self.part(flat, key).clone() for key in self.shapes}
        self.unit.give_back()
        return values

    def reduce(self, gradients):
        flat = view(self.unit.gradient().address, self.gradient, self.unit.gradient_elements)
        flat.zero_()
        for key in self.shapes:
            if key not in self.frozen:
                self.part(flat, key)[:] = gradients[key]
        self.unit.reduce()


class Ddp:
    """Units whose gradients are reduced in buckets, small enough that there are several."""

    def __init__(self, client, units):
        self.client, self.units = client, {unit.id: unit for unit in units}
        ids = (C.c_uint32 * len(self.units))(*self.units)
        self.id, n = client.submit("ddp_create", shardd.WORLD, ids, len(ids), bucket_bytes=20000,
                                   first_bucket_bytes=4000,
                                   finish=lambda r: (r.ddp, r.tensors)).wait()
        self.views = (DdpView * n)()

    def buckets(self):
        """How many there are; one in the first pass."""
        return 1 + max(v.bucket for v in self.views)

    def reduce(self, gradients):
        """Those of all units, ready one after the other, the last first."""
        self.client.do("ddp_forward", self.id, C.addressof(self.views), len(self.views))
        self.client.do("ddp_backward", self.id)
        for i in reversed(range(len(self.views))):
            at, unit = self.views[i], self.units[self.views[i].unit]
            g = gradients[list(unit.shapes)[at.tensor]].flatten()
            assert g.numel() == at.elements
            view(at.data, unit.gradient, at.elements)[:] = g
            self.client.do("ddp_ready", self.id, (C.c_uint32 * 1)(i), 1)
        self.client.do("ddp_finish", self.id)
