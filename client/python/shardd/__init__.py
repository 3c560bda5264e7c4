"""shardd: a client of the daemon that owns sharded training state.

::

    import shardd

    with shardd.connect() as client:                  # $SHARDD_SOCKET
        me = client.join()                            # as the launcher says
        [unit] = client.register([shardd.UnitSpec("block", [shardd.TensorSpec("w", (3, 5))])])
        unit.init_seed(1)
        weights = unit.gather()                       # shared by all ranks, not copied
        print(weights.numpy().sum())
        del weights
        unit.release()

This package needs no other; ``shardd.torch`` needs PyTorch. The manual is docs/python.md.
"""

from ._launch import environment
from ._reconnect import ConnectionEvent, ConnectionState
from ._version import VERSION as __version__
from .base import BaseReader, adapter_publication, load_base, read_base
from .client import (
    WORLD,
    Buffer,
    Client,
    Device,
    Membership,
    Shard,
    StepResult,
    connect,
)
from .delta import Delta
from .errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DaemonRestarted,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SharddError,
    Unavailable,
    Unimplemented,
    VersionMismatch,
    WaitTimeout,
)
from .fetch import FetchedGeneration, fetch_generation
from .live import Generation, Live, declare_publication, drop_publication, publish
from .memory import Dtype, Memory
from .specs import (
    BufferSpec,
    Checkpoints,
    ClipProfile,
    Init,
    Layout,
    Lifetime,
    OptimizerKind,
    OptimizerProfile,
    OptimizerSpec,
    OptimizerWhen,
    Profile,
    ReduceOp,
    StepSettings,
    Strategy,
    TensorSpec,
    UnitSpec,
)
from .ticket import Ticket
from .unit import Place, Unit

__all__ = [
    "WORLD", "Aborted", "AlreadyExists", "BaseReader", "Buffer", "BufferSpec", "Cancelled",
    "Checkpoints",
    "Client", "ClipProfile", "ConnectionEvent", "ConnectionState", "DaemonRestarted",
    "DataLoss", "DeadlineExceeded", "Delta", "Device",
    "Dtype", "FailedPrecondition", "FetchedGeneration", "Generation", "InUse",
    "Init", "Internal", "InvalidArgument", "Layout", "Lifetime", "Live", "Membership", "Memory",
    "NotFound", "OptimizerKind", "OptimizerProfile", "OptimizerSpec", "OptimizerWhen",
    "PermissionDenied", "Place", "Profile", "ReduceOp",
    "ResourceExhausted", "Shard", "SharddError", "StepResult", "StepSettings", "Strategy",
    "TensorSpec", "Ticket", "Unavailable", "Unimplemented", "Unit", "UnitSpec",
    "VersionMismatch", "WaitTimeout", "__version__", "adapter_publication", "connect",
    "declare_publication", "drop_publication", "environment", "fetch_generation", "load_base",
    "publish", "read_base",
]
