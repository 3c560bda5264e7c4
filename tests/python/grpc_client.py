"""What docs/languages.md says of clients with gRPC for Python: run by test_languages.py, in an
environment with grpcio, with the daemon's socket and a folder of stubs. Prints JSON."""

import json
import sys
import time
import zlib

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

TARGET = "unix://" + sys.argv[1]
sys.path.insert(0, sys.argv[2])

from shardd.v1 import publication_pb2 as publications  # noqa: E402
from shardd.v1 import publication_pb2_grpc as publications_grpc  # noqa: E402
from shardd.v1 import shardd_pb2 as api  # noqa: E402
from shardd.v1 import shardd_pb2_grpc as services  # noqa: E402

OWN = ("grpc.use_local_subchannel_pool", 1)


def refused(call, *arguments):
    """The code and text of a call that fails, and its ErrorInfo."""
    try:
        call(*arguments)
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        info = api.ErrorInfo()
        assert status.details[0].Unpack(info)
        return {"code": error.code().name, "text": error.details(), "n": len(status.details),
                "info": json_format.MessageToDict(info)}
    return None


def attach(channel):
    request = api.AttachRequest(client_name="languages", protocol=1)
    return services.SessionServiceStub(channel).Attach(request).session


def channels():
    """Two channels with equal arguments are one connection; others are not."""
    first, second, own = (grpc.insecure_channel(TARGET, options) for options in ([], [], [OWN]))
    attach(first)
    return {"second": refused(attach, second), "own": attach(own) > 0}


def idle():
    """A channel without a call closes its connection when it is idle; with Watch it does not."""
    without, watching = (grpc.insecure_channel(
        TARGET, [OWN, ("grpc.client_idle_timeout_ms", 1000)]) for _ in range(2))
    attach(without)
    attach(watching)
    events = services.SessionServiceStub(watching).Watch(api.WatchRequest())
    time.sleep(2.5)
    attached = {"without": refused(attach, without) is None,
                "with": refused(attach, watching) is None}
    events.cancel()
    return attached


def missing(call, name):
    try:
        call(name)
    except KeyError:
        return True
    return False


def reflection():
    """Calls made of what the daemon says of itself."""
    channel = grpc.insecure_channel(TARGET)
    base = ProtoReflectionDescriptorDatabase(channel)
    pool = descriptor_pool.DescriptorPool(base)

    def call(path, **fields):
        service, method = path.split("/")
        found = pool.FindServiceByName(service).methods_by_name[method]
        request, reply = map(message_factory.GetMessageClass, (found.input_type, found.output_type))
        return channel.unary_unary("/" + path, request.SerializeToString, reply.FromString)(
            request(**fields))

    statuses = call("grpc.health.v1.Health/List").statuses
    return {
        "services": sorted(base.get_services()),
        "version": call("shardd.v1.StatusService/GetStatus").version,
        "health": {name: status.status for name, status in statuses.items()},
        "missing": [missing(base.FindFileByName, "shardd/v1/peer.proto"),
                    missing(base.FindFileContainingSymbol, "shardd.v1.Nope"),
                    missing(base.FindAllExtensionNumbers, "shardd.v1.Nope")],
        "extensions": list(base.FindAllExtensionNumbers("shardd.v1.AttachRequest")),
    }


def errors():
    channel = grpc.insecure_channel(TARGET, [OWN])
    attach(channel)
    join = services.JobServiceStub(channel).Join
    return refused(join, api.JoinRequest(job=api.JobSpec(name="a b", world_size=1)))


def crc32c(data, crc=0):
    crc = ~crc & 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return ~crc & 0xffffffff


def take(stream, weights, most=None):
    """Add the messages of a stream, at most @most with data, to @weights: the generation, its
    tensors, its bytes, and the checksums of its blocks."""
    for message in stream:
        if message.HasField("generation"):
            weights["generation"] = message.generation
            weights.setdefault("data", bytearray(message.generation.bytes))
        weights["tensors"].extend(message.tensors)
        end = message.offset + len(message.data)
        weights["data"][message.offset:end] = message.data
        for block in message.blocks:
            at = block.offset - message.offset
            assert crc32c(message.data[at:at + block.bytes]) == block.checksum
            weights["sums"] += block.checksum.to_bytes(4, "little")
            weights["have"] = block.offset + block.bytes
        if message.data and most is not None:
            most -= 1
            if not most:
                stream.cancel()
                return


def stream():
    """A generation in two parts, without the local channel: the second one goes on behind it."""
    channel = grpc.insecure_channel(TARGET, [OWN])
    attach(channel)
    stub = publications_grpc.PublicationServiceStub(channel)
    what = {"job": "streamed", "name": "engine"}
    weights = {"tensors": [], "sums": b"", "have": 0}

    def ask(**more):
        return stub.StreamGeneration(publications.StreamGenerationRequest(**what, **more))

    take(ask(wait=True, timeout_ms=30000, bytes_per_second=1 << 20), weights, most=1)
    first, part = weights["generation"], weights["have"]
    take(ask(number=first.number, offset=part, layout=first.layout), weights)
    gone = refused(lambda: list(ask(number=first.number + 9)))
    behind = refused(lambda: list(ask(number=first.number, offset=first.bytes + 1)))
    no_delta = refused(lambda: list(ask(number=first.number, delta_offset=8)))
    none = list(ask(newer_than=first.number))
    listed = stub.ListPublications(publications.ListPublicationsRequest(job="streamed"))
    return {
        "step": first.step, "part": part, "whole": weights["have"], "none": none,
        "checksum": crc32c(weights["sums"]) == first.checksum,
        "tensors": [[t.name, list(t.shape),
                     zlib.crc32(weights["data"][t.offset:t.offset + t.bytes])]
                    for t in weights["tensors"]],
        "gone": gone, "behind": behind,
        "no_delta": no_delta,
        "listed": [[p.name, p.number == first.number, p.may_publish] for p in listed.publications],
    }


json.dump({f.__name__: f() for f in (channels, idle, reflection, errors, stream)}, sys.stdout)
