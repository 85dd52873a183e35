"""Tiny random image-text models with their real processors, made without a hub.

A family is a type of transformers. Its processor has a tokenizer of one token per byte and makes a few tokens of an
image. Only processors that run without torchvision are here.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.utils import is_torchvision_available
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from .zoo import byte_tokenizer, random_model

# ChatML with the placeholder of one image per image in the content
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'PLACEHOLDER' }}
{%- else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT = SIZES | {
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
TOWER = SIZES | {"num_attention_heads": 4, "image_size": 24, "patch_size": 6}
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
FIRST_WORD = 10  # tokens of bytes; those of the tokenizer around them are special
LAST_WORD = 260
SMALL = {"height": 24, "width": 24}
PINPOINTS = [[24, 48], [48, 24], [48, 48]]


@dataclass(frozen=True)
class Family:
    """How a tiny model of a type and its processor are made.

    Attributes:
        processor, images: class of the processor, and what makes its part for images.
        ids: field of the config -> the token whose id it holds.
        config: fields of the config besides those of `TEXT` and `TOWER`.
        tokens: special tokens of the processor.
        placeholder: of an image in a chat.
        text, vision: fields of these configs.
        settings: further arguments of the processor.
        named: attribute of the tokenizer -> its token.
    """

    processor: type[ProcessorMixin]
    images: Callable[[], Any]
    ids: dict[str, str]
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ("<image>",)
    placeholder: str = "<image>"
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=lambda: dict(TOWER))
    settings: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)


# Processors without their part for video or audio, which needs torchvision and more tokens


class QwenProcessor(transformers.Qwen2_5_VLProcessor):
    """Qwen2-VL and Qwen2.5-VL on images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(
            tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token)
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Qwen3Processor(transformers.Qwen3VLProcessor):
    """Qwen3-VL on images."""

    __init__ = QwenProcessor.__init__


class GlmProcessor(transformers.Glm4vProcessor):
    """GLM-4V on images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, None, chat_template)


class OnevisionProcessor(transformers.LlavaOnevisionProcessor):
    """LLaVA-OneVision on images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, num_image_tokens=16):
        super().__init__(image_processor, tokenizer, None, num_image_tokens, "full", chat_template)


class InternProcessor(transformers.InternVLProcessor):
    """InternVL on images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, image_seq_length=4):
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template)


class SmolProcessor(transformers.SmolVLMProcessor):
    """SmolVLM on images, without num2words, which writes numbers of frames."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, image_seq_len=4):
        self.fake_image_token = "<fake_token_around_image>"
        self.global_image_token = "<global-img>"
        self.image_token = "<image>"
        self.video_token = "<video>"
        self.end_of_utterance_token = "<end_of_utterance>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.image_seq_len = image_seq_len
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def apply_chat_template(self, *args, **kwargs):
        """Apply the template as all processors do: SmolVLM's own reads the frame rate of its part for video."""
        return ProcessorMixin.apply_chat_template(self, *args, **kwargs)


try:
    from transformers import Gemma4Processor
except ImportError:  # transformers 5.16 needs torchvision for it
    Gemma4Processor = ProcessorMixin


