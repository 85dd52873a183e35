"""`SFTConfig`: TRL's config with the fields of packing, and the checks that need only the config.

`SFTTrainer` makes its `args` an `SFTConfig` with `adopt_args`; the command line constructs one from a file and flags.
The config is checked when it is constructed, before a model is loaded or a row is read: first the types of its values,
then each value alone, at last pairs of settings that cannot be combined (`conflicts.py`).

Words: a *document* is one training example as the model reads it; a *pack* is a row of documents that the model reads
together. With sequence parallelism several ranks share a pack, and their number is its *degree*.
"""

import copy
import inspect
import json
import os
import re
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
import trl
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available

from ..data.dataset_checks import check_choice, check_count, check_max_length, check_overlong
from ..feature import features_of
from ..isolation.packed_model import OnLeak
from ..planning.packing import Overlong, SharePrefixes, TruncationMode
from ..planning.strategies import STRATEGIES, Strategy
from ..planning.units import Balance
from ..samples.turns import AssistantTurns
from .choices import RunSettings
from .conflicts import EXPERIMENTAL, refuse_conflicts
from .foreign_keys import with_hints
from .progress import announce_deepspeed_communication

# TRL's class is read when this module is imported, because a script may later set `trl.SFTConfig` to `SFTConfig`
ConfigOfTrl = trl.SFTConfig
# The keys that the field `exchange_speeds` may have
SPEED_NAMES = ("flops", "within", "between", "latency_within", "latency_between", "ranks_per_node")

# A field in the docstring of `SFTConfig`: its name, and the indented lines of its text
PARAMETER = re.compile(r"^    (\w+) \(.*\):\n((?: {8}.*\n)+)", re.MULTILINE)
Config = TypeVar("Config", bound=type)


def with_help(config: Config) -> Config:
    """Make the text of each field in the docstring of a config the help of its flag on the command line.

    The texts become metadata of the fields, so this decorator must run before `dataclass` does.
    """
    # The names of fields that make an experimental choice. A condition on a field is named by the field in backticks,
    # such as "`tokens_per_rank`", or by the field and its value, such as "`eval_packing=True`"
    experimental = {condition.name.strip("`").partition("=")[0] for condition in EXPERIMENTAL}
    for name, text in PARAMETER.findall(inspect.cleandoc(config.__doc__ or "")):
        label = "Experimental, several GPUs have not run it yet. " if name in experimental else ""
        value = getattr(config, name)
        as_field: Any = value if isinstance(value, Field) else field(default=value)
        as_field.metadata = {**as_field.metadata, "help": label + " ".join(text.split())}
        setattr(config, name, as_field)
    return config


