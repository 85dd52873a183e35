"""Flags that several commands share: data, tokenisation and packing. Names and defaults are those of `SFTConfig`.

Every flag can also be written like the field of `SFTConfig`, so the flags of a training run can be pasted.
"""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from ..planning.families import SharePrefixes
from ..planning.strategies import STRATEGIES

if TYPE_CHECKING:
    from ..data.reader import Rows
    from ..planning.costs import CostModel
    from ..training.config import SFTConfig
    from .sources import Tokenisation


def did_you_mean(names: Iterable[str], known: Iterable[str]) -> str:
    """A question about the known names most like the wrong ones, to be put behind a message; "" if none is alike.

    >>> did_you_mean(["--learning_rat", "--x"], ["--learning_rate", "--seed"])
    ' (did you mean `--learning_rate`?)'
    """
    known = list(known)
    alike = dict.fromkeys(match for name in names for match in get_close_matches(name, known, n=1, cutoff=0.75))
    return f" (did you mean {', '.join(f'`{name}`' for name in alike)}?)" if alike else ""


@contextmanager
def named(setting: str, what: str) -> Iterator[None]:
    """Name the setting whose value cannot be loaded: most messages of transformers name the hub only.

    Args:
        setting: with its value, as it was given.
        what: to give instead.

    Raises:
        ValueError: instead of an OSError, a ValueError, or the ImportError of a missing package.
    """
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"`{setting}` was given. It cannot be loaded: {reason}. Give {what}.") from error


MODEL = "the name of a model on the hub or a folder with one, and `--trust-remote-code` if it has code that you trust"


def add_document_flags(parser: argparse.ArgumentParser, needs_data: bool = True) -> None:
    """Add the flags for the data and its tokenisation."""
    parser.add_argument(
        "data",
        nargs="+" if needs_data else "*",
        metavar="DATA",
        help="a file (.jsonl, .json, .parquet, .csv), a folder written by `prepare` or `save_to_disk`, or a name on "
        "the hub; several are joined to one table. Or lengths in tokens: .txt with one number per line, .npy, .json "
        "with a list, .csv with a column `length`",
    )
    parser.add_argument("--split", default="train", help="split of a dataset with several (default: train)")
    parser.add_argument("--name", metavar="CONFIG", help="configuration of a dataset on the hub")
    parser.add_argument(
        "--model", metavar="MODEL", help="name or folder: its tokenizer and, for the cost model, its config are read"
    )
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="name or folder, if it is not that of the model")
    add_trust_flag(parser)
    as_trained = parser.add_argument_group("tokenisation, as in SFTConfig")
    _add(as_trained, "assistant_only_loss", action="store_true")
    _add(as_trained, "completion_only_loss", type=_boolean, metavar="{true,false}", help="default: as TRL decides")
    _add(as_trained, "eos_token", metavar="TOKEN")
    _add(as_trained, "chat_template_path", metavar="FILE")
    _add(as_trained, "dataset_text_field", "--text-field", default="text", metavar="COLUMN")
    how = "rows that cannot be tokenised (default: raise)"
    _add(as_trained, "bad_rows", choices=("raise", "drop"), default="raise", help=how)
    how = "one row per assistant turn: the history as the chat template renders it at this turn, and the turn"
    _add(as_trained, "per_turn", action="store_true", help=how)
    how = "key of a message that is 0 where it is not trained (default: weight)"
    _add(as_trained, "message_train_key", default="weight", metavar="KEY", help=how)
    _add(as_trained, "assistant_turns", choices=("all", "last"), default="all", help="turns to train")
    _add(as_trained, "train_empty_thinking", type=_boolean, default=True, metavar="{true,false}")
    _add(as_trained, "dataset_num_proc", "--num-proc", type=int, metavar="N", help="processes that tokenise")


def _add(group: Any, field: str, *names: str, **settings: Any) -> None:
    """Add the flag of a field of `SFTConfig`, written with underscores or dashes, or with other names."""
    spellings = dict.fromkeys((*names, f"--{field.replace('_', '-')}", f"--{field}"))
    group.add_argument(*spellings, dest=field, **settings)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'true' nor 'false'")
    return text == "true"


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for code of a model. Without a value, transformers prompts on standard input."""
    how = "run code that comes with the model, as in TRL's ModelConfig; without it such a model is refused"
    _add(parser, "trust_remote_code", action="store_true", help=how)


def add_column_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the columns that training reads beside the tokens."""
    columns = parser.add_argument_group("columns to check and keep, as in SFTConfig")
    _add(columns, "weight_column", metavar="COLUMN", help="weight of each row, 0 or more")
    _add(columns, "source_column", metavar="COLUMN", help="name of the source of each row")


