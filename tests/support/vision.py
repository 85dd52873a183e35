"""Tiny image-text models with their processors, and rows with images, all made offline."""

from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from trl_packfix.survey.zoo import random_model

from .models import build_tokenizer

# ChatML with the placeholder of one image per image in the content
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'PLACEHOLDER' }}
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 6,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
}
SMALL = {"height": 24, "width": 24}
# Those of most tests, then those of the table only (`benchmarks/vision.py`)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "idefics3", "gemma3", "qwen3_5")
MORE = ("qwen2_vl", "qwen3_vl_moe")


class QwenProcessor(Qwen2_5_VLProcessor):
    """Without the part for video, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(
            tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Qwen3Processor(Qwen3VLProcessor):
    """Without the part for video, which needs torchvision."""

    __init__ = QwenProcessor.__init__


def build_processor(family: str) -> ProcessorMixin:
    """The processor of a family, with a tokenizer of one token per byte and images of a few tokens."""
    tokenizer = build_tokenizer()
    placeholder = {"gemma3": "<boi>"}.get(family, "<image>")
    if family.startswith("qwen"):
        placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
        names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    elif family == "gemma3":
        names = ["<boi>", "<soft>", "<eoi>"]
    else:
        names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        names += [f"<row_{i + 1}_col_{j + 1}>" for i in range(3) for j in range(3)]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    if family.startswith("qwen"):
        images = Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 48 * 48}
        )
        kind = QwenProcessor if family.startswith("qwen2") else Qwen3Processor
        return kind(images, tokenizer, chat_template=template)
    if family == "llava":
        images = LlavaImageProcessorPil(size={"shortest_edge": 24}, crop_size=SMALL, do_pad=False)
        return LlavaProcessor(images, tokenizer, 6, "default", chat_template=template, num_additional_image_tokens=1)
    if family == "llava_next":
        images = LlavaNextImageProcessorPil(
            size={"shortest_edge": 24}, crop_size=SMALL, image_grid_pinpoints=[[24, 48], [48, 24], [48, 48]]
        )
        return LlavaNextProcessor(
            images, tokenizer, 6, "default", chat_template=template, num_additional_image_tokens=1
        )
    if family == "idefics3":
        images = Idefics3ImageProcessorPil(size={"longest_edge": 48}, max_image_size={"longest_edge": 24})
        return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    assert family == "gemma3"
    tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token = names
    for name in ("boi", "image", "eoi"):
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{name}_token")))
    images = Gemma3ImageProcessorPil(size=SMALL, do_pan_and_scan=False)
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def build_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> PreTrainedModel:
    """A tiny random model of a family with its vision tower, the same for the same arguments.

    `text` changes the config of the text part.
    """
    tokenizer = build_processor(family).tokenizer
    config: dict[str, Any] = {"text_config": TEXT | text, "vision_config": dict(TOWER)}
    if family.startswith("qwen"):
        special = (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            *((f"vision_{n}", f"<|vision_{n}|>") for n in ("start", "end")),
        )
        config |= {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in special}
        config["vision_config"] = dict(QWEN_TOWER)
        config["text_config"] |= {"rope_parameters": dict(MROPE)}
        if family == "qwen2_5_vl":
            config["vision_config"] |= {"fullatt_block_indexes": [1], "window_size": 16}
        else:
            config["vision_config"] |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        if family == "qwen3_5":
            config["text_config"] |= {
                "layer_types": ["linear_attention", "full_attention"],
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
            }
    elif family == "gemma3":
        config["image_token_id"] = tokenizer.convert_tokens_to_ids("<soft>")
        config["boi_token_id"], config["eoi_token_id"] = tokenizer.convert_tokens_to_ids(["<boi>", "<eoi>"])
        config["mm_tokens_per_image"] = 4
        config["text_config"] |= {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        config["text_config"] |= text
        config["vision_config"]["model_type"] = "siglip_vision_model"
    else:
        config["image_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
        if family == "idefics3":
            config |= {"scale_factor": 2}
            config["text_config"]["model_type"] = "llama"
        else:
            config["text_config"]["model_type"] = "llama"
            config["vision_config"] |= {"model_type": "clip_vision_model", "projection_dim": 32}
            config |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
            config |= {"image_seq_length": 16}
        if family == "llava_next":
            config["image_grid_pinpoints"] = [[24, 48], [48, 24], [48, 48]]
    settings = AutoConfig.for_model(family, **config)
    return random_model(lambda: AutoModelForImageTextToText.from_config(settings), seed).to(dtype)


def picture(width: int, height: int, seed: int) -> Picture.Image:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Picture.fromarray(pixels)


def message(role: str, text: str, num_images: int = 0) -> dict[str, Any]:
    """A message whose images come before its text."""
    parts = [{"type": "image", "text": None}] * num_images + [{"type": "text", "text": text}]
    return {"role": role, "content": parts}


MESSAGES = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})
SIZES = ((24, 24), (40, 24), (24, 48), (56, 40), (30, 30))


def rows(num: int = 16, seed: int = 0) -> Dataset:
    """Conversations with no, one or two images of several sizes, about images that are encoded as PNG."""
    rng = np.random.default_rng(seed)
    table = []
    for _ in range(num):
        count = int(rng.choice([0, 1, 1, 2]))
        sizes = [SIZES[i] for i in rng.integers(0, len(SIZES), count)]
        images = [picture(*size, seed=int(rng.integers(1 << 30))) for size in sizes]
        text = "".join(rng.choice(list("abcdef "), rng.integers(3, 30)))
        answer = "".join(rng.choice(list("xyz "), rng.integers(2, 12)))
        table.append({"images": images, "messages": [message("user", text, count), message("assistant", answer)]})
    return Dataset.from_list(table, features=Features({"images": List(Image()), "messages": MESSAGES}))
