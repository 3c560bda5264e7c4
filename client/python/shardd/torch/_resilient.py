"""Training that continues when a rank or the daemon dies and comes back.

The daemon has the parameters and the optimizer's state, so they outlive the rank. The state of an
optimizer that runs in the process is written to the daemon with every commit (_kept.py). The rest
belongs to this process: the number of the next step, the random generators, and the state of the
user's data. It is stored with every commit, and all ranks return to it together.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..client import Membership
from ..errors import Aborted, FailedPrecondition, InvalidArgument, Unimplemented
from . import _device
from ._kept import Kept
from ._sharded import Sharded
from ._tree import Tree, tree_of, unit_of

_LIMIT = 65536


class Resilient:
    """One ``with`` block is one step; made by :func:`resilient`.

    ``step``: the number of the next step, from 0. ``state``: the user's own state to restore, a
    dictionary that can be pickled. ``rejoins``: how many deaths of ranks and of the
    daemon were survived.
    """

    def __init__(self, model: nn.Module, state: dict[str, Any] | None, wait: float,
                 also: Iterable[Any]) -> None:
        unit = unit_of(model)
        if unit is None:
            raise InvalidArgument("call fully_shard on the model first", "model")
        self._tree: Tree = tree_of(unit)
        if not self._tree.alone:
            raise Unimplemented("this process has several models: resilient supports one")
        self._kept = self._state_that_is_kept()
        self._also = list(also)
        self._inside = False  # a with-block
        self._buffers = _persistent(model)
        self._built = [_bytes(module._buffers[name]) for module, name in self._buffers]
        self.step, self.state, self.rejoins = 0, dict(state or {}), 0
        self._wait, self._began = wait, False
        member = self._tree.client.member
        assert member is not None
        if member.torn:
            raise FailedPrecondition(
                "a step was applied but not committed when the job's ranks ended: the parameters "
                "are past the last commit; name another job, and give resume_from=\"committed\" "
                "to shardd.torch.init, so that it keeps a copy of its last commit")
        if member.has_commit:
            _check_blob(member)
            self._restore(member.blob)

    def _state_that_is_kept(self) -> Kept | None:
        """Of an optimizer in this process; from here on its steps wait for the commit."""
        optimizer = self._tree.optimizer
        if not isinstance(optimizer, Sharded):
            return None
        if optimizer.kept is None:
            raise FailedPrecondition(
                "the state of shardd.torch.Sharded is in this process and dies with it: build the "
                "optimizer with resilient=True, so that there is room for it in the daemon")
        optimizer.puts_off = True
        return optimizer.kept

    def _pack(self, half: int) -> bytes:
        numpy = sys.modules.get("numpy")
        packed = pickle.dumps({
            "step": self.step, "state": self.state, "half": half,
            "also": [x.state_dict() for x in self._also],
            "groups": self._settings(), "buffers": self._changed_buffers(),
            "torch": bytes(torch.random.get_rng_state().tolist()), "gpu": _device.random_state(),
            "python": random.getstate(), "numpy": numpy.random.get_state() if numpy else None})
        if len(packed) > _LIMIT:
            raise InvalidArgument(
                f"state has {len(packed)} bytes with the random generators and the model's changed "
                f"buffers; the maximum is {_LIMIT}: keep a position in the data, not the "
                "data",
                "state")
        return packed

    def _groups(self) -> list[dict[str, Any]]:
        return self._tree.optimizer.param_groups if self._tree.optimizer is not None else []

    def _settings(self) -> list[dict[str, Any]]:
        """The optimizer's of every group; what schedulers have put beside them is theirs."""
        return [{name: group[name] for name in self._tree.optimizer.defaults if name in group}
                for group in self._groups()]

    def _changed_buffers(self) -> dict[int, bytes]:
        """By number, those that are not as the model was built; a restarted rank has the others."""
        now = [_bytes(module._buffers[name]) for module, name in self._buffers]
        return {i: b for i, (b, built) in enumerate(zip(now, self._built)) if b != built}

    def _restore_buffers(self, changed: dict[int, bytes]) -> None:
        for i, (module, name) in enumerate(self._buffers):
            buffer, saved = module._buffers[name], changed.get(i, self._built[i])
            if buffer is not None and saved:
                flat = torch.frombuffer(bytearray(saved), dtype=buffer.dtype)
                with torch.no_grad():
                    buffer.copy_(flat.view(buffer.shape))

    def _restore(self, blob: bytes) -> None:
        try:
            found = pickle.loads(blob)
            self.step, self.state = found["step"], found["state"]
            generators = found["torch"], found["python"], found["numpy"]
            groups, also, buffers = found["groups"], found["also"], found["buffers"]
            on_gpu = found["gpu"]
            half = found["half"]
        except Exception as error:
            raise FailedPrecondition(
                f"the job's last commit was not made by shardd.torch.resilient ({error}): name "
                "another job") from error
        if len(also) != len(self._also) or len(groups) != len(self._groups()):
            raise FailedPrecondition(
                "the job's last commit has other schedulers or parameter groups than this program: "
                "start it as before, or name another job")
        for one, saved in zip(self._also, also):
            one.load_state_dict(saved)
        for group, saved in zip(self._groups(), groups):
            for name, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(name), torch.Tensor):
                    group[name].copy_(value)  # the program may have it, too
                else:
                    group[name] = value
        self._restore_buffers(buffers)
        if self._kept is not None:
            self._kept.read(self._tree.optimizer, half)
        torch.random.set_rng_state(torch.tensor(list(generators[0]), dtype=torch.uint8))
        _device.set_random_state(on_gpu)
        random.setstate(generators[1])
        if generators[2] is not None:
            import numpy

            numpy.random.set_state(generators[2])

    def __enter__(self) -> Resilient:
        if self._inside:
            raise FailedPrecondition("a step of this run is in progress: end its with-block "
                                     "before the next one begins")
        if not self.step and not self._committed():
            # The first death may come in the first step: there must be something to go back to.
            self._commit_first()
        self._inside = True
        return self

    def _committed(self) -> bool:
        member = self._tree.client.member
        return self._began or (member is not None and member.has_commit)

    def _commit_first(self) -> None:
        """A death may come in this commit: then it was made, or nothing has changed."""
        while not self._committed():
            try:
                self._commit()
            except Aborted:
                self._join_again()
                member = self._tree.client.member
                if member is not None and member.has_commit:
                    self._take()

    def _commit(self) -> None:
        half = self._kept.write(self._tree.optimizer) if self._kept is not None else 0
        packed = self._pack(half)
        self._tree.release_all()  # steps what waited for it: from here on a death is not survived
        self._tree.client.commit(self.step, packed)
        if self._kept is not None:
            self._kept.half = half
        self._began = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        self._inside = False
        try:
            if kind is None:
                self.step += 1
                self._commit()
                return False
            if not issubclass(kind, Aborted):
                return False
        except Aborted:
            pass
        self._rejoin()
        return True

    def _join_again(self) -> None:
        """Until all ranks are there."""
        while True:
            try:
                self._tree.rejoin(self._wait)
                break
            except Aborted:  # another death
                continue
        self.rejoins += 1

    def _rejoin(self) -> None:
        """Join again, and take what the last commit has."""
        self._join_again()
        self._take()

    def _take(self) -> None:
        member = self._tree.client.member
        assert member is not None
        if member.torn or not member.has_commit:
            raise FailedPrecondition(
                "a rank or the daemon died before the first commit, or while the ranks' optimizers "
                "were writing parameters, so that they are those of no step: start all ranks "
                "again")
        _check_blob(member)
        self._restore(member.blob)


