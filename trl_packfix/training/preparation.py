"""Prepare a training set as a trainer with packing does, without a trainer and without a model.

The command line uses these functions to plan packs, and to show and check documents. The checks, the set-up of the
tokenizer and the choice of the loss are repeated here as in the constructors of `SFTTrainer` and of TRL's trainer.
"""

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
    """Tokenise the rows of a table as the trainer does. A table that is already tokenised is only checked.

    Args:
        dataset: the training set.
        processing_class: the tokenizer, or a processor. It gets the chat template and the special tokens of `args`.
        args: the config of the run.

    Returns:
        A table with tokens and labels. With `bad_rows="drop"`, a row that cannot be tokenised has no tokens, and the
        reason in the column `BAD_ROW_COLUMN`.
    """
    completion_only = _check_and_set_up(dataset, processing_class, args)
    if "input_ids" in dataset.column_names:
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        check_tokenised(dataset, "train", max(len(tokenizer), tokenizer.vocab_size), packing=True)
        return dataset
    rows = make_samples(
        dataset, "train", args, tokenizer=processing_class, completion_only_loss=completion_only, marks=True
    ).rows
    assert isinstance(rows, Dataset)
    return rows


def prepare_images(dataset: Dataset, processor: Any, args: SFTConfig) -> ImageRows:
    """Return the reader of a table of rows with images, which are measured as the trainer does."""
    completion_only = _check_and_set_up(dataset, processor, args)
    collate = DataCollatorForVisionLanguageModeling(
        processor=processor, completion_only_loss=completion_only, dataset_text_field=args.dataset_text_field
    )
    if args.assistant_only_loss:
        collate = masking_collator(collate, TurnRule.of(args))
    return measure_rows(dataset, row_processor(collate, args.per_turn), "train", args=args, marks=True)


def _check_and_set_up(dataset: Dataset, processing_class: Any, args: SFTConfig) -> bool:
    """Refuse what a trainer refuses, and set the tokenizer up as TRL does.

    Returns:
        Whether only completions are trained.
    """
    # First refuse settings that cannot be combined, and datasets that cannot be used
    refuse_conflicts(RunSettings(args=args, train_dataset=dataset, columns=tuple(dataset.column_names)))
    check_datasets(args, dataset, None, is_formatted=False)
    # Then set EOS, chat template and pad token
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
        # The template is that of another tokenizer, and may use tokens that this one does not have
        source = AutoTokenizer.from_pretrained(template_path)
        vocabulary = tokenizer.get_vocab()
        processing_class.chat_template = source.get_chat_template()
        added_tokens = source.added_tokens_decoder.values()
        tokenizer.add_tokens([token for token in added_tokens if token.content not in vocabulary])
        tokenizer.eos_token = source.eos_token
    tokenizer.pad_token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if args.completion_only_loss is not None:
        return args.completion_only_loss
    # Like TRL, train only the completions of a dataset of prompts and completions
    return {"prompt", "completion"} <= {*dataset.column_names}
