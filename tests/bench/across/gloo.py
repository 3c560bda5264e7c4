"""A rank of PyTorch's Gloo for tests/bench/nodes: one member for each rank, on all nodes.

usage: gloo.py FOLDER GROUP MIB ROUNDS OPS    all-gather to MIB, reduce-scatter of MIB, OPS of one
"""

import sys

import torch
import torch.distributed as dist
import turns


def main():
    folder, group, mib, rounds, ops = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    t, n = turns.Turns(folder, group), int(mib) << 18
    part, whole, one = torch.ones(n // world), torch.ones(n), torch.ones(1)
    while True:
        more = torch.tensor([float(rank == 0 and t.await_next())])
        dist.all_reduce(more)
        if not more.item():
            break
        found = {"gather": [], "reduce": [], "op": []}
        for _ in range(int(rounds)):
            dist.barrier()
            turns.timed(found["gather"], lambda: dist.all_gather_into_tensor(whole, part))
            dist.barrier()
            turns.timed(found["reduce"], lambda: dist.reduce_scatter_tensor(part, whole))
        for _ in range(int(ops)):
            turns.timed(found["op"], lambda: dist.all_reduce(one))
        t.told(**found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