def _check_blob(member: Membership) -> None:
    if not member.blob:
        raise FailedPrecondition(
            f"the commit of step {member.committed_step} has no blob of this rank, {member.rank} "
            f"of {member.world_size}, which has the state of shardd.torch.resilient: the job had "
            "fewer ranks then, or was loaded from a checkpoint that another program made; start as "
            "many ranks as there were, or go on in a loop without resilient, from "
            "session().member.step, and load schedulers and the like by yourself")
    if member.blob_step != member.step:
        raise FailedPrecondition(
            f"the parameters are those of step {member.step}, applied after the last commit, step "
            f"{member.blob_step}: the state of this program belongs to that commit; start all "
            "ranks again")


def _bytes(buffer: torch.Tensor | None) -> bytes:
    if buffer is None:
        return b""
    whole = buffer.detach().cpu().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""


def _persistent(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The buffers that a state dict has: the module, and its name there."""
    return [(module, name) for module in model.modules() for name in module._buffers
            if name not in module._non_persistent_buffers_set]


def resilient(model: nn.Module, state: dict[str, Any] | None = None,
              wait: float = 300.0, also: Iterable[Any] = ()) -> Resilient:
    """Survive the death of other ranks and of the daemon, and continue after this rank's own.

    ::

        run = resilient(model, {"seen": 0}, also=[scheduler])
        while run.step < steps:
            with run:
                loss = model(batch(run.step)).mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.state["seen"] += 1

    At the end of the block the step is committed, on all ranks or none, with ``run.state``, the
    model's persistent buffers, the settings of the parameter groups, what is in ``also``
    (schedulers, a GradScaler: what has a state_dict) and the random generators of torch, random
    and numpy; 64 KiB in all. If the daemon dies, and its jobs outlive it, the ranks connect again,
    in the same processes, and continue from the last commit. If a rank dies, all others
    leave the block, wait for it to come back (:func:`guard`, `shardctl run --max-restarts`), and
    all continue from the last commit. The block must contain the whole step, and everything else
    that all ranks do together (an evaluation, state_dict()): code after it runs on the ranks that
    have left it, and not on the one that came back. A death outside a block is an error, Aborted.
    The optimizer must run in the daemon, or be Sharded with resilient=True, whose steps wait for
    the commit or until parameters are needed. No collective may be called between building the
    optimizer and this call.

    @wait: seconds for a rank to come back; then DeadlineExceeded.
    """
    return Resilient(model, state, wait, also)


__all__ = ["Resilient", "resilient"]
