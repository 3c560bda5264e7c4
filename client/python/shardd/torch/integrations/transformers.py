"""The Trainer of Hugging Face's transformers over sharded parameters.

::

    trainer = ShardedTrainer(model, args, train_dataset=data)    # instead of Trainer
    trainer.train()
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import Unimplemented
from ._common import Options, is_sharded, model_state

try:
    from transformers import Trainer
except ImportError as error:
    raise ImportError("shardd.torch.integrations.transformers needs the packages transformers and "
                      f"accelerate: pip install transformers accelerate ({error})") from error

from .accelerate import Saved, ShardedAccelerator


class ShardedTrainer(Trainer):  # type: ignore[misc]
    """As transformers' Trainer, with the same arguments and the same files. The model is wrapped in
    place when training begins; checkpoints are those of a model that is not sharded, which the
    plain Trainer and from_pretrained load.

    @fully_shard: see ShardedAccelerator. @args, @kwargs: of Trainer.
    Unimplemented: ``fsdp`` and ``deepspeed`` of TrainingArguments.
    """

    def __init__(self, *args: Any, fully_shard: Options = None, **kwargs: Any) -> None:
        self._shard_options, self._shard_later = fully_shard, False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's."""
        for name in ("fsdp", "deepspeed"):
            if getattr(self.args, name, None):
                raise Unimplemented(f"TrainingArguments has {name}={getattr(self.args, name)!r}: "
                                    "shardd shards the model itself; leave it out", name)
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = ShardedAccelerator  # the object that Trainer has made
        self.accelerator.sharded_init(self._shard_options)

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        if not is_sharded(model) and not any(p.is_meta for p in model.parameters()):
            super()._move_model_to_device(model, device)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Trainer loads before the model is wrapped; what is on the meta device cannot be loaded
        there, so it is loaded with the optimizer."""
        mine: Any = self.model if model is None else model
        self._shard_later = any(p.is_meta for p in mine.parameters()) and not is_sharded(mine)
        if not self._shard_later:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._shard_later:
            self._load_from_checkpoint(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save(self, output_dir: str | None = None,
              state_dict: dict[str, Any] | None = None) -> None:
        model: Any = self.model
        if state_dict is None and is_sharded(model):
            state_dict = model_state(model)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        kept: Any = self.optimizer
        self.optimizer: Any = _Once(Saved(kept).state_dict())
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = kept


class _Once:
    """In the place of the optimizer while Trainer, on rank 0 alone, writes its state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


__all__ = ["ShardedTrainer"]
