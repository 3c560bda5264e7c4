"""A strategy of Lightning's Trainer over sharded parameters.

::

    trainer = lightning.Trainer(strategy=ShardedStrategy(), accelerator="cpu", devices=2)
    trainer.fit(module, loader)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...errors import FailedPrecondition, InvalidArgument, Unimplemented
from .._forward import register_fsdp_forward_method
from ._common import Options, is_sharded, model_state, optimizer_state, shard, sharded_roots

try:
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, Strategy
except ImportError as error:
    raise ImportError("shardd.torch.integrations.lightning needs the package lightning: "
                      f"pip install lightning ({error})") from error

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedStrategy(DDPStrategy):
    """Shards the LightningModule with shardd.torch.fully_shard before configure_optimizers.

    With automatic optimization the LightningModule is one model, and each of its step methods a
    forward of it. With manual optimization each module in it that has parameters is a model of its
    own, with an optimizer of its own. If configure_model has wrapped modules, these stay as they
    are, and nothing else is wrapped.
    @fully_shard: arguments of shardd.torch.fully_shard, or a function that gets the model and
    wraps it. @kwargs: of lightning's DDPStrategy, about processes and checkpoints.
    """

    strategy_name = "shardd"

    def __init__(self, fully_shard: Options = None, **kwargs: Any) -> None:
        for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view",
                     "broadcast_buffers", "bucket_cap_mb", "ddp_comm_hook", "ddp_comm_state",
                     "ddp_comm_wrapper", "model_averaging_period"):
            if name in kwargs:
                raise Unimplemented(f"{name} is an argument for DistributedDataParallel: leave it "
                                    "out", name)
        super().__init__(**kwargs)
        self._shard_options = fully_shard

    # -------------------------------------------------------------------------- setup

    def setup(self, trainer: Any) -> None:
        """As Strategy's: the model is wrapped before the optimizers are made."""
        precision = str(getattr(self.precision_plugin, "precision", "32-true"))
        if precision not in ("32-true", "bf16-mixed", "bf16-true"):
            raise Unimplemented(f"precision={precision!r} is not supported: use '32-true', "
                                "'bf16-mixed' or 'bf16-true'", "precision")
        Strategy.setup(self, trainer)

    def model_to_device(self) -> None:
        """As DDPStrategy's, of what is not sharded yet."""
        model = self.model
        assert model is not None
        if not is_sharded(model) and not any(p.is_meta for p in model.parameters()):
            super().model_to_device()

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        module: Any = self.lightning_module
        if is_sharded(model):
            return model
        if module.automatic_optimization:
            shard(model, self._shard_options)
            for name in _STEPS:
                register_fsdp_forward_method(model, name)
        else:
            self._shard_parts(model)
        return model

    def _shard_parts(self, model: nn.Module) -> None:
        own = [name for name, value in model._parameters.items() if value is not None]
        if own:
            raise InvalidArgument(
                f"the LightningModule has a parameter '{own[0]}' itself: with manual optimization "
                "every parameter must be in a module inside it", "model")
        for child in model.children():
            if any(True for _ in child.parameters()):
                shard(child, self._shard_options)

    def setup_optimizers(self, trainer: Any) -> None:
        """As Strategy's."""
        if self.optimizers:
            raise FailedPrecondition("fit() was called twice with one strategy: make a new Trainer "
                                     "and a new model, and load a checkpoint")
        super().setup_optimizers(trainer)

    # ------------------------------------------------------------------------ gradients

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:  # type: ignore[override]
        """Gradients add up on each rank inside: accumulate_grad_batches."""
        assert self.model is not None
        with contextlib.ExitStack() as stack:
            for root in sharded_roots(self.model):
                stack.enter_context(root.no_sync())  # type: ignore[operator]
            yield

    # ---------------------------------------------------------------------------- state

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into the sharded model."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """That of a plain model on rank 0, nothing on the others (collective)."""
        assert self.lightning_module is not None
        return model_state(self.lightning_module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """That of torch.optim's optimizer on rank 0, nothing on the others (collective)."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return optimizer_state(optimizer)

    def teardown(self) -> None:
        """As DDPStrategy's. The number of ranks stays in the environment, from which Lightning
        deletes it: a later session reads it there."""
        world = os.environ.get("WORLD_SIZE")
        super().teardown()
        if world is not None:
            os.environ["WORLD_SIZE"] = world


__all__ = ["ShardedStrategy"]