@dataclass
@with_help
class SFTConfig(trl.SFTConfig):
    r"""
    Configuration class for the [`SFTTrainer`]: every field of [`trl.SFTConfig`], and those of packing below.

    Parameters:
        packing_strategy (`str`, *optional*, defaults to `"stream"`):
            Which documents share a pack. `"stream"` shuffles documents every epoch and packs consecutive ones, `"bfd"`
            is best-fit decreasing over the whole dataset, `"bfd_split"` the same with long documents split, `"wrapped"`
            cuts the concatenation of all documents every `max_length` tokens (fragments of different documents do not
            see each other), `"minibatch"` gives every optimizer step the documents that it has in unpacked training,
            without padding. `padding_free=True` without `packing` means `"minibatch"`.
        overlong (`str`, *optional*):
            What happens to documents longer than `max_length`: `"truncate"` (`truncation_mode` sets the side),
            `"split"`, `"drop"` or `"raise"`. If unset, the strategy decides: `"split"` for `"bfd_split"` and
            `"wrapped"`, else `"truncate"`. Evaluation always truncates, or raises.
        bad_rows (`str`, *optional*, defaults to `"raise"`):
            What happens to rows that the tokenizer or its chat template cannot take: `"raise"` stops and names them,
            `"drop"` leaves them out and, in training, counts them in the report. It works with and without packing, and
            for tables and streams.
        per_turn (`bool`, *optional*, defaults to `False`):
            Train one sample per assistant turn of a conversation: the history as the chat template renders it at this
            turn, with the loss on this turn only. For templates that strip earlier thinking. It works with and without
            packing, for tables and streams, and splits evaluation sets, too.
        message_train_key (`str`, *optional*, defaults to `"weight"`):
            Key of a message that says whether it is trained, with `assistant_only_loss` and `per_turn`: 0 or `False`
            makes an assistant message context, 1, `True` or no value trains it. `"weight"` is that of OpenAI's files,
            `"train"` that of axolotl's, `"loss"` that of ms-swift, `"trainable"` that of verl. If such a key is 0 and
            is not this one, the dataset is refused. `None`: no key is read.
        assistant_turns (`str`, *optional*, defaults to `"all"`):
            Which assistant turns `assistant_only_loss` and `per_turn` train: `"all"`, or only the `"last"` of each
            conversation.
        train_empty_thinking (`bool`, *optional*, defaults to `True`):
            Whether `assistant_only_loss` and `per_turn` train an empty thinking block (`<think>\n\n</think>`) that the
            chat template puts in front of a turn without thoughts. One that the message has itself is trained.
        on_leak (`str`, *optional*, defaults to `"repair"`):
            What to do when a test finds, before the first step, that documents influence each other on this model:
            `"repair"` runs the modules where information crosses on each document separately, and unpacks if that does
            not help; `"unpack"` trains on the same documents as rows of padded batches (correct but slower, and
            reported); `"raise"` stops.
        balance (`str`, *optional*, defaults to `"step"`):
            `"step"` gives all ranks packs of similar cost in each micro-step, `"none"` packs as they come.
        document_weighting (`str`, *optional*, defaults to `"token"`):
            `"token"`: every trained token of an optimizer step counts the same, as in TRL. `"document"`: every document
            does (LongAlign), and within a document every trained token. A fragment of a split document is a document.
            It works with and without packing. Evaluation always counts tokens.
        weight_column (`str`, *optional*):
            Column of the training set with a weight per row, a number of 0 or more. With `"token"` weighting the loss
            of an optimizer step is sum(w_d * loss_t) / sum(w_d) over its trained tokens t, where d is the document of
            t; with `"document"` weighting it is sum(w_d * mean_d) / sum(w_d) over its documents d, where mean_d is the
            mean over the trained tokens of d. Both sums are over all micro-batches and ranks. All weights 1 are no
            weights, and only their ratios matter. A row of weight 0 is read and computed, but trains nothing; a step in
            which all are 0 has the loss 0. Fragments of a split row have its weight. Evaluation and the router loss do
            not use weights. If unset, no column is read, also not one named `weight`.
        source_column (`str`, *optional*):
            Column that names the source of a row: strings, whole numbers or a `ClassLabel`, at most 100 different ones.
            Training logs `loss/NAME` and `trained_tokens/NAME`, and evaluation `eval_loss/NAME` if the evaluation set
            has the column, too. Each loss is the negative log-likelihood of the trained tokens of the source (since the
            last log, over all ranks) divided by their number; weights do not enter it. A source without a trained token
            since the last log is not logged.
        enforce_flash_attention (`bool`, *optional*, defaults to `True`):
            On CUDA, run attention on packed batches with flash attention where a kernel can compute the model, else
            document by document, with a warning. `False` keeps the implementation of the model, which may build a
            (T, T) mask per pack.
        pad_documents_to_multiple_of (`int`, *optional*):
            Give every pack the same shapes, for `torch.compile`, CUDA graphs and FP8 kernels: as many tokens as the
            capacity (rounded up to `pad_to_multiple_of`), this number of documents (with those of the padding; the last
            ones are empty), and `max_length` as the length of the longest. A pack with more documents gets the next
            multiple, which is another shape. It costs tokens: set it only for a kernel or compiler that needs it.
        peak_tflops (`float`, *optional*):
            Dense TFLOP/s of one device, for `mfu` in the log: the FLOPs of the documents (without padding and without
            what checkpointing computes again) over this peak. If unset, common NVIDIA cards have their peak in half
            precision; on others, and in float32, `mfu` is not logged.
        packing_report (`bool`, *optional*, defaults to `True`):
            Print what packing did before training, and save it as `packing_report.json` in `output_dir`.
        logging_nan_inf_filter (`bool`, *optional*, defaults to `False`):
            As in transformers, where it is on: with it the host waits for the GPU after every micro-batch. Without it a
            loss that is NaN or infinite is logged as it is.
        tokens_per_rank (`int`, *optional*):
            Sequence parallelism: most tokens of a pack on one rank. `max_length` may be larger: 2, 4, 8, ... ranks then
            share a pack, and each holds a part of it. How many, the degree, is chosen for every micro-step. The largest
            degree, times this, limits `max_length`: a power of two that divides the number of ranks, and at most the
            number of attention heads. With `packing_strategy` `"stream"` or `"bfd"` and
            `per_device_train_batch_size=1`. If unset, every rank has its own packs.
        share_prefixes (`str`, *optional*, defaults to `"off"`):
            Documents that begin with the same tokens (a system prompt, a prompt with several answers, the turns of one
            chat as one sample each) forward this beginning once. `"pack"`: documents that share a pack share their
            beginnings; batches, steps and the loss stay what they are, up to rounding. `"family"`: documents that begin
            alike are also brought together, so that more is shared; then an optimizer step has more documents, and
            fewer that are independent of each other. A shared token has one draw of dropout for all its documents. If a
            test before the first step shows that the model cannot do it, `"pack"` shares nothing, and a warning says
            why; with `"family"`, or `on_leak="raise"`, training stops. Evaluation in packs shares as training does.
            Images are compared by their content.
        exchange_speeds (`dict`, *optional*):
            With `tokens_per_rank`: what devices and links reach, by which degrees are chosen; as a flag, in JSON.
            `flops` of one device per second (default 400e12), bytes per second of an all-to-all `within` a node (300e9)
            and `between` nodes (50e9), its `latency_within` and `latency_between` in seconds (20e-6, 60e-6), and
            `ranks_per_node` (8). Only ratios decide.

    Example:

    >>> SFTConfig("output", packing=True, max_length=2048, use_cpu=True, bf16=False).effective_overlong
    'truncate'
    """

    packing_strategy: Strategy = field(default="stream", metadata={"choices": STRATEGIES.keys()})
    overlong: Overlong | None = None
    bad_rows: Literal["raise", "drop"] = "raise"
    per_turn: bool = False
    message_train_key: str | None = "weight"
    assistant_turns: AssistantTurns = "all"
    train_empty_thinking: bool = True
    on_leak: OnLeak = "repair"
    balance: Balance = "step"
    document_weighting: Literal["token", "document"] = "token"
    weight_column: str | None = None
    source_column: str | None = None
    enforce_flash_attention: bool = True
    pad_documents_to_multiple_of: int | None = None
    peak_tflops: float | None = None
    packing_report: bool = True
    logging_nan_inf_filter: bool = False
    tokens_per_rank: int | None = None
    share_prefixes: SharePrefixes = "off"
    exchange_speeds: dict[str, float] | str | None = None

    if TYPE_CHECKING:  # TRL has these two fields; here they have the types that packing accepts
        truncation_mode: TruncationMode = "keep_start"
        pad_to_multiple_of: int | None = None

    _VALID_DICT_FIELDS = [*trl.SFTConfig._VALID_DICT_FIELDS, "exchange_speeds"]  # noqa: RUF012 - JSON in flags, as in TRL

    def __post_init__(self) -> None:
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name)
            try:
                if isinstance(value, str) and value.startswith("{"):  # transformers parses such a text as JSON
                    json.loads(value)
            except ValueError as error:
                raise ValueError(
                    f"`{name}={value}` was given. It begins like JSON and cannot be read: {error}. Write names and "
                    """texts in double quotes and the whole in single ones: '{"name": 1.0}'."""
                ) from error
        _convert_numpy(self)
        _refuse_texts(self)
        check_devices(self)
        check_precision(self)
        announce_deepspeed_communication(self)  # prints a line before DeepSpeed compiles, which may take minutes
        unset = [setting.name for setting in fields(self) if getattr(self, setting.name) is setting.default]
        with warnings.catch_warnings():
            # Fields that the user leaves unset must not warn. `gradient_checkpointing`, a field of TRL's, must not warn
            # either: transformers calls it `activation_checkpointing`, and only from version 5.20 on.
            names = "|".join([*unset, "gradient_checkpointing(_kwargs)?"])
            warnings.filterwarnings("ignore", f"`({names})` is deprecated", FutureWarning)
            super().__post_init__()
        check_config(self)

    @property
    def packs_evaluation(self) -> bool:
        """Whether evaluation is packed: the value of `eval_packing` or, if it is unset, of `packing`."""
        return self.packing if self.eval_packing is None else self.eval_packing

    @property
    def effective_overlong(self) -> Overlong:
        """The policy for documents longer than `max_length`: `overlong`, or the default of the strategy."""
        return self.overlong or STRATEGIES[self.packing_strategy].overlong


