"""Which choices of a user cannot be combined, why not, and what to set instead: one record for each choice.

`choices.py` defines and explains the conditions that a run may meet. A `ChoiceConflicts` names one of them, the choice,
and the conditions that exclude it. `refuse_conflicts` raises an error if a run has made a choice and meets a condition
that excludes it. It is called when the config is constructed, when the trainer is constructed, when the engine is
known, and at the first step; each time more is known of the run. docs/combinations.md is written from the same records
(`tools/combinations.py`).
"""

from dataclasses import dataclass, field

from .choices import (
    ADAPTERS,
    ASSISTANT_ONLY,
    ATTENTION_OF_MODEL,
    BATCH_SIZE,
    CHUNKED,
    COLLATOR,
    CONSTANT_SHAPES,
    CONTEXT_PARALLELISM,
    CUT_BLOCKS,
    DEEPSPEED_TENSORS,
    DIVIDED_BATCHES,
    DOCUMENT_WEIGHTING,
    DROP_LAST,
    DROPPED_WEIGHTS,
    ENCODER_DECODER,
    EVERY_TURN,
    EXCHANGE_SPEEDS,
    FORMATTING,
    HISTORY_TRAINED,
    KEEP_END,
    LAST_TURN,
    LIGER,
    LIGER_LOSS,
    LOSS_FUNCTION,
    MEAN_PER_RANK,
    MEGATRON,
    NO_EMPTY_THINKING,
    NO_MAX_STEPS,
    NO_PACKING,
    NO_PROCESSOR,
    NO_TOKENS_PER_RANK,
    NO_TRUNCATION,
    NOISE,
    NOT_OF_STREAMS,
    NOT_PLANNED_BY_TOKENS,
    OFFLOADING_ON_CPU,
    OVERLONG,
    PACKED_EVALUATION,
    PACKED_IMAGES,
    PACKING,
    PER_TURN,
    PIPELINE,
    SAMPLING,
    SEVERAL_DEVICES,
    SHARED_IN_FAMILIES,
    SHARED_IN_PACKS,
    SMOOTHING,
    SOURCE_COLUMN,
    STREAM,
    TENSOR_PARALLELISM,
    TENSORS_AND_SHARDS,
    TOKENS_PER_RANK,
    TOKENS_PER_RANK_OF_HYBRIDS,
    UNPACKED_IMAGES,
    UNPACKED_SEQUENCES,
    UNPREPARED,
    USER_LOADER,
    USER_LOSS,
    USER_SAMPLER,
    VIDEO_OR_SOUND,
    VIRTUAL_TOKENS,
    WEIGHT_COLUMN,
    Condition,
    RunSettings,
)


@dataclass(frozen=True, kw_only=True)
class ChoiceConflicts:
    """A choice of the user, and the conditions that exclude it.

    If two choices exclude each other, only one of their records names the other. A record without `conflicts` refuses
    nothing: it only gives the page of a choice, for docs/combinations.md.

    Attributes:
        choice: the condition that is met if the user has made the choice.
        conflicts: the conditions that exclude the choice, each with the cause. The cause is a sentence that follows
            "CONFLICT was given with CHOICE." in the message, so "it" is the conflict.
        remedies: what to set instead, by condition, where it is not enough to undo one of the two choices.
        page: the page in docs/ that describes the choice; "" without a page.
    """

    choice: Condition
    conflicts: dict[Condition, str] = field(default_factory=dict)
    remedies: dict[Condition, str] = field(default_factory=dict)
    page: str = ""

    def remedy(self, conflict: Condition) -> str:
        """Return what to set instead of this choice together with `conflict`, as a sentence without its full stop."""
        return self.remedies.get(conflict) or f"{_capitalize(conflict.undo)}, or {self.choice.undo}"

    def refuse_conflicts(self, settings: RunSettings) -> None:
        """Raise ValueError if a run has made this choice and meets a condition that excludes it."""
        choice_text = self.choice.describe(settings)  # how a message names the choice; None if it was not made
        if choice_text is None:
            return
        for conflict, cause in self.conflicts.items():
            conflict_text = conflict.describe(settings)
            if conflict_text is not None:
                remedy = self.remedy(conflict)
                message = f"{_capitalize(conflict_text)} was given with {choice_text}. {cause}. {remedy}."
                raise ValueError(message)


