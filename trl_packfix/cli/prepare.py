"""`trl-packfix prepare`: tokenise once before training, so that no rank waits while another rank tokenises."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from ..version import __version__
from . import flags
from .flags import Subparsers

MANIFEST = "prepared.json"
LIBRARIES = ("trl", "transformers", "datasets", "tokenizers")  # the libraries whose versions are in the manifest
# The config fields in the manifest, beside `TurnSettings`: they decide the tokens and labels of a row, and which other
# columns remain.
MANIFEST_SETTINGS = ("eos_token", "chat_template_path", "weight_column", "source_column", "trust_remote_code")

EXAMPLES = """\
  trl-packfix prepare chats.jsonl --model Qwen/Qwen3-0.6B --output chats \\
      --num-proc 32
  trl-packfix plan chats
  deepspeed --num_gpus=8 --module trl_packfix train --dataset_name chats ...

In Python: SFTTrainer(..., train_dataset=datasets.load_from_disk("chats")). TRL tokenises on the main process while all
other ranks wait in a barrier, which times out (ddp_timeout, 30 minutes) on large datasets. Rows with `input_ids` and
`labels` are not tokenised again. max_length is not applied here: the first start of a run computes the spans in one
pass over the labels, and caches them beside the table. Exit code 0, or 2 if nothing was written."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of `prepare` and its flags."""
    parser = flags.add_command(
        subparsers,
        "prepare",
        usage="DATA ... --output DIR",
        epilog=flags.DATA_HELP + EXAMPLES,
        help="tokenise once on a CPU node, so that no rank of a training run waits for it",
        description="Write a dataset tokenised as by TRL, and a manifest (prepared.json) with data, tokenizer, "
        "settings and versions.",
    )
    flags.add_tokenizer(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help="a folder that is empty or does not exist")
    parser.add_argument("--json", action="store_true", help="print the manifest")
    parser.set_defaults(run_command=run_prepare)


def run_prepare(args: argparse.Namespace) -> int:
    """Write the tokenised dataset and its manifest, and print a summary. Return 0."""
    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"`--output {output}` was given and is not empty. Writing a dataset over another would mix their files. "
            "Set `--output` to a folder that does not exist."
        )
    from .sources import check_paths

    check_paths(args.unparsed_words)  # refuses DATA, the words before the first flag, that does not exist
    # Imported only after these checks, because the modules import libraries that take seconds
    from ..samples.turns import TurnSettings
    from .configs import read_run
    from .tokens import load_tokenizer, read_tables, save_measured, save_tokens

    configs = read_run(args)  # of the datasets, the training and the model
    config = configs.training
    tokenizer_name = args.tokenizer or configs.model.model_name_or_path
    if tokenizer_name is None:
        raise ValueError(
            "No tokenizer was given. Token ids depend on the tokenizer. Set `--tokenizer` or `--model` to the name or "
            "the folder of the one that you will train with."
        )
    tokenizer = load_tokenizer(tokenizer_name, configs)
    tables, with_images = read_tables(configs)
    with _written_whole_or_not(output) as folder:
        # `ledger` counts documents and tokens: `given` are all of them, `dropped` those without a trained token, and
        # `kept` the others
        if with_images:
            # Rows with images are written as they are. Their measures, such as lengths, are cached beside the table
            num_written, num_read, ledger = save_measured(tables, tokenizer_name, configs, output=folder)
        else:
            num_written, num_read, ledger = save_tokens(configs, tables, tokenizer, output=folder)
        manifest = {
            "data": configs.names,
            "split": configs.script.dataset_train_split,
            "tokenizer": tokenizer_name,
            "vocabulary": len(tokenizer),
            "settings": {name: getattr(config, name) for name in (*TurnSettings.__annotations__, *MANIFEST_SETTINGS)},
            "conversations": sum(map(len, tables)) if config.per_turn else None,
            "rows": num_written,
            "bad_rows_dropped": num_read - num_written,
            "documents": ledger.given.documents,
            "tokens": ledger.given.tokens,
            "trained_tokens": ledger.given.trained_tokens,
            "documents_without_a_trained_token": sum(count.documents for count in ledger.dropped.values()),
            "versions": {"trl_packfix": __version__} | {name: version(name) for name in LIBRARIES},
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if args.json:
        print(json.dumps(manifest, indent=2))
        return 0
    if num_read > num_written:
        print(f"{num_read - num_written:,} of {num_read:,} rows cannot be tokenised and are dropped")
    if config.per_turn:
        unit = "document" if with_images else "row"  # a row with images stays whole, and its turns become documents
        num_untrained = manifest["documents_without_a_trained_token"]
        turns = f"one {unit} for each of their {ledger.kept.documents:,} assistant turns"
        untrained = f"{num_untrained:,} without an assistant turn are not trained"
        print(f"{manifest['conversations']:,} conversations, {turns}; {untrained}")
    print(
        f"{output}: {num_written:,} rows, {ledger.given.tokens:,} tokens, {ledger.given.trained_tokens:,} trained\n"
        f"Train on it with `datasets.load_from_disk({str(output)!r})`, or `trl-packfix train --dataset_name {output}`"
    )
    return 0


@contextmanager
def _written_whole_or_not(output: Path) -> Iterator[Path]:
    """Yield a new folder beside `output`, which becomes `output` if this context ends without an error.

    After an error the new folder is removed, and nothing else. Files that another run or the user has put into `output`
    meanwhile stay.

    Raises:
        ValueError: something cannot be written.
    """
    output = output.resolve()  # if `output` is a link, the folder that it points to is written
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent, ignore_cleanup_errors=True)
        with temporary as name:
            folder = Path(name, output.name)
            folder.mkdir()
            yield folder
            # The folder moves out of `temporary`, which is then removed. The system refuses to move it if `output` is a
            # folder with files
            folder.rename(output)
    except OSError as error:
        raise ValueError(
            f"`--output {output}` was given, and writing failed: {error}. What was written is removed. Free space on "
            "this disk and on that of the cache (`HF_DATASETS_CACHE`), or set `--output` to a folder on another that "
            "does not exist."
        ) from error
