"""Publications (docs/publish.md) for inference engines: unmodified vLLM and SGLang load the newest
generation from the daemon's shared memory. The manual is docs/engines.md.

``shardd.engines.vllm``: the backend ``shardd``, a weight transfer engine and its trainer side.
``shardd.engines.sglang``: a custom weight loader.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("shardd.engines")


def register_vllm() -> None:
    """Register the backend ``shardd`` with vLLM in this process. Calling this twice is allowed.
    vLLM calls it in all its processes (the entry point ``vllm.general_plugins``); a trainer calls
    it itself.

    It never raises, because an exception would end vLLM. If vLLM has no weight transfer engines, it
    logs the reason.
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
