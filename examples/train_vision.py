"""Fine-tune an image-text model on packed documents with images: full or LoRA, on one process or many.

On the CPU, without a hub, a small random Llava learns to read digits that this script draws. It takes some minutes, and
its answers to new rows are counted at the end (98 % were right):
    python examples/train_vision.py

Your own model and data, on all GPUs of a machine:
    deepspeed --num_gpus=8 examples/train_vision.py --config examples/configs/vision_lora_zero3.yaml

The dataset has a column `images` (a list, which may be empty), and `messages` or `prompt` and `completion`, as in TRL's
documentation of vision datasets. `--config FILE.yaml` may set any of the flags; flags on the command line override it.
"""

from trl_packfix.cli.torch_environment import set_torch_environment

if __name__ == "__main__":
    set_torch_environment()  # before torch is imported

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value, load_dataset
from PIL import Image as Picture
from PIL import ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_packfix import SFTConfig, SFTTrainer

# Segments of a seven-segment display, as lines between points of a 2 x 3 grid, and which of them each digit lights
SEGMENTS = (
    ((0, 0), (1, 0)),
    ((1, 0), (1, 1)),
    ((1, 1), (1, 2)),
    ((0, 2), (1, 2)),
    ((0, 1), (0, 2)),
    ((0, 0), (0, 1)),
    ((0, 1), (1, 1)),
)
LIT = ("012345", "12", "01346", "01236", "1256", "02356", "023456", "012", "0123456", "012356")
SIDE = 24  # of an image, in pixels
WORDS = ["<pad>", "<eos>", "<image>", "user", "assistant", "read", "the", "digits", "count", *map(str, range(10))]
TEMPLATE = """\
{%- for message in messages %}{{ message['role'] + ' ' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}{{ '<image> ' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}
{{- ' <eos> ' if message['role'] == 'assistant' else ' ' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"""
SMALL = {
    "packing": True,
    "output_dir": "output/vision",
    "max_length": 128,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "num_train_epochs": 3,
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": "none",
}


def draw(digit: int, rng: np.random.Generator) -> Picture.Image:
    """A digit of a seven-segment display, a little out of its place, on weak noise."""
    pixels = rng.integers(0, 60, (SIDE, SIDE), dtype=np.uint8)
    picture = Picture.fromarray(pixels).convert("RGB")
    left = rng.integers(5, 9)
    top = rng.integers(2, 5)
    pen = ImageDraw.Draw(picture)
    for index in map(int, LIT[digit]):
        line = [(left + x * 10, top + y * 8) for x, y in SEGMENTS[index]]
        pen.line(line, fill=(255, 255, 255), width=2)
    return picture


def digits(num: int, seed: int) -> Dataset:
    """Rows with one to three images of digits and their numbers, and rows of text alone."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        shown = rng.integers(0, 10, rng.choice([0, 1, 1, 1, 2, 2, 3])).tolist()
        images = [draw(digit, rng) for digit in shown]
        question = [{"type": "image", "text": None}] * len(shown) + [{"type": "text", "text": "read the digits"}]
        answer = " ".join(map(str, shown))
        if not shown:  # text alone
            question = [{"type": "text", "text": "count the digits"}]
            answer = "0"
        rows.append(
            {
                "images": images,
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer}]}],
            }
        )
    part = {"type": Value("string"), "text": Value("string")}
    messages = List({"role": Value("string"), "content": List(part)})
    features = Features({"images": List(Image()), "prompt": messages, "completion": messages})
    return Dataset.from_list(rows, features=features)


def small_llava() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A random Llava with about 300,000 parameters, and its processor: images of 16 tokens."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": SIDE, "width": SIDE}
    images = LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size, do_pad=False)
    processor = LlavaProcessor(images, tokenizer, 6, "default", TEMPLATE, num_additional_image_tokens=1)
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=6, projection_dim=96),
        text_config=LlamaConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=256, pad_token_id=0),
        image_token_id=WORDS.index("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config), processor


@torch.no_grad()
def accuracy(model: LlavaForConditionalGeneration, processor: LlavaProcessor, rows: Dataset) -> float:
    """Share of rows whose whole answer is generated."""
    model.eval()
    right = 0
    for row in rows:
        text = processor.apply_chat_template(row["prompt"], add_generation_prompt=True)
        inputs = processor(images=row["images"] or None, text=[text], return_tensors="pt", add_special_tokens=False)
        made = model.generate(**inputs.to(model.device), max_new_tokens=5, do_sample=False)
        words = processor.tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += words.strip() == row["completion"][0]["content"][0]["text"]
    return right / len(rows)


def main(script_args: ScriptArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    if model_args.model_name_or_path is None:
        model, processor = small_llava()
        train = digits(3000, seed=0)
        held_out = digits(200, seed=1)
    else:
        model = model_args.model_name_or_path
        held_out = None
        processor = AutoProcessor.from_pretrained(model)
        train = load_dataset(script_args.dataset_name, split=script_args.dataset_train_split)
        training_args.model_init_kwargs = {"dtype": model_args.dtype} | (training_args.model_init_kwargs or {})
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        processing_class=processor,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if held_out is not None:
        print(f"Answers that are right on {len(held_out)} new rows: {accuracy(trainer.model, processor, held_out):.1%}")
    trainer.accelerator.wait_for_everyone()
    trainer.end()


if __name__ == "__main__":
    parser = TrlParser(
        (ScriptArguments, SFTConfig, ModelConfig), usage="train_vision.py [--config FILE.yaml] [--FLAG VALUE ...]"
    )
    cpu = {} if torch.cuda.is_available() else {"use_cpu": True, "bf16": False}
    parser.set_defaults(**SMALL, **cpu)
    main(*parser.parse_args_and_config())
