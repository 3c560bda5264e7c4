#!/usr/bin/env python3
"""shardd.torch.integrations.accelerate on 2 ranks: a loop over an Accelerator gives what the same
loop over PyTorch's FSDP2 gives, and its states continue bit for bit."""

import os
import sys

import fsdp
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from fsdp import differences, shared_folder
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import shardd
import shardd.torch as st
from shardd.torch.integrations.accelerate import ShardedAccelerator

os.environ["HF_HUB_OFFLINE"] = "1"
WORLD = 2
STEPS = 8
CASES = {}


def case(trial):
    CASES[trial.__name__] = trial
    return trial


def llama(**more):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        **more))


def rows():
    draw = torch.Generator().manual_seed(1)
    return torch.randint(1, 64, (64, 12), generator=draw)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


class Theirs:
    """FSDP2 by hand, with what the Accelerator does for the loop."""

    def __init__(self, every, **options):
        self.every, self.options, self.step = every, options, 0

    def prepare(self, model, make):
        for layer in model.model.layers:
            fsdp.fsdp.fully_shard(layer, **self.options)
        self.model = fsdp.fsdp.fully_shard(model, **self.options)
        return make(model.parameters())

    def backward(self, loss):
        (loss / self.every).backward()

    def sync(self):
        self.step += 1
        last = self.step % self.every == 0
        self.model.set_requires_gradient_sync(last)
        return last


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def halved(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9 ** n)


def reference(model, every, clip, make=adam, schedule=halved, **options):
    """Losses, norms and the model's parameters."""
    hand = Theirs(every, **options)
    optimizer = hand.prepare(model, make)
    scheduler = schedule(optimizer)
    losses, norms = [], []
    for n in range(STEPS):
        batch = rows()[n * 2 * WORLD:][:2 * WORLD][2 * dist.get_rank():][:2]
        sync = hand.sync()
        loss = loss_of(model, batch)
        hand.backward(loss)
        losses.append(loss.item())
        if sync:
            if clip:
                norms.append(nn.utils.clip_grad_norm_(
                    model.parameters(), clip).full_tensor().item())
            optimizer.step()
            for _ in range(WORLD):  # as accelerate does unless batches are split
                scheduler.step()
            optimizer.zero_grad()
    return losses, norms, {n: p.full_tensor() for n, p in model.named_parameters()}