# If the constructor gets an argument that only the config of another trainer has, its TypeError tells how to write this
# setting for this class. `dataclass` writes the constructor, so it is wrapped after the class is made
SFTConfig.__init__ = with_hints(SFTConfig.__init__)  # type: ignore[method-assign]


def _literal_values(hint: object) -> tuple[str | None, ...]:
    """Return the values that a type hint allows if it is a `Literal`, or a `Literal` or None; else ()."""
    literals = [member for member in (hint, *get_args(hint)) if get_origin(member) is Literal]
    values = tuple(value for literal in literals for value in get_args(literal))
    is_union = hint not in literals
    return (None, *values) if values and is_union else values


TYPE_HINTS = get_type_hints(SFTConfig)  # of all fields, also those of TRL
# The allowed values of each field of this class that has a choice of values, and of two fields of TRL
CHOICES: dict[str, Collection[str | None]] = {
    name: values for name in SFTConfig.__annotations__ if (values := _literal_values(TYPE_HINTS[name]))
}
CHOICES |= {"packing_strategy": STRATEGIES.keys(), "truncation_mode": get_args(TruncationMode)}
TYPES_OF_FIELDS = {name: {*(get_args(hint) or (hint,))} for name, hint in TYPE_HINTS.items()}
# The types of each field that holds a number or a switch, and no text
NUMERIC_FIELDS = {name: types for name, types in TYPES_OF_FIELDS.items() if types <= {bool, int, float, type(None)}}


