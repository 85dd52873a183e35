"""Prepare a training set as a trainer with packing does, without a trainer and without a model.

The command line uses these functions to plan packs, and to show and check documents. The checks, the set-up of the
tokenizer and the choice of the loss are repeated here as in the constructors of `SFTTrainer` and of TRL's trainer.
"""

import copy
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, ProcessorMixin

from ..data.dataset_checks import check_tokenised
from ..samples.checks import columns_of, without_format
from ..samples.data_proof import prove_data
from ..samples.data_report import DataReport
from ..samples.image_support import image_support
from ..samples.make_samples import make_samples
from ..samples.rendering import FormattingFunction, Rendering
from ..samples.row import PerTurnCounts
from ..samples.turns import trains_only_completions
from .checks import check_datasets
from .choices import RunSettings
from .config import SFTConfig, adopt_args
from .conflicts import refuse_conflicts


def prepare_rows(dataset: Dataset, processing_class: Any, args: SFTConfig) -> tuple[Dataset, PerTurnCounts | None]:
    """Tokenise the rows of a table as the trainer does. A table that is already tokenised is only checked.

    Args:
        dataset: the training set.
        processing_class: the tokenizer, or a processor. It gets the chat template and the special tokens of `args`.
        args: the config of the run.

    Returns:
        A table with tokens and labels. With `bad_rows="drop"`, a row that cannot be tokenised stays in the table
        without tokens, with the reason in the column `BAD_ROW_COLUMN` (`samples/row.py`), and is dropped when documents
        are made of rows. The second value says how many conversations `per_turn` has split into how many samples, one
        for each trained turn; it is None without `per_turn`, or if the table is tokenised.
    """
    check_and_set_up(dataset, processing_class, args)
    if "input_ids" in dataset.column_names:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        vocab_size = max(len(tokenizer), tokenizer.vocab_size)  # with added tokens, which some tokenizers do not count
        check_tokenised(dataset, "train", vocab_size, packing=True)
        return dataset, None
    prepared = make_samples(
        dataset,
        "train",
        args,
        tokenizer=processing_class,
        completion_only_loss=trains_only_completions(args),
        keeps_bad_rows=True,  # only with `bad_rows="drop"`
    )
    assert isinstance(prepared.rows, Dataset)
    return prepared.rows, prepared.turns


def check_data(
    dataset: Dataset | IterableDataset,
    processing_class: Any,
    args: trl.SFTConfig | None = None,
    *,
    formatting_func: FormattingFunction | None = None,
    name: str = "train",
) -> DataReport:
    """Report whether the tokens that training would make contain each text of the rows of a dataset exactly once.

    Marks are put into the texts of a few rows. These are chosen so that every kind of text is in one of them: contents,
    thoughts, tool calls and their arguments, tools. They are followed through the chat template. No model is needed,
    and nothing is changed.

    Args:
        dataset: rows that are not tokenised. The first 100 rows of a stream are read.
        processing_class: the tokenizer or processor of the model.
        args (`SFTConfig`, *optional*): decides the chat template, and which messages are trained.
        formatting_func: the function that makes the text of a row, as in the trainer.
        name: the name of the dataset in messages.

    Returns:
        A [`DataReport`]. `report.complete` says whether nothing is lost. `print(report)` says what is lost, in how many
        rows, and what to set. `report.raise_if_lost()` raises a ValueError where training would.

    Example:

    >>> from datasets import Dataset
    >>> from trl_packfix import check_data
    >>> rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]
    >>> check_data(Dataset.from_list(rows), tokenizer).complete  # doctest: +SKIP
    True
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        splits = f" with {[*dataset]}" if isinstance(dataset, dict) else ""
        raise ValueError(
            f"`check_data` was given a `{type(dataset).__name__}`{splits}. It reads the columns and types of one "
            "dataset. Give a `Dataset` or an `IterableDataset`, such as one of several splits."
        )
    dataset = without_format(dataset)  # rows of Python objects, whatever `set_format` has set
    if "input_ids" in columns_of(dataset):
        raise ValueError(
            f"`check_data` was given a dataset with the columns {columns_of(dataset)}: it is tokenised. What its rows "
            "had before is not known from tokens. Give the rows as they were before."
        )
    if isinstance(processing_class, ProcessorMixin) and formatting_func is None:
        # Images that messages name by a path become a column of images
        dataset = image_support().with_named_images(dataset, name)
    rendering = rendering_of(processing_class, args, formatting_func)
    return prove_data(dataset, name, rendering, num_proc=None if args is None else args.dataset_num_proc)


def rendering_of(
    processing_class: Any, args: trl.SFTConfig | None, formatting_func: FormattingFunction | None = None
) -> Rendering:
    """Return the object that makes texts of rows as a trainer does. `args` set up a copy of the tokenizer."""
    if args is None:
        return Rendering(processing_class, formatting_func=formatting_func)
    ours = adopt_args(args, default_output_dir="output")  # as our `SFTConfig`
    processing_class = copy.deepcopy(processing_class)
    _set_up(processing_class, ours)
    return Rendering.from_args(ours, processing_class, formatting_func)


def check_and_set_up(dataset: Dataset, processing_class: Any, args: SFTConfig) -> None:
    """Refuse what a trainer refuses, and set the tokenizer up as TRL does."""
    # First refuse settings that cannot be combined, and datasets that cannot be used
    refuse_conflicts(RunSettings(args=args, train_dataset=dataset, columns=tuple(dataset.column_names)))
    check_datasets(args, dataset, eval_dataset=None, is_formatted=False)  # no `formatting_func`
    # Then set EOS, chat template and pad token
    _set_up(processing_class, args)


def _set_up(processing_class: Any, args: SFTConfig) -> None:
    """Set the tokens and the chat template of a tokenizer or a processor as TRL does."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if args.eos_token is not None:
        if args.eos_token not in tokenizer.get_vocab():
            raise ValueError(
                f"`eos_token={args.eos_token!r}` was given, and it is not in the vocabulary of "
                f"{len(tokenizer)} tokens. Every document must end with EOS. Set `eos_token` to a token of this "
                "tokenizer, or leave it unset."
            )
        tokenizer.eos_token = args.eos_token
    template_path = args.chat_template_path
    if template_path is not None and Path(template_path).is_file() and template_path.endswith((".jinja", ".j2")):
        processing_class.chat_template = Path(template_path).read_text(encoding="utf-8")
    elif template_path is not None:
        # The template of another tokenizer, which may use tokens that this tokenizer does not have
        other_tokenizer = AutoTokenizer.from_pretrained(template_path)
        vocabulary = tokenizer.get_vocab()
        processing_class.chat_template = other_tokenizer.get_chat_template()
        added_tokens = other_tokenizer.added_tokens_decoder.values()
        tokenizer.add_tokens([token for token in added_tokens if token.content not in vocabulary])
        tokenizer.eos_token = other_tokenizer.eos_token  # as TRL does, even if `eos_token` is set
    tokenizer.pad_token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
