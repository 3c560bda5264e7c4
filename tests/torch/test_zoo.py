#!/usr/bin/env python3
"""Models of Hugging Face's transformers and of timm, as a program meets them: each with clipping,
accumulation, both kinds of checkpointing, evaluation in between, generation, LoRA, tied weights,
and made on the meta device. shardd.torch.fully_shard against torch.distributed.fsdp.fully_shard
over gloo, on two ranks, in fp32 and with bf16: losses and weights bit for bit.

Prints one line of TAP a cell; arguments choose by a part of the name. Without arguments each cell
runs in one of the two types, which take turns; with SHARDD_TEST_LONG=1 in both. `--update`
runs all of them and writes the table of docs/python.md.
"""

import functools
import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any, Callable, NamedTuple, Optional

import fsdp
import test_fully_shard as shared
import torch
from fsdp import Fsdp2, Shardd, differences
from torch import nn
from torch.distributed.tensor import DTensor

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
STEPS, LENGTH, VOCABULARY = 3, 9, 67
POLICIES = {"fp32": None, "bf16": fsdp.fsdp.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}

# ------------------------------------------------------------------------ batches


def seeded(rank, step):
    torch.manual_seed(1000 * step + rank)


def text(rank, step):
    """Of a causal model: the labels are the tokens."""
    seeded(rank, step)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def masked(rank, step):
    seeded(rank, step)
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH))
    return {"input_ids": tokens, "labels": torch.randint(3, VOCABULARY, (2, LENGTH))}


def pair(rank, step):
    seeded(rank, step)
    return {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH)),
            "labels": torch.randint(3, VOCABULARY, (2, 5))}


def speech(rank, step):
    seeded(rank, step)
    return {"input_features": torch.randn(2, 8, 40),
            "labels": torch.randint(3, VOCABULARY, (2, 5))}


def sound(rank, step):
    seeded(rank, step)
    return {"input_values": torch.randn(2, 400), "labels": torch.tensor([step % 3, 1])}


def image(rank, step):
    seeded(rank, step)
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([step % 3, rank])}


def picture(rank, step):
    """For timm, whose models take one tensor and compute no loss."""
    return image(rank, step)


# ------------------------------------------------------------------------- models


class Kind(NamedTuple):
    """One architecture. @blocks: the names of the classes that become units of their own."""

    model: str
    config: str
    settings: dict[str, Any]
    blocks: tuple[str, ...]
    batch: Callable[[int, int], dict[str, Any]] = text
    generates: bool = False
    ties: bool = False  # may its embedding be tied, and is it not without being asked?
    checkpoints: bool = True
    lora: Optional[list[str]] = None  # names of modules; None: not with LoRA
    exact: tuple[str, ...] = ()  # classes that stay in fp32: batch norms, whose buffers are fp32
    bounds: dict[str, float] = {}  # by "type, variation": how far parameters may come apart
    raises: tuple[str, ...] = ()  # variations in which FSDP2 raises, and so must shardd
    by_address: bool = False  # fp32: may its gradients depend on where its parameters are?


DECODER = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
           "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "tie_word_embeddings": False}
ENCODER = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
           "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
           "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "num_labels": 3,
          "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
QKV = ["q_proj", "v_proj"]


def decoder(name, block=None, lora=QKV, **settings):
    return Kind(f"{name}ForCausalLM", f"{name}Config", {**DECODER, **settings},
                (block or f"{name}DecoderLayer",), generates=True, ties=True, lora=lora)


