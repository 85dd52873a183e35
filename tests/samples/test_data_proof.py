"""Everything that a dataset gives is in its tokens once, or is named with its rows.

The cases are forms of published datasets and of other libraries, each with the template of a model. What a template
does with a case is known from its source, and from rendering it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import trl
from datasets import Dataset, DatasetDict, Features, IterableDataset, Json, List, Value
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from support.chats import PLAIN, answer, tokenizer_with, user
from support.models import build_tokenizer
from support.runs import build_trainer, config
from support.versions import TRANSFORMERS, sanitises_control_tokens
from tokenizers.processors import TemplateProcessing

from trl_packfix import check_data
from trl_packfix.samples import text_kinds
from trl_packfix.samples.conversation import Conversation
from trl_packfix.samples.data_proof import _Proof, prove_data
from trl_packfix.samples.data_report import DataReport
from trl_packfix.samples.rendering import Rendering
from trl_packfix.samples.turns import TurnRule

OK = answer("It is sunny")
ASK = user("What is the weather")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Reads a thermometer",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}},
        },
    }
]


def turn(role, content):
    return {"role": role, "content": content}


def call(name="get_weather", content="", **arguments):
    function = {"name": name, "arguments": arguments or {"city": "Oslo"}}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


def text_part(text, **more):
    return [{"type": "text", "text": text, **more}]


def sharegpt(*turns):
    return [{"from": role, "value": text} for role, text in turns]


ANSWER_IN_PARTS = turn("assistant", text_part("It is sunny"))


@dataclass
class Case:
    """A form of data. `message` is a part of what is said about it, "" if there is nothing to say."""

    source: str  # where this form is from
    row: dict[str, Any]
    message: str
    template: str = "qwen3"
    severity: str = "warning"
    neighbour: dict[str, Any] | None = None  # another row beside it
    settings: dict[str, Any] = field(default_factory=dict)


def messages(*turns, **columns):
    return {"messages": list(turns), **columns}


LEFT_OUT = "which the chat template leaves out"
ALPACA = {"instruction": "What is the sum", "output": "3"}
FORMAT = "{instruction} {output}".format_map
CASES = {
    # Roles
    "developer": Case("sglang#40082", messages(turn("developer", "Be brief"), ASK, OK), "`developer`, which"),
    "function_call": Case(
        "LLaMA-Factory, glaive_toolcall_en",
        {"conversations": sharegpt(("human", "Hi"), ("function_call", "a b"), ("observation", "c d"), ("gpt", "Yes"))},
        "role `observation`, which",
        "glm4moe",
    ),
    "system in the middle": Case(
        "OpenHermes with notes",
        messages(ASK, OK, turn("system", "Now rhyme"), ASK, OK),
        LEFT_OUT,
        "gptoss",
    ),
    "capitals": Case(
        "BELLE",
        messages(turn("User", "Hi"), turn("Assistant", "Ho")),
        "role `Assistant`, which",
    ),
    "human in messages": Case(
        "Vicuna converted by hand",
        messages(turn("human", "Hi"), turn("gpt", "Ho")),
        "role `gpt`, which the chat template renders as it renders any unknown role",
        "plain",
    ),
    "human in conversations": Case(
        "ShareGPT", {"conversations": sharegpt(("human", "Hi"), ("gpt", "Ho"))}, "are renamed", severity="mended"
    ),
    # Texts
    "parts": Case(
        "OpenAI, LLaVA-Instruct without images",
        messages(turn("user", text_part("Hi")), turn("assistant", text_part("Ho"))),
        "Nothing that the user says",
        severity="error",
    ),
    "parts as Python": Case(
        "the same under ChatML",
        messages(turn("user", text_part("Hi")), turn("assistant", text_part("Ho"))),
        "writes as Python writes a list",
        "printing",
        severity="error",
    ),
    "text beside a call": Case(
        "tau-bench",
        messages(ASK, call(content="Let me look"), turn("tool", "9"), OK),
        "`content beside tool_calls`",
        "llama3_2",
    ),
    "all answers": Case(
        "a template of questions", messages(ASK, OK), "Nothing that the assistant says", "questions", "error"
    ),
    "all answers but their thoughts": Case(
        "a template of questions and thoughts",
        messages(ASK, OK | {"reasoning_content": "Two and one"}),
        "Nothing that the assistant says",
        "thoughts",
        "error",
    ),
    "twice": Case("a template with a summary", messages(ASK, OK), "renders more than once", "twice"),
    "refusal": Case("OpenAI, structured outputs", messages(ASK, OK | {"refusal": "I cannot do that"}), "`refusal`"),
    "ids of messages": Case(
        "oasst2", messages(ASK | {"message_id": "a-1", "lang": "en"}, OK), "`lang` in messages", severity="note"
    ),
    "citations": Case(
        "OpenAI, web search",
        messages(ASK, OK | {"annotations": [{"url_citation": {"title": "The page of the day"}}]}),
        "`annotations",
    ),
    "blocks of a call": Case(
        "Anthropic, traces",
        messages(
            turn("user", text_part("What")),
            {
                "role": "assistant",
                "content": [*text_part("Look"), {"type": "tool_use", "input": {"city": "in Oslo"}}],
            },
        ),
        "`tool_use in content`",
        "qwen2_5_vl",
    ),
    "blocks of a thought": Case(
        "Anthropic, extended thinking",
        messages(
            turn("user", text_part("What")),
            turn("assistant", [{"type": "thinking", "thinking": "Look it up"}, *text_part("Rain")]),
        ),
        "`thinking in content`",
        "qwen2_5_vl",
    ),
    "input_text": Case(
        "OpenAI, Responses",
        messages(turn("user", [{"type": "input_text", "text": "What"}]), ANSWER_IN_PARTS),
        "",
        "qwen2_5_vl",
    ),
    "empty system": Case("LLaMA-Factory, alpaca_en", messages(turn("system", ""), ASK, OK), ""),
    # Thoughts
    "reasoning": Case("OpenThoughts", messages(ASK, OK | {"reasoning_content": "Look up"}), LEFT_OUT, "qwen2_5"),
    "early thought": Case(
        "axon-rl/gem#44",
        messages(ASK, answer("<think>\nLook up\n</think>\n\nYes"), ASK, OK),
        "`content before </think>` in messages of the role `assistant`, which the chat template leaves out",
    ),
    "thinking": Case("gpt-oss, Multilingual-Thinking", messages(ASK, OK | {"thinking": "Look up"}), "", "gptoss"),
    "a thought of two names": Case(
        "gpt-oss beside Qwen3",
        messages(ASK, OK | {"thinking": "Look up", "reasoning_content": "Look up"}),
        "",
        "gptoss",
    ),
    "R1": Case(
        "OpenR1-Math",
        messages(ASK, answer("<think>Look up</think>Yes")),
        "`content before </think>`",
        "deepseek_r1_distill",
    ),
    # Tools
    "tools": Case(
        "hermes-function-calling-v1", messages(ASK, OK, tools=json.dumps(TOOLS)), "have `tools`, which", "phi3"
    ),
    "calls": Case(
        "xlam-function-calling-60k",
        messages(ASK, call(), turn("tool", "9"), OK),
        "`tool_calls`",
        "phi3_5",
    ),
    "arguments as Python": Case(
        "xlam", messages(ASK, call(), OK), "`tool_calls` that the chat template writes as Python", "calls", "error"
    ),
    "arguments in a text": Case(
        "vortico/flama#258, oumi#2599",
        messages(ASK, call() | {"tool_calls": [{"function": {"name": "f", "arguments": '{"city": "Oslo"}'}}]}, OK),
        "are a text of JSON, which the chat template writes as a text in JSON",
        "qwen2_5",
    ),
    "arguments that are no texts": Case(
        "glaive-function-calling-v2", messages(ASK, call(days=3, wind=1.5, hourly=True, at=[1.5, 2.5]), OK), ""
    ),
    "numbers of arguments": Case(
        "a template of texts",
        messages(ASK, call(city="Oslo", wind=2.5), OK),
        "`tool_calls[].function.arguments` in messages of the role `assistant`, which the chat template leaves out",
        "texts",
    ),
    "flags of arguments": Case(
        "a template of numbers",
        messages(ASK, call(city="Oslo", days=3, hourly=True), OK),
        "leaves out, for example 'true'",
        "numbers",
    ),
    "tools in a message": Case(
        "Kimi K2", messages({"role": "system", "content": "Be brief", "tools": json.dumps(TOOLS)}, ASK, OK), "`tools`"
    ),
    "flat tools": Case(
        "OpenAI, Responses", messages(ASK, OK, tools=json.dumps([{"type": "function", **TOOLS[0]["function"]}])), ""
    ),
    "nulls of calls": Case(
        "datasets.from_list",
        messages(ASK, call(city="Oslo")),
        "None only because other rows have them; they are taken out",
        severity="mended",
        neighbour=messages(ASK, call("add", a=1, b=2)),
    ),
    "functions": Case(
        "glaive-function-calling-v2", messages(ASK, OK, functions='[{"name": "f"}]'), "column `functions`"
    ),
    # Keys that leave a message out elsewhere
    "loss": Case(
        "ms-swift",
        messages(ASK, OK | {"loss": False}, ASK, OK),
        "`loss` 0",
        severity="error",
        settings={"trains_assistant": True},
    ),
    "weight": Case(
        "OpenAI",
        messages(ASK, OK | {"weight": 0}, ASK, OK | {"weight": 1}),
        "`assistant_only_loss=True`",
        severity="error",
    ),
    "half a weight": Case(
        "Together, weights", messages(ASK, OK | {"weight": 0.5}), "a `weight` that is neither 0 nor 1, which is not"
    ),
    "half a loss": Case(
        "ms-swift, loss_scale",
        messages(ASK, OK | {"loss": 0.5}),
        "a `loss` that is neither 0 nor 1, which is not read",
        settings={"trains_assistant": True},
    ),
    "loss of a question": Case(
        "ms-swift", messages(ASK | {"loss": False}, OK), "", settings={"trains_assistant": True}
    ),
    "index of a turn": Case(
        "lmsys-chat-1m", messages(ASK | {"turn": 0}, OK | {"turn": 1}), "`turn` 0", severity="note"
    ),
    # Columns
    "documents": Case(
        "RAG data of Cohere", messages(ASK, OK, documents=[{"title": "a", "text": "b c"}]), "column `documents`"
    ),
    "embeddings": Case("retrieval data", messages(ASK, OK, embedding=[0.5, 1.0]), ""),
    "documents of the template": Case(
        "Command R", messages(ASK, OK, chat_template_kwargs={"documents": [{"text": "b c"}]}), "have `documents`"
    ),
    "kwargs": Case(
        "a typing error", messages(ASK, OK, chat_template_kwargs={"enable_thinkin": False}), "`enable_thinkin`"
    ),
    "kwargs that are read": Case("Qwen3", messages(ASK, OK, chat_template_kwargs={"enable_thinking": False}), ""),
    # Media
    "images of a message": Case(
        "Ollama", messages(ASK | {"images": ["a.png"]}, OK), "`images` in their messages", severity="error"
    ),
    "null image of a part": Case(
        "LLaVA-OneVision in Arrow",
        messages(
            turn("user", text_part("Hi", image=None)),
            turn("assistant", text_part("Ho", image=None)),
        ),
        "they are taken out",
        "qwen2_5_vl",
        "mended",
    ),
    # Tokens
    "control token": Case("ChatBug", messages(user("Say <|im_end|> now"), OK), "control tokens"),
    "two BOS": Case("llama-cpp-python#1501", {"text": "<s>Hi"}, "begin with BOS", "bos"),
    # A function of the user
    "formatted": Case("gsm8k", ALPACA, "", settings={"formatting_func": FORMAT}),
    "formatted without a column": Case(
        "Alpaca", ALPACA | {"input": "of 1 and 2"}, "column `input`", settings={"formatting_func": FORMAT}
    ),
    "formatted without an id": Case(
        "Alpaca", ALPACA | {"key": "a-1"}, "column `key`", severity="note", settings={"formatting_func": FORMAT}
    ),
    "formatted without a role": Case(
        "hand-written ChatML",
        messages(turn("developer", "Be brief"), ASK, OK),
        "have `content` in messages of the role `developer`, which `formatting_func` leaves out",
        settings={
            "formatting_func": lambda row: " ".join(m["content"] for m in row["messages"] if m["role"] != "developer")
        },
    ),
    "formatted as Python": Case(
        "a tutorial",
        ALPACA | {"tools": [{"name": "f"}]},
        "`tools` that `formatting_func` writes as Python",
        settings={"formatting_func": "{tools} {instruction} {output}".format_map},
    ),
    "formatted with two BOS": Case(
        "Llama 3", ALPACA, "begin with BOS", "bos", settings={"formatting_func": "<s>{instruction} {output}".format_map}
    ),
    "right": Case("gsm8k", messages(ASK, OK), ""),
    "right tools": Case("sgd", messages(ASK, call(), turn("tool", "9"), OK, tools=json.dumps(TOOLS)), ""),
}
OTHER_TRAIN_KEYS = {"trainable": "verl", "mask": "NeMo", "training": "axolotl"}
CASES |= {
    key: Case(source, messages(ASK, OK | {key: 0}), f"`{key}` 0", severity="error")
    for key, source in OTHER_TRAIN_KEYS.items()
}
UNREAD_COLUMNS = [  # (where it is from, column, value, severity)
    ("Bespoke-Stratos-17k", "system", "Think first", "warning"),
    ("databricks-dolly-15k", "context", "A note", "warning"),
    ("alpaca", "history", [["a", "b"]], "warning"),
    ("Alpaca", "input", "1 and 2", "warning"),
    ("UltraFeedback", "rejected", "It is dark", "note"),
    ("tulu-3-sft-mixture", "source", "web", "note"),
    ("ultrachat_200k", "prompt", ASK["content"], "note"),
]
CASES |= {
    f"column {name}": Case(source, messages(ASK, OK, **{name: value}), f"column `{name}`", severity=severity)
    for source, name, value, severity in UNREAD_COLUMNS
}
MEDIA = {  # (where it is from, a part of a message, which is named after its last key)
    "OpenAI vision": {"type": "image_url", "image_url": {"url": "a.png"}},
    "LLaVA-Video": {"type": "video", "video": "a.mp4"},
    "Qwen2-Audio": {"type": "audio", "audio_url": "a.wav"},
    "OpenAI, audio": {"type": "input_audio", "input_audio": {"data": "x"}},
}
CASES |= {
    name: Case(
        source,
        messages(turn("user", [*text_part("What"), medium]), ANSWER_IN_PARTS),
        f"`{name}` in their messages",
        "qwen2_5_vl",
        "error",
    )
    for source, medium in MEDIA.items()
    for name in [[*medium][-1]]
}


def with_arguments(rule):
    """Return a template that writes the arguments of calls to which a filter applies."""
    call_template = (
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.values() | FILTER | join(' ') }}"
        "{% endfor %}{{ '<|im_end|>"
    )
    return PLAIN.replace("<|im_end|>", "' }}" + call_template.replace("FILTER", rule), 1)


WRITTEN_HERE = {
    "printing": PLAIN.replace("m.content", "(m.content | string)"),
    "thoughts": PLAIN.replace("+ m.content +", "+ (m.content if m.role == 'user' else m.reasoning_content) +"),
    "questions": PLAIN.replace("+ m.content +", "+ (m.content if m.role == 'user' else '') +"),
    "twice": PLAIN.replace("+ m.content +", "+ m.content + ' ' + m.content +"),
    "calls": PLAIN.replace("+ m.content +", "+ m.content + (m.tool_calls | string if m.tool_calls else '') +"),
    "texts": with_arguments("select('string')"),
    "numbers": with_arguments("reject('boolean')"),
}


def tokenizer_of(name):
    if name == "bos":
        tokenizer = build_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        pair = ("<s>", tokenizer.bos_token_id)
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[pair]
        )
        return tokenizer
    tokenizer = tokenizer_with(None if name in WRITTEN_HERE else name)
    tokenizer.chat_template = WRITTEN_HERE.get(name, tokenizer.chat_template)
    tokenizer.bos_token = tokenizer.bos_token or "<|im_start|>"
    return tokenizer


# Templates that TRL's releases of 2026 added or changed: transformers of the same months
NEEDS_RELEASE = {"llama3_2": "5.20", "deepseek_r1_distill": "5.20"}


def prove(rows, tokenizer, **settings):
    """Return the report of a dataset, or of a list of rows as a table."""
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return prove_data(data, "train", Rendering(tokenizer, **settings))


def report_of(case):
    """Return the report of ten rows of a case, and two of the row that it names beside it."""
    rows = [case.row] * 10 + [case.neighbour or case.row] * 2
    return prove(rows, tokenizer_of(case.template), **case.settings)


@pytest.mark.parametrize("name", CASES)
def test_what_a_form_of_data_loses_is_said_with_its_rows(name):
    case = CASES[name]
    if case.template in NEEDS_RELEASE and Version(NEEDS_RELEASE[case.template]) > TRANSFORMERS:
        pytest.skip(f"TRL beside transformers {TRANSFORMERS} has no template {case.template}, or an earlier one")
    report = report_of(case)
    findings = [finding for finding in report.findings if case.message in report.message(finding)]
    if not case.message:
        assert report.findings == ()
        assert report.line().startswith("every text of 12 rows is in the tokens once")
        return
    assert [finding.severity for finding in findings][:1] == [case.severity], str(report)
    assert {finding.num_rows for finding in findings} <= {2, 10, 12}
    assert report.complete == (case.severity in ("note", "mended"))


# What becomes of the rows in training


def test_keys_that_arrow_added_are_not_trained_and_those_that_were_given_are(tmp_path):
    rows = [messages(ASK, call(city="Oslo")), messages(ASK, call("add", a=1, b=None))]
    tokenizer = tokenizer_with("qwen3")
    options = {"packing": False, "max_length": 500, "shuffle_dataset": False}

    def texts(data, **more):
        trainer = build_trainer(tmp_path, data, processing_class=tokenizer, max_steps=1, **options, **more)
        return [tokenizer.decode(row["input_ids"]) for row in trainer.train_dataset]

    table = Dataset.from_list(rows)
    first_row = Dataset.from_list(rows[:1])
    assert [text.count("null") for text in texts(first_row)] == [0]
    for more in ({}, {"assistant_only_loss": True}, {"per_turn": True}):
        for data in (table, table.to_iterable_dataset()):
            assert texts(data, **more)[0] == texts(first_row, **more)[0]
    as_json = Dataset.from_list(rows, features=Features({"messages": List(Json())}))
    assert [text.count("null") for text in texts(as_json)] == [0, 1]


def test_a_dataset_is_refused_or_warned_of_before_it_is_tokenised(tmp_path, caplog):
    wrong = CASES["parts"].row
    right = messages(ASK, OK)
    options = {"packing": False, "processing_class": tokenizer_with("qwen3"), "max_steps": 1}
    for data in (Dataset.from_list([wrong] * 4), Dataset.from_list([wrong] * 4).to_iterable_dataset()):
        with pytest.raises(ValueError, match="4 .*rows of the train dataset have `content in parts`.*Write `content`"):
            build_trainer(tmp_path, data, **options)
        with pytest.raises(ValueError, match="4 .*rows of the eval dataset have `content in parts`"):
            build_trainer(tmp_path, Dataset.from_list([right]), eval_dataset=data, **options)
    trainer = build_trainer(tmp_path, Dataset.from_list([CASES["developer"].row, right]), **options)
    warning = (
        "1 of 2 rows of the train dataset has `content` in messages of the role `developer`, which the chat template"
    )
    assert [warning in message for message in caplog.messages] == [True]
    assert not trainer.data.data_report.complete


@pytest.mark.parametrize("can_sanitise", [True, False])
def test_rows_that_ask_to_sanitise_are_safe_only_where_transformers_can(can_sanitise, monkeypatch):
    monkeypatch.setattr(text_kinds, "sanitises_control_tokens", lambda: can_sanitise)
    case = CASES["control token"]
    row = case.row | {"chat_template_kwargs": {"sanitize_control_tokens": True}}
    report = prove([row] * 3, tokenizer_of(case.template))
    assert ("control tokens" in str(report)) is not can_sanitise


@sanitises_control_tokens
@pytest.mark.parametrize("options", [{}, {"per_turn": True}], ids=str)
def test_control_tokens_in_texts_are_counted_until_rows_sanitise_them(options, tmp_path, caplog):
    """Without it, a text ends its turn; with `assistant_only_loss` transformers refuses to sanitise."""
    row = CASES["control token"].row
    sanitised = row | {"chat_template_kwargs": {"sanitize_control_tokens": True}}
    end = build_tokenizer().convert_tokens_to_ids("<|im_end|>")

    def counted(row, **more):
        caplog.clear()
        trainer = build_trainer(
            tmp_path, Dataset.from_list([row] * 3), packing=False, max_length=300, max_steps=1, **more
        )
        is_said = any("3 of 3 rows of the train dataset have texts with control" in text for text in caplog.messages)
        return trainer.train_dataset[0]["input_ids"].count(end), is_said

    assert counted(row, **options) == (3, True)
    assert counted(sanitised, **options) == (2, False)
    with pytest.raises(ValueError, match="not compatible with `return_assistant_tokens_mask=True`"):
        counted(sanitised, assistant_only_loss=True)


@pytest.mark.parametrize("key", ["loss", "mask", "keep_this"])
@pytest.mark.parametrize("off, on", [(False, True), (0, 1), (0.0, 1.0)])
def test_any_key_with_booleans_or_weights_says_which_messages_are_trained(key, off, on):
    rows = [messages(ASK, OK | {key: off}, ASK, answer("Yes") | {key: on})] * 3
    assert prove(rows, build_tokenizer(), train_key=key, trains_assistant=True).complete
    assert TurnRule(key).select_turns(Conversation.from_row(rows[0])).trained == [3]


def test_a_conversation_of_many_turns_is_rendered_a_few_times(monkeypatch):
    """Turns that lose their thoughts must not be rendered one by one."""
    rendered = []
    render = Conversation.text
    monkeypatch.setattr(Conversation, "text", lambda *args: rendered.append(len(args[1])) or render(*args))
    turns = [user("a b"), answer("c d", reasoning_content="I think")] * 500
    report = prove([{"messages": turns}], tokenizer_with("qwen3"))
    assert [finding.what.split("`")[1] for finding in report.findings] == ["reasoning_content"]
    assert "Set `per_turn=True`" in report.findings[0].remedy
    assert 10 > rendered.count(1000) > 1
    assert len(rendered) < 20


def test_check_data_says_what_training_loses_without_a_trainer(tmp_path):
    """Check with the template and the turns that the settings choose, and leave the tokenizer unchanged."""
    tokenizer = tokenizer_with("qwen3")
    rows = Dataset.from_list([CASES["early thought"].row] * 3)
    assert [finding.num_rows for finding in check_data(rows, tokenizer).findings] == [3]
    assert check_data(rows, tokenizer, config(tmp_path, per_turn=True)).complete
    (tmp_path / "plain.jinja").write_text(PLAIN)
    before = tokenizer.chat_template
    settings_of_trl = trl.SFTConfig(
        str(tmp_path), chat_template_path=str(tmp_path / "plain.jinja"), use_cpu=True, bf16=False
    )
    assert check_data(rows, tokenizer, settings_of_trl).complete
    assert tokenizer.chat_template == before
    formatted = Dataset.from_list([ALPACA | {"system": "Be brief"}] * 3)
    (finding,) = check_data(formatted, tokenizer, formatting_func=FORMAT).findings
    assert finding.what == "have a column `system`, which is not read"
    report = check_data(Dataset.from_list([CASES["all answers"].row] * 3), tokenizer_of("questions"), name="mine")
    with pytest.raises(ValueError, match="3 of 3 rows of the mine dataset have `content` in messages of the role"):
        report.raise_if_lost()
    with pytest.raises(ValueError, match="it is tokenised"):
        check_data(Dataset.from_dict({"input_ids": [[1, 2]]}), tokenizer)


def test_check_data_reads_a_table_without_rows():
    rows = Dataset.from_list([CASES["early thought"].row]).select([])
    report = check_data(rows, tokenizer_with("qwen3"))
    assert report.num_rows == 0
    assert report.findings == ()


@pytest.mark.parametrize("format_type", ["numpy", "torch"])
def test_check_data_reads_a_stream_of_any_format(format_type):
    stream = Dataset.from_list([CASES["early thought"].row] * 3).to_iterable_dataset()
    tokenizer = tokenizer_with("qwen3")
    expected = check_data(stream, tokenizer)
    assert expected.num_kinds > 0
    assert check_data(stream.with_format(format_type), tokenizer) == expected


def test_check_data_refuses_what_is_no_dataset():
    rows = [CASES["early thought"].row]
    splits = DatasetDict(train=Dataset.from_list(rows))
    with pytest.raises(ValueError, match=r"given a `DatasetDict` with \['train'\].*one of several splits"):
        check_data(splits, tokenizer_with("qwen3"))
    with pytest.raises(ValueError, match=r"given a `list`\. .*Give a `Dataset`"):
        check_data(rows, tokenizer_with("qwen3"))


def test_the_report_of_a_run_has_a_line_about_its_data(tmp_path, capsys):
    rows = [messages(ASK, OK)] * 3 + [CASES["developer"].row]
    expected = "4 rows (4 kinds of texts, 2 rows rendered); 1 row has `content` in messages of the role `developer`"
    options = {"processing_class": tokenizer_with("qwen3"), "max_length": 200, "max_steps": 1}
    trainer = build_trainer(tmp_path, Dataset.from_list(rows), **options)
    trainer.train()
    assert dict(trainer.packing_report.lines())["data"].startswith(expected)
    (finding,) = trainer.packing_report.to_dict()["data"]["findings"]
    assert (finding["num_rows"], finding["rows"], finding["example"]) == (1, (3,), "Be brief")
    build_trainer(tmp_path, Dataset.from_list(rows[:3]), packing=False, **options).train()
    assert (
        "Data: every text of 3 rows is in the tokens once (2 kinds of texts, 1 row rendered)" in capsys.readouterr().out
    )


def test_the_line_of_a_report_claims_nothing_of_texts_that_were_not_tried():
    line = DataReport("train", 12, num_kinds=3, num_rendered=2, num_untried=1).line()
    assert line.startswith("every text that was tried of 12 rows is in the tokens once (")
    assert line.endswith("; 1 kind not tried)")


# Rows that may be anything

TOO_MANY = [user("a b"), answer("c d")] * 2000
BAD = {
    "a template that raises": ([messages(ASK, OK)], "{{ raise_exception('no') }}", False, False),
    "messages that are none": ([{"messages": [None, ASK]}, {"messages": []}, {"messages": None}], None, False, True),
    "text beside messages": ([messages(ASK, OK, text=None), {"messages": None, "text": "words"}], None, True, True),
    "tools that are no JSON": ([messages(ASK, OK, tools="[")], None, False, False),
    "tools of another form": ([messages(ASK, OK, tools=json.dumps({"name": "f"}))], None, False, False),
    "calls and roles of other forms": (
        [messages(ASK, OK | {"tool_calls": calls}) for calls in (["f"], None)],
        PLAIN.replace("+ m.content +", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '') +"),
        True,
        True,
    ),
    "a function that is a text": (
        [messages(ASK, OK | {"tool_calls": [{"type": "function", "function": "f"}]})],
        PLAIN.replace("+ m.content +", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '') +"),
        True,
        True,
    ),
    "bytes": ([messages(ASK, OK, image_bytes=b"abc")], None, True, True),
    "many turns": ([{"messages": TOO_MANY}], None, True, True),
    "marks of ours": ([messages(user("zq0x zq1x"), OK)], None, True, False),
    "a template that looks at texts": (
        [messages(user("/think hi"), OK)],
        PLAIN.replace(
            "{% for m", "{% if messages[0].content[0] != '/' %}{{ raise_exception('no') }}{% endif %}{% for m"
        ),
        True,
        True,
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("per_turn", [False, True])
def test_no_row_ends_the_proof(name, per_turn):
    rows, template, is_rendered, is_tried = BAD[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    for data in (Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
        report = prove(data, tokenizer, per_turn=per_turn)
        report.raise_if_lost()
        assert report.complete
        assert bool(report.num_rendered) == is_rendered
        assert (report.num_untried == 0) == is_tried


@pytest.mark.parametrize("name", ["enable(", "m.c.ntent"])
def test_a_template_argument_whose_name_is_a_pattern_is_not_read(name):
    rows = [messages(ASK, OK, chat_template_kwargs={name: True})]
    (finding,) = prove(rows, tokenizer_of("printing")).findings
    assert finding.what == f"have `{name}` in `chat_template_kwargs`, which the chat template does not read"


def test_a_row_whose_texts_are_counted_is_counted_as_rendered(monkeypatch):
    def raises(*args):
        raise RuntimeError("as an unforeseen value may")

    monkeypatch.setattr(_Proof, "_note_roles_and_arguments", raises)
    report = prove([CASES["developer"].row], tokenizer_with("qwen3"))
    assert report.findings, "its texts are counted"
    assert report.num_rendered == 1


def test_a_function_of_the_user_that_raises_does_not_end_the_proof():
    def formatted(row):  # it looks at a text, so that this text cannot be marked
        return row["instruction"] + {"3": "three"}[row["output"]]

    rows = [ALPACA | {"output": "3"}, ALPACA | {"output": "4"}]
    report = prove(rows, build_tokenizer(), formatting_func=formatted)
    assert (report.num_rendered, report.num_untried) == (1, 1)
    assert report.complete


def test_a_function_of_the_user_gets_a_copy_of_each_row():
    rows = [messages(ASK, OK)]
    before = json.dumps(rows)

    def formatted(row):
        return " ".join(message.pop("content") for message in row["messages"])

    stream = IterableDataset.from_generator(lambda: iter(rows))
    assert prove(stream, build_tokenizer(), formatting_func=formatted).complete
    assert json.dumps(rows) == before


@pytest.mark.parametrize("content", [9, 0, 2.5, True])
def test_a_number_as_content_beside_images_hides_no_text_of_its_row(content):
    rows = [messages(turn("developer", "Be brief"), ASK, call(), turn("tool", content), OK, images=[])]
    stream = IterableDataset.from_generator(lambda: iter(rows))  # a table would need one type for all contents
    (finding,) = [found for found in prove(stream, tokenizer_with("qwen3")).findings if "developer" in found.what]
    assert finding.example == "Be brief"


@pytest.mark.parametrize(
    "row",
    [
        messages(ASK, call(), turn("tool", 0), OK),
        {"conversations": sharegpt(("human", "Hi"), ("tool", 0), ("gpt", "Yes"))},
    ],
)
def test_a_content_of_0_is_no_key_that_excludes_a_message(row):
    report = prove(IterableDataset.from_generator(lambda: iter([row])), tokenizer_with("qwen3"))
    assert report.num_rendered == 1
    assert not [finding for finding in report.findings if "0, which is not read" in finding.what]


def test_json_of_a_stream_is_read_as_json():
    rows = [{"messages": [user("hi"), answer("yo")]}] * 4
    table = Dataset.from_list(rows, features=Features({"messages": List(Json())}))
    report = prove(table.to_iterable_dataset(), tokenizer_with("qwen3"))
    assert report.complete
    assert "plain text" not in str(report)


@pytest.mark.parametrize("num_rows, is_seen", [(100, True), (101, False)])
def test_the_first_rows_of_a_stream_are_read(num_rows, is_seen):
    rows = [messages(ASK, OK)] * (num_rows - 1) + [CASES["developer"].row]
    report = prove(Dataset.from_list(rows).to_iterable_dataset(), tokenizer_with("qwen3"))
    assert report.num_rows == 100
    assert "the first 100 rows" in report.line()
    assert report.complete is not is_seen


# The proof is tested by what is known to be lost

NEW = "{%- set given = messages -%}{%- set all = namespace(m=[]) -%}{%- for m in given -%}"
END = "{%- endfor -%}{%- set messages = all.m -%}"
TWO_CALLS = call() | {"tool_calls": call()["tool_calls"] + call("get_time", zone="CET")["tool_calls"]}
TRACE = messages(
    turn("system", "You read a thermometer"),
    ASK,
    TWO_CALLS,
    turn("tool", "Nine degrees"),
    OK | {"reasoning_content": "That is cold"},
    tools=json.dumps([*TOOLS, {"type": "function", "function": TOOLS[0]["function"] | {"name": "get_time"}}]),
)
# What is put before a template, the path and role of what it changes then
MUTANTS = {
    "the last message": ("{%- set messages = messages[:-1] -%}", "content", "assistant"),
    "a tool": ("{%- set tools = tools[:-1] -%}", "tools", ""),
    "a call": (
        f"{NEW}{{%- set all.m = all.m + [dict(m, tool_calls=m.tool_calls[:-1]) if m.tool_calls else m] -%}}{END}",
        "tool_calls",
        "assistant",
    ),
    "twice": (
        f"{NEW}{{%- set text = m.content ~ (m.content if m.role == 'user' else '') -%}}"
        f"{{%- set all.m = all.m + [dict(m, content=text)] -%}}{END}",
        "content",
        "user",
    ),
}


def lost(template):
    """Return path and role of the texts that are left out or repeated."""
    tokenizer = tokenizer_of(None)
    tokenizer.chat_template = template
    report = prove(Dataset.from_list([TRACE], features=JSON), tokenizer)
    assert report.num_rendered == 1
    losses = [finding.what for finding in report.findings if "chat template" in finding.what]
    return {(what.split("`")[1].partition("[")[0], what.split("`")[3] if "role" in what else "") for what in losses}


JSON = Features({"messages": List(Json()), "tools": Value("string")})


@pytest.mark.parametrize("template", ["qwen3", "glm4moe", "qwen3_6_training"])
def test_what_a_changed_template_loses_is_found(template):
    source = tokenizer_with(template).chat_template
    lost_unchanged = lost(source)
    for change, *text in MUTANTS.values():
        assert tuple(text) in lost(change + source)
        assert tuple(text) not in lost_unchanged, "the template itself loses it, so the change proves nothing"


DROPS = """{%- for m in messages -%}
{%- if m.role != 'note' -%}[{{ m.role }}]{%- if not (loop.first and m.role == 'system') -%}{{ m.content }}{%- endif -%}
{%- if m.role == 'user' and m.aside -%}({{ m.aside }}){%- endif -%}
{%- if m.role == 'assistant' and loop.last -%}{{ m.thinking }}{%- endif -%}{%- endif -%}
{%- endfor -%}"""
WORDS = st.text(st.characters(categories=["L", "P", "Zs", "N"]), min_size=1, max_size=12).filter(
    lambda text: "zq" not in text
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "note"]), "content": WORDS},
    optional={"aside": WORDS.map("an aside {}".format), "thinking": WORDS},
)


def expected(conversation):
    """Yield path and role of the texts that `DROPS` leaves out and that are more than white space."""
    for i, message in enumerate(conversation):
        is_last = i == len(conversation) - 1
        role = message["role"]
        dropped = {"content": role == "note" or (i == 0 and role == "system")}
        dropped |= {"aside": role != "user", "thinking": role != "assistant" or not is_last}
        yield from ((key, role) for key in dropped if dropped[key] and message.get(key, "").strip())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(MESSAGE, min_size=1, max_size=5))
def test_of_any_conversation_exactly_what_the_template_drops_is_found(conversation):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = DROPS
    rows = Dataset.from_list([{"messages": conversation}], features=Features({"messages": List(Json())}))
    report = prove(rows, tokenizer)
    left_out = {tuple(finding.what.split("`")[1:4:2]) for finding in report.findings if "leaves out" in finding.what}
    same = {m["thinking"] for m in conversation if "thinking" in m} & {m["content"] for m in conversation}
    assume(not same)  # a thought that its message says, too, is a copy
    assert left_out == set(expected(conversation))