def loop(accelerator, model, clip=None, make=adam, schedule=halved, steps=(0, STEPS), load=None,
         save=None):
    """The same by an Accelerator; the optimizer is built before the model is wrapped."""
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert accelerator.unwrap_model(model) is model
    if load:
        accelerator.load_state(load)
        loader = accelerator.skip_first_batches(loader, steps[0])
    losses, norms = [], []
    for n, batch in zip(range(*steps), loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients and clip:
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                assert type(norm) is torch.Tensor, type(norm)
                norms.append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if save and n == save[1]:
            accelerator.save_state(save[0])
    return losses, norms, model


def compared(name, make_model=llama, every=2, clip=0.5, mixed=None, options=None, **more):
    st.init(job=name, op_timeout=60)
    accelerator = ShardedAccelerator(cpu=True, gradient_accumulation_steps=every,
                                     mixed_precision=mixed or "no")
    losses, norms, model = loop(accelerator, make_model(), clip, **more)
    end = {n: v.clone() for n, v in model.state_dict().items()}
    names = dict(model.named_parameters())
    expected = reference(make_model(), every, clip, **(options or {}), **more)
    wrong = [] if losses == expected[0] else [f"losses {losses} differ from {expected[0]}"]
    if norms != expected[1] or bool(norms) != bool(clip):
        wrong.append(f"norms {norms} differ from {expected[1]}")
    wrong += differences([{n: end[n] for n in names}], [expected[2]])
    st.shutdown()
    return wrong


@case
def accumulated_and_clipped(name, rank):
    return compared(name)


@case
def neither(name, rank):
    return compared(name, every=1, clip=None)


@case
def tied_weights(name, rank):
    return compared(name, lambda: llama(tie_word_embeddings=True))


@case
def an_optimizer_on_the_shard(name, rank):
    return compared(name, make=lambda p: torch.optim.Adagrad(p, lr=0.05))


@case
def an_optimizer_that_has_stepped(name, rank):
    """It keeps its state. In FSDP2 another one loads it."""
    made = []

    def stepped():
        model = llama()
        made[:] = [adam(model.parameters())]
        loss_of(model, rows()[40:44]).backward()
        made[0].step()
        made[0].zero_grad()
        return model

    def make(parameters):
        parameters = list(parameters)
        if not isinstance(parameters[0], DTensor):
            return made[0]
        optimizer = adam(parameters)
        state = made[0].state_dict()
        for kept, p in zip(state["state"].values(), parameters):
            kept.update({n: distribute_tensor(kept[n], p.device_mesh, p.placements)
                         for n in ("exp_avg", "exp_avg_sq")})
        optimizer.load_state_dict(state)
        return optimizer

    return compared(name, stepped, make=make)


@case
def groups_with_their_settings(name, rank):
    def groups(parameters):
        parameters = list(parameters)
        return torch.optim.AdamW([
            {"params": parameters[:3], "weight_decay": 0.3},
            {"params": parameters[3:], "lr": 0.02, "betas": (0.8, 0.9)}], lr=0.01, fused=True)

    return compared(name, make=groups)


@case
def in_bf16(name, rank):
    """As accelerate has FSDP2 compute: everything in bf16."""
    policy = fsdp.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return compared(name, mixed="bf16", options={"mp_policy": policy})


@case
def saved_and_resumed(name, rank, make=adam, **model):
    """8 steps in one run, and 4 of them, saved, and 4 after that, are equal; a plain Accelerator
    reads the same files."""
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    accelerator = ShardedAccelerator(cpu=True, gradient_accumulation_steps=2)
    losses, norms, trained = loop(accelerator, llama(**model), 0.5, make, save=(folder, 3))
    end = {n: v.clone() for n, v in trained.state_dict().items()}
    full = accelerator.get_state_dict(trained)
    wrong = differences([full], [{} if rank else end])
    accelerator.save_model(trained, folder + "/model")
    accelerator.unwrap_model(trained).save_pretrained(
        folder + "/pretrained", is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(trained))
    accelerator.wait_for_everyone()
    for kind in ("model", "pretrained"):
        loaded = llama(**model)
        safetensors.torch.load_model(loaded, f"{folder}/{kind}/model.safetensors")
        wrong += differences([dict(loaded.state_dict())], [end])
    st.shutdown()
    st.init(job=name + "2", op_timeout=60)
    accelerator = ShardedAccelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(77)
    other = transformers.LlamaForCausalLM(llama(**model).config)
    again, later_norms, trained = loop(accelerator, other, 0.5, make, steps=(4, STEPS), load=folder)
    if again != losses[4:] or later_norms != norms[2:]:
        wrong.append(f"{again}, {later_norms} is not the end of {losses}, {norms}")
    wrong += differences([dict(trained.state_dict())], [end])
    st.shutdown()
    files = sorted(f for f in os.listdir(folder) if os.path.isfile(f"{folder}/{f}"))
    if files != ["model.safetensors", "optimizer.bin", "random_states_0.pkl",
                 "random_states_1.pkl", "scheduler.bin"]:
        wrong.append(f"the folder has {files}")
    plain = llama(**model)
    safetensors.torch.load_model(plain, folder + "/model.safetensors")
    optimizer = make(plain.parameters())
    optimizer.load_state_dict(torch.load(folder + "/optimizer.bin"))
    kept = "exp_avg" if make is adam else "sum"
    if not all(optimizer.state[p][kept].any() for p in plain.parameters()):
        wrong.append("torch.optim's optimizer has no state from optimizer.bin")
    return wrong


@case
def saved_and_resumed_with_tied_weights(name, rank):
    return saved_and_resumed(name, rank, tie_word_embeddings=True)


@case
def saved_and_resumed_on_the_shard(name, rank):
    return saved_and_resumed(name, rank, lambda p: torch.optim.Adagrad(p, lr=0.05))


def refused(kind, word, call):
    try:
        call()
    except kind as error:
        return [] if word in str(error) else [f"{error} does not say {word}"]
    return [f"{word}: nothing was refused"]


@case
def refusals(name, rank):
    """What would be ignored or trained wrong has a sentence."""
    st.init(job=name, op_timeout=60)
    wrong = refused(shardd.InvalidArgument, "has not wrapped the model",
                    lambda: ShardedAccelerator(cpu=True, fully_shard=lambda model: None).prepare(
                        nn.Linear(2, 2)))
    AcceleratorState._reset_state(True)
    wrong += refused(shardd.Unimplemented, "mixed_precision='fp16'", lambda: ShardedAccelerator(
        cpu=True, mixed_precision="fp16"))
    st.shutdown()
    return wrong


def trial(name, rank):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD), OMP_NUM_THREADS="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    AcceleratorState._reset_state(True)
    return CASES[name](name, rank)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(WORLD, fsdp.wanted(CASES), trial)))