KINDS = {
    "GPT-2": Kind("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}, ("GPT2Block",), generates=True, lora=["c_attn"]),
    "Llama": decoder("Llama"),
    "Mistral": decoder("Mistral", sliding_window=4),
    "Qwen3": decoder("Qwen3", head_dim=8),
    "Gemma 3": Kind(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8, "sliding_window": 4},
        ("Gemma3DecoderLayer",), generates=True, ties=True, lora=QKV),
    "Phi-3": decoder("Phi3", lora=["qkv_proj", "o_proj"]),
    "OLMo 2": decoder("Olmo2"),
    "Mixtral": decoder("Mixtral", num_local_experts=4, **EXPERTS),
    "OPT": Kind("OPTForCausalLM", "OPTConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 32, "word_embed_proj_dim": 16,
        "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False}, ("OPTDecoderLayer",), generates=True, ties=True, lora=QKV),
    "GPT-NeoX": Kind("GPTNeoXForCausalLM", "GPTNeoXConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0}, ("GPTNeoXLayer",), generates=True, ties=True,
        lora=["query_key_value"]),
    "Mamba": Kind("MambaForCausalLM", "MambaConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
        "time_step_rank": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        ("MambaBlock",), generates=True, lora=["in_proj", "x_proj"]),
    "BERT": Kind("BertForMaskedLM", "BertConfig", ENCODER, ("BertLayer",), masked,
                 lora=["query", "value"]),
    "RoBERTa": Kind("RobertaForMaskedLM", "RobertaConfig", {**ENCODER}, ("RobertaLayer",), masked,
                    lora=["query", "value"]),
    "ALBERT": Kind("AlbertForMaskedLM", "AlbertConfig", {
        **ENCODER, "embedding_size": 8, "num_hidden_groups": 1, "inner_group_num": 1},
        ("AlbertLayer",), masked, checkpoints=False, lora=["query", "value"],
        bounds={"fp32, accumulation": 1e-6}),
    "DeBERTa": Kind("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **ENCODER, "relative_attention": True, "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"]}, ("DebertaV2Layer",), masked,
        lora=["query_proj", "value_proj"], raises=("reentrant checkpointing",)),
    "T5": Kind("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
        "num_decoder_layers": 2, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        "pad_token_id": 0, "eos_token_id": 2}, ("T5Block",), pair, generates=True,
        lora=["q", "v"]),
    "BART": Kind("BartForConditionalGeneration", "BartConfig", {
        "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "max_position_embeddings": 32, "dropout": 0.0, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
        "forced_eos_token_id": None},
        ("BartEncoderLayer", "BartDecoderLayer"), pair, generates=True, lora=QKV),
    "Whisper": Kind("WhisperForConditionalGeneration", "WhisperConfig", {
        "vocab_size": VOCABULARY, "num_mel_bins": 8, "encoder_layers": 2, "decoder_layers": 2,
        "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 20,
        "max_target_positions": 16, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
        "begin_suppress_tokens": None, "use_cache": False},
        ("WhisperEncoderLayer", "WhisperDecoderLayer"), speech, lora=QKV),
    "Wav2Vec 2": Kind("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 24, "conv_dim": [8, 8],
        "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0,
        "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
        "final_dropout": 0.0, "layerdrop": 0.0, "mask_time_prob": 0.0, "num_labels": 3,
        "classifier_proj_size": 8}, ("Wav2Vec2EncoderLayer",), sound, lora=QKV),
    "ViT": Kind("ViTForImageClassification", "ViTConfig", VISION, ("ViTLayer",), image,
                lora=QKV),
    "DINOv2": Kind("Dinov2ForImageClassification", "Dinov2Config", {
        **VISION, "mlp_ratio": 2}, ("Dinov2Layer",), image, lora=QKV),
    "ConvNeXt": Kind("ConvNextForImageClassification", "ConvNextConfig", {
        "num_labels": 3, "image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1],
        "num_stages": 2, "patch_size": 4}, ("ConvNextLayer",), image, checkpoints=False,
        lora=["pwconv1"]),
    "timm ResNet": Kind("resnet18", "", {"num_classes": 3}, ("BasicBlock",), picture,
                        exact=("BatchNorm2d",)),
    "timm ViT": Kind("vit_tiny_patch16_224", "", {
        "num_classes": 3, "img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2},
        ("Block",), picture, lora=["qkv"]),
    "timm EfficientNet": Kind("efficientnet_b0", "", {"num_classes": 3},
                              ("InvertedResidual",), picture, exact=("BatchNormAct2d",),
                              by_address=True),
}


