"""Turns: what is compared is measured in turn, by processes that live all the time.

tests/bench/nodes makes the file BLOCK.NUMBER when it is somebody's turn. The process that leads a
group waits for it; the others wait for that one in a barrier of the group. Each prints what it has
measured in a block as a line of JSON.
"""

import json
import os
import pathlib
import statistics
import time

END = "end"


class Turns:
    """@group: its name, of its files in @folder."""

    def __init__(self, folder, group):
        self.folder, self.group, self.number = pathlib.Path(folder), group, 0

    def await_next(self):
        """Return: whether there is another block. Only the leader calls it."""
        path = self.folder / f"{self.group}.{self.number}"
        while not path.exists():
            if (self.folder / END).exists():
                return False
            time.sleep(0.002)
        return True

    def told(self, **values):
        print(json.dumps({"block": self.number, **values}), flush=True)
        self.number += 1


def timed(times, call):
    """@call: its seconds go into a list of @times."""
    begun = time.perf_counter()
    call()
    times.append(time.perf_counter() - begun)


def median(values):
    return statistics.median(values)


def place():
    """Rank and world size, as launchers set them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
