"""The rows of a training set as a trainer with packing prepares, and refuses, them, without a trainer and a model."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from ..data.dataset_checks import check_tokenised
from ..data.image_rows import ImageRows
from ..samples.images import masking_collator
from ..samples.make_samples import make_samples
from ..samples.turns import TurnRule
from .checks import check_datasets
from .choices import RunSettings
from .config import SFTConfig
from .features import refuse_conflicts
from .images import measure_rows, row_processor


def prepare_rows(dataset: Dataset, processing_class: Any, args: SFTConfig) -> Dataset:
    """Tokens and labels of the rows of a table; a table that is tokenised is only checked.

    With `bad_rows="drop"`, rows that cannot be tokenised have no tokens, and the reason in the column `BAD_ROW_COLUMN`.
    """
    completion_only = _prepare(dataset, processing_class, args)
    if "input_ids" in dataset.column_names:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        check_tokenised(dataset, "train", max(len(tokenizer), tokenizer.vocab_size), packing=True)
        return dataset
    settings = {"tokenizer": processing_class, "completion_only_loss": completion_only, "marks": True}
    rows = make_samples(dataset, "train", args, **settings).rows
    assert isinstance(rows, Dataset)
    return rows


def prepare_images(dataset: Dataset, processor: Any, args: SFTConfig) -> ImageRows:
    """The documents of rows with images, measured."""
    completion_only = _prepare(dataset, processor, args)
    collate = DataCollatorForVisionLanguageModeling(
        processor=processor, completion_only_loss=completion_only, dataset_text_field=args.dataset_text_field
    )
    if args.assistant_only_loss:
        collate = masking_collator(collate, TurnRule.of(args))
    return measure_rows(dataset, row_processor(collate, args.per_turn), "train", args=args, marks=True)


def _prepare(dataset: Dataset, processing_class: Any, args: SFTConfig) -> bool:
    """Refuse what a trainer refuses, and set the tokenizer up as TRL does. Returns `completion_only_loss`."""
    refuse_conflicts(RunSettings(args=args, train_dataset=dataset, columns=tuple(dataset.column_names)))
    check_datasets(args, dataset, None, is_formatted=False)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if args.eos_token is not None:
        if args.eos_token not in tokenizer.get_vocab():
            raise ValueError(
                f"`eos_token={args.eos_token!r}` was given, and it is not in the vocabulary of "
                f"{len(tokenizer)} tokens. Every document must end with EOS. Set `eos_token` to a token of this "
                "tokenizer, or leave it unset."
            )
        tokenizer.eos_token = args.eos_token
    path = args.chat_template_path
    if path is not None and Path(path).is_file() and path.endswith((".jinja", ".j2")):
        processing_class.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        source = AutoTokenizer.from_pretrained(path)
        known = tokenizer.get_vocab()
        processing_class.chat_template = source.get_chat_template()
        tokenizer.add_tokens([token for token in source.added_tokens_decoder.values() if token.content not in known])
        tokenizer.eos_token = source.eos_token
    tokenizer.pad_token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if args.completion_only_loss is not None:
        return args.completion_only_loss
    return {"prompt", "completion"} <= {*dataset.column_names}  # as in TRL
