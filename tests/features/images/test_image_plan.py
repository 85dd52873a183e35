"""`trl-packfix plan`, `show` and `prepare` on rows with images: figures of a training run, and lengths made ahead."""

import io
import re

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List, load_from_disk
from peft import LoraConfig
from support.features import PRESENT
from support.models import build_tokenizer
from support.runs import build_trainer
from support.vision import MESSAGES, build_model, build_processor, message, picture, rows
from transformers import AutoProcessor

from trl_packfix.cli import main
from trl_packfix.features.images.processor import RowProcessor

NOT_PLANNED = ("model", "attention", "isolation", "trained", "data", "experimental")  # what only a run can say
ROWS = rows(40)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_plan")
    build_model("llava").save_pretrained(folder / "model")
    build_processor("llava").save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "tokenizer")
    ROWS.to_parquet(folder / "rows.parquet")
    Dataset.from_dict({"text": ["some text"] * 3}).to_json(folder / "text.jsonl")
    (folder / "lengths.txt").write_text("5\n6\n")
    return folder


def trainer_of(folder, workplace, dataset, processor=None, **settings):
    processor = processor or AutoProcessor.from_pretrained(workplace / "model")
    return build_trainer(folder, dataset, build_model("llava"), processing_class=processor, **settings)


def words_of(command, workplace):
    return [command, workplace / "rows.parquet", "--model", workplace / "model"]


def test_figures_are_those_of_the_training_run(workplace, tmp_path, printed):
    """Images of 16 tokens: some documents with two of them are too long, others are truncated behind them."""
    words = [*words_of("plan", workplace), "--max-length", 36, "--batch-size", 2]
    one_rank, ranks = printed(*words, "--world-size", 1, 4, "--strategy", "stream", code=1)["plans"]
    training = trainer_of(tmp_path, workplace, ROWS, max_length=36)
    training.get_train_dataloader()
    wanted = training.packing_report.to_dict()
    planned = wanted.keys() - {*NOT_PLANNED}
    assert {name: one_rank[name] for name in planned} == {name: wanted[name] for name in planned}
    if "prefixes" in PRESENT:
        shared = printed(*words, "--strategy", "stream", "--share-prefixes", "pack", code=1)["plans"][0]["prefixes"]
        assert shared["rows"] <= shared["images"] == 1, "no two rows have the same image"
    counts = np.array([len(row["images"]) for row in ROWS])
    dropped = wanted["ledger"]["dropped"]["overlong"]["documents"]
    assert 0 < dropped <= (counts == 2).sum()
    assert wanted["ledger"]["truncated"]["documents"] > 0
    assert one_rank["images"]["num_images"] == counts.sum() - 2 * dropped
    assert 0.1 < one_rank["images"]["tower_share"] < 0.9
    documents = training.data.source.documents.lengths
    text = 3 * training.data.cost_model(documents).sum()
    assert one_rank["flops"] == pytest.approx(text / (1 - one_rank["images"]["tower_share"]))
    assert ranks["images"]["tower_imbalance"] > 1 < ranks["images"]["language_imbalance"]


@pytest.mark.parametrize("modules", ["all-linear", r".*language_model.*q_proj"])
def test_a_tower_without_adapters_costs_less(modules, workplace, tmp_path, printed):
    """Under LoRA the vision tower has a backward pass only if it gets adapters."""
    words = ["--max-length", 80, "--batch-size", 2, "--use_peft", "--lora_target_modules", modules]
    (planned,) = printed(*words_of("plan", workplace), *words)["plans"]
    adapters = LoraConfig(target_modules=modules)
    training = trainer_of(tmp_path, workplace, ROWS, max_length=80, peft_config=adapters)
    trains_tower = any(parameter.requires_grad for parameter in training.data.reading.tower.parameters())
    assert trains_tower == (modules == "all-linear")
    training.get_train_dataloader()
    assert planned["images"] == training.packing_report.to_dict()["images"]


