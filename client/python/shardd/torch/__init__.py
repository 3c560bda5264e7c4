"""shardd.torch: train PyTorch modules with the daemon.

::

    from shardd.torch import AdamW, fully_shard      # instead of torch's

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=1e-3)   # runs in the daemon

The rest of the loop is unchanged: forward, backward, ``optimizer.step()``, ``zero_grad()``. Rank,
world size and job come from the launcher (torchrun, shardctl run, mpirun, srun). The manual is
docs/python.md.
"""

from . import _needs  # noqa: F401

# isort: split
from . import _adopt  # noqa: F401
from ._again import by_environment, guard
from ._base import Base, attach_base, load_base
from ._forward import register_fsdp_forward_method, share_comm_ctx
from ._live import Live
from ._replicate import ReplicatedModule, replicate
from ._resilient import Resilient, resilient
from ._rows import Rows
from ._session import init, rank, session, shutdown, world_size
from ._sharded import Sharded
from ._state import load_state_dict, state_dict, summon_full_params
from ._wrap import ShardedModule, fully_shard
from ._wrap import ShardedModule as FSDPModule
from ._wrap import Unsharded as UnshardHandle
from .amp import GradScaler
from .optim import SGD, Adam, AdamW, clip_grad_norm_, commit, optimizer_state_dict

__all__ = [
    "SGD", "Adam", "AdamW", "Base", "FSDPModule", "GradScaler", "Live", "ReplicatedModule",
    "Resilient", "Rows", "Sharded", "ShardedModule", "UnshardHandle", "attach_base",
    "clip_grad_norm_", "commit", "fully_shard", "guard", "init", "load_base", "load_state_dict",
    "optimizer_state_dict", "rank", "register_fsdp_forward_method", "replicate", "resilient",
    "session", "share_comm_ctx", "shutdown", "state_dict", "summon_full_params", "world_size",
]

by_environment()
