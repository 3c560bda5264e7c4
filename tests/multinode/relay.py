#!/usr/bin/python3
"""The cable of a node, as a program: it holds frames back, loses them, and resets connections.

A relay stands between the node's interface and the bridge. Frames are whole Ethernet frames, so TCP
of both ends is the kernel's own. As a program: relay.py INTERFACE turns off the offloads of an
interface, with which frames would have no checksums and be larger than the link allows.
"""

import array
import fcntl
import heapq
import random
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time

import lab

ETH_P_ALL, ETH_P_IP = 3, 0x0800
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_S{TXCSUM,TSO,GSO,GRO}
OUTGOING = 4
LONGEST = 65536
FIN, SYN, RST, ACK = 1, 2, 4, 16


def turn_off_offloads(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(s, SIOCETHTOOL,
                        struct.pack("16sP", interface.encode(), value.buffer_info()[0]))


def ones(data):
    """The checksum of the internet protocols."""
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Segment:
    """A frame with a segment of TCP over IPv4; other frames are no Segment (of)."""

    @classmethod
    def of(cls, frame):
        if len(frame) < 54 or struct.unpack_from("!H", frame, 12)[0] != ETH_P_IP or frame[23] != 6:
            return None
        return cls(frame)

    def __init__(self, frame):
        self.frame, self.ip = frame, 14
        self.tcp = self.ip + 4 * (frame[14] & 15)
        self.payload = self.tcp + 4 * (frame[self.tcp + 12] >> 4)
        self.end = self.ip + struct.unpack_from("!H", frame, 16)[0]
        self.ports = struct.unpack_from("!HH", frame, self.tcp)
        self.seq, self.ack = struct.unpack_from("!II", frame, self.tcp + 4)
        self.addresses = frame[26:30], frame[30:34]
        self.flags = frame[self.tcp + 13]

    def bytes(self):
        return self.end - self.payload

    def connection(self):
        return frozenset(zip(self.addresses, self.ports))

    def built(self, addresses, ports, seq, ack, flags, payload=b"", back=False):
        mac = self.frame[6:12] + self.frame[0:6] if back else self.frame[0:12]
        source, destination = addresses
        length = 40 + len(payload)
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 0, 0, 64, 6, 0, source, destination)
        ip = ip[:10] + struct.pack("!H", ones(ip)) + ip[12:]
        tcp = struct.pack("!HHIIBBHHH", *ports, seq & 0xFFFFFFFF, ack, 5 << 4, flags, 1000, 0, 0)
        pseudo = source + destination + struct.pack("!HH", 6, 20 + len(payload))
        tcp = tcp[:16] + struct.pack("!H", ones(pseudo + tcp + payload)) + tcp[18:]
        return mac + struct.pack("!H", ETH_P_IP) + ip + tcp + payload

    def cut(self, n):
        """The first @n bytes of its payload, and the reset behind them."""
        payload = self.frame[self.payload:self.payload + n]
        first = self.built(self.addresses, self.ports, self.seq, self.ack, ACK, payload)
        reset = self.built(self.addresses, self.ports, self.seq + n, self.ack, RST | ACK)
        return ([first] if n else []) + [reset]

    def reset_back(self):
        """The reset for its sender."""
        return self.built(self.addresses[::-1], self.ports[::-1], self.ack, self.seq, RST | ACK,
                          back=True)


class Relay(threading.Thread):
    """Of namespace @name; @peers: only what it exchanges with these nodes is held back or lost,
    else all. It passes frames on as they come, until one of its attributes says something else."""

    def __init__(self, x, name, peers=()):
        super().__init__(daemon=True)
        self.net = name
        self.delay_s = 0.0
        self.loss = 0.0  # the part of the frames that are lost
        self.rate = 0  # bytes per second in each direction; 0: no limit
        self.stalled = False  # all frames wait
        self.silent = None  # of which ports: all their frames are lost
        self.reset_after = None  # bytes; then the connection that has the next one is reset
        self.reset_which = lambda _: True  # of which ports: only their bytes count
        self.resets, self.lost = 0, 0
        self.only = {socket.inet_aton(p.address) for p in peers}
        self.rng = random.Random(7)
        self.late, self.number, self.free_at = [], 0, {}
        self.dead = set()
        for net in x.nets:
            subprocess.run(["nsenter", f"--net=/run/netns/{net}", sys.executable, "-B", __file__,
                            "eth0"], check=True)
        lab.sh(f"ip link set v-{name} nomaster")
        lab.sh(f"ip link add r-{name} type veth peer name q-{name}")
        lab.sh(f"ip link set r-{name} up")
        lab.sh(f"ip link set q-{name} master br0 up")
        self.sockets = [self.open(f"{side}-{name}") for side in "vr"]
        self.ended = False
        self.start()

    @staticmethod
    def open(interface):
        s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        s.bind((interface, ETH_P_ALL))
        s.setblocking(False)
        return s

    def run(self):
        with selectors.DefaultSelector() as waits:
            for i, s in enumerate(self.sockets):
                waits.register(s, selectors.EVENT_READ, i)
            while not self.ended:
                for key, _ in waits.select(self.until_next()):
                    self.read(key.data)
                self.pass_on()
        for s in self.sockets:
            s.close()

    def end(self):
        """The cable is a plain one again."""
        self.ended = True
        self.join()
        lab.sh(f"ip link del r-{self.net}")
        lab.sh(f"ip link set v-{self.net} master br0")

    def until_next(self):
        return min(0.02, max(0.0, self.late[0][0] - time.monotonic())) if self.late else 0.02

    def read(self, side):
        for _ in range(64):
            try:
                frame, address = self.sockets[side].recvfrom(LONGEST)
            except BlockingIOError:
                return
            if address[2] != OUTGOING:
                self.take(side, frame)

    def take(self, side, frame):
        segment = Segment.of(frame)
        if segment and (self.reset_after is not None or self.dead) and self.cut(side, segment):
            return None
        if self.silent and segment and self.silent(segment.ports):
            self.lost += 1
            return None
        if not self.is_meant(segment):
            return self.put(side, frame, 0)
        if self.loss and self.rng.random() < self.loss:
            self.lost += 1
            return None
        return self.put(side, frame, self.delay_s)

    def is_meant(self, segment):
        return not self.only or bool(segment and self.only & set(segment.addresses))

    def put(self, side, frame, delay):
        now = time.monotonic()
        at = now + delay
        if self.rate:
            at = max(at, self.free_at.get(side, 0.0))
            self.free_at[side] = at + len(frame) / self.rate
        self.number += 1
        heapq.heappush(self.late, (at, self.number, side, frame))

    def pass_on(self):
        now = time.monotonic()
        while self.late and self.late[0][0] <= now and not self.stalled:
            _, _, side, frame = heapq.heappop(self.late)
            self.send(1 - side, frame)

    def send(self, side, frame):
        try:
            self.sockets[side].send(frame)
        except BlockingIOError:
            self.lost += 1  # as a full queue of a switch

    def cut(self, side, segment):
        """Return: the frame is done with."""
        if segment.connection() in self.dead:
            return not segment.flags & SYN
        if self.reset_after is None or segment.flags & (SYN | FIN) or not self.reset_which(
                segment.ports):
            return False
        n = segment.bytes()
        if n <= self.reset_after:
            self.reset_after -= n
            return False
        for frame in segment.cut(self.reset_after):
            self.put(side, frame, 0)
        self.put(1 - side, segment.reset_back(), 0)
        self.dead.add(segment.connection())
        self.reset_after, self.resets = None, self.resets + 1
        return True


if __name__ == "__main__":
    turn_off_offloads(sys.argv[1])
