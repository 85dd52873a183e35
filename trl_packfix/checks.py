"""Bad input, found before work starts: what packing cannot do with this model, tokenizer, dataset or collator."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import trl
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, PretrainedConfig

from .config import SFTConfig
from .prepared import prepared_token_range
from .reader import TokenReader, mask_columns
from .refusals import check_not_padded

NUM_SHOWN = 10  # rows that a message names
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns of what is not text


def model_config(model: Any, args: SFTConfig) -> PretrainedConfig:
    """The text config of a model that is given as an object or as a name."""
    if isinstance(model, str):
        init: Any = args.model_init_kwargs or {}
        config = AutoConfig.from_pretrained(
            model, revision=init.get("revision"), trust_remote_code=args.trust_remote_code
        )
    else:
        config = model.config
    return config.get_text_config()


def check_overrides(trainer_class: type[trl.SFTTrainer]) -> None:
    """Refuse a method of a subclass that packing never calls."""
    if trainer_class._get_train_sampler is not trl.SFTTrainer._get_train_sampler:
        raise ValueError(
            f"`{trainer_class.__name__}._get_train_sampler` was given with packing. Packs are planned from the lengths "
            "of all documents and no sampler is called, so yours would be ignored. Set `packing=False`, or bring the "
            'dataset into your order, set `train_sampling_strategy="sequential"` and remove the method.'
        )


def check_before_loading(args: SFTConfig, model: Any, train_dataset: Any, data_collator: Any, peft_config: Any) -> None:
    """What can be refused before a model is loaded or a token is made. Only called with packing.

    Raises:
        ValueError: an encoder-decoder, a loss that depends on the ranks, vision data, a custom collator, prompt
            learning, positions that do not exist; with an iterable dataset also another strategy than `stream`, no
            `max_steps`, `dataloader_drop_last`.
    """
    if not isinstance(model, str) and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} was given with packing. It is an encoder-decoder: its encoder reads a whole "
            "document at once, and this trainer trains causal language models. Give one "
            "(`AutoModelForCausalLM.from_pretrained`), or train this model with transformers' `Seq2SeqTrainer`."
        )
    if data_collator is not None:
        raise ValueError(
            f"`data_collator={type(data_collator).__name__}` was given with packing. A pack needs a collator that "
            "keeps document boundaries, and any other would lose them. Leave `data_collator` unset (pad with "
            "`pad_to_multiple_of`), or set `packing=False`."
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            f"`average_tokens_across_devices=False` was given with packing on {args.world_size} ranks. Ranks hold "
            "different numbers of trained tokens, and a mean of their means is not the loss per token (the difference "
            "was 0.7 % in a small run). Leave `average_tokens_across_devices` at its default, True."
        )
    if isinstance(train_dataset, IterableDataset):
        _check_stream(args)
    if isinstance(train_dataset, Dataset | IterableDataset):
        media = [name for name in train_dataset.column_names or () if name in MEDIA]
        if media:
            raise ValueError(
                f"The dataset has the column `{media[0]}` and packing is on. Images, video and audio belong to rows, "
                "and a pack has one row for many documents. Set `packing=False` and `padding_free=False` for such "
                "data, or remove the column where the text alone is to be trained."
            )
    for config in _peft_configs(model, peft_config):
        if config.is_prompt_learning:
            raise ValueError(
                f"The adapter is {config.peft_type.value} with {config.num_virtual_tokens} virtual tokens, and packing "
                "is on. Virtual tokens stand once before a row, so the documents of a pack would share them or lose "
                "them. Use LoRA, or set `packing=False`."
            )
    positions = getattr(model_config(model, args), "max_position_embeddings", None)
    if args.max_length is not None and positions is not None and 0 < positions < args.max_length:  # xlnet says -1
        raise ValueError(
            f"`max_length={args.max_length}` was given and the model has {positions} positions "
            "(`max_position_embeddings`). A longer document would reach positions that the model never learned. Set "
            f"`max_length` to {positions} or less, or extend the positions in the model's config."
        )


def _check_stream(args: SFTConfig) -> None:
    """What cannot be done with an iterable dataset, whose documents and their number are not known before they come."""
    if args.packing_strategy != "stream":
        raise ValueError(
            f"`packing_strategy={args.packing_strategy!r}` was given with an `IterableDataset`. It plans with all "
            "documents of an epoch, and a stream is known only as far as it was read. Set "
            '`packing_strategy="stream"`, or load the dataset without streaming.'
        )
    if args.max_steps <= 0:
        raise ValueError(
            f"`max_steps={args.max_steps}` was given with an `IterableDataset`. A stream does not say how long it is, "
            "so the end of training and the learning-rate schedule cannot be known from it. Set `max_steps` to the "
            "optimizer steps to train; the stream begins again when it ends."
        )
    if args.dataloader_drop_last:
        raise ValueError(
            "`dataloader_drop_last=True` was given with an `IterableDataset`. The last packs of a pass are split "
            "between the micro-batches of one more step, so nothing is incomplete and nothing can be dropped. Set "
            "`dataloader_drop_last=False`."
        )


def _peft_configs(model: Any, peft_config: Any) -> list[Any]:
    given = list(getattr(model, "peft_config", {}).values()) if not isinstance(model, str) else []
    return given + ([peft_config] if hasattr(peft_config, "is_prompt_learning") else [])


def check_rows(dataset: Dataset | IterableDataset | None, name: str) -> None:
    """Refuse a dataset without rows, of which TRL reads the first."""
    if isinstance(dataset, IterableDataset) and next(iter(dataset), None) is None:
        raise ValueError(
            f"The {name} dataset is an `IterableDataset` of 0 rows. There is nothing to train or evaluate. Check the "
            "files, the split and the filters that it comes from, and that its generator makes new rows each time it "
            "is called."
        )
    if isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError(
            f"The {name} dataset has 0 rows and the columns {dataset.column_names}. There is nothing to train or "
            "evaluate. Check the file, the split and the filters that it comes from."
        )


def check_raw_dataset(dataset: Dataset, name: str, tokenizer: Any, args: SFTConfig, is_formatted: bool = False) -> None:
    """What can be refused in a dataset that is not tokenised yet; `is_formatted`: a function will make its text.

    With `bad_rows="drop"` single rows are not looked at.

    Raises:
        ValueError: no rows, nothing to tokenise, or missing values there; plain text and no EOS token;
            `assistant_only_loss` and rows without an assistant message.
    """
    check_rows(dataset, name)
    columns = dataset.column_names
    if not is_formatted and dataset.format["type"] != "custom":  # TRL refuses transforms, and a look would run them
        _check_text(dataset, name, args)
    conversational = "messages" in columns or "conversations" in columns
    if not conversational and tokenizer.eos_token is None and not _is_conversational_prompt(dataset):
        raise ValueError(
            f"The tokenizer ({type(tokenizer).__name__}) has no EOS token, and the {name} dataset of {len(dataset)} "
            "rows is plain text. Every document must end with EOS, or the model never learns to stop. Set "
            "`eos_token` in the config, or `tokenizer.eos_token`."
        )
    if args.assistant_only_loss and args.bad_rows == "raise" and "messages" in columns:
        silent = _rows_without_assistant(dataset)
        if len(silent):
            raise ValueError(
                f"`assistant_only_loss=True` was given and {len(silent)} of {len(dataset)} rows of the {name} dataset "
                f"have no assistant message; the first are {silent[:NUM_SHOWN].tolist()}. Such a row has nothing to "
                "train on. Remove these rows (`dataset.select`), or set `assistant_only_loss=False`."
            )


def _check_text(dataset: Dataset, name: str, args: SFTConfig) -> None:
    """Refuse a dataset in which TRL would find nothing to tokenise, and stop with an error of Python's."""
    text_field = args.dataset_text_field
    columns = _text_columns(dataset, text_field)
    if not columns:
        found = ", ".join(f"`{field.name}` ({field.type})" for field in dataset.features.arrow_schema)
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has the columns {found}. TRL tokenises `messages` (lists of "
            "`role` and `content`), `conversations` (lists of `from` and `value`), `prompt` with `completion`, or the "
            f"text in `{text_field}`, and none of them is there. Rename or reshape a column, or set "
            "`dataset_text_field` to the one that holds the text."
        )
    for column in columns if args.bad_rows == "raise" else ():
        if dataset.data.column(column).null_count:  # of all rows of the table, selected or not, without a copy
            values = dataset.select_columns(column).with_format("arrow")[:][column]
            missing = np.flatnonzero(values.is_null().to_numpy())
            if len(missing):
                raise ValueError(
                    f"{len(missing)} of {len(dataset)} rows of the {name} dataset hold None in `{column}`; the first "
                    f"are {missing[:NUM_SHOWN].tolist()}. There is nothing to tokenise in them. Remove these rows "
                    "(`dataset.select`), or write what is missing."
                )


