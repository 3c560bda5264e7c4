#!/usr/bin/env python3
"""A trainer without libshardd: what any language does that has gRPC, sockets and mmap.

    pip install grpcio grpcio-tools
    mkdir -p stubs
    python -m grpc_tools.protoc -I proto --python_out=stubs --grpc_python_out=stubs \\
        shardd/v1/shardd.proto shardd/v1/status.proto shardd/v1/publication.proto
    export PYTHONPATH=stubs
    python client/python/examples/grpc_trainer.py /run/shardd/shardd.sock 0 2 &
    python client/python/examples/grpc_trainer.py /run/shardd/shardd.sock 1 2

Run these at the top of the source tree. Two ranks train a unit of 231 numbers towards 0 with AdamW,
and print a checksum of the parameters after each step; docs/languages.md explains the calls. Memory
is that of the host, without GPUs. The stubs are in package shardd.v1, so the package of
client/python must not be installed beside them.
"""

import argparse
import array
import mmap
import os
import socket
import struct
import sys
import zlib

import grpc
from shardd.v1 import shardd_pb2 as api
from shardd.v1 import shardd_pb2_grpc as services

HEADER = struct.Struct("=IHHII")  # of each frame of the local channel: proto/local_abi.h
MAGIC, HELLO, WELCOME, GET_SLAB, SLAB, ERROR = 0x31444853, 1, 2, 3, 4, 5


class LocalChannel:
    """The second socket, over which descriptors of memory come."""

    def __init__(self, path, token):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._slabs = {}
        self._ask(HELLO, struct.pack("=II16s", 1, 0, token), WELCOME)

    def _ask(self, kind, body, answer):
        """Send a frame. Return the body of the answer, and its descriptors."""
        self._socket.sendall(HEADER.pack(MAGIC, kind, HEADER.size + len(body), 0, 0) + body)
        # a descriptor comes with the first byte of its frame
        got, fds, _, _ = socket.recv_fds(self._socket, HEADER.size, 1)
        got += self._receive(HEADER.size - len(got))
        _, kind, size, _, _ = HEADER.unpack(got)
        body = self._receive(size - HEADER.size)
        if kind == ERROR:
            raise OSError(body[8:].split(b"\0")[0].decode())
        if kind != answer:
            raise OSError(f"a frame of type {kind} in place of {answer}")
        return body, fds

    def _receive(self, size):
        got = b""
        while len(got) < size:
            more = self._socket.recv(size - len(got))
            if not more:
                raise ConnectionError("the daemon has closed the local channel")
            got += more
        return got

    def memory(self, place):
        """What an op has handed out, as a memoryview of floats."""
        if place.slab not in self._slabs:  # ask once for each: it stays mapped
            body, (fd,) = self._ask(GET_SLAB, struct.pack("=II", place.slab, 0), SLAB)
            _, writable, size, _, _ = struct.unpack("=IIQII", body)
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._slabs[place.slab] = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
            os.close(fd)
        whole = memoryview(self._slabs[place.slab])
        return whole[place.offset:place.offset + place.bytes].cast("f")


class Trainer:
    def __init__(self, path):
        # A connection of its own, and so a session of its own, also beside other channels.
        self._channel = grpc.insecure_channel(
            "unix://" + os.path.abspath(path), [("grpc.use_local_subchannel_pool", 1)])
        self.jobs = services.JobServiceStub(self._channel)
        self.units = services.UnitServiceStub(self._channel)
        self.training = services.TrainingServiceStub(self._channel)
        session = services.SessionServiceStub(self._channel)
        attached = session.Attach(api.AttachRequest(client_name="grpc_trainer", protocol=1))
        self.local = LocalChannel(path, attached.token)
        # An open call: a channel without one closes its connection after 30 minutes, and the
        # session would end with it. Its messages say why an epoch has ended.
        self.events = session.Watch(api.WatchRequest())
        self._epoch = self._seq = 0

    def join(self, job, rank, world):
        joined = self.jobs.Join(api.JoinRequest(
            job=api.JobSpec(name=job, world_size=world), rank=rank))
        self._epoch, self._seq = joined.epoch, 0
        return joined

    def op(self):
        """The header of the next op. Ops run in this order, also if calls overtake each other."""
        self._seq += 1
        return api.OpHeader(epoch=self._epoch, seq=self._seq)

    def step(self, unit, rank, number):
        """One step. Return the parameters before it."""
        training = self.training
        place = training.Gather(api.GatherRequest(header=self.op(), unit=unit.unit)).place
        parameters = array.array("f", self.local.memory(place)[:unit.elements])
        training.Release(api.ReleaseRequest(header=self.op(), unit=unit.unit))
        place = training.GradientBuffer(
            api.GradientBufferRequest(header=self.op(), unit=unit.unit)).place
        self.local.memory(place)[:unit.gradient_elements] = array.array(
            "f", (p * (rank + 1) + i / 1024 for i, p in enumerate(parameters)))
        training.Reduce(api.ReduceRequest(header=self.op(), unit=unit.unit))
        training.Step(api.StepRequest(header=self.op()))
        training.Commit(api.CommitRequest(header=self.op(), step=number))
        return parameters


def model():
    adamw = api.Optimizer(kind=api.Optimizer.KIND_ADAMW, lr=0.05, weight_decay=0.01, beta1=0.9,
                          beta2=0.999, eps=1e-8)
    uniform = api.Init(kind=api.Init.KIND_UNIFORM, a=-1, b=1)
    return api.UnitSpec(name="block", optimizer=adamw, tensors=[
        api.TensorSpec(name="w", shape=[32, 7], init=uniform),
        api.TensorSpec(name="b", shape=[7], init=uniform)])


def train(args):
    trainer = Trainer(args.socket)
    joined = trainer.join(args.job, args.rank, args.world)
    unit, = trainer.units.RegisterUnits(api.RegisterUnitsRequest(units=[model()])).units
    if not unit.initialised:  # else an earlier life of the job left its parameters
        trainer.units.Initialise(api.InitialiseRequest(
            header=trainer.op(), unit=unit.unit, seed=api.Seed(seed=args.seed)))
    for number in range(joined.step + 1, args.steps + 1):
        parameters = trainer.step(unit, args.rank, number)
        print(f"step {number} crc32 {zlib.crc32(parameters):08x}", flush=True)
    trainer.jobs.Leave(api.LeaveRequest())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("socket", help="of the daemon")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int, help="number of ranks")
    parser.add_argument("--job", default="grpc_trainer")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    try:
        train(parser.parse_args())
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")


if __name__ == "__main__":
    main()