class GemmaProcessor(Gemma4Processor):
    """Gemma 4 on images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token_id = tokenizer.image_token_id
        self.boi_token, self.image_token, self.eoi_token = GEMMA4[:3]
        self.boa_token, self.audio_token, self.eoa_token = GEMMA4[3:6]
        self.video_token = GEMMA4[6]
        self.audio_token_id = None
        self.video_token_id = None
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class PixtralImages(ProcessorMixin):
    """Make the tokens of `PixtralProcessor`, which cannot be imported without torchvision: rows of merged patches."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, patch_size=12):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size = patch_size  # of a token, in pixels
        self.image_token = PIXTRAL[0]
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    def _process_images(self, images, **images_kwargs):
        return super()._process_images(images, **(images_kwargs | {"patch_size": self.patch_size}))

    def replace_image_token(self, image_inputs, image_idx, **kwargs):
        """Return the tokens of an image: each row ends with a break, the last with the end of the image."""
        height, width = (int(size) // self.patch_size for size in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width
        return PIXTRAL[1].join([row] * height) + PIXTRAL[2]

    @property
    def model_input_names(self):
        """Names of what it returns."""
        return [*super().model_input_names, "image_sizes"]


QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
IDEFICS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{i + 1}_col_{j + 1}>" for i in range(3) for j in range(3)),
)
GEMMA3 = ("<boi>", "<soft>", "<eoi>")
GEMMA4 = (*GEMMA3, "<boa>", "<audio>", "<eoa>", "<|video|>")
INTERNVL = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
PIXTRAL = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
AYA = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_1", "TILE_2", "TILE_3", "TILE_GLOBAL")
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}


QWEN_IMAGES = partial(
    transformers.Qwen2VLImageProcessorPil,
    patch_size=4,
    merge_size=2,
    size={"shortest_edge": 256, "longest_edge": 48 * 48},
)
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IMAGE_ID = {"image_token_id": "<image>"}
IMAGE_INDEX = {"image_token_index": "<image>"}
GEMMA_IDS = {"image_token_id": "<soft>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>"}
GEMMA_NAMES = {"boi": "<boi>", "image": "<soft>", "eoi": "<eoi>"}
MROPE_TEXT = {"rope_parameters": dict(MROPE)}
LLAMA = {"model_type": "llama"}
LAST_LAYER = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
OF_PATCHES = {"patch_size": 6, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
LLAVA_IMAGES = partial(transformers.LlavaImageProcessorPil, size={"shortest_edge": 24}, crop_size=SMALL, do_pad=False)
TILES = partial(transformers.GotOcr2ImageProcessorPil, size=SMALL, max_patches=3)
SQUARES = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
PERCEIVER = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4}
PERCEIVER |= {"resampler_head_dim": 8, "num_key_value_heads": 2}


def _qwen_family(kind: type[ProcessorMixin], vision: dict[str, Any], **text: Any) -> Family:
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    return Family(kind, QWEN_IMAGES, QWEN_IDS, {}, QWEN, placeholder, MROPE_TEXT | text, QWEN_TOWER | vision)


