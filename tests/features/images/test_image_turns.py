"""One sample per assistant turn of conversations with images: what generation sees, and no image of a later turn.

That they train as in unpacked TRL are rows of the table of equivalences.
"""

import json
import logging

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, Features, Image, List, load_from_disk
from support.features import PRESENT, needs
from support.paths import ROOT
from support.vision import MESSAGES, build_model, build_processor, by_turn, conversations, make, message, stripping

from trl_packfix.cli import main
from trl_packfix.features.images.processor import RowProcessor
from trl_packfix.layout import layout_of
from trl_packfix.samples.conversation import Conversation

pytestmark = pytest.mark.slow

TURNS = conversations()
UNPACKED = {"packing": False, "max_length": None, "config_class": trl.SFTConfig, "trainer_class": trl.SFTTrainer}
PER_TURN = {"per_turn": True, "packing_strategy": "minibatch", "max_length": 300}


def trainer_of(folder, dataset=TURNS, family="llava", **settings):
    return make(folder, family, dataset, **(PER_TURN | {"processor": stripping(build_processor(family))} | settings))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "idefics3"])
def test_a_sample_is_the_row_of_trl(family, tmp_path):
    """Compare tokens, labels, and the pixels of the images up to the turn."""
    silent = [{"images": TURNS[0]["images"][:1], "messages": TURNS[0]["messages"][:1], "share": 9.0}]
    trainer = trainer_of(tmp_path, Dataset.from_list([*TURNS, *silent], features=TURNS.features), family)
    reader = trainer.data.source.reader
    expected = by_turn()
    stock = make(tmp_path, family, expected, **UNPACKED)
    assert len(reader) == len(expected) + 1
    assert reader.image_counts.tolist() == [1, 2, 3] * len(TURNS) + [1]
    for i in range(len(expected)):
        sample = reader.read(i, 0, reader.lengths[i])
        expected_row = dict(stock.data_collator([dict(expected[i])]))
        for name in ("input_ids", "labels"):
            assert np.array_equal(sample.pop(name), expected_row.pop(name)[0]), name
        expected_row.pop("attention_mask")
        assert sample.keys() == expected_row.keys() >= {"pixel_values"}
        assert all(torch.equal(sample[name], expected_row[name]) for name in expected_row)
    last = reader.read(len(expected), 0, reader.lengths[-1])
    assert (last["labels"] == -100).all()
    assert last["input_ids"].dtype == np.int64
    assert "pixel_values" in last


@needs("prefixes")
def test_in_the_order_of_the_table_a_conversation_computes_each_image_once(tmp_path):
    """Train with the settings that docs/per_turn.md names."""
    page = (ROOT / "docs" / "per_turn.md").read_text()
    settings = {"share_prefixes": "pack", "packing_strategy": "minibatch", "train_sampling_strategy": "sequential"}
    assert all(f'`{name}="{value}"`' in page for name, value in settings.items())
    trainer = trainer_of(tmp_path, per_device_train_batch_size=3, **settings)
    batches = list(trainer.get_train_dataloader())
    assert [(layout_of(batch).document_count, len(batch["pixel_values"])) for batch in batches] == [(3, 3)] * len(TURNS)
    line = "6, one document for each of their 18 assistant turns"
    assert dict(trainer.packing_report.lines())["conversations"] == line
    assert trainer.packing_report.num_documents == 18


# Evaluation


def test_evaluation_has_each_turn_once(tmp_path):
    """Evaluation must give the loss of the turns made by hand, packed and padded, and each source that of its turns."""
    model = build_model("llava")
    table = TURNS.add_column("source", ["a", "b"] * 3)
    turns = by_turn().add_column("source", np.repeat(table["source"], 3))
    kwargs = {"model": model, "source_column": "source"}
    expected = make(tmp_path, "llava", turns, eval_packing=False, max_length=300, **kwargs).evaluate(turns)
    losses = [name for name in expected if "loss" in name]
    assert len(losses) == 3
    for more in ({}, {"eval_packing": False}, *[{"share_prefixes": "pack"}] * ("prefixes" in PRESENT)):
        trainer = trainer_of(tmp_path, table, weight_column="share", **kwargs, **more)
        assert trainer.data.source.row_values.weights.tolist() == np.repeat(table["share"], 3).tolist()
        metrics = trainer.evaluate(table)
        assert {name: metrics[name] for name in losses} == pytest.approx({n: expected[n] for n in losses}, rel=2e-6)
    assert len(trainer.predict(TURNS.select(range(2))).predictions) == 6


# Rows


def chat(*texts, images=0):
    """Return messages of user and assistant in turn; the first has the images."""
    roles = ("user", "assistant") * len(texts)
    return [message(role, text, 0 if i else images) for i, (role, text) in enumerate(zip(roles, texts, strict=False))]


def table_of(*rows):
    features = Features({"images": List(Image()), "messages": MESSAGES})
    return Dataset.from_list([{"images": images, "messages": messages} for images, messages in rows], features=features)


