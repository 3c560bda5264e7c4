#!/usr/bin/env python3
"""shardd.torch.integrations.lightning on 2 ranks: the same LightningModule over PyTorch's FSDP2
gives the same losses, parameters and averages, and a checkpoint continues bit for bit."""

import contextlib
import logging
import os
import sys
import warnings

import fsdp
import lightning
import torch
from fsdp import differences, shared_folder
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import shardd
import shardd.torch as st
from shardd.torch.integrations.lightning import ShardedStrategy

WORLD = 2
CASES = {}
warnings.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


def case(trial):
    CASES[trial.__name__] = trial
    return trial


class Fsdp2Strategy(DDPStrategy):
    """PyTorch's fully_shard at the same place."""

    def setup(self, trainer):
        Strategy.setup(self, trainer)

    def _setup_model(self, model):
        if model.automatic_optimization:
            self.parts = [fsdp.fsdp.fully_shard(model)]
            for name in ("training_step", "validation_step"):
                fsdp.fsdp.register_fsdp_forward_method(model, name)
        else:
            self.parts = [fsdp.fsdp.fully_shard(part) for part in model.children()]
        return model

    @contextlib.contextmanager
    def block_backward_sync(self):
        for part in self.parts:
            part.set_requires_gradient_sync(False)
        yield
        for part in self.parts:
            part.set_requires_gradient_sync(True)


