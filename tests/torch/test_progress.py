#!/usr/bin/env python3
"""Bars of progress: on a terminal, on rank 0, of what takes a while; nowhere else.

Prints one line of TAP a test.
"""

import contextlib
import io
import os
import pty
import sys
import unittest
import unittest.mock

import fsdp  # noqa: F401 - says where modules are
import support
import torch
from torch import nn

import shardd.torch as st
from shardd.torch import _progress


@contextlib.contextmanager
def terminal():
    """stderr is one; what was written to it is appended to the list."""
    master, slave = pty.openpty()
    said = []
    with os.fdopen(slave, "w") as stream, unittest.mock.patch.object(sys, "stderr", stream):
        yield said
        stream.flush()
    with contextlib.suppress(OSError):  # the other end is closed: so it says that all was read
        while True:
            said.append(os.read(master, 65536).decode())
            if not said[-1]:
                break
    os.close(master)


def model():
    torch.manual_seed(1)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    for layer in net:
        st.fully_shard(layer)
    return st.fully_shard(net)


def on_rank(rank, world, socket):
    """What each of the four says on a terminal. Rank 1 has one, too."""
    os.environ.update(SHARDD_SOCKET=socket)
    st.init(job="bars", rank=rank, world_size=world, op_timeout=60)
    _progress.DELAY = _progress._EVERY = 0
    said = []

    def shown(act):
        with terminal() as out:
            found = act()
        said.append("".join(out))
        return found

    net = model()
    optimizer = shown(lambda: st.AdamW(net.parameters()))
    state = shown(net.state_dict)
    shown(lambda: net.load_state_dict(state))
    states = shown(optimizer.state_dict)
    shown(lambda: optimizer.load_state_dict(states))
    st.shutdown()
    return said


class Progress(unittest.TestCase):
    def test_everything_that_may_take_a_while_has_a_bar_on_rank_0(self):
        with support.daemon() as socket:
            first, second = support.ranks(on_rank, 2, socket)
        self.assertEqual(second, [""] * 5)
        nbytes = 4 * 4 * (64 * 64 + 64)
        for what, factor, said in zip(
                ("initialising", "saving", "loading", "saving the optimizer's state",
                 "loading the optimizer's state"), (1, 1, 1, 2, 2), first):
            pictures = [p for p in said.replace("\n", "").split("\r") if p]
            self.assertEqual([p.partition(" [")[0] for p in pictures],
                             [what] * (4 * factor + 1), said)
            percents = [int(p.partition("] ")[2].partition("%")[0]) for p in pictures]
            self.assertEqual(percents, [round(100 * i / (4 * factor))
                                        for i in range(1, 4 * factor + 1)] + [100])
            self.assertIn(f"of {_progress._size(factor * nbytes)}, ", pictures[0])
            self.assertRegex(pictures[0], r" [KMG]iB/s  [0-3]\x1b")
            self.assertTrue(said.endswith("\n"), repr(said))

    def test_nothing_is_shown_where_stderr_is_no_terminal(self):
        with unittest.mock.patch.object(sys, "stderr", io.StringIO()) as stream, \
                unittest.mock.patch.object(_progress, "DELAY", 0), \
                _progress.Bar("saving", 10, 0) as bar:
            bar.add(5, "a")
        self.assertEqual(stream.getvalue(), "")

    def test_nothing_is_shown_of_what_is_over_at_once(self):
        with terminal() as out, _progress.Bar("saving", 10, 0) as bar:
            bar.add(10, "a")
        self.assertEqual("".join(out), "")

    def test_an_end_before_the_end_leaves_the_line(self):
        with unittest.mock.patch.object(_progress, "DELAY", 0), terminal() as out, \
                contextlib.suppress(KeyError), _progress.Bar("loading", 8 << 30, 0) as bar:
            bar.add(2 << 30, "layers.7")
            raise KeyError
        said = "".join(out)
        self.assertIn(" 25%  2.0 GiB of 8.0 GiB", said)
        self.assertIn("  layers.7", said)
        self.assertTrue(said.endswith("\n"))


if __name__ == "__main__":
    support.main()
