"""Prove that every text of a dataset is in its tokens exactly once.

A chat template renders the keys that it knows, and ignores all other keys without an error. So a mark is put into every
text of a few rows. These rows have every kind of text in the dataset (`text_kinds.py`). They are rendered as training
renders them, with the chat template or with the user's `formatting_func`, and the marks are looked for: a text whose
mark is missing is omitted from training, and a text whose mark is there twice is repeated. A number is marked by
replacing it with a rare number. A boolean or a null (of tools and arguments) cannot be marked: it is replaced by
another value, and the rendered row must change. The result is a `DataReport` (`data_report.py`), by which
`make_samples.py` refuses a dataset or warns.

A marked row must be rendered like the unmarked row, apart from its marks. If it is not, the template compares a text
with a value, such as `if content == "..."`. Then one text is marked at a time. A text that changes the rendered row
even then is counted as not tried.

Words: the *kind* of a text is its path in the row (such as `tool_calls[].function.name`), the role of its message, and
the place of this message in the conversation. A fact about a row, for example that a column is not read, is written as
a kind, too, with a path of its own. `KindReader` lists these, and `text_kinds.py` has the names of their paths
(`CONTROL`, `PLACEHOLDER_FOUND`, ...). The *shape* of a row is the set of all its kinds.
"""

import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from textwrap import shorten
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from ..compat import main_process_first, sanitises_control_tokens
from .checks import PLACEHOLDER, has_images
from .conversation import NUM_SHOWN, Conversation, Tokenizer, plain_tokenizer
from .data_report import DataReport, Finding
from .marks import MARK, copy_texts, with_marks, without_marks
from .rendering import FormattedRow, FormattingFunction, Rendering
from .row import MAX_ROWS_NAMED
from .text_kinds import (
    BEGINS_WITH_BOS,
    CONSTANT,
    CONTROL,
    LABEL,
    LONGEST_LABEL,
    MEDIA,
    NULL_IN,
    OTHER_FORM,
    PLACEHOLDER_FOUND,
    RENAMED_ROLE,
    THOUGHTS,
    UNREAD_COLUMN,
    Kind,
    KindReader,
    Leaf,
    RowKinds,
    leaves,
    read_kinds,
)
from .texts import struct_columns, without_nulls
from .turns import TurnSettings, template_of

# Limits, so that the proof takes seconds for any dataset
NUM_READ_OF_STREAM = 100  # rows that are read at the beginning of a stream
NUM_RENDERED = 20  # rows that are rendered, two for each kind if possible
MOST_SHAPES = 200  # shapes of which one row is tried
MOST_MARKS = 20_000  # marks in all rows together
MAX_TRIED_PER_ROW = 50  # of a row: texts that are marked alone, and booleans and nulls that are replaced
# Of a kind: booleans and nulls that are replaced, and missing texts of the assistant that are looked for once more, in
# the conversation up to their turn (a template may render a thought in the last turn only)
MAX_TRIED_PER_KIND = 8
KNOWN_ROLES = ("system", "user", "assistant", "tool")  # of transformers and TRL
SANITISED = '{"sanitize_control_tokens": True}'  # arguments with which transformers removes control tokens from texts
UNKNOWN_ROLE = "zqrolex"  # a role that no template knows
NO_NULL = "zq0x"  # a text that no row has, which replaces a null
# Names of columns that other libraries render
RENDERED_COLUMNS = re.compile("prompt|system|instruction|input$|document|context|function|tools|history|video|audio")
# Keys of messages by which other libraries exclude a message from the loss
TRAIN_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "mask")