def test_turns_that_cannot_be_rendered_are_named_or_dropped(tmp_path, caplog):
    image = TURNS[0]["images"][:1]
    drawn = [message("user", "draw"), message("assistant", "here", 1), *chat("nice", "x")]
    data = table_of((image, chat("a", "b", images=1)), (image, drawn), (image, chat("a", "b")), ([], chat("a", "b")))
    named = r"2 of 4 rows of the train dataset cannot be tokenised; the first are \[1, 2\]. Row 1: .*with an image"
    with pytest.raises(ValueError, match=named):
        trainer_of(tmp_path, data)
    trainer = trainer_of(tmp_path, data, bad_rows="drop")
    assert "2 turns in 2 of 4 conversations of the train dataset cannot be rendered and are dropped" in caplog.text
    trainer.get_train_dataloader()
    ledger = trainer.packing_report.ledger
    assert (ledger.kept.documents, ledger.dropped["bad_row"].documents) == (3, 2)
    assert trainer.data.source.reader.image_counts.tolist() == [1, 0, 1, 0, 0], (
        "the image that was drawn is in the history"
    )
    with pytest.raises(ValueError, match=r"none of the 1 conversations .*role `assistant`"):
        trainer_of(tmp_path, table_of((image, chat("a", images=1))))


def test_what_strips_nothing_or_does_not_end_is_said(tmp_path, caplog):
    def warnings_about(processor):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer_of(tmp_path, processor=processor)
        return ["all of the first 6 conversations" in caplog.text, "without an end-of-turn token" in caplog.text]

    endless = build_processor("llava")
    endless.chat_template = endless.chat_template.replace("<|im_end|>", "")
    assert warnings_about(stripping(build_processor("llava"))) == [False, False]
    assert warnings_about(build_processor("llava")) == [True, False]
    assert warnings_about(endless) == [True, True]


def test_images_of_plain_messages_belong_to_the_first_of_the_user():
    """Give the images to the first message of the user, as in TRL; a greeting before it has none."""
    messages = [{"role": role, "content": "a"} for role in ("system", "assistant", "user", "assistant")]
    conversation = Conversation.from_row({"messages": messages}, TURNS[0]["images"][:2])
    processor = build_processor("llava")
    rows = [conversation.row_of_turn(turn, processor) for turn in (1, 3)]
    assert [len(row["images"]) for row in rows] == [row["prompt"].count("<image>") for row in rows] == [0, 2]


def test_a_template_that_changes_the_history_keeps_the_prompt_of_generation():
    """Take the turn as the template renders it, as for text."""
    processor = build_processor("llava")
    text = "{{ part['text'] }}"
    is_seen = "part['text'] != 'b' or messages | length != 4 or add_generation_prompt"
    assert text in processor.chat_template
    processor.chat_template = processor.chat_template.replace(text, f"{{% if {is_seen} %}}{text}{{% endif %}}")
    conversation = Conversation.from_row({"messages": chat("a", "b", "c", "d", images=1)}, TURNS[0]["images"][:1])
    rendered = conversation.text(conversation.messages, processor)
    row = conversation.row_of_turn(3, processor)
    assert not rendered.startswith(row["prompt"])
    assert "\nb<" in row["prompt"]
    assert "\nb<" not in rendered
    assert row["completion"] == "d<|im_end|>\n"
    assert rendered.endswith(row["completion"])


def test_evaluation_with_images_of_a_run_without_is_refused(tmp_path):
    data = TURNS.remove_columns("images")
    plain = [[turn | {"content": turn["content"][-1]["text"]} for turn in turns] for turns in data["messages"]]
    text = Dataset.from_dict({"messages": plain})
    with pytest.raises(ValueError, match=r"the eval dataset has the columns .*with images, and the training set has"):
        trainer_of(tmp_path, text, eval_dataset=TURNS)


def test_prepare_measures_turns_and_keeps_conversations(tmp_path, capsys, monkeypatch, printed):
    build_model("llava").save_pretrained(tmp_path / "model")
    stripping(build_processor("llava")).save_pretrained(tmp_path / "model")
    TURNS.to_parquet(tmp_path / "rows.parquet")
    words = [tmp_path / "rows.parquet", "--model", tmp_path / "model", "--per-turn"]
    assert main(["prepare", *map(str, words), "--output", str(tmp_path / "out")]) == 0
    assert "6 conversations, one document for each of their 18 assistant turns; 0 without" in capsys.readouterr().out
    planned = printed("plan", *words, "--max-length", 300)["plans"][0]
    assert planned["num_documents"] == 18
    assert planned["images"]["num_images"] == 36

    def never(*args):
        raise AssertionError("a turn was measured again")

    monkeypatch.setattr(RowProcessor, "measure_row", never)
    processor = type(build_processor("llava")).from_pretrained(tmp_path / "model")
    trainer = trainer_of(tmp_path / "run", load_from_disk(str(tmp_path / "out")), processor=processor)
    assert len(trainer.data.source.documents) == 18
    manifest = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert manifest["tokens"] == trainer.data.source.reader.lengths.sum()
    assert manifest["conversations"] == 6