def refuse_conflicts(settings: RunSettings) -> None:
    """Raise ValueError if a run has two choices that cannot be combined."""
    for record in CONFLICTS:
        record.refuse_conflicts(settings)


def experimental_choices(settings: RunSettings) -> tuple[str, ...]:
    """Return the names of the experimental choices that a run has made."""
    used = [condition for condition in EXPERIMENTAL if condition.describe(settings) is not None]
    return tuple(condition.name.replace("`", "") for condition in used)


def _capitalize(text: str) -> str:
    """Return the text with a capital first letter. The other letters stay as they are."""
    return text[0].upper() + text[1:]


# Choices that have not run on several GPUs yet. The help, the report and docs/combinations.md say so.
EXPERIMENTAL = (TOKENS_PER_RANK, TENSOR_PARALLELISM)

ON_SEVERAL_DEVICES = "The boundaries of a pack are on one device, and modules on other devices cannot read them"
# Causes that several records below give. In the causes, a *row* is a row of the dataset or of a batch. Where documents
# share rows (`_SHARED_ROWS`), it is one token of a pack
_STREAM_SO_FAR = "a stream is known only as far as it has been read"
_LOSS_OF_TRL = "There the loss is TRL's, which counts tokens of all rows together"
_NO_PLACE = "What a row has belongs to its document, and where documents are in a batch of this collator is not known"
_BEFORE_A_ROW = "Virtual tokens are put once before a row, so the documents of a pack would share them or lose them"
_SHARED_ROWS = {
    LOSS_FUNCTION: "It gets one label per row, and a shared row is a target of several documents, so it would count "
    "once and not once for each",
    USER_LOSS: "A shared token is one row for all its documents, and another loss would count it once",
    NOISE: "The amplitude of its noise is set by the length of the document, and a shared token has one row for "
    "documents of several lengths",
    CONSTANT_SHAPES: "It gives all packs the same shapes, and the number of keys of a pack with shared tokens "
    "depends on its documents",
    TOKENS_PER_RANK_OF_HYBRIDS: "The rows that a convolution reads before a shared piece may lie on any rank, and "
    "ranks exchange only the last ones of each part",
}
_WEIGHTS = {
    LOSS_FUNCTION: "It gets a whole batch and returns one number, in which documents have no weight",
    MEAN_PER_RANK: "Each rank would take the mean over its own documents, so those on a rank with few would count more",
    USER_LOSS: "Another loss has no weights of documents, so the setting would be ignored",
    UNPACKED_IMAGES: _LOSS_OF_TRL,
    UNPACKED_SEQUENCES: _LOSS_OF_TRL,
}
_TURNS_UNKNOWN = "It makes one text of each row, in which turns are not known"
_NO_TURNS = "Turns are then not told from other text, so the setting would be ignored"
_OWN_ROWS = "Documents share rows of a pack, and an unpacked document has a row of its own"

