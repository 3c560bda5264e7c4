#!/usr/bin/env python3
"""shardd.torch.integrations.transformers on 2 ranks: the same Trainer over PyTorch's FSDP2 gives
the same losses, norms and parameters, and what it saves is what the plain Trainer saves."""

import contextlib
import functools
import glob
import os
import subprocess
import sys

import fsdp
import peft
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from fsdp import differences, shared_folder
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.checkpoint import state_dict as dcp

import shardd
import shardd.torch as st
from shardd.torch.integrations.transformers import ShardedTrainer

os.environ["HF_HUB_OFFLINE"] = "1"
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
WORLD = 2
CASES = {}


def case(trial):
    CASES[trial.__name__] = trial
    return trial


class Fsdp2Accelerator(Accelerator):
    """FSDP2 on the processor, for which accelerate itself takes DistributedDataParallel."""

    def prepare(self, *args, **kwargs):
        for model in args:
            if isinstance(model, torch.nn.Module) and not isinstance(model, fsdp.fsdp.FSDPModule):
                [optimizer] = [a for a in args if isinstance(a, torch.optim.Optimizer)]
                before = dict(model.named_parameters())
                for layer in model.model.layers:
                    fsdp.fsdp.fully_shard(layer, **self.options)
                fsdp.fsdp.fully_shard(model, **self.options)
                after = {before[n]: p for n, p in model.named_parameters()}
                for group in optimizer.param_groups:
                    group["params"] = [after[p] for p in group["params"]]
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model, **kwargs):
        return model

    def prepare_optimizer(self, optimizer, device_placement=None):
        return super().prepare_optimizer(optimizer, device_placement=False)

    @contextlib.contextmanager
    def no_sync(self, model):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, *args, **kwargs):
        return super().clip_grad_norm_(*args, **kwargs).full_tensor()


class Fsdp2Trainer(transformers.Trainer):
    options = {}

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Fsdp2Accelerator
        self.accelerator.options = self.options


def llama(**more):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        **more))


@functools.lru_cache
def data():
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 64, (12,), generator=draw) for _ in range(48)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, **more):
    return transformers.TrainingArguments(**{**dict(
        output_dir=folder, use_cpu=True, max_steps=6, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=1e-2, warmup_steps=2,
        weight_decay=0.1, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="no", report_to=[], disable_tqdm=True, log_level="error", seed=7), **more})


def trainer(kind, model, folder, **more):
    made = kind(model, arguments(folder, **more), train_dataset=data(), eval_dataset=data()[:8])
    made.remove_callback(transformers.PrinterCallback)
    return made


def logged(made):
    """What it has logged of each step, without times."""
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    return [{n: float(entry[n]) for n in wanted if n in entry}
            for entry in made.state.log_history if "loss" in entry or "eval_loss" in entry]


def whole(made):
    if isinstance(made, ShardedTrainer):
        return {n: v.clone() for n, v in made.model.state_dict().items()}
    return dcp.get_model_state_dict(made.model, options=dcp.StateDictOptions(full_state_dict=True))


def said(ours, theirs):
    """Sentences about what differs of two trainers that have trained."""
    a, b = logged(ours), logged(theirs)
    wrong = [f"{x} differs from {y}" for x, y in zip(a, b) if x != y]
    if len(a) != len(b) or not a:
        wrong.append(f"{len(a)} lines are logged, not {len(b)}")
    return wrong + differences([whole(ours)], [whole(theirs)])


def against_fsdp2(name, rank, model=llama, options=None, **more):
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    ours = trainer(ShardedTrainer, model(), folder, **more)
    ours.train()
    kind = type("Theirs", (Fsdp2Trainer,), {"options": options or {}})
    theirs = trainer(kind, model(), folder, **more)
    theirs.train()
    assert isinstance(theirs.model, fsdp.fsdp.FSDPModule)
    assert isinstance(ours.model, st.FSDPModule)
    wrong = said(ours, theirs)
    if "torch_compile" in more and not isinstance(ours.model_wrapped, OptimizedModule):
        wrong.append("the model is not compiled")
    st.shutdown()
    return wrong


