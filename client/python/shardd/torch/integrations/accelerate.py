"""An Accelerator of Hugging Face's accelerate that shards the models it prepares.

::

    accelerator = ShardedAccelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import Unimplemented
from .._forward import register_fsdp_forward_method
from ._common import Options, is_sharded, model_state, optimizer_state, rebind, shard, whole

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError("shardd.torch.integrations.accelerate needs the package accelerate: "
                      f"pip install accelerate ({error})") from error


class ShardedAccelerator(Accelerator):  # type: ignore[misc]
    """As accelerate's Accelerator; models are wrapped with shardd.torch.fully_shard and trained in
    the daemon.

    @fully_shard: the arguments of shardd.torch.fully_shard, or a function that gets the model and
    wraps it. By default the layers of a model of transformers and the model are units, and of
    another model the whole. With ``mixed_precision="bf16"`` they compute and reduce in bf16, as
    accelerate has it for FSDP2. @args, @kwargs: of Accelerator.
    Unimplemented: plugins that shard or split a model themselves, fp16, fp8.
    """

    def __init__(self, *args: Any, fully_shard: Options = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sharded_init(fully_shard)

    def sharded_init(self, fully_shard: Options) -> None:
        """What the constructor does after that of Accelerator."""
        self._shard_options = fully_shard
        self._shard_replaced: Any = WeakIdKeyDictionary()
        self._shard_defaults: dict[str, Any] = {}
        if str(self.distributed_type.value) not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise Unimplemented(
                f"accelerate is configured for {self.distributed_type.value}: shardd shards the "
                "model itself; leave out FSDP, DeepSpeed and Megatron-LM, and their plugins",
                "distributed_type")
        if self.parallelism_config is not None:
            raise Unimplemented("parallelism_config is given: shardd shards over all ranks; leave "
                                "it out", "parallelism_config")
        if self.mixed_precision not in ("no", "bf16"):
            raise Unimplemented(f"mixed_precision={self.mixed_precision!r} is not supported: use "
                                "'bf16' or 'no'", "mixed_precision")
        if self.mixed_precision == "bf16":
            self._shard_defaults["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16,
                output_dtype=torch.bfloat16)

    # ----------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerator.prepare. The model is wrapped in place; an optimizer that was built with
        its parameters stays the same object and gets the sharded ones. (Collective.)"""
        for model in args:
            if isinstance(model, torch.nn.Module):
                self.prepare_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> torch.nn.Module:
        """Wrap @model, unless it is wrapped, compiled or not, already. @evaluation_mode: a model
        that is not wrapped stays so, whole on every rank."""
        if evaluation_mode and not is_sharded(model):
            return model.to(self.device) if device_placement is not False else model
        if not is_sharded(model):
            if not any(p.is_meta for p in model.parameters()) and self.device_placement \
                    and device_placement is not False:
                model.to(self.device)
            self._shard_replaced.update(shard(model, self._shard_options, **self._shard_defaults))
            if hasattr(model, "generate"):
                register_fsdp_forward_method(model, "generate")
        if not any(model is one for one in self._models):
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        if getattr(self.state.dynamo_plugin.backend, "value", "NO") != "NO":
            return torch.compile(  # type: ignore[return-value]
                model, **self.state.dynamo_plugin.to_kwargs())
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerator's: the parameters of @optimizer become the sharded ones."""
        rebind(without_wrapper(optimizer), self._shard_replaced)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerator's."""
        self._shard_replaced = WeakIdKeyDictionary()
        return super().free_memory(*objects)

    # --------------------------------------------------------------------- gradients

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """As Accelerator's (collective). Return: the norm of the gradients of all ranks before, a
        plain tensor."""
        return whole(super().clip_grad_norm_(list(parameters), max_norm, norm_type))

    # ------------------------------------------------------------------------- state

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of a plain model on rank 0, nothing on the others, as for FSDP2
        (collective)."""
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        if not is_sharded(model):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return model_state(model)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True,
                   **save_model_func_kwargs: Any) -> Any:
        """As Accelerator's, in the files that it writes for a model that is not sharded
        (collective)."""
        optimizers: list[Any] = self._optimizers
        self._optimizers: list[Any] = [Saved(o) for o in optimizers]
        try:
            saved = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        finally:
            self._optimizers = optimizers
        self.wait_for_everyone()
        return saved


def without_wrapper(optimizer: Any) -> Any:
    """The optimizer that accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


class Saved:
    """An optimizer while it is saved: its state dict is rank 0's alone."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = without_wrapper(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Collective."""
        return optimizer_state(self._optimizer)


__all__ = ["Saved", "ShardedAccelerator", "without_wrapper"]
