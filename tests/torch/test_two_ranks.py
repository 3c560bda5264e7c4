#!/usr/bin/env python3
"""What several ranks of shardd.torch notice of each other: copies that are begun ahead, and models
that differ.

Prints one line of TAP a test.
"""

import os
import unittest
from collections import OrderedDict

import fsdp
import support
import torch
from support import ranks
from torch import nn

import shardd
import shardd.torch as st


def differ(rank, world, socket, how):
    os.environ["SHARDD_SOCKET"] = socket
    st.init(job="differ", rank=rank, world_size=world, op_timeout=30)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + (rank if how == "shapes" else 0)))
    if how == "order" and rank:
        net = nn.Sequential(OrderedDict([("1", net[1]), ("0", net[0])]))
    for layer in net if how != "units" or rank else net[:1]:
        st.fully_shard(layer)
    st.fully_shard(net)
    try:
        net(torch.ones(5, 4))
    except (shardd.FailedPrecondition, shardd.Aborted) as error:
        return str(error)
    finally:
        st.shutdown()
    return ""


def in_bf16(rank, world, socket):
    """Four steps of six units. Return: what the daemon says of this rank's gathers."""
    os.environ["SHARDD_SOCKET"] = socket
    client = st.init(job="ahead", rank=rank, world_size=world, op_timeout=60)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    policy = fsdp.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in net:
        st.fully_shard(layer, mp_policy=policy)
    st.fully_shard(net)
    optimizer = st.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        net(torch.ones(2, 32, dtype=torch.bfloat16)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    said = client.status("ahead")["jobs"][0]["ranks"][rank]
    st.shutdown()
    return {name: value for name, value in said.items() if name.startswith("prefetch")}


class TwoRanks(unittest.TestCase):
    def test_copies_are_begun_ahead(self):
        """The daemon learns the order in the first step; of 12 gathers in each of the other three
        all but the first can be expected."""
        with support.daemon() as socket:
            for said in ranks(in_bf16, 2, socket):
                self.assertEqual(said["prefetch"], "FOLLOWING", said)
                self.assertGreaterEqual(said["prefetch_hits"], 30, said)
                self.assertEqual(said["prefetch_deviations"], 0, said)

    def test_ranks_with_different_models(self):
        with support.daemon() as socket:
            said = ranks(differ, 2, socket, "shapes")
        self.assertTrue(any("weight" in s or "bias" in s for s in said), said)
        self.assertTrue(all("build the same model" in s for s in said), said)

    def test_ranks_with_different_units(self):
        for how in ("units", "order"):
            with self.subTest(how), support.daemon() as socket:
                said = ranks(differ, 2, socket, how)
                self.assertTrue(all(said), said)
                self.assertTrue(any("unit" in s for s in said), said)
                self.assertTrue(all("build the same model" in s for s in said), said)


if __name__ == "__main__":
    support.main()