DEEPSTACK = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
}
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _qwen_family(QwenProcessor, {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": _qwen_family(QwenProcessor, {"fullatt_block_indexes": [1], "window_size": 16}),
    "qwen3_vl": _qwen_family(Qwen3Processor, DEEPSTACK),
    "qwen3_vl_moe": _qwen_family(Qwen3Processor, DEEPSTACK, **EXPERTS),
    "qwen3_5": _qwen_family(Qwen3Processor, DEEPSTACK, **DELTA),
    "llava": Family(
        transformers.LlavaProcessor, LLAVA_IMAGES, IMAGE_ID, LAST_LAYER, text=LLAMA, vision=CLIP, settings=OF_PATCHES
    ),
    "llava_next": Family(
        transformers.LlavaNextProcessor,
        partial(
            transformers.LlavaNextImageProcessorPil,
            size={"shortest_edge": 24},
            crop_size=SMALL,
            image_grid_pinpoints=PINPOINTS,
        ),
        IMAGE_ID,
        LAST_LAYER | {"image_seq_length": 16, "image_grid_pinpoints": PINPOINTS},
        text=LLAMA,
        vision=CLIP,
        settings=OF_PATCHES,
    ),
    "llava_onevision": Family(
        OnevisionProcessor,
        partial(transformers.LlavaOnevisionImageProcessorPil, size=SMALL, image_grid_pinpoints=PINPOINTS),
        IMAGE_INDEX | {"video_token_index": "<video>"},
        {"image_grid_pinpoints": PINPOINTS},
        ("<image>", "<video>"),
        text={"model_type": "qwen2"},
        vision=SIGLIP,
    ),
    "idefics2": Family(
        transformers.Idefics2Processor,
        partial(transformers.Idefics2ImageProcessorPil, size={"shortest_edge": 12, "longest_edge": 24}),
        IMAGE_ID,
        {"perceiver_config": PERCEIVER},
        IDEFICS[:4],
        text={"model_type": "mistral"},
        settings={"image_seq_len": 4},
    ),
    "idefics3": Family(
        transformers.Idefics3Processor,
        partial(transformers.Idefics3ImageProcessorPil, **SQUARES),
        IMAGE_ID,
        {"scale_factor": 2},
        IDEFICS,
        text=LLAMA,
        settings={"image_seq_len": 4},
    ),
    "smolvlm": Family(
        SmolProcessor,
        partial(transformers.SmolVLMImageProcessorPil, **SQUARES),
        IMAGE_ID,
        {"scale_factor": 2},
        IDEFICS,
        text=LLAMA,
    ),
    "internvl": Family(
        InternProcessor,
        TILES,
        {"image_token_id": "<IMG_CONTEXT>"},
        {"image_seq_length": 4},
        INTERNVL,
        "<IMG_CONTEXT>",
        {"model_type": "qwen2"},
        TOWER | {"image_size": [24, 24], "patch_size": [6, 6]},
        named=dict(zip(("start_image", "end_image", "context_image", "video"), INTERNVL, strict=True)),
    ),
    "mistral3": Family(
        PixtralImages,
        partial(transformers.PixtralImageProcessorPil, size={"longest_edge": 48}, patch_size=6),
        {"image_token_index": "[IMG]"},
        {},
        PIXTRAL,
        "[IMG]",
        {"model_type": "mistral"},
        TOWER | {"model_type": "pixtral", "image_size": 48, "head_dim": 8},
    ),
    "aya_vision": Family(
        transformers.AyaVisionProcessor,
        TILES,
        {"image_token_index": "<|IMG_PATCH|>"},
        {},
        AYA,
        text={"model_type": "cohere2"} | WINDOWED,
        vision=SIGLIP,
        settings={"patch_size": 6, "img_size": 24, "downsample_factor": 2},
    ),
    "glm4v": Family(
        GlmProcessor,
        partial(
            transformers.Glm4vImageProcessorPil,
            patch_size=4,
            merge_size=2,
            size={"shortest_edge": 512, "longest_edge": 2 * 48 * 48},
        ),
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            **{
                f"{kind}_{end}_token_id": f"<|{word}_of_{kind}|>"
                for kind in ("image", "video")
                for end, word in (("start", "begin"), ("end", "end"))
            },
        },
        {},
        GLM,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        QWEN_TOWER | {"image_size": 48},
    ),
    "gemma3": Family(
        transformers.Gemma3Processor,
        partial(transformers.Gemma3ImageProcessorPil, size=SMALL, do_pan_and_scan=False),
        GEMMA_IDS,
        {"mm_tokens_per_image": 4},
        GEMMA3,
        "<boi>",
        WINDOWED,
        TOWER | {"model_type": "siglip_vision_model"},
        settings={"image_seq_length": 4},
        named=GEMMA_NAMES,
    ),
    "gemma4": Family(
        GemmaProcessor,
        # The smallest number of tokens that it supports
        partial(transformers.Gemma4ImageProcessorPil, patch_size=2, max_soft_tokens=70, pooling_kernel_size=3),
        GEMMA_IDS
        | {"audio_token_id": "<audio>", "boa_token_id": "<boa>"}
        | {"eoa_token_index": "<eoa>", "video_token_id": "<|video|>"},
        {},
        GEMMA4,
        "<soft>",
        WINDOWED
        | {"global_head_dim": 8, "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8}
        | {"use_bidirectional_attention": "vision"},
        SIZES
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
        | {"patch_size": 2, "position_embedding_size": 320},
        named=GEMMA_NAMES,
    ),
    "paligemma": Family(
        transformers.PaliGemmaProcessor,
        partial(transformers.SiglipImageProcessorPil, size=SMALL, image_seq_length=16),
        IMAGE_INDEX,
        {"projection_dim": 32, "hidden_size": 32},
        text={"model_type": "gemma", "vocab_size": 1536},  # with 1152 tokens for places in an image
        vision=SIGLIP | {"projection_dim": 32},
    ),
    "mllama": Family(
        transformers.MllamaProcessor,
        partial(transformers.MllamaImageProcessorPil, size=SMALL),
        {"image_token_index": "<|image|>"},
        {},
        ("<|image|>", "<|python_tag|>"),
        "<|image|>",
        {"model_type": "mllama_text_model", "num_hidden_layers": 3, "cross_attention_layers": [1]},
        SIZES
        | {"image_size": 24, "patch_size": 6, "num_global_layers": 1, "attention_heads": 4}
        | {"intermediate_layers_indices": [0], "vision_output_dim": 64},
    ),
    "vipllava": Family(
        transformers.LlavaProcessor,
        LLAVA_IMAGES,
        IMAGE_INDEX,
        {"vision_feature_layer": [-2, -1], "image_seq_length": 16},
        text=LLAMA,
        vision=CLIP,
        settings=OF_PATCHES,
    ),
}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
FAMILIES |= {
    "qwen3_5_moe": _qwen_family(Qwen3Processor, DEEPSTACK, **DELTA, **EXPERTS, shared_expert_intermediate_size=32),
    "glm4v_moe": replace(FAMILIES["glm4v"], text=FAMILIES["glm4v"].text | MOE),
}


def build_processor(family: str) -> ProcessorMixin:
    """Return the processor of a family, with a tokenizer of one token per byte and images of a few tokens."""
    recipe = FAMILIES[family]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(recipe.tokens)})
    for name, token in recipe.named.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    template = TEMPLATE.replace("PLACEHOLDER", recipe.placeholder)
    return recipe.processor(recipe.images(), tokenizer, chat_template=template, **recipe.settings)