class Module(lightning.LightningModule):
    """An encoder and a decoder, layers of the module itself."""

    def __init__(self, optimizer=None):
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.decoder = nn.Linear(16, 8)
        self.losses, self.made = [], optimizer

    def loss(self, batch):
        return (self.decoder(self.encoder(batch)) - batch).pow(2).mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self):
        if self.made is not None:
            return self.made(self.parameters())
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Pair(lightning.LightningModule):
    """Two models, each with its optimizer, stepped by hand."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(6)
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, index):
        of_generator, of_critic = self.optimizers()
        made = self.critic(self.generator(batch))
        loss = (made - 1).pow(2).mean()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 0.1)
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        other = (self.critic(batch) - 1).pow(2).mean() \
            + self.critic(self.generator(batch).detach()).pow(2).mean()
        self.manual_backward(other)
        of_critic.step()
        of_critic.zero_grad()
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self):
        return [torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
                torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)]


def loader(rows=48):
    draw = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader(torch.randn(rows, 8, generator=draw), batch_size=4,
                                       shuffle=True)


def fit(strategy, module, resume=None, **more):
    lightning.seed_everything(11, verbose=False)
    made = lightning.Trainer(**{**dict(
        strategy=strategy, accelerator="cpu", devices=WORLD, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False), **more})
    made.fit(module, loader(), loader(16), ckpt_path=resume, weights_only=False)
    return made


def whole(module, ours):
    if ours:
        return {n: v.clone() for n, v in module.state_dict().items()}
    return dcp.get_model_state_dict(module, options=dcp.StateDictOptions(full_state_dict=True))


def against_fsdp2(name, make=Module, **more):
    st.init(job=name, op_timeout=60)
    ours, theirs = make(), make()
    a = fit(ShardedStrategy(), ours, **more)
    b = fit(Fsdp2Strategy(), theirs, **more)
    wrong = [] if ours.losses == theirs.losses and len(ours.losses) > 8 else \
        [f"losses {ours.losses} differ from {theirs.losses}"]
    if a.callback_metrics != b.callback_metrics or (make is Module and "val" not in
                                                    a.callback_metrics):
        wrong.append(f"averages {a.callback_metrics} differ from {b.callback_metrics}")
    wrong += differences([whole(ours, True)], [whole(theirs, False)])
    st.shutdown()
    return wrong


@case
def automatic(name, rank):
    return against_fsdp2(name)


@case
def clipped_and_accumulated(name, rank):
    return against_fsdp2(name, accumulate_grad_batches=2, gradient_clip_val=0.05)


@case
def clipped_by_value(name, rank):
    return against_fsdp2(name, gradient_clip_val=0.002, gradient_clip_algorithm="value")


@case
def an_optimizer_on_the_shard(name, rank):
    return against_fsdp2(name, lambda: Module(lambda p: torch.optim.Adagrad(p, lr=0.05)))


@case
def two_models_by_hand(name, rank):
    return against_fsdp2(name, Pair)


@case
def saved_and_resumed(name, rank):
    path = shared_folder(rank) + "/one.ckpt"
    st.init(job=name, op_timeout=60)
    first = Module()
    fit(ShardedStrategy(), first, max_epochs=1, accumulate_grad_batches=2).save_checkpoint(path)
    end = whole(first, True)
    st.shutdown()
    st.init(job=name + "2", op_timeout=60)
    through = Module()
    fit(ShardedStrategy(), through, max_epochs=2, accumulate_grad_batches=2)
    expected = whole(through, True)
    st.shutdown()
    st.init(job=name + "3", op_timeout=60)
    later = Module()
    torch.nn.init.zeros_(later.decoder.weight)
    fit(ShardedStrategy(), later, resume=path, max_epochs=2, accumulate_grad_batches=2)
    wrong = []
    if later.losses[-8:] != through.losses[-8:]:  # 6 steps and 2 of validation
        wrong.append(f"losses {later.losses} are not the end of {through.losses}")
    wrong += differences([whole(later, True)], [expected])
    st.shutdown()
    saved = torch.load(path, weights_only=False)
    plain = Module()
    plain.load_state_dict(saved["state_dict"])
    wrong += differences([dict(plain.state_dict())], [end])
    adam = torch.optim.AdamW(plain.parameters())
    adam.load_state_dict(saved["optimizer_states"][0])
    if not all(adam.state[p]["exp_avg"].any() for p in plain.parameters()):
        wrong.append("torch.optim.AdamW has no state from the checkpoint")
    return wrong


@case
def autocast(name, rank):
    return against_fsdp2(name, precision="bf16-mixed", accumulate_grad_batches=2)


@case
def parameters_of_bf16(name, rank):
    return against_fsdp2(name, precision="bf16-true")


@case
def tested_after_fit(name, rank):
    """On the sharded model, as validation is; the numbers are those of the plain module."""
    st.init(job=name, op_timeout=60)
    module = Module()
    made = fit(ShardedStrategy(), module)
    [said] = made.validate(module, loader(16), verbose=False)
    plain = Module()
    plain.load_state_dict(whole(module, True))
    st.shutdown()
    batches = [next(iter([x])) for x in torch.utils.data.DataLoader(
        loader(16).dataset, batch_size=16)]
    expected = plain.loss(batches[0]).item()
    return [] if abs(said["val"] - expected) < 1e-6 else [f"{said} is not {expected}"]


class Wrapped(Module):
    """Its own hook wraps it."""

    def configure_model(self):
        if not isinstance(self.encoder, st.FSDPModule):
            st.fully_shard(self.encoder)
            st.fully_shard(self)

    def training_step(self, batch, index):
        loss = self(batch)
        self.losses.append(loss.item())
        return loss

    forward = Module.loss

    def validation_step(self, batch, index):
        self.losses.append(self(batch).item())


@case
def wrapped_by_configure_model(name, rank):
    st.init(job=name, op_timeout=60)
    one, other = Wrapped(), Module()
    fit(ShardedStrategy(), one)
    end = whole(one, True)
    st.shutdown()
    st.init(job=name + "2", op_timeout=60)
    fit(ShardedStrategy(), other)
    wrong = differences([end], [whole(other, True)])
    st.shutdown()
    return wrong + ([] if one.losses == other.losses else ["losses differ"])


def refused(kind, word, call):
    try:
        call()
    except kind as error:
        return [] if word in str(error) else [f"{error} does not say {word}"]
    finally:
        os.environ["WORLD_SIZE"] = str(WORLD)
    return [f"{word}: nothing was refused"]


class Own(Pair):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


@case
def refusals(name, rank):
    st.init(job=name, op_timeout=60)
    module = Module()
    made = fit(ShardedStrategy(), module)
    wrong = refused(shardd.FailedPrecondition, "fit() was called twice",
                    lambda: made.fit(module, loader()))
    wrong += refused(shardd.InvalidArgument, "has a parameter 'scale' itself",
                     lambda: fit(ShardedStrategy(), Own()))
    wrong += refused(shardd.Unimplemented, "'64-true' is not supported",
                     lambda: fit(ShardedStrategy(), Module(), precision="64-true"))
    wrong += refused(shardd.Unimplemented, "for DistributedDataParallel",
                     lambda: ShardedStrategy(static_graph=True))
    st.shutdown()
    return wrong


def trial(name, rank):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD), NODE_RANK="0",
                      WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    return CASES[name](name, rank)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(WORLD, fsdp.wanted(CASES), trial)))
