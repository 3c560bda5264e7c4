"""The backend ``shardd`` for vLLM's weight transfer: a worker loads the newest generation from the
daemon's shared memory. The manual is docs/engines.md.

An update is complete when `update_weights` returns. Before and after it, the model has the weights
of one generation. If the requested generation is not made in time, the model keeps the previous
one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..client import Client
from ..errors import InUse, InvalidArgument
from ..live import Generation, publish
from ._weights import (
    Change,
    Exchange,
    Held,
    Weights,
    checked,
    copy_parameters,
    few,
    log,
    patch_parameters,
    placed,
    tensors,
)


@dataclass
class ShardInitInfo(WeightTransferInitInfo):
    """What a worker reads.

    ``publication``: with ``{tp_rank}`` or ``{pp_rank}`` in it, each worker reads its own.
    ``socket``: of the daemon on the worker's machine; None: $SHARDD_SOCKET, else the usual one.
    ``names``: ``checkpoint``: the model's own ``load_weights`` accepts the names, cuts out the part
    for this rank and joins what vLLM joins; ``parameters``: the tensors have the names, shapes and
    types of the worker's ``named_parameters()`` and are copied into them. ``complete``: every
    parameter must be present. ``copy``: the model gets a copy of each tensor; for a model that
    modifies its input. ``patches``: after the first update only the changes are written, if there
    is a delta. ``wait``: how many seconds an update waits for its generation, unless its own
    ``wait`` is set.
    """

    job: str
    publication: str = "engine"
    socket: str | None = None
    names: str = "checkpoint"
    complete: bool = True
    copy: bool = False
    patches: bool = False
    wait: float = 60.0

    def __post_init__(self) -> None:
        checked("init_info", **vars(self))


@dataclass
class ShardUpdateInfo(WeightTransferUpdateInfo):
    """Which generation an update loads: the newest one, with at least this number and this step.
    ``number``: may be an object with the number for each publication by name. ``wait``: seconds;
    None: as in init_info. ``whole``: load all weights, without patches."""

    number: int | dict[str, int] = 0
    step: int = 0
    wait: float | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        numbers = self.number.values() if isinstance(self.number, dict) else [self.number]
        for number in numbers:
            checked("update_info", number=number)
        checked("update_info", step=self.step, whole=self.whole,
                wait=0 if self.wait is None else self.wait)

    def number_of(self, publication: str) -> int:
        """The number for @publication. InvalidArgument: only others have a number."""
        if not isinstance(self.number, dict):
            return self.number
        if publication not in self.number:
            raise InvalidArgument(f"number of update_info has no publication '{publication}', "
                                  "which this worker reads", "number")
        return self.number[publication]


def _tp_and_pp(parallel: Any) -> tuple[int, int]:
    """The tensor and pipeline parallel ranks of this worker. A single worker has no groups."""
    if parallel.world_size == 1:
        return 0, 0
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group, get_pp_group().rank_in_group


def _exchange(parallel: Any) -> Exchange | None:
    """The exchange among the workers that hold parts of one model: those of tensor and pipeline
    parallelism, and of all replicas if experts are spread over them. None: there is one worker."""
    experts = parallel.enable_expert_parallel and parallel.data_parallel_size > 1
    if parallel.world_size == 1 and not experts:
        return None
    from vllm.distributed.parallel_state import get_ep_group, get_pp_group, get_tp_group

    groups = [get_ep_group() if experts else get_tp_group(), get_pp_group()]

    def exchange(mine: Any) -> list[Any]:
        every = [mine]
        for group in groups:
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, every, group=group.cpu_group)
            every = [one for part in parts for one in part]
        return every

    return exchange


def _abandon(model: Any, model_config: Any) -> None:
    """Undo vLLM's preparation of a load that failed. Incomplete layers get their previous weights
    back, and nothing refers to the generation."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


