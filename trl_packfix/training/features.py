"""What goes with what: a record per feature, with what it cannot be combined with, why, and what to set instead.

`refuse_conflicts` raises the message of two choices that cannot be combined. It is asked when the config is made, when
the trainer is constructed, when the engine is known, and at the first step. docs/combinations.md is made of the same
records (`tools/combinations.py`). A feature with settings of its own begins with its record here.
"""

from dataclasses import dataclass, field

from . import choices as of
from .choices import Condition, RunSettings


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A feature, and what it cannot be combined with. A pair of features is in the record of one of them."""

    choice: Condition
    conflicts: dict[Condition, str] = field(default_factory=dict)  # and why not
    remedies: dict[Condition, str] = field(
        default_factory=dict
    )  # where there is more to say than to undo one of the two
    page: str = ""  # in docs/, where it is described

    def remedy(self, other: Condition) -> str:
        """What to set instead of this feature with `other`."""
        return self.remedies.get(other) or f"{_capital(other.undo)}, or {self.choice.undo}"

    def refuse_conflicts(self, setup: RunSettings) -> None:
        """Refuse what this feature cannot be combined with."""
        if (ours := self.choice.describe(setup)) is None:
            return
        for other, cause in self.conflicts.items():
            if (theirs := other.describe(setup)) is not None:
                message = f"{_capital(theirs)} was given with {ours}. {cause}. {self.remedy(other)}."
                raise ValueError(message)


def refuse_conflicts(setup: RunSettings) -> None:
    """Refuse two choices that cannot be combined."""
    for feature in FEATURES:
        feature.refuse_conflicts(setup)


def experimental_choices(setup: RunSettings) -> tuple[str, ...]:
    """Names of the choices that were given and that several GPUs have not run yet."""
    return tuple(choice.name.replace("`", "") for choice in EXPERIMENTAL if choice.describe(setup) is not None)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


# Several GPUs have not run these yet: help, report and docs/combinations.md say so
EXPERIMENTAL = (of.TOKENS_PER_RANK, of.TENSOR_PARALLELISM)

ON_SEVERAL_DEVICES = "The boundaries of a pack are on one device, and modules on other devices cannot read them"
_STREAM_SO_FAR = "a stream is known only as far as it has been read"
_LOSS_OF_TRL = "There the loss is TRL's, which counts tokens of all rows together"
_NO_PLACE = "What a row has belongs to its document, and where documents are in a batch of this collator is not known"
_BEFORE_A_ROW = "Virtual tokens are put once before a row, so the documents of a pack would share them or lose them"
_SHARED_ROWS = {
    of.LOSS_FUNCTION: "It gets one label per row, and a shared row is a target of several documents, so it would count "
    "once and not once for each",
    of.OWN_LOSS: "A shared token is one row for all its documents, and another loss would count it once",
    of.NOISE: "The amplitude of its noise is set by the length of the document, and a shared token has one row for "
    "documents of several lengths",
    of.CONSTANT_SHAPES: "It gives all packs the same shapes, and the number of keys of a pack with shared tokens "
    "depends on its documents",
    of.PARTS_OF_HYBRIDS: "The rows that a convolution reads before a shared piece may lie on any rank, and ranks "
    "exchange only the last ones of each part",
}
_WEIGHTS = {
    of.LOSS_FUNCTION: "It gets a whole batch and returns one number, in which documents have no weight",
    of.OWN_MEANS: "Each rank would take the mean over its own documents, so those on a rank with few would count more",
    of.OWN_LOSS: "Another loss has no weights of documents, so the setting would be ignored",
    of.UNPACKED_IMAGES: _LOSS_OF_TRL,
    of.UNPACKED_SEQUENCES: _LOSS_OF_TRL,
}
_TURNS_UNKNOWN = "It makes one text of each row, in which turns are not known"
_NO_TURNS = "It chooses among the assistant's turns, and without either of the two every token is trained"
_OWN_ROWS = "Documents share rows of a pack, and an unpacked document has a row of its own"

FEATURES = (
    Feature(
        choice=of.NO_PACKING,
        conflicts={
            of.OVERLONG: "It is a setting of packing; unpacked training truncates at `max_length`",
            of.CONSTANT_SHAPES: "It pads packs, and unpacked rows have none of their boundaries",
            of.IN_PACKS: _OWN_ROWS,
            of.IN_FAMILIES: _OWN_ROWS,
            of.TOKENS_PER_RANK: "It shares packs between ranks, and without packing there are none",
        },
        page="packing.md",
    ),
    Feature(
        choice=of.PACKING,
        conflicts={
            of.COLLATOR: "A pack needs a collator that keeps document boundaries, and any other would lose them",
            of.OWN_SAMPLER: "Packs are planned from the lengths of all documents and no sampler is called, so the "
            "method would be ignored",
            of.OWN_LOADER: "Packs are planned for the loader of this trainer, and other batches may have no "
            "boundaries, or leave documents out",
            of.SAMPLING: "Packs are made of documents of all lengths and balanced over ranks by `balance`, so batches "
            "by length have no meaning",
            of.DIVIDED_MODEL: "Every rank reads its own packs, and one pack of shape (1, T) cannot be divided",
            of.OWN_MEANS: "Ranks hold different numbers of trained tokens, so the mean of their means is not the loss "
            "per token (the difference was 0.7 % in a small run)",
            of.ENCODER_DECODER: "The encoder of an encoder-decoder reads a whole document at once, and this trainer "
            "trains causal language models",
            of.VIRTUAL_TOKENS: _BEFORE_A_ROW,
            of.VIDEO_OR_SOUND: "Video and audio belong to rows, and a pack has one row for many documents",
            of.CONTEXT_PARALLELISM: "It replaces attention by its own, which divides a row between ranks as if it were "
            "one document, so documents of a pack would attend across their boundaries",
            of.DEEPSPEED_TENSORS: "Its engine divides the layers only when training starts, and gives the ranks of a "
            "group numbers of its own, so which ranks must read the same packs is not known when they are planned",
            of.PIPELINE: "A rank then has some of the layers only and no rank can run a whole forward, which the loss "
            "and the test of isolation need",
            of.MEGATRON: "It splits a document over ranks and reads data with its own loader",
            of.SEVERAL_DEVICES: ON_SEVERAL_DEVICES,
            of.OFFLOADING_ON_CPU: "It moves activations from an accelerator to the memory of the CPU, where they are "
            "already, and TRL's code for it fails there",
        },
        remedies={of.OFFLOADING_ON_CPU: "Leave `activation_offloading` unset: it fails without packing, too"},
        page="packing.md",
    ),
    Feature(choice=of.PACKED_EVALUATION, conflicts={of.VIRTUAL_TOKENS: _BEFORE_A_ROW}, page="packing.md"),
    Feature(
        choice=of.TOKENS_PER_RANK,
        conflicts={
            of.LOSS_FUNCTION: "Such a loss shifts labels itself, and the label of the last token of a part lies on the "
            "next rank, so it would be lost",
            of.OWN_LOSS: "On a part of a pack, labels must be shifted before the cut and counted once per group, which "
            "another loss does not do",
            of.DROPPED_WEIGHTS: "The ranks of a group compute different heads and draw the same random numbers, so the "
            "heads would drop the same weights",
            of.OWN_ATTENTION: "That keeps the attention of the model, which does not exchange tokens between the ranks "
            "of a group",
            of.NOT_BY_LENGTHS: "Packs that several ranks share are planned by the tokens of these ranks together, and "
            "this strategy plans by `max_length` or by the batch size",
            of.BATCH_SIZE: "A pack has at most `tokens_per_rank` tokens on each of its ranks, so the batch size would "
            "have no effect",
            of.TENSOR_PARALLELISM: "The neighbouring ranks that divide the heads of a layer must hold the same tokens, "
            "and neighbouring ranks that share a pack hold different ones",
        },
        page="long_context.md",
    ),
    Feature(choice=of.IN_PACKS, conflicts=_SHARED_ROWS, page="prefixes.md"),
    Feature(
        choice=of.IN_FAMILIES,
        conflicts=_SHARED_ROWS
        | {
            of.CUT_BLOCKS: "It cuts all documents where a block of `max_length` tokens ends, in the order of the "
            "table, so documents that begin alike cannot be brought together",
        },
        remedies={of.CUT_BLOCKS: 'Set `share_prefixes="pack"`, or another `packing_strategy`'},
        page="prefixes.md",
    ),
    Feature(
        choice=of.STREAM,
        conflicts={
            of.NOT_OF_STREAMS: f"It plans with all documents of an epoch, and {_STREAM_SO_FAR}",
            of.IN_FAMILIES: f"Documents that begin alike are found by sorting all of them, and {_STREAM_SO_FAR}",
            of.NO_END: "A stream does not say how long it is, so the number of steps and the learning-rate schedule "
            "cannot be computed",
            of.DROP_LAST: "The last packs of a pass are split between the micro-batches of one more step, so nothing "
            "is incomplete and there is nothing to drop",
        },
        remedies={of.IN_FAMILIES: 'Set `share_prefixes="pack"`, or load the dataset without streaming'},
        page="data.md",
    ),
    Feature(
        choice=of.NO_TRUNCATION,
        conflicts={of.KEEP_END: "There nothing is truncated, so the mode would be ignored"},
    ),
    Feature(
        choice=of.PACKED_IMAGES,
        conflicts={
            of.CONSTANT_SHAPES: "It gives all packs the same shapes, and the pixels of a pack depend on its images",
            of.CUT_BLOCKS: "It cuts all documents where a block of `max_length` tokens ends, also inside an image",
            of.NO_PROCESSOR: "Images are made into tokens by a processor of transformers; a tokenizer makes no pixels, "
            "so they would be ignored",
        },
        page="vision.md",
    ),
    Feature(
        choice=of.PER_TURN,
        conflicts={
            of.ASSISTANT_ONLY: "Each sample trains one assistant turn already, and for `assistant_only_loss` TRL may "
            "replace the chat template by one that keeps earlier thinking, so that the history would not be what the "
            "model sees",
            of.HISTORY_TRAINED: "It trains the history, too, and that of a conversation of n turns is in up to n "
            "samples, so its first turns would be trained n times",
            of.UNPREPARED: "Conversations are split when the dataset is prepared, so `per_turn` would be ignored",
            of.FORMATTING: _TURNS_UNKNOWN,
            of.UNPACKED_IMAGES: "There TRL's loader makes one sample of each row, and as rows of their own the turns "
            "would repeat the images of their history",
        },
        page="per_turn.md",
    ),
    Feature(choice=of.ASSISTANT_ONLY, conflicts={of.FORMATTING: _TURNS_UNKNOWN}, page="assistant_turns.md"),
    Feature(choice=of.LAST_TURN, conflicts={of.EVERY_TURN: _NO_TURNS}),
    Feature(choice=of.NO_EMPTY_THINKING, conflicts={of.EVERY_TURN: _NO_TURNS}),
    Feature(choice=of.SPEEDS, conflicts={of.NO_PARTS: "No pack is shared, so nothing is exchanged"}),
    Feature(choice=of.SMOOTHING, page="packing.md"),
    Feature(choice=of.NOISE, page="packing.md"),
    Feature(choice=of.CONSTANT_SHAPES, page="gpus.md"),
    Feature(choice=of.BY_DOCUMENT, conflicts=_WEIGHTS, page="data.md"),
    Feature(choice=of.WEIGHT_COLUMN, conflicts=_WEIGHTS | {of.COLLATOR: _NO_PLACE}, page="data.md"),
    Feature(
        choice=of.SOURCE_COLUMN,
        conflicts={
            of.COLLATOR: _NO_PLACE,
            of.UNPACKED_IMAGES: _LOSS_OF_TRL,
            of.UNPACKED_SEQUENCES: _LOSS_OF_TRL,
            of.OWN_LOSS: "Another loss is not summed by source, so the setting would be ignored",
        },
        page="data.md",
    ),
    Feature(
        choice=of.LIGER,
        conflicts={
            of.LIGER_LOSS: "It replaces the forward of the model or the cross entropy of torch, and this trainer "
            "weights the loss of each token, which that loss does not return"
        },
    ),
    Feature(choice=of.TENSOR_PARALLELISM, page="model_parallelism.md"),
    Feature(
        choice=of.TENSORS_AND_SHARDS,
        conflicts={
            of.ADAPTERS: "The adapter is made in the size of what this rank stores of a layer, and FSDP gathers the "
            "layer before it runs, so the two do not fit",
        },
    ),
    Feature(
        choice=of.LOSS_FUNCTION,
        conflicts={
            of.CHUNKED: "That loss, the default of TRL below 1.15, computes no logits, which the function needs"
        },
        page="user_code.md",
    ),
)