def add_packing_flags(parser: argparse.ArgumentParser, several: bool) -> None:
    """Add the flags for packing; with `several`, lengths, strategies and world sizes are lists."""
    many: dict[str, Any] = {"nargs": "+"} if several else {}
    packing = parser.add_argument_group("packing, as in SFTConfig" + (" (* takes several)" if several else ""))
    star = "* " if several else ""
    packing.add_argument(
        "--max-length",
        "--max_length",
        type=int,
        **many,
        metavar="TOKENS",
        default=None if several else 1024,
        help=f"{star}largest number of tokens of a document (default: "
        + ("1024, 2048, ... up to the longest)" if several else "1024)"),
    )
    packing.add_argument(
        "--strategy",
        "--packing_strategy",
        choices=[*STRATEGIES],
        **many,
        default=["stream", "bfd"] if several else "stream",
        help=f"{star}which documents share a pack (default: {'stream bfd' if several else 'stream'})",
    )
    packing.add_argument(
        "--world-size",
        "--gpus",
        type=int,
        **many,
        metavar="RANKS",
        default=[1] if several else 1,
        help=f"{star}data-parallel ranks, usually GPUs (default: 1)",
    )
    packing.add_argument(
        "--batch-size",
        "--per_device_train_batch_size",
        type=int,
        metavar="N",
        help="default: 8, with --tokens-per-rank 1",
    )
    how = "sequence parallelism: most tokens of a pack on one rank; --max-length may be larger (default: off)"
    _add(packing, "tokens_per_rank", type=int, metavar="TOKENS", help=how)
    how = "with --tokens-per-rank: what devices and links reach, see SFTConfig"
    _add(packing, "exchange_speeds", metavar="JSON", help=how)
    packing.add_argument("--accumulation", "--gradient_accumulation_steps", type=int, default=1, metavar="N")
    packing.add_argument("--overlong", choices=("truncate", "split", "drop", "raise"))
    how = (
        "forward the common beginning of documents once: those that share a pack anyway ('pack'), or documents brought "
        "together ('family'); needs tokens, not lengths (default: off)"
    )
    _add(packing, "share_prefixes", choices=get_args(SharePrefixes), default="off", help=how)
    packing.add_argument("--balance", choices=("step", "none"), default="step")
    packing.add_argument("--seed", type=int, default=42)


def tokenisation(args: argparse.Namespace) -> "Tokenisation":
    from .sources import Tokenisation

    if args.dataset_num_proc is not None and args.dataset_num_proc < 1:
        raise ValueError(
            f"`--num-proc {args.dataset_num_proc}` was given. It counts the processes that tokenise, and there is at "
            "least one. Set `--num-proc` to 1 or more."
        )
    names = {field.name for field in fields(Tokenisation)} & vars(args).keys()
    return Tokenisation(**{name: getattr(args, name) for name in names})


def read_documents(args: argparse.Namespace) -> "Rows":
    """The rows of DATA, tokenised with these flags.

    Raises:
        ValueError: `--share-prefixes` for files of lengths; see also `open_tables`.
    """
    from .sources import LengthRows, open_tables

    tokenizer, settings = args.tokenizer or args.model, tokenisation(args)
    reader = open_tables(args.data, tokenizer, settings, split=args.split, config=args.name)
    if args.share_prefixes != "off" and isinstance(reader, LengthRows):
        raise ValueError(
            f"`--share-prefixes {args.share_prefixes}` was given with the lengths of {len(reader):,} documents. Which "
            "of them begin alike is known from their tokens. Give a dataset, or set `--share-prefixes off`."
        )
    return reader


def check_images(config: "SFTConfig", reader: "Rows") -> None:
    """Refuse settings that do not go with images, if rows have some."""
    from ..training.choices import Setup
    from ..training.features import refuse

    if reader.image_counts is not None:
        refuse(Setup(args=config, columns=("images",)))


def load_model_config(args: argparse.Namespace) -> Any:
    """The config of `--model`; None without this flag."""
    if args.model is None:
        return None
    from transformers import AutoConfig

    with named(f"--model {args.model}", MODEL):
        return AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)


def load_cost_model(args: argparse.Namespace, reader: "Rows") -> "CostModel":
    """The cost model of `--model`, else of a Llama with 7B parameters; with the costs of images if rows have some."""
    from ..data.model_costs import make_cost_model, with_tower

    config = load_model_config(args)
    costs = make_cost_model(config)
    return costs if reader.image_counts is None else with_tower(costs, config)


def batch_size(args: argparse.Namespace) -> int:
    """The batch size given, or its default."""
    if args.batch_size is not None:
        return args.batch_size
    return 8 if args.tokens_per_rank is None else 1


def packing_config(args: argparse.Namespace, max_length: int, strategy: Any) -> "SFTConfig":
    """The config of a run with these flags. `SFTConfig` checks them."""
    from ..training.config import SFTConfig

    for name, value in (("batch-size", batch_size(args)), ("accumulation", args.accumulation)):
        if value < 1:
            raise ValueError(f"`--{name} {value}` was given. A step needs at least 1. Set `--{name}` to 1 or more.")
    chosen: Any = strategy  # checked by SFTConfig
    return SFTConfig(
        "unused",
        packing=True,
        max_length=max_length,
        packing_strategy=chosen,
        per_device_train_batch_size=batch_size(args),
        gradient_accumulation_steps=args.accumulation,
        overlong=args.overlong,
        balance=args.balance,
        tokens_per_rank=args.tokens_per_rank,
        share_prefixes=args.share_prefixes,
        exchange_speeds=args.exchange_speeds,
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