def _pack_again(model: Any) -> None:
    """vLLM's CPU build computes with packed copies of weights. A reload packs the layers again that
    were loaded, but not an output layer that is tied to the embedding."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            layer.quant_method.process_weights_after_loading(layer)


def _compare(model: Any, found: Generation, copied: bool) -> str:
    """Check that the model has the values of @found, which it has loaded. The loader runs again and
    compares instead of copying. Return: "", or the difference."""
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

    copy_ = torch.Tensor.copy_

    def compare(to: Any, given: Any, non_blocking: bool = False) -> Any:
        if to.shape != given.shape:
            raise InvalidArgument(f"a parameter of the shape {list(to.shape)} is made of one of "
                                  f"{list(given.shape)}")
        given = given.to(to.device, to.dtype)
        if not bool(((to == given) | (to.isnan() & given.isnan())).all()):
            raise InvalidArgument(f"values of the shape {list(to.shape)} are kept in another way")
        return to

    torch.Tensor.copy_ = compare  # type: ignore[method-assign,assignment]
    try:
        with torch.no_grad(), disable_mtp_completeness_check():
            model.load_weights(tensors(found, copied))
    except Exception as error:
        return str(error)
    finally:
        torch.Tensor.copy_ = copy_  # type: ignore[method-assign]
    return ""


class ShardWeightTransferEngine(WeightTransferEngine[ShardInitInfo, ShardUpdateInfo]):
    """The worker side. One `update_weights` between start and finish loads one generation."""

    init_info_cls = ShardInitInfo
    update_info_cls = ShardUpdateInfo

    _weights: Weights | None = None
    _info: ShardInitInfo | None = None
    loaded: tuple[int, int] | None = None  # number and step
    patched: int | None = None  # values that the last update wrote; None: it loaded all

    def init_transfer_engine(self, init_info: ShardInitInfo) -> None:
        """Connect to the daemon. Another call selects another publication. NotFound: there is no
        such job or publication."""
        ranks = _tp_and_pp(self.parallel_config)
        weights = Weights(init_info.job, placed(init_info.publication, *ranks), init_info.socket)
        self.shutdown()
        self._weights, self._info = weights, init_info
        self._held: WeakKeyDictionary[Any, Held] = WeakKeyDictionary()  # by model: also a draft

    def start_weight_update(self) -> None:
        """Do nothing: the model keeps its weights until the generation is available."""

    def finish_weight_update(self) -> None:
        """Do nothing: the update is complete already."""

    def receive_weights(self, update_info: ShardUpdateInfo) -> None:
        """Load the generation. DeadlineExceeded: it was not made in time, and the model is
        unchanged on all ranks."""
        weights, info = self._weights, self._info
        if weights is None or info is None:
            raise RuntimeError("the backend 'shardd' does not know what to load: call "
                               "init_weight_transfer_engine first")
        begin, wait = time.monotonic(), update_info.wait
        found = weights.acquire(update_info.number_of(weights.publication), update_info.step,
                                info.wait if wait is None else wait,
                                _exchange(self.parallel_config))
        leased = time.monotonic()
        number, step = found.number, found.step
        with self._released(weights):
            self.patched = None
            if not info.patches:
                self._load(found, info)
            elif update_info.whole or not self._patch(found, info):
                self._load_to_be_patched(found, info)
            del found
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # copies may still read the generation
        self.loaded = number, step
        log.info("%s generation %d (step %d) of '%s' in %.3f s, after %.3f s of waiting",
                 "loaded" if self.patched is None else f"wrote {self.patched} values of",
                 number, step, weights.publication, time.monotonic() - leased, leased - begin)

    @contextlib.contextmanager
    def _released(self, weights: Weights) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # a frame of the traceback may refer to it
                weights.release()
            raise
        try:
            weights.release()
        except InUse as error:
            raise RuntimeError(
                f"the model keeps tensors that it was given ({error}), and their memory becomes "
                "another generation's: say copy: true in init_info, and update again") from error

    def _load(self, found: Generation, info: ShardInitInfo) -> None:
        if info.names == "parameters":
            copy_parameters(self.model, found, info.complete)
        else:
            self._reload(found, info)

    def _patch(self, found: Generation, info: ShardInitInfo) -> bool:
        """Write the changes since the model's generation. False: the whole of @found must be
        loaded; this is also the result after a failure."""
        held = self._held.setdefault(self.model, Held())
        changes = (None if held.unlike else
                   held.changes(self.model, found, info.names != "parameters"))
        if changes is None:
            return False
        held.forget()
        try:
            if info.names == "parameters":
                patch_parameters(self.model, changes)
            else:
                self._load_patches(changes)
        except Exception as error:
            log.warning("patches of generation %d of '%s' failed (%s: %s): all of it is loaded",
                        found.number, found._live.name, type(error).__name__, error)
            return False
        held.note(self.model, found.number)
        self.patched = sum(len(change.indices) for change in changes)
        return True

    def _load_patches(self, changes: list[Change]) -> None:
        """Use vLLM's own function for sparse patches of a checkpoint."""
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            load_checkpoint_weight_patches(self.model, (
                CheckpointWeightPatch(change.name, change.shape, change.values.dtype,
                                      change.values.to(self.device), change.indices.to(self.device))
                for change in changes), validate_unique_indices=False)
        if self.device.type == "cpu":
            _pack_again(self.model)

    def _load_to_be_patched(self, found: Generation, info: ShardInitInfo) -> None:
        """Load all weights. The first time, check whether patches can follow."""
        held = self._held.setdefault(self.model, Held())
        held.forget()
        self._load(found, info)
        if held.unlike is None:
            held.unlike = "" if info.names == "parameters" else self._try_patches(found, info)
            if held.unlike:
                log.warning("'%s' is always loaded as a whole, since %s", found._live.name,
                            held.unlike)
        if not held.unlike:
            held.note(self.model, found.number)

    def _try_patches(self, found: Generation, info: ShardInitInfo) -> str:
        """Check that the model, which has @found, accepts patches. Return: "", or why not."""
        if self.model_config.quantization is not None:
            return "the model is quantized"
        if getattr(self.model_config, "use_mla", False):
            return "the model has multi-head latent attention, which keeps products of its weights"
        unlike = ""
        try:
            self._load_patches([Change(name, tuple(seen.shape), torch.empty(0).long(),
                                       torch.empty(0, dtype=seen.dtype))
                                for name, seen in tensors(found)])
        except Exception as error:
            unlike = f"its loader takes no patches ({type(error).__name__}: {error})"
        harmed = [name for name, parameter in self.model.named_parameters()
                  if parameter.is_floating_point() and bool(parameter.isnan().any())]
        if harmed:
            self._load(found, info)
            return f"its loader does not only copy: {few(harmed)}"
        return unlike or _compare(self.model, found, info.copy)

    def _reload(self, found: Generation, info: ShardInitInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        # vLLM itself checks a checkpoint in the same way
        asks = info.complete and self.model_config.quantization is None
        expected = {name for name, _ in self.model.named_parameters()} if asks else set()
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                loaded = self.model.load_weights(tensors(found, info.copy))
            missing = sorted(expected - set(loaded)) if loaded is not None else []
            if missing:
                raise InvalidArgument(
                    f"no tensor of the publication is for {few(missing)}: publish all of the "
                    "model, or say complete: false in init_info", "publication")
        except BaseException:
            _abandon(self.model, self.model_config)
            raise
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_again(self.model)

    def shutdown(self) -> None:
        """Disconnect. A further update needs init_weight_transfer_engine."""
        weights, self._weights, self._info = self._weights, None, None
        if weights is not None:
            weights.close()


@dataclass
class ShardTrainerInitInfo(TrainerInitInfo):
    """What the trainer side publishes. ``socket``: of the trainer's daemon. ``tp_size``,
    ``pp_size``: of the engine, if ``publication`` has ``{tp_rank}`` or ``{pp_rank}``. ``worker``:
    further fields of :class:`ShardInitInfo` for the workers. ``publish_timeout``: seconds to wait
    for each generation; 0: the job's op_timeout."""

    backend: ClassVar[str] = "shardd"

    job: str
    publication: str = "engine"
    socket: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    worker: dict[str, Any] | None = None
    publish_timeout: float = 0

    def names(self) -> list[str]:
        """The names of all publications, in the order of ranks."""
        return list(dict.fromkeys(placed(self.publication, tp, pp)
                                  for pp in range(self.pp_size) for tp in range(self.tp_size)))


class ShardTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShardTrainerInitInfo]):
    """The trainer side. `send_weights` publishes the last committed step and makes the workers load
    it. The daemon has the weights, so there is no WeightSource. Ranks other than 0 do nothing."""

    init_info_cls = ShardTrainerInitInfo

    def __init__(self, info: ShardTrainerInitInfo, client: Any, source: Any = None) -> None:
        if source is not None:
            raise ValueError("the backend 'shardd' takes no WeightSource: it publishes what the "
                             "daemon has")
        super().__init__(client=client, source=None, is_sender=info.is_sender)
        self._info = info
        self._daemon = Client(info.socket) if info.is_sender else None

    @classmethod
    def trainer_init(cls, init_info: ShardTrainerInitInfo, *, client: Any,
                     source: Any = None) -> ShardTrainerWeightTransferEngine:
        """Connect, and make the workers connect."""
        made = cls(init_info, client, source)
        if made.is_sender:
            try:
                client.init_weight_transfer_engine(
                    {"job": init_info.job, "publication": init_info.publication,
                     **(init_info.worker or {})})
            except BaseException:
                made.shutdown()
                raise
        return made

    def send_weights(self) -> None:
        """Publish, then start, update and finish. The version of the weights in vLLM is the number
        of the generation, or the largest number if there are several publications."""
        if not self.is_sender:
            return
        if self._daemon is None:
            raise RuntimeError("this trainer's side was shut down")
        info = self._info
        numbers = {name: publish(name, info.job, self._daemon, info.publish_timeout)
                   for name in info.names()}
        self.client.start_weight_update()
        self.client.update_weights({"number": numbers})
        self.client.finish_weight_update(weight_version=str(max(numbers.values())))

    def shutdown(self) -> None:
        """Disconnect from the daemon."""
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.close()


__all__ = ["ShardInitInfo", "ShardTrainerInitInfo", "ShardTrainerWeightTransferEngine",
           "ShardUpdateInfo", "ShardWeightTransferEngine"]
