"""A collector of OpenTelemetry that does not behave, for test_otlp_hostile.py: HTTP/2 by hand,
since a library of gRPC does not send what is wrong."""

import base64
import contextlib
import gzip
import socket
import struct
import threading
import time

DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value, bits):
    """As HPACK writes it, without flags before it."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = [most], value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def header(name, value):
    texts = [t.encode() if isinstance(t, str) else t for t in (name, value)]
    return b"\0" + b"".join(integer(len(t), 7) + t for t in texts)


OPENING = b"\x88" + header("content-type", "application/grpc")


def varint(value):
    out = b""
    value &= (1 << 64) - 1
    while value >= 128:
        out, value = out + bytes([value % 128 + 128]), value // 128
    return out + bytes([value])


def field(number, value):
    """Of protobuf: an int, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def partial(rejected, text=b""):
    return field(1, field(1, rejected) + field(2, text))


def retry_info(seconds):
    """grpc-status-details-bin."""
    wait = field(1, b"type.googleapis.com/google.rpc.RetryInfo")
    status = field(1, 8) + field(3, wait + field(2, field(1, field(1, seconds))))
    return base64.b64encode(status).decode()


class Request:
    """One that has come whole."""

    def __init__(self, connection, stream, body, number):
        self.connection, self.stream, self.body, self.number = connection, stream, body, number
        self.kind = "metrics" if b"process_start_time_seconds" in body else "traces"

    def send(self, *frames):
        self.connection.sendall(b"".join(frames))

    def headers(self, block, end=False):
        return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), self.stream, block)

    def message(self, payload, compressed=False):
        whole = struct.pack(">BI", compressed, len(payload)) + payload
        parts = [whole[i : i + 16384] for i in range(0, len(whole), 16384)]
        return b"".join(frame(DATA, 0, self.stream, part) for part in parts)

    def answer(self, payload=b"", status=0, text="", details=None):
        """A message if it is good, and the status."""
        last = header("grpc-status", str(status)) + (header("grpc-message", text) if text else b"")
        if details:
            last += header("grpc-status-details-bin", details)
        body = [] if status else [self.headers(OPENING), self.message(payload)]
        self.send(*body, self.headers(last if body else OPENING + last, end=True))

    def bomb(self, bytes_):
        """What is small on the wire, and @bytes_ long when it is decompressed."""
        packed = gzip.compress(bytes(bytes_), 9)
        self.send(
            self.headers(OPENING + header("grpc-encoding", "gzip")),
            self.message(packed, compressed=True),
            self.headers(header("grpc-status", "0"), end=True),
        )


class Collector:
    """@accepted(connection), if given, is called first; if it returns true that was all.
    @answer(request) answers a request."""

    def __init__(self, answer=None, accepted=None):
        self._answer, self._accepted = answer, accepted
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self.connections, self.requests = [], []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def of(self, kind):
        return [r for r in self.requests if r.kind == kind]

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError, EOFError):
            if self._accepted and self._accepted(connection):
                return
            connection.sendall(frame(SETTINGS, 0, 0))
            self._read(connection, connection.makefile("rb"))
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _read(self, connection, file):
        bodies = {}
        self._take(file, PREFACE)
        while True:
            head = self._take(file, 9)
            size, (kind, flags, stream) = int.from_bytes(head[:3], "big"), head[3:5] + head[8:9]
            stream = int.from_bytes(head[5:9], "big") & 0x7FFFFFFF
            payload = self._take(file, size)
            if kind == SETTINGS and not flags & ACK:
                connection.sendall(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                connection.sendall(frame(PING, ACK, 0, payload))
            elif kind == DATA:
                bodies[stream] = bodies.get(stream, b"") + payload
                if size:
                    more = struct.pack(">I", size)
                    frames = [frame(WINDOW, 0, at, more) for at in (0, stream)]
                    connection.sendall(b"".join(frames))
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                request = Request(connection, stream, bodies.pop(stream, b""), len(self.requests))
                request.at = time.monotonic()
                self.requests.append(request)
                if self._answer:
                    self._answer(request)

    @staticmethod
    def _take(file, size):
        got = file.read(size)
        if len(got) < size:
            raise EOFError
        return got
