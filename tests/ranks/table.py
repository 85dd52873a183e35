"""The table of equivalences: each row is a way to train, and must end with the weights of TRL's unpacked training.

In each of three steps of SGD all documents of a row are trained, however they are packed, cut, shared, or dealt to
ranks. So one unpacked run is the reference of all rows that have its model and its loss.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import yaml
from datasets import Dataset, concatenate_datasets
from peft import IA3Config, LoraConfig
from support import vision
from support.features import PRESENT, features_in
from support.models import build_tiny_model
from support.prefixes import forest
from support.runs import checkpointing, tokenised
from sweep import zoo
from sweep.image_families import FAMILIES
from trl import ModelConfig, get_peft_config

from trl_packfix.cli import recipes

NUM_STEPS = 3
MILLION = yaml.safe_load(recipes.read_recipe("qwen3-8b-1m"))
WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
YARN = MILLION["model_init_kwargs"]["rope_parameters"] | {"factor": 4.0, "original_max_position_embeddings": 32}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "odd_heads": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "sinks": ("gpt_oss", {}),
    "dividing_sinks": ("granite_swa", WINDOWED),
    "experts": ("mixtral", {}),
    "dividing_experts": ("qwen3_moe", {}),
    "windows": ("gemma3", {}),
    "norms": ("qwen3", {}),
    "learned_positions": ("opt", {}),
    "leaking": ("bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "yarn": ("qwen3", {"max_position_embeddings": 128, "rope_parameters": YARN}),
}
HYBRIDS = {"delta": "qwen3_5_text", "conv": "lfm2", "scan": "falcon_h1", "mamba": "mamba"}
HYBRIDS |= {"scan_and_experts": "granitemoehybrid", "scan_alone": "nemotron_h"}
MIXING = {*HYBRIDS, "mamba2", "kimi_linear", "jamba", "qwen3_next", "qwen3_5"}
OF_MODELS = {"hybrids": MIXING, "images": FAMILIES}  # by feature, the models that need it


def adapter(**settings: Any) -> LoraConfig:
    """Return the config of adapters as the flags of the command make it."""
    lora_settings = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_task_type": "CAUSAL_LM"}
    return get_peft_config(ModelConfig(**lora_settings | {"lora_target_modules": ["all-linear"]} | settings))


ADAPTERS = {
    "lora": adapter(),
    "dora": adapter(use_dora=True),
    "dora_attention": adapter(use_dora=True, lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "rslora": adapter(use_rslora=True, lora_modules_to_save=["norm"]),
    # PEFT refuses the output projection of some types, whose fused kernel leaves an adapter out
    # Jamba reads the weight of `dt_proj` itself, so an adapter of it never learns
    "inputs": LoraConfig(
        r=4, target_modules="all-linear", exclude_modules=["out_proj", "dt_proj"], task_type="CAUSAL_LM"
    ),
    "attention": LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"),
    "ia3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "language": LoraConfig(r=4, target_modules=vision.LANGUAGE),
    "towers": LoraConfig(r=4, target_modules=r".*(q_proj|v_proj|qkv|attn.proj)"),
}


def build_model(name: str) -> torch.nn.Module:
    if name in TINY:
        model_type, sizes = TINY[name]
        return build_tiny_model(model_type, **sizes)
    if name in FAMILIES:
        return vision.build_model(name)
    return zoo.build_model(HYBRIDS.get(name, name), vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def texts(seed: int = 0) -> Dataset:
    """Return tokenised documents of 3 to 90 tokens, of which a part is trained; the long ones begin alike."""
    rng = np.random.default_rng(seed)
    columns = {"share": lambda i: 2.0, "source": lambda i: "ab"[i % 2]}
    short = tokenised(rng, (3, 14, 9, 12, 4, 8, 11, 6), lambda i, length: 1 + i % 2, **columns)
    return concatenate_datasets([short, forest(11, seed)])


def few_trained(seed: int = 0) -> Dataset:
    """Return documents of which the last token is trained, or the last twentieth."""
    rng = np.random.default_rng(seed)
    return tokenised(rng, rng.integers(20, 90, 12), lambda i, length: length - (1 if i % 2 else max(1, length // 20)))


def conversations(seed: int = 0) -> Dataset:
    """Return conversations of one to three turns, each of which becomes a sample; all begin with the same words."""
    rng = np.random.default_rng(4 + seed)
    rows = []
    for i in range(7):
        messages = [{"role": "system", "content": "be brief"}]
        for _ in range(1 + i % 3):
            for role in ("user", "assistant"):
                messages.append({"role": role, "content": "".join(rng.choice(list("abc "), rng.integers(1, 5)))})
        rows.append({"messages": messages})
    return Dataset.from_list(rows)


@cache
def documents(name: str, seed: int = 0) -> Dataset:
    builders = {
        "texts": lambda: texts(seed),
        "few": lambda: few_trained(seed),
        "turns": lambda: conversations(seed),
        "screens": vision.conversations,
        "screens_by_hand": vision.by_turn,
        "images": lambda: vision.rows(12, seed=4 + seed, counts=(0, 0, 1, 2, 4)),
        "pictures": lambda: vision.rows(12, seed=4 + seed, counts=(1, 1, 2)),
        "questions": lambda: vision.questions(12),
    }
    return builders[name]()


@dataclass(frozen=True)
class Row:
    """One way to train."""

    model: str = "llama"  # of `build_model`
    adapter: str = ""  # of `ADAPTERS`; "" trains all weights
    data: str = "texts"  # of `documents`
    num: int | None = None  # only the first of them
    given: dict[str, Any] = field(default_factory=dict)  # settings of the reference, too
    ours: dict[str, Any] = field(default_factory=dict)  # settings of packed training only
    engines: tuple[str, ...] = ("ddp",)  # under which it runs; "one" is one process
    shares: int | None = None  # ranks share packs, of up to this number of tokens on all ranks
    shards: int | None = None  # the ranks read a stream of so many
    accumulation: int = 0  # micro-batches of a step on each rank; 0 means 5, or 7 where ranks share packs
    dtype: torch.dtype = torch.float32
    proves: bool = True  # False where another row has the same model and engine, and its proof on parts of packs
    evaluates: bool = False  # the loss of evaluation after training is compared, too
    code: str = ""  # the user's loss or step, of `support/user_code.py`
    finds: str = ""  # a fault in gradients that the proof must find on the model as the engine wraps it
    faults: tuple[str, ...] = ()  # of `faults.py`, which the comparison must find

    @property
    def has_images(self) -> bool:
        return self.data in ("images", "pictures", "questions", "screens", "screens_by_hand")

    @property
    def micro_batches(self) -> int:
        return self.accumulation or (7 if self.shares else 5)

    @property
    def size(self) -> int:
        """Number of samples."""
        return {"turns": 13, "screens": 18}.get(self.data) or len(self.documents())

    @property
    def unpacked(self) -> "Row":
        """The reference; TRL has rows of turns that are made by hand."""
        of_model = {"ours": {"packing": False}, "dtype": self.dtype}
        if self.data == "screens":
            return Row(self.model, data="screens_by_hand", **of_model)
        return Row(self.model, self.adapter, self.data, self.num, self.given, code=self.code, **of_model)

    def documents(self, seed: int = 0) -> Dataset:
        dataset = documents(self.data, seed)
        return dataset.select(range(self.num)) if self.num else dataset

    @property
    def features(self) -> set[str]:
        """The features that the row combines."""
        by_model = {name for name, models in OF_MODELS.items() if self.model in models}
        return features_in(self.ours) | by_model

    @property
    def is_in_trl(self) -> bool:
        """Whether TRL has the settings of the reference."""
        return not self.given.keys() & {"document_weighting", "weight_column", "per_turn"}


CHECKPOINTED = checkpointing(False)
REENTRANT = checkpointing(True)
WEIGHTED = {"weight_column": "share", "source_column": "source"}
BY_DOCUMENT = {"document_weighting": "document"}
ADAM = {"optim": "adamw_torch", "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3, "weight_decay": 0.3}
ADAM |= {"learning_rate": 0.05, "max_grad_norm": 0.1, "warmup_steps": 2}
ADAM |= {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}
OTHER = {"optim": "rmsprop", "optim_args": "alpha=0.5,eps=0.001", "learning_rate": 0.01, "seed": 7, "data_seed": 8}
SCREENS = {"data": "screens", "accumulation": 3, "given": {"per_turn": True}}
PACK = {"share_prefixes": "pack"}
FAMILY = {"share_prefixes": "family", "packing_strategy": "bfd"}
# The statistic of a router is that of a micro-batch, so a step is one
ROUTED = {"router_aux_loss_coef": 0.1}
NO_ROUTER_LOSS = {"router_aux_loss_coef": 0.0}
ONE_PACK = {"num": 10, "shares": 192, "accumulation": 1, "given": ROUTED}
FAST = {"exchange_speeds": {"within": 1e18, "latency_within": 1e-18}}  # so that all ranks share each pack
ALIKE = {"shares": 256, "accumulation": 4, "ours": PACK | FAST}
IMAGES = {"data": "images", "num": 9, "accumulation": 8}
QUESTIONS = {"data": "questions", "shares": 384, "accumulation": 4, "ours": PACK | FAST}
OF_TOWERS = {"data": "images", "accumulation": 3}
ONE = ("one",)
STATIC = {"pad_documents_to_multiple_of": 16}
UNPACKED = {"on_leak": "unpack"}
REPAIRED = ("mpt", "bart", "rwkv")
NATIVE = ("qwen2_5_vl", "llava", "llava_onevision", "idefics2", "smolvlm", "internvl", "mistral3")
NATIVE += ("glm4v", "qwen3_5")
IMAGE_FAULTS = ("compared_by_placeholder", "images_of_other_rows")

ROWS: dict[str, Row] = {
    # Each rank has packs of its own
    "full": Row(engines=("ddp", "fsdp2"), evaluates=True, faults=("averaged_by_ranks",)),
    "checkpointed": Row(ours=CHECKPOINTED, engines=("zero1",)),
    "lora": Row(adapter="lora", ours=CHECKPOINTED, engines=("zero2", "zero3", "fsdp2")),
    "tied": Row("tied", ours=CHECKPOINTED, engines=("zero3", "fsdp2"), evaluates=True),
    "idle": Row(num=3, accumulation=2, engines=("ddp", "zero3", "fsdp2")),
    "idle_own_loss": Row(num=3, accumulation=2, code="share_func", engines=("ddp", "zero3")),
    "unpacked": Row("leaking", ours=UNPACKED),
    # Parameters are gathered per call of a module, and ranks hold other numbers of documents
    "repaired": Row("leaking", engines=("zero3", "fsdp2")),
    "conv": Row("conv", engines=("zero3",)),
    "mamba": Row("mamba", engines=("fsdp2",)),
    "weighted": Row(given=WEIGHTED | BY_DOCUMENT, evaluates=True, faults=("totals_of_one_rank",)),
    "prefixes": Row(given=WEIGHTED, ours=PACK, evaluates=True),
    # Ranks share packs
    "parts": Row(
        shares=128, engines=("ddp4", "fsdp2"), evaluates=True, faults=("leak", "chunks", "heads", "late_shift")
    ),
    "parts_dora": Row(adapter="dora", dtype=torch.float64, shares=128),
    "parts_sinks": Row("sinks", shares=128),  # every second layer has a window
    "parts_odd_heads": Row("odd_heads", shares=128, ours={"pad_documents_to_multiple_of": 8}),
    "parts_experts": Row(
        "experts", engines=("ddp4",), ours={"pad_to_multiple_of": 1} | FAST, **ONE_PACK, faults=("statistic_of_parts",)
    ),
    "parts_smoothed": Row(
        given={"label_smoothing_factor": 0.3} | BY_DOCUMENT, shares=128, proves=False, faults=("counted_by_all",)
    ),
    "parts_reentrant": Row(shares=128, ours=REENTRANT, engines=("zero3_offload",)),
    # The recipe of a million tokens, in small
    "parts_million": Row(
        "yarn",
        shares=128,
        ours={name: MILLION[name] for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs")},
        engines=("zero3",),
    ),
    "parts_delta": Row("delta", shares=128, ours=CHECKPOINTED),
    "parts_conv": Row("conv", shares=128, engines=("fsdp2",), finds="no_gradient"),
    "parts_mamba": Row(
        "mamba", shares=128, ours={"gradient_checkpointing": True}, engines=("ddp", "zero3"), finds="gradients_lost"
    ),
    # Also documents that begin alike, of which nothing is shared in the reference
    "parts_prefixes": Row(
        given={"label_smoothing_factor": 0.3} | BY_DOCUMENT,
        **ALIKE,
        proves=False,
        faults=("prefixes", "border_lost", "counted_by_all"),
    ),
    "parts_prefixes_experts": Row(
        "experts", ours=PACK | {"pad_to_multiple_of": 1} | FAST, **ONE_PACK, faults=("rows_once", "counted_by_all")
    ),
    "parts_family": Row(
        shares=128,
        given=WEIGHTED,
        ours=FAMILY,
        engines=("ddp4", "zero3"),
        evaluates=True,
        faults=("prefixes", "border_lost", "counted_by_all"),
    ),
    "parts_family_turns": Row(data="turns", shares=128, given={"per_turn": True}, ours=FAMILY, proves=False),
    "parts_prefixes_recomputed": Row(
        **ALIKE | {"ours": PACK | FAST | {"recomputes": True}}, engines=("fsdp2",), proves=False
    ),
    # All ranks read everything, with a degree per micro-step; groups of two read shards of their own
    "parts_stream": Row(**ALIKE, shards=1, evaluates=True, faults=("one_label_per_row",)),
    "parts_stream_shards": Row(
        shares=128,
        shards=4,
        given=WEIGHTED | {"max_length": 64},
        ours={"pad_to_multiple_of": 64, "dataloader_num_workers": 2},
        engines=("ddp4",),
        faults=("own_shards_unseen", "sources_as_met"),
    ),
    # Images that lie in several parts
    "parts_llava": Row(
        "llava", shares=384, **IMAGES, engines=("ddp4",), evaluates=True, faults=("cut_late", "features_late")
    ),
    "parts_qwen2_5_vl": Row(
        "qwen2_5_vl",
        shares=160,
        **IMAGES,
        ours=CHECKPOINTED,
        engines=("ddp", "zero3"),
        faults=("positions_of_the_first",),
    ),
    "parts_qwen3_vl": Row(
        "qwen3_vl", shares=160, **IMAGES, proves=False, faults=("features_of_the_first", "features_without_gradients")
    ),
    "parts_prefixes_llava": Row("llava", **QUESTIONS, evaluates=True, faults=("other_images_unseen",)),
    "parts_family_qwen3_vl": Row("qwen3_vl", **QUESTIONS | {"ours": FAMILY | FAST}, proves=False),
    "parts_stream_qwen2_5_vl": Row("qwen2_5_vl", **QUESTIONS, shards=1, proves=False),
    # Images on one rank
    # A document per micro-batch, so that often one of the ranks has no image, and must not wait
    "images": Row("qwen2_5_vl", data="images", accumulation=6, engines=("ddp", "zero3", "fsdp2")),
    "images_lora": Row("qwen2_5_vl", "language", **OF_TOWERS, engines=("zero3",)),
    "images_prefixes": Row("qwen2_5_vl", data="questions", accumulation=3, ours=PACK),
    "images_stream": Row("qwen2_5_vl", **OF_TOWERS, shards=1),
    # Models that ranks divide
    "dividing": Row(
        given={"max_grad_norm": 0.1},
        ours={"eval_on_start": True} | CHECKPOINTED,
        engines=("tp", "tp_fsdp"),
        evaluates=True,
        faults=("other_texts",),
    ),
    "dividing_lora": Row(adapter="lora", engines=("tp",)),
    "dividing_sinks": Row("dividing_sinks", engines=("tp",)),
    "dividing_weighted": Row(given=WEIGHTED | BY_DOCUMENT, engines=("tp",), evaluates=True, faults=("counted_twice",)),
    "dividing_unpacked": Row(ours={"packing": False}, engines=("tp",)),
    # Another micro-batch has other noise, so the reference is packed
    "dividing_noise": Row(given={"neftune_noise_alpha": 5.0}, ours={"by_name": True}, engines=("tp",)),
    "dividing_prefixes": Row(ours=PACK, engines=("tp",)),
    "dividing_images": Row("llava", **OF_TOWERS, engines=("tp",)),
    "dividing_stream": Row(engines=("tp", "tp_fsdp"), shards=2),
    "dividing_routed": Row("dividing_experts", num=10, accumulation=1, given=ROUTED, engines=("tp", "tp_ep")),
    "dividing_experts": Row("dividing_experts", engines=("tp", "ep_fsdp", "tp_ep_fsdp"), faults=("summed_twice",)),
    "dividing_experts_lora": Row("dividing_experts", "attention", engines=("tp_ep", "ep_fsdp")),
    # One process
    "one": Row(engines=ONE, faults=("one_document",)),
    "one_norms": Row("norms", engines=ONE, ours=CHECKPOINTED),
    "one_learned_positions": Row("learned_positions", engines=ONE, faults=("one_document",)),
    "one_windows": Row("windows", engines=ONE),
    "one_sinks": Row("sinks", engines=ONE, ours=CHECKPOINTED),
    "one_experts": Row("experts", num=10, accumulation=1, given=ROUTED, engines=ONE),
    "one_delta": Row("delta", engines=ONE),
    "one_conv": Row("conv", engines=ONE, faults=("boundary_of_mixers",)),
    "one_scan": Row("scan", engines=ONE),
    "one_scan_alone": Row("scan_alone", "inputs", engines=ONE),
    "one_scan_and_experts": Row("scan_and_experts", given=NO_ROUTER_LOSS, engines=ONE, faults=("boundary_of_mixers",)),
    "one_bf16": Row(given={"bf16": True}, engines=ONE),
    "one_dft": Row(given={"loss_type": "dft", "learning_rate": 20.0}, engines=ONE),
    "one_adam": Row(given=ADAM, engines=ONE),
    "one_rmsprop": Row(given=OTHER, engines=ONE),
    "one_rslora": Row(adapter="rslora", engines=ONE),
    "one_ia3": Row(adapter="ia3", engines=ONE),
    "one_few": Row(data="few", engines=ONE, evaluates=True),
    "one_few_documents": Row(data="few", given=BY_DOCUMENT, engines=ONE, evaluates=True),
    "one_smoothed": Row(given={"label_smoothing_factor": 0.1}, engines=ONE),
    # Packs of one shape
    "one_static": Row(ours=STATIC, evaluates=True, engines=ONE),
    "one_static_repaired": Row("leaking", ours=STATIC, engines=ONE),
    "one_static_experts": Row("experts", num=10, accumulation=1, given=ROUTED, ours=STATIC, engines=ONE),
    # Modules that are repaired, models whose documents become rows, and layers that begin anew in each document
    **{f"one_{name}": Row(name, engines=ONE) for name in (*REPAIRED, "mamba2", "kimi_linear")},
    "one_bart_as_rows": Row("bart", ours=UNPACKED, engines=ONE),
    "one_bloom_lora_as_rows": Row(
        "leaking", "lora", given={"learning_rate": 4.0}, ours=UNPACKED | CHECKPOINTED, engines=ONE
    ),
    "one_bloom_lora": Row("leaking", "lora", given={"learning_rate": 4.0}, engines=ONE),
    "one_jamba_lora": Row("jamba", "inputs", given=NO_ROUTER_LOSS, engines=ONE),
    "one_qwen3_next": Row("qwen3_next", given=NO_ROUTER_LOSS, engines=ONE),
    "one_mamba_checkpointed": Row("mamba", ours=CHECKPOINTED, engines=ONE),
    "one_mamba_reentrant": Row("mamba", ours=REENTRANT, engines=ONE),
    # It selects blocks of keys
    "one_minimax_m3": Row("minimax_m3_vl_text", given=NO_ROUTER_LOSS, engines=ONE),
    "one_prefixes": Row(ours=PACK, engines=ONE, faults=("one_label_per_row", "each_row_once")),
    "one_prefixes_stream": Row(given=WEIGHTED, ours=PACK, shards=1, engines=ONE),
    "one_prefixes_documents": Row(given=BY_DOCUMENT, ours=PACK | CHECKPOINTED, engines=ONE, faults=("each_row_once",)),
    "one_prefixes_windows": Row("windows", ours=PACK, engines=ONE),
    "one_prefixes_sinks": Row("sinks", ours=PACK | REENTRANT, engines=ONE),
    "one_prefixes_lora": Row(adapter="lora", ours=PACK | REENTRANT, engines=ONE),
    "one_prefixes_dft": Row(given={"loss_type": "dft", "learning_rate": 20.0}, ours=PACK, engines=ONE),
    "one_prefixes_experts": Row(
        "experts",
        accumulation=1,
        given=ROUTED,
        ours=PACK | {"pad_to_multiple_of": 64},
        engines=ONE,
        faults=("rows_once",),
    ),
    **{f"one_{family}": Row(family, **OF_TOWERS, engines=ONE) for family in NATIVE},
    "one_aya_vision": Row("aya_vision", **OF_TOWERS, given={"learning_rate": 1.0}, engines=ONE),
    "one_gemma3": Row("gemma3", **OF_TOWERS, engines=ONE),
    # the rate of the others makes gemma4 diverge; the search for its repair takes seconds, and ends with rows, too
    "one_gemma4": Row("gemma4", **OF_TOWERS, given={"learning_rate": 0.03}, ours=UNPACKED, engines=ONE),
    "one_paligemma": Row("paligemma", data="pictures", accumulation=3, engines=ONE),
    "one_images_lora": Row("qwen2_5_vl", "language", **OF_TOWERS, ours=CHECKPOINTED, engines=ONE),
    "one_images_reentrant": Row("qwen2_5_vl", "towers", **OF_TOWERS, ours=REENTRANT, engines=ONE),
    "one_images_smoothed": Row("llava", **OF_TOWERS, given={"label_smoothing_factor": 0.3}, engines=ONE),
    "one_images_bf16": Row("qwen2_5_vl", **OF_TOWERS, given={"bf16": True}, engines=ONE),
    "one_questions_llava": Row("llava", data="questions", accumulation=3, ours=PACK, engines=ONE, faults=IMAGE_FAULTS),
    "one_questions_qwen2_5_vl": Row("qwen2_5_vl", data="questions", accumulation=3, ours=PACK, engines=ONE),
    "one_questions_qwen3_5": Row(
        "qwen3_5", data="questions", accumulation=3, ours=PACK, engines=ONE, faults=("states_forgotten",)
    ),
    "one_screens": Row("llava", **SCREENS, engines=ONE),
    "one_screens_shared": Row(
        "llava",
        **SCREENS,
        ours=PACK,
        engines=ONE,
        faults=("images_of_the_last_turn", "first_images_again", "thoughts_kept"),
    ),
    "one_family_llava": Row(
        "llava", data="questions", accumulation=2, ours=FAMILY, engines=ONE, faults=("compared_by_placeholder",)
    ),
}
ROWS = {name: row for name, row in ROWS.items() if row.features <= PRESENT}
PAIRS = [(engine, name) for name, row in ROWS.items() for engine in row.engines if engine != "one"]
IN_ONE = [name for name, row in ROWS.items() if row.engines == ONE]
FAULTS = [(row.engines[0], name, fault) for name, row in ROWS.items() if row.engines != ONE for fault in row.faults]