@case
def clipped_and_accumulated(name, rank):
    return against_fsdp2(name, rank)


@case
def without_clipping(name, rank):
    return against_fsdp2(name, rank, max_grad_norm=0.0, gradient_accumulation_steps=1)


@case
def tied_weights(name, rank):
    return against_fsdp2(name, rank, functools.partial(llama, tie_word_embeddings=True))


@case
def gradient_checkpointing(name, rank):
    return against_fsdp2(name, rank, gradient_checkpointing=True)


@case
def saved_and_resumed(name, rank):
    """A run of 6 steps, and one that continues its checkpoint of step 3, are equal; the plain
    Trainer resumes from it too; and from_pretrained loads what save_model has written."""
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    first = trainer(ShardedTrainer, llama(), folder, save_strategy="steps", save_steps=3)
    first.train()
    first.save_model(folder + "/final")
    end = whole(first)
    st.shutdown()
    st.init(job=name + "2", op_timeout=60)
    torch.manual_seed(99)
    second = trainer(ShardedTrainer, llama(), folder)
    second.train(resume_from_checkpoint=folder + "/checkpoint-3")
    wrong = differences([whole(second)], [end])
    a, b = logged(first), logged(second)
    wrong += [f"{x} differs from {y}" for x, y in zip(a, b) if x != y and x["step"] > 3]
    st.shutdown()
    dist.barrier()
    plain = transformers.LlamaForCausalLM.from_pretrained(folder + "/final")
    wrong += differences([plain.state_dict()], [end])
    files = sorted(os.path.basename(f) for f in glob.glob(folder + "/checkpoint-3/*"))
    if "optimizer.pt" not in files or "model.safetensors" not in files:
        wrong.append(f"the checkpoint has {files}")
    return wrong


@case
def a_model_on_the_meta_device_resumes(name, rank):
    """The values are the checkpoint's, not those of its initialisation."""
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    first = trainer(ShardedTrainer, llama(), folder, save_strategy="steps", save_steps=3)
    first.train()
    end = whole(first)
    st.shutdown()
    st.init(job=name + "2", op_timeout=60)
    with torch.device("meta"):
        empty = llama()
    second = trainer(ShardedTrainer, empty, folder)
    second.train(resume_from_checkpoint=folder + "/checkpoint-3")
    wrong = differences([whole(second)], [end])
    st.shutdown()
    return wrong


@case
def compiled(name, rank):
    return against_fsdp2(name, rank, torch_compile=True, torch_compile_backend="aot_eager")


@case
def bf16(name, rank):
    """As accelerate has FSDP2 compute: all in bf16, over fp32 parameters."""
    policy = fsdp.fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return against_fsdp2(name, rank, options={"mp_policy": policy}, bf16=True)


@case
def an_optimizer_on_the_shard(name, rank):
    return against_fsdp2(name, rank, optim="adagrad")


@case
def the_plain_trainer_resumes(name, rank):
    """From a checkpoint of 2 ranks, on 1 rank without shardd: parameters and the optimizer's state
    are what was saved."""
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    first = trainer(ShardedTrainer, llama(), folder, save_strategy="steps", save_steps=3,
                    max_steps=3)
    first.train()
    end, adam = whole(first), first.optimizer.state_dict()
    st.shutdown()
    dist.barrier()
    model = llama()
    plain = torch.optim.AdamW(_as_trainer_groups(model), lr=1e-2, fused=True)
    plain.load_state_dict(torch.load(folder + "/checkpoint-3/optimizer.pt", weights_only=True))
    ours = {n: s["exp_avg"] for n, s in adam["state"].items()}
    theirs = {n: s["exp_avg"] for n, s in plain.state_dict()["state"].items()}
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder + "/checkpoint-3")
    return differences([ours], [theirs]) + differences([loaded.state_dict()], [end])


