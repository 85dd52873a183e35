"""The config files in the wheel: listed, parsed, and run in miniature on a model of their type."""

import re

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from support import vision
from support.features import needs
from support.models import build_tiny_model, build_tokenizer
from sweep.image_families import FAMILIES as IMAGE_FAMILIES
from trl import get_peft_config

from trl_packfix import SFTTrainer
from trl_packfix.cli import recipes
from trl_packfix.cli.configs import parse_configs

pytestmark = pytest.mark.slow

CPU = "--use_cpu --bf16 false --dtype float32 --report_to none --disable_tqdm true --save_strategy no".split()
SMALL = "--max_length 256 --max_steps 1 --gradient_accumulation_steps 1 --dataset_num_proc 1 --warmup_steps 0".split()
NAMES = recipes.recipe_names()
MODELS = {
    "qwen3-0.6b": "qwen3",
    "gpt-oss-20b-lora": "gpt_oss",
    "gemma-3-4b-lora": "gemma3",
    "gemma-4-e4b-lora": "gemma4",
    "qwen3.5-4b-lora": "qwen3_5",
    "qwen2.5-vl-3b-lora": "qwen2_5_vl",
    "agent-per-turn": "qwen3",
}
MARKS = {"qwen2.5-vl-3b-lora": needs("images")}  # the only one whose rows have images
CHATS = Dataset.from_list(
    [{"messages": [{"role": role, "content": f"{i} {role}"} for role in ("user", "assistant")] * 2} for i in range(6)]
)
FOR_ACCELERATE = "accelerate-fsdp2"


def test_every_recipe_is_listed_and_printed(output_of, printed):
    listing = output_of("recipes")
    assert [line.split()[0] for line in listing.splitlines()] == NAMES
    assert len(NAMES) >= 10
    assert yaml.safe_load(output_of("recipes", "qwen3-8b-lora"))["model_name_or_path"] == "Qwen/Qwen3-8B"
    assert printed("recipes", "qwen3-8b-lora")["use_peft"] is True


def test_the_file_for_accelerate_is_accepted():
    config = load_config_from_file(str(recipes.FOLDER / f"{FOR_ACCELERATE}.yaml"))
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize("name", sorted(set(NAMES) - {FOR_ACCELERATE}))
def test_a_recipe_is_accepted(name, tmp_path, printed):
    """It is accepted by `train` and by `plan`, on a machine without the GPUs that it names, too."""
    file = recipes.FOLDER / f"{name}.yaml"
    settings = yaml.safe_load(file.read_text())
    script, args, model, *_ = parse_configs(["--config", str(file), *CPU])
    assert args.packing
    assert args.max_length == settings["max_length"]
    assert script.dataset_name
    assert model.use_peft == settings.get("use_peft", False) == ("LoRA" in file.read_text().splitlines()[0])
    (tmp_path / "lengths.txt").write_text("5 7 90")
    words = ["plan", tmp_path / "lengths.txt", "--config", file, "--model", tmp_path, "--world-size", 8]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2097152}')
    planned = printed(*words, "--per_turn", "false", "--share_prefixes", "off")["plans"][0]
    assert planned["max_length"] == settings["max_length"]
    assert planned["batch_size"] == args.per_device_train_batch_size
    assert ("8 GPUs" in recipes.recipe_titles()[name]) == ("deepspeed --num_gpus=8" in file.read_text())


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-8b-1m", "qwen3-8b-lora"])
def test_the_memory_in_a_header_is_what_plan_predicts(name, data_dir, tmp_path, printed):
    text = recipes.read_recipe(name)
    peak, command = re.search(r"# (\d+) GiB on each GPU.*\n#   trl-packfix (plan .*)", text).groups()
    (tmp_path / "config.json").write_text((data_dir / "configs" / "full" / "qwen3-8b.json").read_text())
    rows = printed(*command.replace("Qwen/Qwen3-8B", str(tmp_path)).split())["memory"]
    settings = yaml.safe_load(text)
    of_run = ("LoRA, DDP" if settings.get("use_peft") else "full, ZeRO-3", settings["gradient_checkpointing"])
    (row,) = [row for row in rows if (row["method"], row["checkpointing"]) == of_run]
    assert round(row["peak"]) == int(peak)
    host = re.search(r"(\d+) GiB of the host", text)
    assert round(row["host"]) == (int(host[1]) if host else 0)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in MODELS])
def test_a_recipe_trains(name, tmp_path, monkeypatch):
    """Build the model and its processor here: transformers loads processors of images with torchvision only."""
    monkeypatch.chdir(tmp_path)
    model_type = MODELS[name]
    _, args, model_args, *_ = parse_configs(["--config", str(recipes.FOLDER / f"{name}.yaml"), *CPU, *SMALL])
    has_tower = model_type in IMAGE_FAMILIES
    trainer = SFTTrainer(
        vision.build_model(model_type) if has_tower else build_tiny_model(model_type),
        args,
        train_dataset=vision.rows(6) if name == "qwen2.5-vl-3b-lora" else CHATS,
        processing_class=vision.build_processor(model_type) if has_tower else build_tokenizer(),
        peft_config=get_peft_config(model_args),
    )
    weights = dict(trainer.model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    may_change = {name for name, weight in weights.items() if weight.requires_grad}
    trainer.train()
    changed = {name for name, weight in trainer.model.named_parameters() if not weight.equal(before[name])}
    assert changed
    assert changed <= may_change
    assert all("lora_" in name for name in changed) == model_args.use_peft
    assert not any("visual" in name or "vision" in name for name in may_change)
    assert trainer.packing_report.num_documents == (12 if name == "agent-per-turn" else 6)
