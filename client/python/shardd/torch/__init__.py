"""shardd.torch: PyTorch's modules trained over the daemon.

::

    from shardd.torch import AdamW, fully_shard      # instead of torch's

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)   # runs in the daemon

The rest of the loop stays: forward, backward, ``optimizer.step()``, ``zero_grad()``. Rank, world
size and job come from the launcher (torchrun, shardctl run, mpirun, srun). The manual is
docs/python.md.
"""

from . import _needs  # noqa: F401
from ._again import by_environment, guard
from ._live import live
from ._replicate import ReplicatedModule, replicate
from ._resilient import Resilient, resilient
from ._rows import Rows
from ._session import init, rank, session, shutdown, world_size
from ._state import load_state_dict, state_dict, summon_full_params
from ._wrap import ShardedModule, fully_shard
from .amp import GradScaler
from .optim import SGD, Adam, AdamW, Sharded, clip_grad_norm_, commit, optimizer_state_dict

__all__ = [
    "SGD", "Adam", "AdamW", "GradScaler", "ReplicatedModule", "Resilient", "Rows", "Sharded",
    "ShardedModule", "clip_grad_norm_", "commit", "fully_shard", "guard", "init", "live",
    "load_state_dict", "optimizer_state_dict", "rank", "replicate", "resilient", "session",
    "shutdown", "state_dict", "summon_full_params", "world_size",
]

by_environment()