def prove_or_refuse(
    dataset: Dataset | IterableDataset,
    name: str,
    *,
    args: TurnSettings,
    tokenizer: Tokenizer,
    formatting_func: FormattingFunction | None = None,
) -> DataReport:
    """Prove the data of a training run before it is tokenised, on all ranks. Refuse it or warn if texts are lost.

    Raises:
        ValueError: If a finding is an error.
    """
    rendering = Rendering.from_args(args, tokenizer, formatting_func)
    with main_process_first():  # `datasets` caches the kinds of the rows for the other ranks
        report = prove_data(dataset, name, rendering, num_proc=args.dataset_num_proc)
    report.raise_if_lost()
    if args.process_index == 0:
        report.warn()
    return report


def prove_data(
    dataset: Dataset | IterableDataset, name: str, rendering: Rendering, *, num_proc: int | None = None
) -> DataReport:
    """Look for every text of a dataset in the text that is tokenised, and return the report.

    Args:
        dataset: A table, or a stream, whose first rows are read.
        name: The dataset's name in messages.
        rendering: How rows become text.
        num_proc: Number of processes that read the rows of a table.
    """
    reader = _make_kind_reader(dataset, rendering)
    row_kinds = read_kinds(dataset, reader, num=NUM_READ_OF_STREAM, num_proc=num_proc)
    proof = _Proof(row_kinds, rendering, reader)
    covered: Counter[Kind] = Counter()  # for each kind the number of rendered rows that have it
    # The most frequent shapes come first, and `first_rows` has a row of each.
    for shape, row_index in zip(row_kinds.shapes[:MOST_SHAPES], row_kinds.first_rows, strict=False):
        is_needed = proof.num_rendered < NUM_RENDERED and any(covered[kind] < 2 for kind in shape)
        if is_needed and proof.render(row_index):
            covered.update(shape)
    texts = {kind for kind in row_kinds.kinds if kind.is_text}
    return DataReport(
        name,
        len(row_kinds),
        of_stream=row_kinds.is_of_stream,
        num_kinds=len(texts),
        num_rendered=proof.num_rendered,
        num_untried=len(texts - proof.states.keys()),
        findings=tuple(proof.findings(has_images=has_images(dataset))),
    )


def _make_kind_reader(dataset: Dataset | IterableDataset, rendering: Rendering) -> KindReader:
    """Return the reader of the kinds of the rows, with the control tokens and the BOS of the tokenizer."""
    tokenizer: Any = plain_tokenizer(rendering.tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})  # tokenizers of Mistral have none
    control = {token.content for token in added.values() if token.special}
    # Texts of rows with images may have placeholders of images, which are control tokens such as "<image>". Tokens with
    # "image", "video" or "audio" in their name (`MEDIA`) are therefore not looked for
    if has_images(dataset):
        control = {token for token in control if not MEDIA.search(token)}
    pattern = "|".join(re.escape(token) for token in sorted(control, key=len, reverse=True))
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    bos = str(tokenizer.bos_token) if adds_bos else ""
    return KindReader(
        rendering.text_field,
        struct_columns(dataset.features),
        pattern,
        bos,
        PLACEHOLDER if has_images(dataset) else "",
        is_formatted=rendering.formatting_func is not None,
    )


