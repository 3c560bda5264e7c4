#!/usr/bin/env python3
"""A collector of OpenTelemetry, for test_otlp.py, which runs it in an environment with grpcio and
opentelemetry-proto: the definition of OTLP that it decodes with is not ours.

    otlp_collector.py PORT [CERT KEY]

A line of JSON on standard input says how the next requests are answered, of one kind ("traces",
"metrics") or of both:
{"status": "UNAVAILABLE", "retry_ms": 100} {"delay": 3} {"rejected": 5, "message": "..."} {}.
A line of JSON on standard output is a request, with "kind", "open" (requests of that kind that were
under way then), "headers", "bytes", "answer" and "resources". The first line has the port."""

import json
import sys
import threading
import time
from concurrent import futures

import grpc
from google.protobuf import any_pb2, duration_pb2, json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_grpc

LOCK = threading.Lock()
ORDERS = {"traces": {}, "metrics": {}}
OPEN = {"traces": 0, "metrics": 0}


def say(**what):
    with LOCK:
        print(json.dumps(what), flush=True)


def refuse(context, order):
    code = grpc.StatusCode[order["status"]]
    status = status_pb2.Status(code=code.value[0], message=order.get("message", "as ordered"))
    if "retry_ms" in order:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(order["retry_ms"])
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    context.abort_with_status(rpc_status.to_status(status))


def take(kind, request, context, answer):
    order = ORDERS[kind]
    with LOCK:
        OPEN[kind] += 1
        opened = OPEN[kind]
    time.sleep(order.get("delay", 0))
    with LOCK:
        OPEN[kind] -= 1
    say(
        kind=kind,
        at=time.time(),
        open=opened,
        headers=dict(context.invocation_metadata()),
        bytes=request.ByteSize(),
        answer=order,
        resources=json_format.MessageToDict(request, preserving_proto_field_name=True),
    )
    if "status" in order:
        refuse(context, order)
    if "rejected" in order:
        name = "rejected_spans" if kind == "traces" else "rejected_data_points"
        setattr(answer.partial_success, name, order["rejected"])
        answer.partial_success.error_message = order.get("message", "")
    return answer


class Traces(traces_grpc.TraceServiceServicer):
    def Export(self, request, context):
        return take("traces", request, context, traces.ExportTraceServiceResponse())


class Metrics(metrics_grpc.MetricsServiceServicer):
    def Export(self, request, context):
        return take("metrics", request, context, metrics.ExportMetricsServiceResponse())


def main():
    port, files = sys.argv[1], sys.argv[2:]
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    traces_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    if files:
        with open(files[0], "rb") as cert, open(files[1], "rb") as key:
            own = grpc.ssl_server_credentials([(key.read(), cert.read())])
        port = server.add_secure_port(f"localhost:{port}", own)
    else:
        port = server.add_insecure_port(f"localhost:{port}")
    server.start()
    say(port=port)
    for line in sys.stdin:
        order = json.loads(line)
        for kind in [order.pop("kind")] if "kind" in order else list(ORDERS):
            ORDERS[kind] = order
        say(ordered=order)
    server.stop(0)


if __name__ == "__main__":
    main()