def _convert_numpy(args: SFTConfig) -> None:
    """Make numbers and switches of numpy those of Python, in place: JSON, in which runs are saved, has no others."""
    for name in NUMERIC_FIELDS:
        value = getattr(args, name)
        if isinstance(value, np.generic):
            setattr(args, name, value.item())
    if isinstance(args.exchange_speeds, dict):
        speeds = args.exchange_speeds.items()
        args.exchange_speeds = {key: value.item() if isinstance(value, np.generic) else value for key, value in speeds}


def _refuse_texts(args: SFTConfig) -> None:
    """Refuse texts as values of fields that hold a number or a switch.

    A text in place of a number would fail only where it is used, and a text in place of a switch would switch it on.
    """
    for name, types in NUMERIC_FIELDS.items():
        value = getattr(args, name)
        if not isinstance(value, str) or name == "packing":  # `check_config` says more about `packing`
            continue
        cause = "It is a text, and this field holds a number"
        remedy = "a number"
        if bool in types:
            cause = "Any text counts as true, also this one"
            remedy = "True or False"
        for number_type in types & {int, float}:
            with suppress(ValueError):
                remedy = f"{number_type(value)}, without quotes"
        raise ValueError(
            f"`{name}={value!r}` was given. {cause}. Set `{name}` to {remedy}, or leave it unset for the default."
        )


def adopt_args(args: TrainingArguments | None, default_output_dir: str) -> SFTConfig:
    """Return an `SFTConfig` of this package with the values of `args`, which are not changed.

    Args:
        args: a config of this package, of TRL or of transformers; None for the defaults. TRL's default
            `packing_strategy="bfd"` is kept.
        default_output_dir: `output_dir` if `args` is None.
    """
    if args is None:
        return SFTConfig(default_output_dir)
    if isinstance(args, SFTConfig):
        # The config was checked when it was made, but values may have been set since. A trainer with `padding_free` has
        # set `packing` in its own config, which may be given to another trainer, and has no `max_length`
        config = copy.copy(args)
        _convert_numpy(config)
        _refuse_texts(config)
        check_config(config, may_lack_max_length=True)
        return config
    if isinstance(args, ConfigOfTrl):
        # The values are copied. Constructing a config from them would run `__post_init__` a second time.
        config = object.__new__(SFTConfig)
        defaults = {setting.name: setting.default for setting in fields(SFTConfig)}
        vars(config).update(defaults | vars(args))
        _convert_numpy(config)
        _refuse_texts(config)
        check_devices(config)
        check_config(config)
        return config
    warnings.warn(
        "`args` is a `TrainingArguments`, which has no `packing`: documents are not packed. Pass an `SFTConfig` with "
        "`packing=True`.",
        stacklevel=4,  # the line that constructs the trainer
    )
    values: dict[str, Any] = args.to_dict()
    values["hub_token"] = args.hub_token  # `to_dict` hides it
    return SFTConfig(**values)


def with_settings(args: SFTConfig, **settings: object) -> SFTConfig:
    """Return a copy of `args` with the values `settings`. Raise ValueError if the settings contradict each other."""
    args = copy.copy(args)
    vars(args).update(settings)
    check_config(args)
    return args


def lacks_devices() -> bool:
    """Return whether several processes were started without a GPU, and no environment variable chooses CPUs."""
    use_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
    if use_cpu or os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available()