class Timm(nn.Module):
    """A model of timm behind the call of transformers: a loss from pixels and labels."""

    def __init__(self, name, settings):
        super().__init__()
        self.inner = timm()[0].create_model(name, **settings)

    def gradient_checkpointing_enable(self, options):
        self.inner.set_grad_checkpointing(True)

    def forward(self, pixel_values, labels=None):
        logits = self.inner(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return Output(loss, logits)


class Output(NamedTuple):
    loss: Any
    logits: torch.Tensor


TORCHVISION = pathlib.Path(sys.prefix, "torchvision")  # tests/run installs it


@functools.cache
def timm():
    """The module. It imports torchvision, whose wheel on PyPI is built for CUDA: with a PyTorch
    without CUDA its operators are missing, and it fails at the first one that it describes."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(TORCHVISION))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms") if torch.version.cuda is None else ():
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("timm"), library


def make(kind, **more):
    torch.manual_seed(11)
    if not kind.config:
        return Timm(kind.model, kind.settings)
    import transformers

    settings = {**kind.settings, **more}
    model = getattr(transformers, kind.model)(getattr(transformers, kind.config)(**settings))
    if hasattr(model, "generation_config"):
        model.generation_config.pad_token_id = 0
    return model


# ---------------------------------------------------------------------- variations


class Cell:
    """One training. Subclasses say what differs; `fits` says for which models."""

    def fits(self, kind):
        return True

    def model(self, api, kind):
        return make(kind)

    def wrap(self, api, model, kind, policy):
        options = {"mp_policy": policy} if policy else {}
        blocks = [m for m in model.modules() if type(m).__name__ in kind.blocks]
        assert blocks, f"no module of {kind.model} is one of {kind.blocks}"
        for module in [m for m in model.modules() if policy and type(m).__name__ in kind.exact]:
            api.fully_shard(module)
        for module in blocks:
            api.fully_shard(module, **options)
        api.fully_shard(model, **options)

    def backward(self, api, model, batch, step):
        loss = model(**batch(step)).loss.float()
        loss.backward()
        return loss

    def before(self, model, batch, step):
        """At the begin of a step. Return: what else is compared."""
        return {}

    def each(self, api, model):
        """Between backward and the optimizer's step. Return: what else is compared."""
        return {}

    def run(self, api, kind, policy, rank):
        model = self.model(api, kind)
        model.train()
        self.wrap(api, model, kind, policy)
        extra = {}

        def micro(model, step):
            extra.update(self.before(model, batch, step))
            return self.backward(api, model, batch, step)

        def batch(step):
            return kind.batch(rank, step)

        return shared.loop(
            api, model, None, rank, steps=STEPS, lr=1e-2, micro=micro,
            params=lambda model: [p for p in model.parameters() if p.requires_grad],
            each=lambda model, optimizer, step: {**extra, **self.each(api, model)})


class Clipped(Cell):
    """By PyTorch's own function. Norms by shardd's are added in fp64: test_fully_shard's bound."""

    def each(self, api, model):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return {"norm": norm.full_tensor() if isinstance(norm, DTensor) else norm}


class Accumulated(Cell):
    def backward(self, api, model, batch, step):
        total = 0.0
        for part in range(2):
            api.sync(model, part == 1)
            loss = model(**batch(10 * step + part)).loss.float() / 2
            loss.backward()
            total = total + loss.detach()
        return total


class Checkpointed(Cell):
    def __init__(self, reentrant):
        self.reentrant = reentrant

    def fits(self, kind):
        return kind.checkpoints

    def model(self, api, kind):
        model = make(kind)
        if kind.config:
            model.gradient_checkpointing_enable({"use_reentrant": self.reentrant})
        else:
            model.gradient_checkpointing_enable(None)
        return model


class Evaluated(Cell):
    """After a step and not between backward and the step: FSDP2 keeps what the outermost unit
    gathered for the evaluation, and computes the next forward with the parameters before it."""

    def before(self, model, batch, step):
        model.eval()
        with torch.no_grad():
            loss = model(**batch(50 + step)).loss.float()
        model.train()
        return {"evaluated": loss}


class Generated(Cell):
    def fits(self, kind):
        return kind.generates

    def wrap(self, api, model, kind, policy):
        super().wrap(api, model, kind, policy)
        api.forward_method(model, "generate")

    def before(self, model, batch, step):
        model.eval()
        given = batch(50 + step)["input_ids"]
        with torch.no_grad():
            tokens = model.generate(input_ids=given, attention_mask=torch.ones_like(given),
                                    do_sample=False, max_new_tokens=4, min_new_tokens=4)
        model.train()
        return {"tokens": tokens.float()}


class Adapted(Cell):
    """LoRA by peft."""

    def fits(self, kind):
        return kind.lora is not None

    def model(self, api, kind):
        import peft

        torch.manual_seed(12)
        config = peft.LoraConfig(r=2, target_modules=kind.lora, lora_dropout=0.0,
                                 init_lora_weights=False)
        return peft.get_peft_model(make(kind), config)


class Tied(Cell):
    def fits(self, kind):
        return kind.ties

    def model(self, api, kind):
        return make(kind, tie_word_embeddings=True)


class Meta(Cell):
    """Ours is made on the meta device and takes its values from a state dict; FSDP2's is not."""

    def model(self, api, kind):
        if not isinstance(api, Shardd):
            return make(kind)
        self.values = make(kind).state_dict()
        with torch.device("meta"):
            return make(kind)

    def wrap(self, api, model, kind, policy):
        super().wrap(api, model, kind, policy)
        if isinstance(api, Shardd):
            model.load_state_dict(self.values)


CELLS = {
    "plain": Cell(), "clipping": Clipped(), "accumulation": Accumulated(),
    "checkpointing": Checkpointed(False), "reentrant checkpointing": Checkpointed(True),
    "evaluation": Evaluated(), "generate": Generated(), "LoRA": Adapted(), "tied weights": Tied(),
    "meta device": Meta()}


def name_of(kind, dtype, cell):
    return f"{kind}, {dtype}, {cell}"


def names(everything):
    """With not @everything each cell in one of the dtypes."""
    chosen = []
    for i, (kind, row) in enumerate(KINDS.items()):
        for j, (cell, does) in enumerate(CELLS.items()):
            for k, dtype in enumerate(POLICIES):
                if does.fits(row) and (everything or (i + j) % 2 == k):
                    chosen.append(name_of(kind, dtype, cell))
    return chosen


def raised(train):
    """The first words of the exception that it ends with."""
    try:
        train()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"[:60]
    return "nothing"


def gradients(kind, offset):
    """PyTorch's own, with parameters @offset elements behind the begin of a cache line."""
    model = make(kind)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                room = torch.empty(p.numel() + 32)
                first = -(room.data_ptr() // 4) % 16 + offset
                place = room[first:first + p.numel()].view(p.shape)
                module._parameters[name] = nn.Parameter(place.copy_(p.detach()))
    model(**kind.batch(0, 0)).loss.backward()
    return [p.grad for p in model.parameters()]


@functools.cache
def differs_by_address(label):
    """On AMD's processors PyTorch's convolutions round by the address of their parameters. Those
    of FSDP2 are at other addresses than the daemon's."""
    kind = KINDS[label]
    return kind.by_address and not all(map(torch.equal, gradients(kind, 0), gradients(kind, 1)))


def both(name, rank):
    label, dtype, cell = name.split(", ")
    kind = KINDS[label]
    if dtype == "fp32" and differs_by_address(label):
        return fsdp.Skipped("PyTorch's gradients depend on the address of the parameters here")

    def trained(api):
        return CELLS[cell].run(api, kind, POLICIES[dtype], rank)

    fails = cell in kind.raises
    theirs = raised(lambda: trained(Fsdp2())) if fails else trained(Fsdp2())
    api = Shardd(name.replace(", ", "-").replace(" ", "-"))
    try:
        if fails:
            ours = raised(lambda: trained(api))
            return [] if ours == theirs != "nothing" else [f"raised {ours}; FSDP2: {theirs}"]
        return differences(trained(api), theirs, kind.bounds.get(f"{dtype}, {cell}", 0.0))
    finally:
        api.close()


# ------------------------------------------------------------------- the table of docs


BEGIN, END = "<!-- zoo: written by tests/torch/test_zoo.py -->\n", "<!-- end of the zoo -->\n"


def entry(kind, cell, failed):
    """Of the table. @failed: names of cells that differed where they must not."""
    row = KINDS[kind]
    if not CELLS[cell].fits(row):
        return ""
    if any(name_of(kind, dtype, cell) in failed for dtype in POLICIES):
        return "**differs**"
    if cell in row.raises:
        return "raises"
    bounds = {d: row.bounds[f"{d}, {cell}"] for d in POLICIES if f"{d}, {cell}" in row.bounds}
    return "; ".join(f"{d}: {b:g}" for d, b in bounds.items()) or "="


def table(failed):
    lines = ["| | " + " | ".join(CELLS) + " |", "| --- |" + " :---: |" * len(CELLS)]
    for kind in KINDS:
        lines.append(f"| {kind} | " + " | ".join(entry(kind, c, failed) for c in CELLS) + " |")
    return "\n".join(lines) + "\n"


def update():
    """Run this program with all cells, and write what it said."""
    said = subprocess.run([sys.executable, __file__], env={**os.environ, "SHARDD_TEST_LONG": "1"},
                          text=True, stdout=subprocess.PIPE).stdout
    sys.stdout.write(said)
    lines = [line for line in said.splitlines() if line.startswith(("ok - ", "not ok - "))]
    if any(" # SKIP " in line for line in lines):
        sys.exit("some cells were skipped, on this processor: nothing is written")
    if len(lines) != len(names(True)):
        sys.exit(f"{len(lines)} cells were reported, not {len(names(True))}: nothing is written")
    failed = {line.removeprefix("not ok - ").rpartition(", ")[0] for line in lines
              if line.startswith("not")}
    page = fsdp.HERE.parents[1] / "docs/python.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n" + table(failed) + "\n" + END + after)


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    else:
        everything = bool(os.environ.get("SHARDD_TEST_LONG")) or len(sys.argv) > 1
        sys.exit(fsdp.report(fsdp.Plan(2, fsdp.wanted(names(everything)), both)))