CONFLICTS = (
    ChoiceConflicts(
        choice=NO_PACKING,
        conflicts={
            OVERLONG: "It is a setting of packing; unpacked training truncates at `max_length`",
            CONSTANT_SHAPES: "It pads packs, and unpacked rows have none of their boundaries",
            SHARED_IN_PACKS: _OWN_ROWS,
            SHARED_IN_FAMILIES: _OWN_ROWS,
            TOKENS_PER_RANK: "It shares packs between ranks, and without packing there are none",
        },
        page="packing.md",
    ),
    ChoiceConflicts(
        choice=PACKING,
        conflicts={
            COLLATOR: "A pack needs a collator that keeps document boundaries, and any other would lose them",
            USER_SAMPLER: "Packs are planned from the lengths of all documents and no sampler is called, so the "
            "method would be ignored",
            USER_LOADER: "Packs are planned for the loader of this trainer, and other batches may have no "
            "boundaries, or leave documents out",
            SAMPLING: "Packs are made of documents of all lengths and balanced over ranks by `balance`, so batches "
            "by length have no meaning",
            DIVIDED_BATCHES: "Every rank reads its own packs, and one pack of shape (1, T) cannot be divided",
            MEAN_PER_RANK: "Ranks hold different numbers of trained tokens, so the mean of their means is not the loss "
            "per token (the difference was 0.7 % in a small run)",
            ENCODER_DECODER: "The encoder of an encoder-decoder reads a whole document at once, and this trainer "
            "trains causal language models",
            VIRTUAL_TOKENS: _BEFORE_A_ROW,
            VIDEO_OR_SOUND: "Video and audio belong to rows, and a pack has one row for many documents",
            CONTEXT_PARALLELISM: "It replaces attention by its own, which divides a row between ranks as if it were "
            "one document, so documents of a pack would attend across their boundaries",
            DEEPSPEED_TENSORS: "Its engine divides the layers only when training starts, and gives the ranks of a "
            "group numbers of its own, so which ranks must read the same packs is not known when they are planned",
            PIPELINE: "A rank then has some of the layers only and no rank can run a whole forward, which the loss "
            "and the test of isolation need",
            MEGATRON: "It splits a document over ranks and reads data with its own loader",
            SEVERAL_DEVICES: ON_SEVERAL_DEVICES,
            OFFLOADING_ON_CPU: "It moves activations from an accelerator to the memory of the CPU, where they are "
            "already, and TRL's code for it fails there",
        },
        remedies={OFFLOADING_ON_CPU: "Leave `activation_offloading` unset: it fails without packing, too"},
        page="packing.md",
    ),
    ChoiceConflicts(choice=PACKED_EVALUATION, conflicts={VIRTUAL_TOKENS: _BEFORE_A_ROW}, page="packing.md"),
    ChoiceConflicts(
        choice=TOKENS_PER_RANK,
        conflicts={
            LOSS_FUNCTION: "Such a loss shifts labels itself, and the label of the last token of a part lies on the "
            "next rank, so it would be lost",
            USER_LOSS: "On a part of a pack, labels must be shifted before the cut and counted once per group, which "
            "another loss does not do",
            DROPPED_WEIGHTS: "The ranks of a group compute different heads and draw the same random numbers, so the "
            "heads would drop the same weights",
            ATTENTION_OF_MODEL: "That keeps the attention of the model, which does not exchange tokens between the "
            "ranks of a group",
            NOT_PLANNED_BY_TOKENS: "Packs that several ranks share are planned by the tokens of these ranks together, "
            "and this strategy plans by `max_length` or by the batch size",
            BATCH_SIZE: "A pack has at most `tokens_per_rank` tokens on each of its ranks, so the batch size would "
            "have no effect",
            TENSOR_PARALLELISM: "The neighbouring ranks that divide the heads of a layer must hold the same tokens, "
            "and neighbouring ranks that share a pack hold different ones",
        },
        page="long_context.md",
    ),
    ChoiceConflicts(choice=SHARED_IN_PACKS, conflicts=_SHARED_ROWS, page="prefixes.md"),
    ChoiceConflicts(
        choice=SHARED_IN_FAMILIES,
        conflicts=_SHARED_ROWS
        | {
            CUT_BLOCKS: "It cuts all documents where a block of `max_length` tokens ends, in the order of the "
            "table, so documents that begin alike cannot be brought together",
        },
        remedies={CUT_BLOCKS: 'Set `share_prefixes="pack"`, or another `packing_strategy`'},
        page="prefixes.md",
    ),
    ChoiceConflicts(
        choice=STREAM,
        conflicts={
            NOT_OF_STREAMS: f"It plans with all documents of an epoch, and {_STREAM_SO_FAR}",
            SHARED_IN_FAMILIES: f"Documents that begin alike are found by sorting all of them, and {_STREAM_SO_FAR}",
            NO_MAX_STEPS: "A stream does not say how long it is, so the number of steps and the learning-rate schedule "
            "cannot be computed",
            DROP_LAST: "The last packs of a pass are split between the micro-batches of one more step, so nothing "
            "is incomplete and there is nothing to drop",
        },
        remedies={SHARED_IN_FAMILIES: 'Set `share_prefixes="pack"`, or load the dataset without streaming'},
        page="data.md",
    ),
    ChoiceConflicts(
        choice=NO_TRUNCATION,
        conflicts={KEEP_END: "There nothing is truncated, so the mode would be ignored"},
    ),
    ChoiceConflicts(
        choice=PACKED_IMAGES,
        conflicts={
            CONSTANT_SHAPES: "It gives all packs the same shapes, and the pixels of a pack depend on its images",
            CUT_BLOCKS: "It cuts all documents where a block of `max_length` tokens ends, also inside an image",
            NO_PROCESSOR: "Images are made into tokens by a processor of transformers; a tokenizer makes no pixels, "
            "so they would be ignored",
        },
        page="vision.md",
    ),
    ChoiceConflicts(
        choice=PER_TURN,
        conflicts={
            ASSISTANT_ONLY: "Each sample trains one assistant turn already, and for `assistant_only_loss` TRL may "
            "replace the chat template by one that keeps earlier thinking, so that the history would not be what the "
            "model sees",
            HISTORY_TRAINED: "It trains the history, too, and that of a conversation of n turns is in up to n "
            "samples, so its first turns would be trained n times",
            UNPREPARED: "Conversations are split when the dataset is prepared, so `per_turn` would be ignored",
            FORMATTING: _TURNS_UNKNOWN,
            UNPACKED_IMAGES: "There TRL's loader makes one sample of each row, and as rows of their own the turns "
            "would repeat the images of their history",
        },
        page="per_turn.md",
    ),
    ChoiceConflicts(choice=ASSISTANT_ONLY, conflicts={FORMATTING: _TURNS_UNKNOWN}, page="assistant_turns.md"),
    ChoiceConflicts(choice=LAST_TURN, conflicts={EVERY_TURN: _NO_TURNS}),
    ChoiceConflicts(choice=NO_EMPTY_THINKING, conflicts={EVERY_TURN: _NO_TURNS}),
    ChoiceConflicts(
        choice=EXCHANGE_SPEEDS, conflicts={NO_TOKENS_PER_RANK: "No pack is shared, so nothing is exchanged"}
    ),
    ChoiceConflicts(choice=SMOOTHING, page="packing.md"),
    ChoiceConflicts(choice=NOISE, page="packing.md"),
    ChoiceConflicts(choice=CONSTANT_SHAPES, page="gpus.md"),
    ChoiceConflicts(choice=DOCUMENT_WEIGHTING, conflicts=_WEIGHTS, page="data.md"),
    ChoiceConflicts(choice=WEIGHT_COLUMN, conflicts=_WEIGHTS | {COLLATOR: _NO_PLACE}, page="data.md"),
    ChoiceConflicts(
        choice=SOURCE_COLUMN,
        conflicts={
            COLLATOR: _NO_PLACE,
            UNPACKED_IMAGES: _LOSS_OF_TRL,
            UNPACKED_SEQUENCES: _LOSS_OF_TRL,
            USER_LOSS: "Another loss is not summed by source, so the setting would be ignored",
        },
        page="data.md",
    ),
    ChoiceConflicts(
        choice=LIGER,
        conflicts={
            LIGER_LOSS: "It replaces the forward of the model or the cross entropy of torch, and this trainer "
            "weights the loss of each token, which that loss does not return"
        },
    ),
    ChoiceConflicts(choice=TENSOR_PARALLELISM, page="model_parallelism.md"),
    ChoiceConflicts(
        choice=TENSORS_AND_SHARDS,
        conflicts={
            ADAPTERS: "The adapter is made in the size of what this rank stores of a layer, and FSDP gathers the "
            "layer before it runs, so the two do not fit",
        },
    ),
    ChoiceConflicts(
        choice=LOSS_FUNCTION,
        conflicts={CHUNKED: "That loss, the default of TRL below 1.15, computes no logits, which the function needs"},
        page="user_code.md",
    ),
)