def _as_trainer_groups(model):
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if "norm" not in n]},
            {"params": [p for n, p in named if "norm" in n]}]


@case
def the_best_model_is_loaded(name, rank):
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    ours = trainer(ShardedTrainer, llama(), folder, save_strategy="steps", save_steps=2,
                   load_best_model_at_end=True, metric_for_best_model="eval_loss",
                   greater_is_better=True, max_steps=4)  # the worst one, which is not the last
    ours.train()
    best = ours.state.best_model_checkpoint
    loaded = transformers.LlamaForCausalLM.from_pretrained(best)
    wrong = [] if best.endswith("checkpoint-2") else [f"the best is {best}"]
    wrong += differences([whole(ours)], [loaded.state_dict()])
    loss = ours.evaluate()["eval_loss"]
    if loss != ours.state.best_metric:
        wrong.append(f"the loss is {loss}, was {ours.state.best_metric}")
    st.shutdown()
    return wrong


@case
def evaluated_first_and_generated_after(name, rank):
    """The whole model before training; then the sharded one."""
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)
    ours = trainer(ShardedTrainer, llama(), folder, max_steps=2)
    before = ours.evaluate()["eval_loss"]
    wrong = ["the model was sharded for an evaluation"] if isinstance(
        ours.model, st.FSDPModule) else []
    ours.train()
    if not isinstance(ours.model, st.FSDPModule):
        wrong.append("the model was not sharded for training")
    if not ours.evaluate()["eval_loss"] < before:
        wrong.append("it has not learned")
    words = ours.model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4,
                                do_sample=False)
    plain = llama()
    plain.load_state_dict(whole(ours))
    plain.eval()
    if words.tolist() != plain.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=4,
                                        do_sample=False).tolist():
        wrong.append("generate gives something else than the plain model")
    st.shutdown()
    return wrong


@case
def lora(name, rank):
    """Only the adapters are trained and saved; peft loads them."""
    folder = shared_folder(rank)
    st.init(job=name, op_timeout=60)

    def adapted():
        model = llama()
        return peft.get_peft_model(model, peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    ours = trainer(ShardedTrainer, adapted(), folder, max_steps=3)
    ours.train()
    ours.save_model(folder + "/adapter")
    end = whole(ours)
    st.shutdown()
    dist.barrier()
    plain = peft.PeftModel.from_pretrained(llama(), folder + "/adapter")
    changed = [n for n, v in plain.state_dict().items() if "lora_B" in n and v.any()]
    wrong = [] if len(changed) == 4 else [f"trained: {changed}"]
    return wrong + differences([dict(plain.state_dict())], [end])


@case
def a_package_that_is_missing(name, rank):
    """is named by its module alone; shardd.torch works without."""
    wrong = []
    for package, module in (("accelerate", "accelerate"), ("transformers", "transformers"),
                            ("lightning", "lightning")):
        code = (f"import sys; sys.modules['{package}'] = None; import shardd.torch\n"
                f"try:\n import shardd.torch.integrations.{module}\n"
                "except ImportError as error: print(error)")
        said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        if f"needs the package{'s' * (module == 'transformers')} {package}" not in said.stdout \
                or "pip install" not in said.stdout:
            wrong.append(f"{package}: {said.stdout}{said.stderr}")
    return wrong


@case
def what_shards_by_itself_is_refused(name, rank):
    try:
        trainer(ShardedTrainer, llama(), shared_folder(rank), fsdp=True,
                fsdp_config={"version": 2})
    except shardd.Unimplemented as error:
        return [] if "shardd shards the model itself" in str(error) else [str(error)]
    return ["fsdp=True was not refused"]


def trial(name, rank):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(WORLD), OMP_NUM_THREADS="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    return CASES[name](name, rank)


if __name__ == "__main__":
    sys.exit(fsdp.report(fsdp.Plan(WORLD, fsdp.wanted(CASES), trial)))