def build_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **text: Any) -> PreTrainedModel:
    """Return a tiny random model of a family with its vision tower, the same for the same arguments.

    `text` changes the config of the text part.
    """
    recipe = FAMILIES[family]
    ids = build_processor(family).tokenizer.get_vocab()
    given = {name: ids[token] for name, token in recipe.ids.items()} | copy.deepcopy(recipe.config)
    given |= {"text_config": copy.deepcopy(TEXT | recipe.text | text), "vision_config": dict(recipe.vision)}
    settings = AutoConfig.for_model(family, **given)
    model = random_model(lambda: AutoModelForImageTextToText.from_config(settings), seed)
    nn.Module.to(model, dtype)
    return model


def make_examples(family: str, model: PreTrainedModel) -> Any:
    """Make documents with images for a model of a family, through its processor: an `ImageExamples` of the feature."""
    collator, examples, processor = (
        import_module(f"trl_packfix.features.images.{name}") for name in ("collator", "examples", "processor")
    )
    kind = type(model.base_model)
    rope_index = collator.RopeIndex(kind, model.config) if hasattr(kind, "get_rope_index") else None
    process = processor.RowProcessor(DataCollatorForVisionLanguageModeling(build_processor(family)))
    return examples.ImageExamples(process, rope_index=rope_index)


def why_not(model_type: str) -> str:
    """Return why there is no family of this type."""
    images = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type)
    if model_type not in PROCESSOR_MAPPING_NAMES:
        return "transformers names no processor of this type"
    if isinstance(images, dict) and "pil" not in images and not is_torchvision_available():
        return f"{images['torchvision']} needs torchvision, which is not installed"
    return f"no tiny {PROCESSOR_MAPPING_NAMES[model_type]} is defined in tools/sweep/image_families.py"