class _Proof:
    """Renders rows with marks, and collects what became of the texts."""

    def __init__(self, row_kinds: RowKinds, rendering: Rendering, reader: KindReader):
        self.row_kinds = row_kinds
        self.kinds = row_kinds.kinds
        self.rendering = rendering
        self.structs = reader.structs  # features of columns whose dictionaries get all keys of the column from Arrow
        self.bos = reader.bos
        self.num_rendered = 0
        self.num_with_bos = 0  # rows that `formatting_func` begins with BOS
        self.num_marks = 0
        # For each kind how many of its texts were "kept", "repeated", "left out", or "left out later" (missing only
        # because later turns follow). A kind that was not tried has no entry
        self.states: dict[Kind, Counter[str]] = defaultdict(Counter)
        self.examples: dict[Kind, str] = {}  # for each kind, a text that is missing or a constant that was replaced
        self.unknown_roles: set[str] = set()
        self.python_paths: set[str] = set()  # paths of lists and dictionaries that Python printed into the text
        self.escaped_paths: set[str] = set()  # paths of arguments given as text of JSON, which is escaped again
        self.unread_arguments: set[str] = set()  # names in `chat_template_kwargs` that the template does not read
        self.null_columns: set[str] = set()  # columns where nulls that Arrow added would be rendered
        self.copied_columns: set[str] = set()  # columns whose texts are in the messages too

    def render(self, row_index: int) -> bool:
        """Render a row without and with marks, and return whether it could be rendered.

        A row that cannot be rendered is bad, and is refused or dropped when samples are made. A row whose texts would
        need more marks than `MOST_MARKS` allows is not rendered either.
        """
        num_before = self.num_rendered
        try:
            raw_row = self.row_kinds.rows[row_index]
            row = without_nulls(raw_row, self.structs)
            conversation = self.rendering.conversation(row)
            text = self.rendering.text(conversation)
            num_marks = sum(leaf.kind.is_text for leaf in leaves(conversation.messages, conversation.arguments))
            # The first row is rendered in any case, however many texts it has
            if self.num_rendered and self.num_marks + num_marks > MOST_MARKS:
                return False
            self.num_marks += num_marks
            if not self._mark_and_count(conversation, text):
                for i in range(min(num_marks, MAX_TRIED_PER_ROW)):
                    self._mark_and_count(conversation, text, only=i)
            self.num_rendered += 1  # already here, because its texts are counted, whatever an error below leaves out
            self._replace_constants_and_count(conversation, text)
            self._note_roles_and_arguments(conversation, text)
            self._note_copied_and_null_columns(raw_row, row, conversation, text=text)
        except Exception:  # the proof must never end a training run that could tokenise the row
            pass
        return self.num_rendered > num_before

    def _note_copied_and_null_columns(
        self, raw_row: dict[str, Any], row: dict[str, Any], conversation: Conversation, *, text: str
    ) -> None:
        """Note columns whose texts are in the messages too, and columns where nulls that Arrow added would be rendered.

        Args:
            raw_row: The columns of the row, with these nulls.
            row: The columns without them.
            conversation: The conversation of `row`.
            text: The rendered conversation.
        """
        messages = conversation.messages
        if isinstance(conversation, FormattedRow):
            messages = messages[1:]  # the first message of a `FormattedRow` is the row itself
        message_texts = {str(leaf.holder[leaf.key]).strip() for leaf in leaves(messages, {})}
        columns = {name: value.strip() for name, value in row.items() if isinstance(value, str)}
        # A value with fewer than `LONGEST_LABEL` (64) characters may be in the text by chance.
        long_columns = {name for name, value in columns.items() if len(value) >= LONGEST_LABEL and value in text}
        self.copied_columns |= long_columns.union(name for name, value in columns.items() if value in message_texts)
        changed = [name for name in self.structs if raw_row.get(name) != row.get(name)]
        for name in changed:
            with_nulls = self.rendering.conversation(row | {name: raw_row[name]})
            if self.rendering.text_or_none(with_nulls) != text:
                self.null_columns.add(name)

    def _mark_and_count(self, conversation: Conversation, text: str, only: int | None = None) -> bool:
        """Mark the texts of a conversation, and count what becomes of the marks.

        Args:
            conversation: The conversation without marks.
            text: The rendered conversation without marks.
            only: Index of the one text to mark; None marks all.

        Returns:
            False if nothing could be counted, because the marks change more of the rendered row than themselves.
        """
        marked, marks = with_marks(conversation, only)
        rendered = self.rendering.text_or_none(marked)
        if rendered is None or without_marks(rendered, marks) != text:
            return False
        # A template may change a text to capital letters, and the marks in it. Marks are written in small letters
        counts = Counter(mark.lower() for mark in MARK.findall(rendered))
        # (index of the message, text) of the marks that were found
        texts_found = {(leaf.message, value) for mark, (leaf, value) in marks.items() if counts[mark]}
        for mark, (leaf, value) in marks.items():
            state = "kept"
            # Only texts under `content` count as repeated. Others, such as the name of a tool, may be rendered twice on
            # purpose. With `per_turn` the samples of all turns are rendered, and each sample repeats the turns before
            # its own.
            if counts[mark] > 1 and leaf.kind.path.startswith("content") and not self.rendering.per_turn:
                state = "repeated"
            # A message may have the same thought as `reasoning` and as `reasoning_content`, and one of them is enough.
            if not counts[mark] and (leaf.message, value) not in texts_found:
                state = self._state_of_missing_text(marked, mark, leaf)
            self.states[leaf.kind][state] += 1
            if state.startswith("left out"):
                self.examples.setdefault(leaf.kind, shorten(str(value), NUM_SHOWN, placeholder=" ..."))
        return True

    def _replace_constants_and_count(self, conversation: Conversation, text: str) -> None:
        """Replace each boolean and null of tools and arguments, one at a time, and count if the text changes."""
        changed = copy_texts(conversation)
        values = leaves(changed.messages, changed.arguments)
        constants = [leaf for leaf in values if leaf.kind.path.endswith(CONSTANT)]
        for leaf in constants[:MAX_TRIED_PER_ROW]:
            states = self.states.get(leaf.kind, Counter())
            if states.total() >= MAX_TRIED_PER_KIND:
                continue
            value = leaf.holder[leaf.key]
            leaf.holder[leaf.key] = NO_NULL if value is None else not value
            rendered = self.rendering.text_or_none(changed)
            leaf.holder[leaf.key] = value
            if rendered is not None:
                self.states[leaf.kind]["left out" if rendered == text else "kept"] += 1
                self.examples.setdefault(leaf.kind, json.dumps(value))

    def _state_of_missing_text(self, marked: Conversation, mark: str, leaf: Leaf) -> str:
        """Return "left out", or "left out later" if a text is missing only because later turns follow.

        Templates may render a thought of the assistant while its turn is the last, and omit it from the history.
        """
        states = self.states[leaf.kind]
        if leaf.kind.role != "assistant" or self.rendering.per_turn:
            return "left out"
        # A conversation may have thousands of turns, so only the first texts of a kind are rendered up to their turn.
        # Each further text counts as "left out" if any of these is, and else as "left out later"
        if states["left out"] + states["left out later"] >= MAX_TRIED_PER_KIND:
            return "left out" if states["left out"] else "left out later"
        up_to_turn = replace(marked, messages=marked.messages[: leaf.message + 1])
        text = self.rendering.text_or_none(up_to_turn) or ""
        return "left out later" if mark in text.lower() else "left out"

    def _note_roles_and_arguments(self, conversation: Conversation, text: str) -> None:
        """Note unknown roles, unread arguments and badly written values of a row that is rendered without marks."""
        messages = conversation.messages
        arguments = conversation.arguments
        if isinstance(conversation, FormattedRow):
            if self.bos and text.startswith(self.bos):
                self.num_with_bos += 1
            self._note_badly_written_values(list(messages[0].items()), text)  # its first message is the row itself
            return
        # A role is unknown if its name is all that the template takes from it: another name changes the name alone
        for role in {message["role"] for message in messages} - {*KNOWN_ROLES}:
            renamed = [message | {"role": UNKNOWN_ROLE} if message["role"] == role else message for message in messages]
            renamed_text = self.rendering.text_or_none(replace(conversation, messages=renamed))
            if renamed_text is not None and renamed_text != text and renamed_text.replace(UNKNOWN_ROLE, role) == text:
                self.unknown_roles.add(role)
        values = [("content", message.get("content")) for message in messages]
        calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
        for call in calls:  # a call may have its name and arguments without `function` around them
            function = call.get("function")
            arguments_of_call = (function if isinstance(function, dict) else call).get("arguments")
            values += [("tool_calls", call), ("tool_calls", arguments_of_call)]
        values += [("tools", tool) for tool in arguments.get("tools") or ()]
        self._note_badly_written_values(values, text)
        # An argument is read if it is a parameter of the method that renders, or if its name is in the template
        template = str(template_of(self.rendering.tokenizer, arguments))
        parameters = inspect.signature(type(self.rendering.tokenizer).apply_chat_template).parameters
        self.unread_arguments |= {
            name for name in arguments if name not in parameters and not re.search(rf"\b{re.escape(name)}\b", template)
        }

    def _note_badly_written_values(self, values: list[tuple[str, Any]], text: str) -> None:
        """Note the paths of values that Python printed into the text, and of JSON that is written as a text of JSON.

        Args:
            values: Pairs of path and value. Only the first and the last of many are looked for.
            text: The rendered row.
        """
        for path, value in values[:MAX_TRIED_PER_ROW] + values[-MAX_TRIED_PER_ROW:]:
            if isinstance(value, list | dict) and value and str(value) in text and str(value) != _as_json(value):
                self.python_paths.add(path)
            if path == "tool_calls" and isinstance(value, str) and '"' in value:
                escaped = json.dumps(value)[1:-1]  # the text of JSON between its quotes
                if escaped in text:
                    self.escaped_paths.add(path)

    # Findings

    def _kinds_with_path(self, path: str, role: str | None = None) -> set[Kind]:
        """Return the kinds of the dataset with a path and a role; with any role if it is None."""
        return {kind for kind in self.kinds if kind.path == path and role in (None, kind.role)}

    def _kinds_below(self, *beginnings: str) -> set[Kind]:
        """Return the kinds of the dataset whose path begins in one of these ways."""
        return {kind for kind in self.kinds if kind.path.startswith(beginnings)}

    def _yield_finding(
        self, predicate: str, kinds: Collection[Kind] | None, *, without: Collection[Kind] = (), **fields: Any
    ) -> Iterator[Finding]:
        """Yield one finding, if any row has one of `kinds` (None: any row) and none of the kinds `without`."""
        rows = np.arange(len(self.row_kinds)) if kinds is None else self.row_kinds.rows_with(kinds)
        rows = np.setdiff1d(rows, self.row_kinds.rows_with(without))
        if len(rows):
            yield Finding(predicate, len(rows), tuple(rows[:MAX_ROWS_NAMED].tolist()), **fields)

    def findings(self, *, has_images: bool) -> Iterator[Finding]:
        """Yield a finding for everything that is missing from the tokens, repeated or changed."""
        # Only the first rows of a stream are known, so a stream is not judged.
        if self.rendering.needs_assistant and not self.row_kinds.is_of_stream:
            # A kind with an empty path says that the row has a message of this role (`KindReader`). Rows with `prompt`
            # or `conversations` are not judged here.
            assistant_kinds = {kind for kind in self.kinds if not kind.path and kind.role == "assistant"}
            yield from self._yield_finding(
                "have no assistant message, and `assistant_only_loss=True` was given",
                None,
                without=assistant_kinds | {OTHER_FORM},
                cause="They have no token to train.",
                remedy="Remove these rows (`dataset.select`), or set `assistant_only_loss=False`.",
                severity="error",
            )
        if self.rendering.formatting_func is None:
            yield from self._media_findings(has_images=has_images)
            yield from self._train_key_findings()
        yield from self._text_findings()
        for path in sorted(self.python_paths):
            yield from self._yield_finding(
                f"have `{path}` that {self.rendering.name} writes as Python writes a list or a dictionary",
                self._kinds_below(path),
                cause="The model would learn Python's quotes in place of JSON.",
                remedy="Give it as text (`json.dumps`), or set `chat_template_path` to a template that reads it.",
                severity="error" if self.rendering.formatting_func is None else "warning",
            )
        for path in sorted(self.escaped_paths):
            yield from self._yield_finding(
                f"have `{path}` whose `arguments` are a text of JSON, which the chat template writes as a text in JSON",
                self._kinds_below(path),
                cause='The model would learn `{\\"city\\": ...}` with a backslash before each quote.',
                remedy="Give `arguments` as a dictionary (`json.loads`).",
            )
        for role in sorted(self.unknown_roles):
            yield from self._yield_finding(
                f"have the role `{role}`, which the chat template renders as it renders any unknown role",
                self._kinds_with_path("", role),
                cause="The model would be trained on turns that it never sees.",
                remedy="Rename the role, or set `chat_template_path` to a template that knows it.",
            )
        for name in sorted(self.null_columns):
            yield from self._yield_finding(
                f"have keys in `{name}` that are None only because other rows have them; they are taken out",
                self._kinds_with_path(f"{NULL_IN}{name}"),
                remedy=f"If a null is meant, load or cast the column `{name}` with the type `Json`.",
                severity="mended",  # this package corrects the rows
            )
        # transformers cannot both remove control tokens from texts ("sanitise" them) and return a mask of the
        # assistant's tokens. `assistant_only_loss` needs this mask, and `per_turn` does not. So with
        # `assistant_only_loss` alone the remedy also asks for `per_turn`
        per_turn = " and set `per_turn=True`" if self.rendering.trains_assistant and not self.rendering.per_turn else ""
        needed = "" if sanitises_control_tokens() else "install a transformers that sanitises them and "
        yield from self._yield_finding(
            "have texts with control tokens of the tokenizer",
            self._kinds_with_path(CONTROL),
            cause="They become the tokens that the chat template writes itself, so a text can end a turn or begin one.",
            remedy=f"Remove the tokens, or {needed}give these rows `{SANITISED}` in a column "
            f"`chat_template_kwargs`{per_turn}.",
        )
        all_begin_with_bos = self.num_with_bos > 0 and self.num_with_bos == self.num_rendered
        yield from self._yield_finding(
            "have texts that begin with BOS",
            None if all_begin_with_bos else self._kinds_with_path(BEGINS_WITH_BOS),
            cause="The tokenizer adds BOS, too, so these documents begin with two.",
            remedy="Remove it from the texts, or give the messages themselves.",
        )
        yield from self._yield_finding(
            "have the roles `human` or `gpt` in `conversations`, which are renamed to `user` and `assistant`",
            self._kinds_with_path(RENAMED_ROLE),
            severity="mended",
        )
        yield from self._unread_findings()

    def _text_findings(self) -> Iterator[Finding]:
        """Yield findings of texts that are missing or repeated, one for all texts of a path and role."""
        rendered_roots = {_root(kind.path) for kind, states in self.states.items() if states["kept"]}
        groups: dict[tuple[str, str], dict[Kind, Counter[str]]] = defaultdict(dict)
        for kind, states in self.states.items():
            # If nothing of a column or key is rendered, one finding names it, and not each of its paths.
            root = _root(kind.path)
            path = _grouped(kind.path) if root in rendered_roots else root
            groups[path, kind.role][kind] = states
        for (path, role), group in groups.items():
            where = f"have `{path}`" + (f" in messages of the role `{role}`" if role else "")
            lost = {kind: states for kind, states in group.items() if states["left out"] or states["left out later"]}
            # With `formatting_func`, texts without a role are in columns, so the finding is that of an unread column
            if not role and self.rendering.formatting_func is not None:
                yield from self._unread_column(path, lost)
                continue
            predicate = f"{where}, which {self.rendering.name} leaves out"
            yield from self._yield_finding(predicate, lost, **self._missing_text_fields(path, role, lost))
            yield from self._yield_finding(
                f"{where}, which {self.rendering.name} renders more than once",
                {kind for kind, states in group.items() if states["repeated"]},
                cause="The model would be trained on it twice.",
                remedy="Set `chat_template_path` to a template that renders it once.",
            )

    def _missing_text_fields(self, path: str, role: str, lost: dict[Kind, Counter[str]]) -> dict[str, Any]:
        """Return the example, cause, remedy and severity of a finding of missing texts, as arguments of `Finding`."""
        states = sum(lost.values(), Counter[str]())
        num = states["left out"] + states["left out later"]
        cause = f"{num} of {states.total()} such texts are missing in the rows that were rendered."
        example = self.examples[next(iter(lost))] if lost else ""
        cause_of_loss = {"example": example, "cause": f"{cause} The model never sees them."}
        if self.rendering.formatting_func is not None:
            return cause_of_loss | {"remedy": "Write them into the text that `formatting_func` returns."}
        rendering_template = "`chat_template_path` to a template that renders it"
        if self._loses_whole_role(path, role):
            return {
                "example": example,
                "cause": f"{cause} Nothing that the {role} says would be in the tokens.",
                "remedy": f"Write `content` as text, or set {rendering_template}.",
                "severity": "error",
            }
        remedy = f"Set {rendering_template}, or write it into `content`."
        if not states["left out"]:
            remedy = "Set `per_turn=True`, which trains each turn as it is rendered when it is the last."
        elif role not in (*KNOWN_ROLES, ""):
            remedy = f"Rename the role to one that the template knows, or set {rendering_template}."
        return cause_of_loss | {"remedy": remedy}

    def _loses_whole_role(self, path: str, role: str) -> bool:
        """Return whether `path` is the content of the user or of the assistant, and all texts of the role are missing.

        Thoughts do not count, because many templates omit them.
        """
        texts = [states for kind, states in self.states.items() if kind.role == role and not _is_thought(kind.path)]
        is_lost = not any(states["kept"] or states["repeated"] or states["left out later"] for states in texts)
        is_content = path.startswith("content") and not _is_thought(path)
        return role in ("user", "assistant") and is_content and is_lost

    def _media_findings(self, *, has_images: bool) -> Iterator[Finding]:
        """Yield findings of images, videos and sounds in messages that are not read."""
        for path in sorted({kind.path for kind in self.kinds if kind.is_medium}):
            name = path.partition(" ")[0]  # the path is "image in content" or "image in message", for example
            if not (has_images and name.startswith("image")):
                yield from self._yield_finding(
                    f"have `{name}` in their messages, and no column of images",
                    self._kinds_with_path(path),
                    cause="Nothing of it would be trained but placeholders.",
                    remedy="Give the images of each row in a column `images`, and a part "
                    '`{"type": "image"}` in `content` where each belongs; or remove it from the messages.',
                    severity="error",
                )
        is_image_token = getattr(self.rendering.tokenizer, "image_token", None) == PLACEHOLDER
        outcome = f"`{PLACEHOLDER}` would be trained as a text"
        yield from self._yield_finding(
            f"have images, and messages whose `content` is a text with `{PLACEHOLDER}`, as LLaVA writes it",
            self._kinds_with_path(PLACEHOLDER_FOUND),
            cause="TRL puts a placeholder for each image before the text of the first user message, so "
            + ("the processor would look for more images than there are." if is_image_token else f"{outcome}."),
            remedy=f"Remove `{PLACEHOLDER}` from the texts, or write `content` as a list of parts with "
            '`{"type": "image"}` where the image belongs.',
            severity="error" if is_image_token else "warning",
        )

    def _train_key_findings(self) -> Iterator[Finding]:
        """Yield findings of keys that exclude messages from training, but are not read.

        A message is excluded if its key `message_train_key` is 0. There are three cases: `assistant_only_loss=False`,
        where no key is read; a key with the value 0 that is not `message_train_key`; and a key that is neither 0 nor 1.
        The paths of these kinds are "KEY=0" and "KEY=number".
        """
        train_key = self.rendering.train_key
        if not train_key:
            return
        is_read = self.rendering.trains_assistant
        # Rows that have the key that is read are not reported for other keys
        train_key_kinds = self._kinds_below(f"{train_key}=")
        for path in sorted({kind.path for kind in self.kinds if kind.path.endswith("=0")}):
            key = path.removesuffix("=0")
            if key == train_key and is_read:
                continue
            cause = f"`message_train_key={train_key!r}` reads another key"
            remedy = f"`message_train_key={key!r}`"
            if not is_read:
                cause = "`assistant_only_loss=False` trains every message"
                remedy = f"`assistant_only_loss=True` and {remedy}, which trains the assistant's messages without them"
            yield from self._yield_finding(
                f"have messages with `{key}` 0, which is not read",
                self._kinds_with_path(path, "assistant" if is_read else None),
                without=() if key == train_key else train_key_kinds,
                cause=f"They would be trained: {cause}.",
                remedy=f"Set {remedy}, or `message_train_key=None` if the key means something else.",
                severity="error" if key in (train_key, *TRAIN_KEYS) else "note",
            )
        for key in TRAIN_KEYS:
            if not (key == train_key and is_read):  # the samples refuse a bad value of the key that is read
                yield from self._yield_finding(
                    f"have messages with a `{key}` that is neither 0 nor 1, which is not read",
                    self._kinds_with_path(f"{key}=number", "assistant" if is_read else None),
                    cause="These messages are trained as all others: a message is trained or it is not.",
                    remedy=f"Set `{key}` to 0 or 1, give whole rows a weight (`weight_column`), or set "
                    "`message_train_key=None` if the key means something else.",
                )

    def _unread_findings(self) -> Iterator[Finding]:
        """Yield findings of columns, labels of messages and template arguments that are not read."""
        # If an argument is a list or a dictionary, the paths of its values begin with its name. The path of any other
        # argument is "chat_template_kwargs.NAME"
        for name in sorted(self.unread_arguments):
            yield from self._yield_finding(
                f"have `{name}` in `chat_template_kwargs`, which the chat template does not read",
                self._kinds_below(name, f"chat_template_kwargs.{name}"),
                remedy="Correct its name, or remove it.",
            )
        for path in sorted({kind.path for kind in self._kinds_below(UNREAD_COLUMN, LABEL)}):
            if path.startswith(UNREAD_COLUMN):
                yield from self._unread_column(path.removeprefix(UNREAD_COLUMN), self._kinds_with_path(path))
            else:
                name = path.removeprefix(LABEL)
                yield from self._yield_finding(
                    f"have `{name}` in messages", self._kinds_with_path(path), severity="note"
                )

    def _unread_column(self, name: str, kinds: Collection[Kind]) -> Iterator[Finding]:
        """Yield the finding of a column that is not read, a warning if other libraries render such a column."""
        target = "a message, for example of the role `system`"
        if self.rendering.formatting_func is not None:
            target = "the text that `formatting_func` returns"
        yield from self._yield_finding(
            f"have a column `{name}`, which is not read",
            kinds,
            cause="It is not in the tokens.",
            remedy=f"Write it into {target}, or remove it.",
            severity="warning" if RENDERED_COLUMNS.match(name) and name not in self.copied_columns else "note",
        )


def _root(path: str) -> str:
    """Return the path up to its first list."""
    return path.partition("[")[0]


def _grouped(path: str) -> str:
    """Return the path up to arguments or properties, so that one finding has all of them.

    >>> _grouped("tools[].function.parameters.properties.*.items.properties.*.description")
    'tools[].function.parameters.properties'
    """
    return re.sub(r"(arguments|properties)\b.*", r"\1", path)


def _as_json(value: object) -> str:
    """Return a value as text of JSON, or as Python writes it if it has no JSON."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:  # an image
        return str(value)


def _is_thought(path: str) -> bool:
    """Return whether a path, as in `Kind`, leads to thoughts: by a key, or as in "content before </think>"."""
    return path in THOUGHTS or "think" in path
