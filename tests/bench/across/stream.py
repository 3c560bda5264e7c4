"""A plain TCP connection between two nodes, for tests/bench/nodes: both send MIB to the other at
once, and one byte there and back.

usage: stream.py FOLDER GROUP MIB ROUNDS ADDRESS    RANK 0 listens there, RANK 1 connects
"""

import socket
import sys
import threading
import time

import turns

PORT = 7300
PINGS = 200


def connected(rank, address):
    if rank == 0:
        with socket.create_server((address, PORT)) as server:
            s = server.accept()[0]
    else:
        while True:
            try:
                s = socket.create_connection((address, PORT))
                break
            except OSError:
                time.sleep(0.05)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def receive(s, view):
    at = 0
    while at < len(view):
        n = s.recv_into(view[at:])
        if not n:
            raise ConnectionError("the other process has ended")
        at += n


def exchange(s, out, into):
    sender = threading.Thread(target=s.sendall, args=(out,))
    sender.start()
    receive(s, memoryview(into))
    sender.join()


def meet(s):
    """A byte there and back: both are here."""
    one = bytearray(1)
    s.sendall(one)
    receive(s, memoryview(one))


def ping(s, first):
    one = bytearray(1)
    if first:
        s.sendall(one)
    receive(s, memoryview(one))
    if not first:
        s.sendall(one)


def main():
    folder, group, mib, rounds, address = sys.argv[1:]
    rank, _ = turns.place()
    s, t = connected(rank, address), turns.Turns(folder, group)
    out, into = bytearray(int(mib) << 20), bytearray(int(mib) << 20)
    while True:
        more = bytearray([rank == 0 and t.await_next()])
        if rank == 0:
            s.sendall(more)
        else:
            receive(s, memoryview(more))
        if not more[0]:
            return
        found = {"stream": [], "ping": []}
        for _ in range(int(rounds)):
            meet(s)
            turns.timed(found["stream"], lambda: exchange(s, out, into))
        for _ in range(PINGS):
            turns.timed(found["ping"], lambda: ping(s, rank == 0))
        t.told(**found)


if __name__ == "__main__":
    main()