def test_show_names_the_images_of_a_document(workplace, capsys, printed):
    words = [*words_of("show", workplace), "--max-length", 80]
    packs = printed(*words, "--packs", 3)
    shown = [(document["row"], document["images"]) for pack in packs for document in pack["documents"]]
    assert shown == [(row, len(ROWS[row]["images"])) for row, _ in shown]
    assert {images for _, images in shown} == {0, 1, 2}
    assert main([*map(str, words), "--packs", "3"]) == 0
    out = capsys.readouterr().out
    assert "images: 2, position_ids" in out
    assert "<image> x 16 " in out
    assert "<image>" * 4 not in out


def test_training_finds_the_lengths_that_prepare_made(workplace, tmp_path, printed, monkeypatch):
    words = [*words_of("prepare", workplace), "--output", tmp_path / "out"]
    manifest = printed(*words)
    monkeypatch.delattr(RowProcessor, "measure_row")
    data = load_from_disk(str(tmp_path / "out"))
    training = trainer_of(tmp_path / "run", workplace, data, max_length=80)
    assert manifest["tokens"] == training.data.source.reader.lengths.sum()
    assert manifest["rows"] == len(ROWS)
    with pytest.raises(ValueError, match="cannot be processed"):  # guard: another processor does not find them
        processor = AutoProcessor.from_pretrained(workplace / "model")
        processor.num_additional_image_tokens = 0
        trainer_of(tmp_path / "run", workplace, data, processor)


def test_bad_rows_are_dropped_by_prepare_or_nothing_is_written(workplace, tmp_path, capsys, printed):
    buffer = io.BytesIO()
    picture(24, 24, 0).save(buffer, "PNG")
    chat = [message("user", "ab", 1), message("assistant", "c")]
    images = [[{"bytes": data, "path": None}] for data in (buffer.getvalue(), b"not an image")]
    columns = {"images": images, "messages": [chat] * 2}
    features = {"images": List(Image()), "messages": MESSAGES}
    Dataset.from_dict(columns, features=Features(features)).to_parquet(tmp_path / "bad.parquet")
    words = ["prepare", tmp_path / "bad.parquet", "--model", workplace / "model", "--output", tmp_path / "out"]
    assert main([*map(str, words)]) == 2
    assert "1 of 2 rows of the train dataset with images cannot be processed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    manifest = printed(*words, "--bad-rows", "drop")
    assert manifest["bad_rows_dropped"] == manifest["rows"] == len(load_from_disk(str(tmp_path / "out"))) == 1


NOT_POSSIBLE = {  # words -> the message
    "plan rows.parquet": "has the column `images`, and no model was given",
    "plan rows.parquet --tokenizer tokenizer": "has the column `images`, and `tokenizer` has a tokenizer only",
    "show rows.parquet text.jsonl --model model": "1 dataset with images and 1 without were given",
    "plan rows.parquet lengths.txt --model model": "1 file with lengths and 1 dataset were given",
    "prepare rows.parquet text.jsonl --model model --output both": "2 datasets were given, and 1 of them has images",
    "plan rows.parquet --model model --strategy wrapped": "also inside an image",
}


@pytest.mark.parametrize("words", NOT_POSSIBLE)
def test_what_cannot_be_planned_is_said(words, workplace, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    assert main(words.split()) == 2
    assert NOT_POSSIBLE[words] in capsys.readouterr().err
    assert not (workplace / "both").exists()


def test_the_table_has_the_images_also_for_ranks_that_share_packs(workplace, capsys, monkeypatch):
    monkeypatch.chdir(workplace)
    words = ["plan", "rows.parquet", "--model", "model", "--max-length", "256", "--tokens-per-rank", "64"]
    assert main([*words, "--world-size", "4"]) == 0
    assert "degree" in capsys.readouterr().out
    assert main([*words[:4], "--max-length", "56", "--world-size", "2"]) == 1
    assert re.search(r"images   .* images/pack +too long +language +tower", capsys.readouterr().out, re.DOTALL)
