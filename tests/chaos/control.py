"""The file that the runner shares with the instrumented daemon: tests/chaos/points.h."""

import mmap
import struct

FUNCTIONS = (
    "journal_begin",
    "journal_end",
    "journal_base_begin",
    "journal_base_end",
    "redo_task_publish",
    "redo_task_free",
    "redo_run",
    "redo_complete",
    "redo_clear",
    "keeper_add",
    "keeper_drop",
    "launch_run",
    "ring_post",
    "rpc_call_reply",
)
NODE_FUNCTIONS = (
    "order_announce",
    "match_start",
    "turn_start",
    "comm_all_gather",
    "comm_sum",
    "comm_all_reduce",
    "comm_complete",
    "decide_begin",
    "order_decided",
    "apply_allow",
)
POINTS = (
    *(f"{when} {name}" for name in FUNCTIONS for when in ("before", "after")),
    "inside launch_run",
    *(f"{when} {name}" for name in NODE_FUNCTIONS for when in ("before", "after")),
    "before a commit is announced",
    "after a commit is announced",
)
STOPS = 1 << 31
HEAD = struct.Struct("IiQ")
POINT = struct.Struct("QQ")


class Control:
    def __init__(self, path):
        size = HEAD.size + POINT.size * len(POINTS)
        with open(path, "wb+") as f:
            f.truncate(size)
            self.at = mmap.mmap(f.fileno(), size)

    def arm(self, point, passes, stops=False):
        """The daemon, or one after it, dies at the given pass of the point, or stops there."""
        self.at[4:8] = struct.pack("i", passes)
        self.at[0:4] = struct.pack("I", point + 1 | (STOPS if stops else 0))

    def disarm(self):
        self.at[0:4] = struct.pack("I", 0)

    def died_s(self):
        """When the last one died at a point, in seconds of the monotonic clock."""
        return HEAD.unpack_from(self.at)[2] / 1e9

    def passes(self, point):
        return POINT.unpack_from(self.at, HEAD.size + POINT.size * point)[0]

    def deaths(self):
        """How many died at each point, or stopped."""
        return [
            POINT.unpack_from(self.at, HEAD.size + POINT.size * i)[1] for i in range(len(POINTS))
        ]
