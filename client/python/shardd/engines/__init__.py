"""Publications (docs/publish.md) in inference engines: vLLM and SGLang load the newest generation
from the memory that the daemon shares. Neither needs a change. The manual is docs/engines.md.

``shardd.engines.vllm``: a weight transfer engine and its trainer's side, the backend ``shardd``.
``shardd.engines.sglang``: a custom weight loader.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("shardd.engines")


def register_vllm() -> None:
    """Make the backend ``shardd`` known to vLLM in this process; again is allowed. vLLM calls this
    in all its processes (the entry point ``vllm.general_plugins``), a trainer calls it itself.

    It never raises, since vLLM would end: without weight transfer engines in vLLM it logs why.
    """
    try:
        from vllm.distributed.weight_transfer import (
            WeightTransferEngineFactory,
            WeightTransferTrainerFactory,
        )
    except ImportError as error:
        _log.warning("vLLM has no weight transfer engines that shardd knows (vLLM 0.32 and 0.33 "
                     "have them), so there is no backend 'shardd': %s", error)
        return
    module = "shardd.engines.vllm"
    for factory, name in ((WeightTransferEngineFactory, "ShardWeightTransferEngine"),
                          (WeightTransferTrainerFactory, "ShardTrainerWeightTransferEngine")):
        if "shardd" not in factory._registry:
            factory.register_engine("shardd", module, name)


__all__ = ["register_vllm"]
