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
    Overtaken,
    PermissionDenied,
    ResourceExhausted,
    SharddError,
    Unavailable,
    Unimplemented,
    VersionMismatch,
    WaitTimeout,
)
from .live import Generation, Live, declare_publication, drop_publication, publish
from .memory import Dtype, Memory
from .reader import Reader, ReadTensor, read
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
    "WORLD", "Aborted", "AlreadyExists", "Buffer", "BufferSpec", "Cancelled", "Checkpoints",
    "Client", "ClipProfile", "ConnectionEvent", "ConnectionState", "DaemonRestarted",
    "DataLoss", "DeadlineExceeded", "Device",
    "Dtype", "FailedPrecondition", "Generation", "InUse",
    "Init", "Internal", "InvalidArgument", "Layout", "Lifetime", "Live", "Membership", "Memory",
    "NotFound", "OptimizerKind", "OptimizerProfile", "OptimizerSpec", "OptimizerWhen",
    "Overtaken", "PermissionDenied", "Place", "Profile", "ReadTensor", "Reader", "ReduceOp",
    "ResourceExhausted", "Shard", "SharddError", "StepResult", "StepSettings", "Strategy",
    "TensorSpec", "Ticket", "Unavailable", "Unimplemented", "Unit", "UnitSpec",
    "VersionMismatch", "WaitTimeout", "__version__", "connect",
    "declare_publication", "drop_publication", "environment", "publish", "read",
]