def _text_columns(dataset: Dataset, text_field: str) -> list[str]:
    """The columns that TRL tokenises, chosen as it does; [] if there are none."""
    columns = dataset.column_names
    if "prompt" in columns:
        return ["prompt", "completion"] if "completion" in columns else []
    for column, key in (("conversations", "from"), ("messages", "role")):
        if column in columns:
            first = dataset.select_columns(column).with_format(None)[0][column]
            # An empty first row does not say what the others hold, and None is refused by its number.
            if not first or (isinstance(first, list) and isinstance(first[0], dict) and key in first[0]):
                return [column]
    return [text_field] if text_field in columns else []


def _is_conversational_prompt(dataset: Dataset) -> bool:
    feature = dataset.features.get("prompt")
    return feature is not None and getattr(feature, "dtype", None) != "string"


def _rows_without_assistant(dataset: Dataset) -> np.ndarray:
    """Rows in which no message has the role "assistant", from Arrow: no row becomes a Python object."""
    column = dataset.select_columns("messages").with_format("arrow")[:]["messages"]
    has_assistant: list[np.ndarray] = []
    for chunk in column.chunks:
        if not (pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)):
            return np.zeros(0, np.int64)  # not the layout of messages: TRL will say so
        messages = chunk.flatten()
        if not pa.types.is_struct(messages.type) or messages.type.get_field_index("role") < 0:
            return np.zeros(0, np.int64)
        role = pc.fill_null(pc.equal(pc.struct_field(messages, "role"), "assistant"), False)
        parents = pc.list_parent_indices(chunk).to_numpy()
        has_assistant.append(
            np.bincount(parents, weights=role.to_numpy(zero_copy_only=False), minlength=len(chunk)) > 0
        )
    return np.flatnonzero(~np.concatenate(has_assistant)) if has_assistant else np.zeros(0, np.int64)