def check_devices(args: SFTConfig) -> None:
    """Refuse several processes on a machine without a GPU, unless a setting says to train on CPUs."""
    if lacks_devices() and not (args.use_cpu or args.ddp_backend == "gloo"):
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were started, and no GPU was found "
            "(`torch.accelerator.is_available()`). All of them would train on the CPU of this machine, and share its "
            f"cores. Check the driver and the build of torch ({torch.__version__}). To train on CPUs, set "
            "`use_cpu=True`, also under DeepSpeed."
        )


def check_precision(args: SFTConfig) -> None:
    """Refuse bfloat16, TRL's default, on a machine without a GPU, unless `use_cpu` says to train on the CPU."""
    is_bf16 = not args.fp16 if args.bf16 is None else args.bf16  # as TRL chooses it
    if is_bf16 and not (args.use_cpu or torch.accelerator.is_available() or is_torch_xla_available()):
        raise ValueError(
            "`bf16=True` was given or is the default, without `use_cpu`, and no GPU was found "
            "(`torch.accelerator.is_available()`). A model of common size would take days on the CPU of this machine. "
            f"Check the driver and the build of torch ({torch.__version__}), or set `use_cpu=True` to train on the "
            "CPU all the same."
        )


def check_config(args: SFTConfig, *, may_lack_max_length: bool = False) -> None:
    """Refuse settings of packing that are unknown or contradict each other.

    Args:
        args: the config.
        may_lack_max_length: whether `max_length` may be None with `packing`, if the strategy keeps the steps of
            unpacked training. Its packs are limited by their number of documents.
    """
    if isinstance(args.packing, str):
        raise ValueError(
            f"`packing={args.packing!r}` was given. TRL takes any text for `True` and packs by `packing_strategy`, "
            f"which is {args.packing_strategy!r}. Set `packing=True`, and `packing_strategy` to the one that you mean."
        )
    for name, values in CHOICES.items():
        check_choice(name, getattr(args, name), values)
    if args.peak_tflops is not None and not args.peak_tflops > 0:  # NaN is refused, too
        raise ValueError(
            f"`peak_tflops={args.peak_tflops}` was given. It is the divisor of `mfu`, the share of the peak that "
            "training reaches. Set it to the dense TFLOP/s of one device (H100 in bfloat16: 989), or leave it unset."
        )
    _check_tokens_per_rank(args)
    if args.packing or args.padding_free:
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "pad_to_multiple_of",
            "pad_documents_to_multiple_of",
        ):
            if getattr(args, name) is not None:
                check_count(name, getattr(args, name))
        # `padding_free` without `packing` does not limit the tokens of a pack, so it does not need `max_length`
        keeps_unpacked_steps = STRATEGIES[args.packing_strategy].keeps_unpacked_steps
        is_padding_free = may_lack_max_length and keeps_unpacked_steps
        packs_by_length = args.packing and not is_padding_free
        needs_max_length = packs_by_length or args.pad_documents_to_multiple_of is not None
        if needs_max_length or args.max_length is not None:
            check_max_length(args.max_length, args.per_device_train_batch_size)
        check_overlong("packing_strategy", args.packing_strategy, args.overlong)
    features_of(args)  # raises ValueError if the code of a feature is missing: features are folders that can be deleted
    refuse_conflicts(RunSettings(args=args))  # as far as they do not depend on model, dataset and engine


def _check_tokens_per_rank(args: SFTConfig) -> None:
    """Refuse values of `tokens_per_rank` and `exchange_speeds` that cannot be used.

    The planner checks that there are enough ranks for `max_length` tokens.
    """
    tokens = args.tokens_per_rank
    speeds = args.exchange_speeds
    if tokens is None:
        return
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise ValueError(
            f"`tokens_per_rank={tokens!r}` was given. It is a number of tokens, the most that a rank holds of a pack, "
            "so it must be a whole number. Set `tokens_per_rank` to what the memory of one device allows, such as "
            "16384."
        )
    check_count("tokens_per_rank", tokens)
    if speeds is None:
        return
    # Anything but a dictionary has no speeds, so it is refused as a name without a valid number
    named_speeds = speeds.items() if isinstance(speeds, dict) else [(speeds, 0.0)]
    for name, speed in named_speeds:
        is_positive_number = type(speed) in (int, float) and 0 < speed < inf
        if name not in SPEED_NAMES or not is_positive_number:
            raise ValueError(
                f"`exchange_speeds={speeds!r}` was given. Degrees are chosen by {', '.join(SPEED_NAMES)}, each a "
                f"number above 0, and {name!r} is not one of them. Set a dictionary of these, or leave it unset."
            )
