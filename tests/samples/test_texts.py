"""Each row is tokenised by its own form, whatever the first row is: as stock TRL does with rows of this form alone."""

import itertools
import logging

import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from support import vision
from support.features import needs
from support.models import build_tokenizer
from support.runs import TOOL, all_documents, build_trainer, stock

pytestmark = pytest.mark.slow


def chat(i):
    return [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": f"hello {i}"}]


FORMS = {
    "chat": lambda i: {"messages": chat(i)},
    "text": lambda i: {"text": f"plain {i}"},
    "pair": lambda i: {"prompt": f"word {i}", "completion": f" more {i}"},
    "from": lambda i: {"conversations": [{"from": m["role"], "value": m["content"]} for m in chat(i + 50)]},
}
NUM = 5  # rows of each form
FIRST = [[*FORMS][i:] + [*FORMS][:i] for i in range(len(FORMS))]  # each form is the first once


def rows_of(form):
    return [FORMS[form](i) for i in range(NUM)]


def samples(rows):
    return [(row["input_ids"], row["labels"]) for row in rows]


KNOWN = {}


def of_stock(folder, form):
    if form not in KNOWN:
        KNOWN[form] = samples(stock(folder, Dataset.from_list(rows_of(form))).train_dataset)
    return KNOWN[form]


def table(forms):
    return concatenate_datasets([Dataset.from_list(rows_of(form)) for form in forms])


def interleaved(forms):
    streams = [IterableDataset.from_generator(rows_of, gen_kwargs={"form": form}) for form in forms]
    return interleave_datasets(streams, stopping_strategy="all_exhausted")


def of_kind(dataset, is_stream):
    return dataset.to_iterable_dataset() if is_stream else dataset


def in_turn(forms):
    """Return a stream whose rows have the columns of their form only, and no types."""
    return IterableDataset.from_generator(lambda: itertools.chain(*zip(*map(rows_of, forms), strict=True)))


DATASETS = {"table": table, "interleaved": interleaved, "in turn": in_turn}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("forms", FIRST, ids="first".join)
def test_rows_of_several_forms_are_tokenised_as_each_form_alone(kind, forms, tmp_path):
    trainer = build_trainer(tmp_path, DATASETS[kind](forms), packing=False, max_steps=1, shuffle_dataset=False)
    expected = [of_stock(tmp_path, form) for form in forms]
    in_order = itertools.chain(*expected) if kind == "table" else itertools.chain(*zip(*expected, strict=True))
    assert samples(trainer.train_dataset) == list(in_order)


@pytest.mark.parametrize("kind", DATASETS)
def test_rows_of_several_forms_train_in_packs(kind, tmp_path):
    trainer = build_trainer(tmp_path, DATASETS[kind](FIRST[1]), max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    if kind == "table":
        expected = itertools.chain(*(of_stock(tmp_path, form) for form in FORMS))
        assert all_documents(trainer) == sorted((tokens, [-100, *labels[1:]]) for tokens, labels in expected)


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("setting", ["assistant_only_loss", "per_turn"])
def test_rows_without_an_assistant_are_bad_rows_where_it_is_trained(kind, setting, tmp_path):
    dataset = DATASETS[kind](["text", "chat"])
    settings = {setting: True, "packing": False, "max_steps": 1}
    message = "no text to tokenise" if kind == "in turn" else "`messages` is None"
    message = "5 of 10 rows.*no assistant" if (kind, setting) == ("table", "assistant_only_loss") else message
    with pytest.raises(ValueError, match=message):
        list(build_trainer(tmp_path, dataset, **settings).train_dataset)
    trainer = build_trainer(tmp_path, dataset, bad_rows="drop", **settings, shuffle_dataset=False)
    texts = [build_tokenizer().decode([t for t in row["labels"] if t != -100]) for row in trainer.train_dataset]
    assert [text.removesuffix("\n").removesuffix("<|im_end|>") for text in texts] == [f"hello {i}" for i in range(NUM)]


BAD = {"chat": {"messages": []}, "text": {"text": None}, "pair": {"prompt": None, "completion": " m"}}
BAD["from"] = {"conversations": []}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_first_row_is_dropped_as_any_other(form, is_stream, tmp_path):
    features = Dataset.from_list(rows_of(form)).features
    dataset = of_kind(Dataset.from_list([BAD[form], *rows_of(form)], features=features), is_stream)
    settings = {"packing": False, "max_steps": 1, "shuffle_dataset": False}
    trainer = build_trainer(tmp_path, dataset, bad_rows="drop", **settings)
    assert samples(trainer.train_dataset) == of_stock(tmp_path, form)
    with pytest.raises(ValueError, match="(?i)(row 0|first are .0.)"):
        list(build_trainer(tmp_path, dataset, **settings).train_dataset)


BESIDE = {"prompt": "hi", "prompt_id": "7"}
PREFERENCES = {"prompt": "hi", "chosen": chat(8), "rejected": "no"}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("columns", [BESIDE, PREFERENCES], ids=["ultrachat", "ultrafeedback"])
def test_a_prompt_without_a_completion_beside_messages_is_left_out_and_named(columns, is_stream, tmp_path, caplog):
    dataset = of_kind(Dataset.from_list([row | columns for row in rows_of("chat")]), is_stream)
    trainer = build_trainer(tmp_path, dataset, packing=False, max_steps=1, shuffle_dataset=False)
    assert samples(trainer.train_dataset) == of_stock(tmp_path, "chat")
    assert "dataset have a column `prompt`, which is not read" in caplog.text
    copies = [{"messages": chat(i), "prompt": f"hi {i}"} for i in range(NUM)]
    caplog.clear()
    build_trainer(tmp_path, Dataset.from_list(copies), packing=False)
    assert "`prompt`" not in caplog.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_without_a_completion_beside_a_text_is_refused(is_stream, tmp_path):
    dataset = of_kind(Dataset.from_list([row | BESIDE for row in rows_of("text")]), is_stream)
    message = "a prompt without a completion" if is_stream else "5 of 5 rows .*a `prompt` and no `completion`.*Rename"
    with pytest.raises(ValueError, match=message):
        build_trainer(tmp_path, dataset, packing=False, max_steps=1)


@pytest.mark.parametrize("settings", [{}, {"assistant_only_loss": True}, {"per_turn": True}], ids=str)
def test_tools_that_are_an_empty_text_are_no_tools(settings, tmp_path):
    settings = settings | {"packing": False, "shuffle_dataset": False, "max_length": 500}

    def samples_with(**tools):
        dataset = Dataset.from_list([row | tools for row in rows_of("chat")])
        return samples(build_trainer(tmp_path, dataset, **settings).train_dataset)

    assert samples_with() == samples_with(tools="") == samples_with(tools="\n") != samples_with(tools=TOOL)
    with pytest.raises(ValueError, match="Row 0: `tools` is a text that is not JSON.*Give rows of the form"):
        samples_with(tools="[")


@pytest.mark.parametrize("format_type", ["pandas", "numpy", "torch", "arrow"])
@pytest.mark.parametrize("form", ["chat", "text"])
def test_the_format_of_a_dataset_does_not_matter(form, format_type, tmp_path):
    formatted = Dataset.from_list(rows_of(form)).with_format(format_type)
    kwargs = {"eval_dataset": {"one": formatted}, "packing": False, "shuffle_dataset": False}
    trainer = build_trainer(tmp_path, formatted, **kwargs)
    assert samples(trainer.train_dataset) == of_stock(tmp_path, form)
    assert samples(trainer.eval_dataset["one"]) == of_stock(tmp_path, form)
    stream = Dataset.from_list(rows_of(form)).to_iterable_dataset().with_format(format_type)
    trainer = build_trainer(tmp_path, stream, packing=False, max_steps=1)
    assert samples(trainer.train_dataset) == of_stock(tmp_path, form)
    assert trainer.evaluate(formatted)["eval_loss"] > 0


@pytest.mark.parametrize("is_stream", [False, True])
def test_conversations_need_a_chat_template(is_stream, tmp_path):
    def prepared(form):
        dataset = of_kind(Dataset.from_list(rows_of(form)), is_stream)
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
        return build_trainer(tmp_path, dataset, processing_class=tokenizer, packing=False, max_steps=1).train_dataset

    with pytest.raises(ValueError, match="has no chat template.*messages do not become text. Set `chat_template_path`"):
        prepared("chat")
    assert len(list(prepared("text"))) == NUM


def test_rows_that_unpacked_trl_drops_are_counted(tmp_path, caplog):
    rows = [{"prompt": "long " * (90 if i < 3 else 2), "completion": " x"} for i in range(12)]
    trainer = build_trainer(tmp_path, Dataset.from_list(rows), packing=False, max_length=16)
    assert len(trainer.train_dataset) == 9
    assert "3 of 12 documents have no trained token and are dropped" in caplog.text
    with pytest.raises(ValueError, match=r"has 3 rows .*no document remains .*3 untrained; `max_length=16`"):
        build_trainer(tmp_path, Dataset.from_list(rows[:3]), packing=False, max_length=16)


@needs("images")
@pytest.mark.parametrize("packing", [True, False])
def test_placeholders_that_llava_writes_into_texts_are_refused_or_named(packing, tmp_path, caplog):
    def make_trainer(family, rows):
        dataset = Dataset.from_list([{"images": vision.PICTURES[:1]} | row for row in rows])
        return vision.make(tmp_path, family, dataset, packing=packing, max_length=400)

    question, answer = chat(0)
    chats = [{"messages": [question | {"content": "<image>\nwhat?"}, answer]}, FORMS["chat"](1)] * 4
    with pytest.raises(ValueError, match="4 of 8 rows .*`<image>`.*more images than there are. Remove `<image>`"):
        make_trainer("llava", chats)
    with caplog.at_level(logging.WARNING):
        make_trainer("qwen2_5_vl", chats[1::2])
        assert "LLaVA" not in caplog.text
        make_trainer("qwen2_5_vl", chats)
    assert "`<image>` would be trained as a text" in caplog.text
    with pytest.raises(ValueError, match="8 rows has images and `conversations`.*maybe_convert_to_chatml"):
        make_trainer("llava", [FORMS["from"](i) for i in range(8)])