def check_prepared_sets(args: SFTConfig, train_dataset: Any, eval_dataset: Any, vocab_size: int | None) -> None:
    """With `skip_prepare_dataset`, what is checked else when TRL prepares a set."""
    if not (isinstance(args.dataset_kwargs, dict) and args.dataset_kwargs.get("skip_prepare_dataset")):
        return
    eval_packing = args.packing if args.eval_packing is None else args.eval_packing
    eval_sets = eval_dataset if isinstance(eval_dataset, dict) else {"eval": eval_dataset}
    sets = [("train", train_dataset, args.packing), *((name, each, eval_packing) for name, each in eval_sets.items())]
    for name, dataset, packing in sets:
        check_rows(dataset, name)
        if isinstance(dataset, Dataset) and "input_ids" in dataset.column_names:
            check_tokenised(dataset, name, vocab_size, packing)


def check_tokenised(dataset: Dataset, name: str, vocab_size: int | None, packing: bool) -> None:
    """What can be refused in a dataset that the user tokenised, where it is packed and where it is not."""
    if packing:
        check_tokens(dataset, name, vocab_size)
    else:
        _check_not_packed(dataset, name)


def check_tokens(dataset: Dataset, name: str, vocab_size: int | None) -> None:
    """What packing refuses in tokenised rows.

    Raises:
        ValueError: labels of another length, padding under an `attention_mask`, ids outside the vocabulary.
    """
    masks = mask_columns(dataset)
    reader = TokenReader(dataset.remove_columns(masks) if len(masks) > 1 else dataset)  # TRL makes labels of both
    check_not_padded(dataset, name)
    if vocab_size is None:
        return
    low, high = prepared_token_range(reader)
    if low < 0 or high >= vocab_size:
        row = reader.first_row_outside(0, vocab_size)
        if row is not None:
            raise ValueError(
                f"Row {row} of the {name} dataset has token ids from {low} to {high}, and the model has {vocab_size} "
                "embeddings. An id outside them cannot be looked up. Tokenise with the tokenizer of this model, or "
                "resize its embeddings."
            )


def _check_not_packed(dataset: Dataset, name: str) -> None:
    """Refuse rows that are packs already (`seq_lengths`): without packing their boundaries are lost."""
    if "seq_lengths" in dataset.column_names:
        raise ValueError(
            f"The {name} dataset of {len(dataset)} rows has `seq_lengths`, so its rows are packs, and packing is off "
            "for it. A padded batch has no boundaries, and the documents of a row would see each other. Set "
            "`packing=True` (and `eval_packing`), or remove the column."
        )
