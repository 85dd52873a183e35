"""Keep in one module all code for certain versions of other libraries, and all changes of their objects.

Each function says what it does and why, with a link where there is one, and when it can be removed. Other modules call
these functions without knowing versions, and change no object of another library (`tests/test_fence.py`). One
workaround is elsewhere: for Python's fork, in `data/threads.py`.

A *pack* below is several documents in one row, with their boundaries. The *leak probe* tests a model before training:
documents of a pack must not change each other. A *repaired module* has failed this test, and runs on one document per
row. The leak probe imports this module and needs torch and transformers only. So every other library is imported by the
function that uses it.

For a review of all changes at once (a reader of single functions can skip it): who undoes each change, and when.

    ReplacedValues               the last `leave`: for functions of mixers, when no packed forward that calls them is
                                 running any more, of any model and in any thread
    change_checkpoint_functions  the guard of packed forwards (`attention/forwards.py`), when it is removed
    set_lora_cast                the hooks of the packed model, when training or evaluation ends
    set_config_attention         the packed model, when training or evaluation ends
    saves_varlen_attention       the end of the last construction of a trainer
    callbacks_left_out,
    hooks_left_out, not_logged,
    summed_once, train_mode_kept,
    whole_model_saved            the end of the context, also after an error
    replace_router_logits        transformers, at the end of the forward
    undo_compilation             nobody: it undoes itself what this package has done, when training ends
    call_first                   `remove()` of the object that `pack_forward` has returned

These changes stay, because:

    run_hooks_inside_adapters    adapters of peft 0.21 and later behave in the same way
    replace_forward,
    add_capped_head              TRL also leaves its own fused head on a model
    name_num_experts             TRL's fused head reads the config in every forward
    set_pad_token_by_text        the token stays the same, and TRL sets it in the same way
    name_wrapped_layers,
    keep_from_preparing,
    forget_evaluation            the changed object is not used after the training
    declare_whole_sizes          peft should have set these sizes itself
"""

import importlib
import importlib.metadata
import inspect
import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

if TYPE_CHECKING:
    import trl
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from datasets import IterableDataset

TRL_FLOOR = "1.9.0"  # the oldest version of TRL that is supported
SUMMED_BY_RANKS = "replicated_with_grad_allreduce"  # a style of transformers' plans of tensor parallelism
VARLEN_KERNEL = "_flash_attention_forward"  # name of the operator in `torch.ops.aten`
# The attribute in which torch's `CheckpointWrapper`, which FSDP puts around modules, holds its checkpoint function
WRAPPER_CHECKPOINT = "checkpoint_fn"
# The attributes that hold a checkpoint function: of layers of transformers, and of this wrapper
CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", WRAPPER_CHECKPOINT)
# The values of accelerate's `DistributedType` with which it wraps a model in DistributedDataParallel
DDP = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU")


def require_trl(installed: str | None = None) -> None:
    """Raise ImportError for a version of TRL that the trainer does not support.

    TRL builds a `labels` column in `_prepare_dataset` from 1.9 on, and the trainer depends on it. Can be removed when
    the version in `pyproject.toml` is enough (an environment can be changed after installation).
    """
    installed = installed or importlib.metadata.version("trl")
    if Version(installed) < Version(TRL_FLOOR):
        raise ImportError(
            f"trl {installed} is installed. trl_packfix builds on the dataset preparation of trl {TRL_FLOOR}, which "
            f"earlier versions do not have. Run `pip install 'trl>={TRL_FLOOR}'`."
        )


def loads_tokenizer_of_revision(installed: str | None = None) -> bool:
    """Return whether TRL's trainer loads the tokenizer or processor of the model's revision, and not of the newest.

    Can be removed with support for TRL below 1.13.
    """
    return Version(installed or importlib.metadata.version("trl")) >= Version("1.13.0")


def scores_tokens(installed: str | None = None) -> bool:
    """Return whether TRL's fused LM head returns a log-probability per token on every device.

    Before TRL 1.15 there is no such head. The head of 1.15 needs Triton, which torch for CPUs does not have. Where the
    result is False, the trainer adds a head of this package (`training/lm_head.py`). Can be removed with support for
    TRL below 1.16.
    https://github.com/huggingface/trl/releases/tag/v1.16.0
    """
    return Version(installed or importlib.metadata.version("trl")) >= Version("1.16.0")


def router_loss_coefficient(trainer: object, args: "trl.SFTConfig") -> float | None:
    """Return the weight of the router loss.

    From TRL 1.13 on the trainer has it as an attribute, and before only the config has it. Can be removed with support
    for TRL below 1.13.
    """
    return getattr(trainer, "router_aux_loss_coef", args.router_aux_loss_coef)


def drops_router_logits(model: nn.Module) -> bool:
    """Return whether the layers of a model have routers whose logits its forward does not return.

    Below transformers 5.18 a forward of DBRX, or of Granite's mixtures, does not record the logits of their routers.
    TRL's router loss then ends in an AttributeError. Can be removed with support for transformers below 5.18.
    https://github.com/huggingface/transformers/releases/tag/v5.18.0
    """
    if Version(transformers.__version__) >= Version("5.18.0.dev0"):
        return False
    # What a model records in its forward, by name. A model that records nothing returns router logits in another way.
    records = [part._can_record_outputs or {} for part in model.modules() if isinstance(part, PreTrainedModel)]
    has_logits = any("router_logits" in record for record in records)
    has_router = any(type(module).__name__.endswith("Router") for module in model.modules())
    return has_router and any(records) and not has_logits


def find_kernel_package(function: Callable[..., Any]) -> tuple[str, bool] | None:
    """Return the package with a kernel that transformers calls in place of this function, and whether it calls it now.

    For a function without such a kernel the result is None. From transformers 5.17 on, the wrapper around the function
    holds both values; `is_new_implementation` is whether the kernel was found. Before, the package is only in the
    arguments of its decorator, which are read from the source. Reading the source can be removed with support for
    transformers below 5.17.
    https://github.com/huggingface/transformers/blob/v5.16.0/src/transformers/integrations/hub_kernels.py
    """
    if not inspect.isfunction(function):
        return None
    wrapper = inspect.getclosurevars(function).nonlocals
    if "is_new_implementation" not in wrapper:
        return None
    if "package" in wrapper:
        return wrapper["package"], wrapper["is_new_implementation"]
    decorator = re.match(r'@use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"', inspect.getsource(function))
    return None if decorator is None else (decorator[1], wrapper["is_new_implementation"])


def train_every_token(collate: Any) -> Any:
    """Return a copy of TRL's vision collator for rows in which every token is trained.

    With one of two fields the collator trains only completions or only answers. The collator of TRL 1.9 has no field
    for answers, `assistant_only_loss`. Can be removed with support for TRL 1.9.
    """
    names = {field.name for field in fields(collate)} & {"completion_only_loss", "assistant_only_loss"}
    return replace(collate, **dict.fromkeys(names, False))


def set_pad_token_by_text(tokenizer: Any) -> None:
    """Set the padding token of a tokenizer to its own text, which changes the hash of the tokenizer.

    TRL sets the token in this way, too, except that TRL 1.9 does not for rows with images. `datasets` finds the lengths
    that `trl-packfix prepare` has cached only if the hash is equal. Can be removed with support for TRL 1.9.
    """
    text = tokenizer.pad_token
    if text is not None:
        tokenizer.pad_token = text


def can_train_answers_only(collate: Any) -> bool:
    """Return whether TRL's vision collator can train only the answers of rows with images.

    The collator of TRL 1.9 has no fields for it, and below 5.18 transformers does not find turns behind images. Can be
    removed with support for TRL 1.9 and for transformers below 5.18.
    https://github.com/huggingface/transformers/releases/tag/v5.18.0
    """
    names = {field.name for field in fields(collate)}
    finds_turns = Version(transformers.__version__) >= Version("5.18.0.dev0")
    return {"assistant_only_loss", "chat_template"} <= names and finds_turns


def sanitises_control_tokens() -> bool:
    """Return whether `chat_template_kwargs={"sanitize_control_tokens": True}` keeps control tokens in texts as text.

    transformers 5.16 passes this argument to the template, which ignores it. Can be removed with support for versions
    whose `apply_chat_template` has no such argument.
    """
    return "sanitize_control_tokens" in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters


def end_training(trainer: "transformers.Trainer") -> None:
    """Finish the trackers and destroy the process group, at the very end of a script.

    transformers has `Trainer.end` for this, but not in 5.16. Can be removed with support for transformers 5.16.
    """
    if hasattr(trainer, "end"):
        trainer.end()
    else:
        trainer.accelerator.end_training()


@contextmanager
def main_process_first() -> Iterator[None]:
    """Make the main process run this context first, then the main process of each node, then the other processes.

    So each cache is written once. Later versions of TRL than 1.9 have this context as `global_then_local_main_first`.
    Can be removed with support for TRL 1.9.
    """
    from accelerate import PartialState

    state = PartialState()
    with state.main_process_first(), state.local_main_process_first():
        yield


def run_hooks_inside_adapters(model: nn.Module) -> None:
    """Make PEFT's wrapper run the hooks of the model inside it, as peft does from 0.21 on.

    peft 0.20 calls only `forward` of the inner model. So no hook on that model runs: not the hooks of this package,
    which read the boundaries of a pack, and not the hooks of DeepSpeed, which gather parameters. Adapters with a
    `forward` of their own (AdaLoRA) do not change. Can be removed with support for peft below 0.21.
    """
    peft = sys.modules.get("peft")  # imported by whoever made the adapters
    if peft is None or Version(peft.__version__) >= Version("0.21"):
        return
    from peft.tuners.tuners_utils import BaseTuner

    def call_with_hooks(adapters: BaseTuner, *args: Any, **kwargs: Any) -> Any:
        return adapters.model(*args, **kwargs)

    adapters: Any = getattr(model, "base_model", None)
    if getattr(type(adapters), "forward", None) is BaseTuner.forward:
        adapters.forward = MethodType(call_with_hooks, adapters)


def nested_rope_keys(config: PreTrainedConfig, rope: dict[str, Any]) -> list[str]:
    """Return the layer types for which a config has rotary parameters of their own; [] if all layers share parameters.

    From transformers 5.20 on, configs have a method for this. Can be removed with support for transformers below 5.20.

    Args:
        rope: `config.rope_parameters`, by layer type if layers have parameters of their own.
    """
    if hasattr(config, "nested_rope_parameter_keys"):
        return config.nested_rope_parameter_keys(rope)
    return [name for name, value in rope.items() if isinstance(value, dict)]


def recorded_router_logits() -> list[torch.Tensor]:
    """Return the list of router logits that transformers has recorded in the running forward; [] if it records none.

    Its entries become a part of the output when the forward ends, so the caller may replace them. Can be removed when
    transformers has a public way to do so.
    """
    from transformers.utils.output_capturing import _active_collector

    return (_active_collector.get() or {}).get("router_logits", [])


def replace_router_logits(first: int, logits: list[torch.Tensor]) -> None:
    """Replace the router logits that transformers has recorded in the running forward, from index `first` on.

    A repaired module runs its router on several batches of documents, and each call is recorded. The output of the
    model must have the logits of the pack instead. The record is dropped at the end of the forward. Can be removed when
    transformers has a public way for it.
    """
    recorded_router_logits()[first:] = logits


def gather_lm_head_with_model(model: PreTrainedModel) -> None:
    """Tell DeepSpeed ZeRO-3 that TRL's fused loss reads the parameters of the LM head without calling the head.

    DeepSpeed finds this out itself at the first forward with the fused loss, but not if an earlier forward has called
    the head, and the forwards of the leak probe do. Two parts of the run then gather the head at the same time, and
    version 0.19 stops with "Cannot partition a param in flight". It stays registered. Can be removed when TRL's
    `maybe_gather_lm_head_ctx` waits for such parameters.
    https://deepspeed.readthedocs.io/en/latest/zero3.html#registering-external-parameters
    """
    head = model.get_output_embeddings()
    if head is None or not is_deepspeed_zero3_enabled():
        return
    import deepspeed

    for parameter in head.parameters(recurse=False):
        deepspeed.zero.register_external_parameter(model, parameter)


MAX_GRAPHS = 64  # the most graphs that torch may compile for the layers of a model; torch's own limit is 8
# torch's name for the place from which a compiled layer reads the length of the longest document of the running pack
LONGEST_DOCUMENT = r".*\.packed_forwards\[\d+\]\.max_length_[qk]$"


@contextmanager
def compiles_layers_of_packs(is_used: bool) -> Iterator[None]:
    """Make torch compile layers that read the boundaries of packs, within this context.

    It changes four settings of torch, if `is_used`.

    1. Checkpointed layers read the boundaries from a global object while a forward runs (`PackedForward`), and store
       there what they have derived from them. This is a side effect, and torch silently compiles no checkpointed layer
       with side effects. `skip_fwd_side_effects_in_bwd_under_checkpoint` declares that the effects need not happen
       again when a layer is recomputed. Can be removed when this is torch's default.
       https://github.com/pytorch/pytorch/pull/165775
    2. With shared prefixes layers also read the length of the longest document from this object. torch takes a number
       that it reads from a global variable for a constant, and would compile again for each pack, until it gives up.
       `dynamic_sources` lists numbers that are not constants. The user's list stays in it.
       https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html
    3. torch splits graphs where DDP exchanges gradients, and refuses graphs that have checkpoints. The graph of a layer
       is small enough, and DDP exchanges gradients between layers. So `optimize_ddp` is off.
    4. torch limits the number of graphs per function. Layers are compiled through one method of `Module`, so all kinds
       of layers share one limit, in training and in evaluation. So `recompile_limit` is raised.
    """
    if not is_used:
        yield
        return
    sources = ",".join(filter(None, (torch.compiler.config.dynamic_sources, LONGEST_DOCUMENT)))
    flag = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    skips = torch._dynamo.config.patch({flag: True}) if hasattr(torch._dynamo.config, flag) else nullcontext()
    dynamic_numbers = torch.compiler.config.patch(dynamic_sources=sources)  # type: ignore[attr-defined]
    limits = torch._dynamo.config.patch(optimize_ddp=False, recompile_limit=MAX_GRAPHS)
    with dynamic_numbers, skips, limits:
        yield


def look_up_backend(backend: str | Callable[..., Any], mode: str | None) -> Callable[..., Callable[..., Any]]:
    """Return the function with which torch compiles graphs for a backend and a mode of `torch.compile`.

    torch's page says how a custom backend calls another one: it looks it up with `torch._dynamo.lookup_backend`. This
    function also gives inductor the options of a mode, as `torch.compile` does, and other backends the mode's name. Can
    be removed when torch has a function for both.
    https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_custom_backends.html
    """
    from torch._dynamo import lookup_backend  # imports sympy

    compile_graph: Callable[..., Callable[..., Any]] = lookup_backend(backend)
    if mode is None or mode == "default":
        return compile_graph
    if backend == "inductor":
        return partial(compile_graph, config_patches=torch._inductor.list_mode_options(mode, dynamic=True))
    return partial(compile_graph, mode=mode)


def undo_compilation(module: nn.Module) -> None:
    """Undo `module.compile()`, which this package has called, when training ends. torch has no public method for it.

    Can be removed when it has one.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.compile
    """
    module._compiled_call_impl = None


def gathers_on_cpus(installed: str | None = None) -> bool:
    """Return whether DeepSpeed ZeRO-3 waits until parameters are gathered, also on CPUs.

    Before 0.19.8, a gather of several parameters, for instance of weight and bias, waits only for the last parameter.
    With NCCL the gathers before it are complete by then. With gloo they may not be, and then uninitialised memory is
    read, loaded or saved. Can be removed with support for DeepSpeed below 0.19.8.
    https://github.com/deepspeedai/DeepSpeed/pull/8539
    """
    return Version(installed or importlib.metadata.version("deepspeed")) >= Version("0.19.8")


def require_gathers(world_size: int, device_type: str) -> None:
    """Refuse ZeRO-3 on several CPU ranks if DeepSpeed does not wait for gathered parameters (`gathers_on_cpus`)."""
    if device_type == "cpu" and world_size > 1 and is_deepspeed_zero3_enabled() and not gathers_on_cpus():
        raise ValueError(
            f"ZeRO-3 on {world_size} CPU ranks was given with deepspeed {importlib.metadata.version('deepspeed')}. "
            "Before 0.19.8 it reads gathered parameters without waiting for them on CPUs, so that weights are wrong at "
            "random. Run `pip install 'deepspeed>=0.19.8'`, or train with DDP."
        )


def unshard_lm_head(model: PreTrainedModel) -> RemovableHandle | None:
    """Register a hook that gathers an LM head before TRL's fused loss reads it, if the head is its own FSDP2 unit.

    Usually accelerate shards the head together with the last norm, whose forward gathers both. It looks for this norm
    among the children of the base model. Image-text models and opt have the norm elsewhere, and their head is sharded
    by itself. TRL's loss reads the weights of the head without calling the head, so it gathers them with `full_tensor`.
    The backward of `full_tensor` does not sum gradients over ranks, so that each rank would train its rows of the head
    on its own tokens only. Can be removed when TRL passes `grad_placements`.
    https://docs.pytorch.org/docs/stable/distributed.tensor.html#torch.distributed.tensor.DTensor.full_tensor

    Returns:
        The handle of the hook; None for every other head.
    """
    head = model.get_output_embeddings()
    below = model.base_model
    is_sharded = isinstance(head, FSDPModule)
    if not is_sharded or below is model:
        return None

    def unshard(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        # Without a backward the sharded head does no harm, and no backward would shard it again.
        if torch.is_grad_enabled() and isinstance(head.weight, DTensor):
            head.unshard()

    return below.register_forward_hook(unshard)


def parameters_summed_by_ranks(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters whose gradients transformers sums over ranks in a hook (tensor parallelism)."""
    plan = getattr(model, "tp_plan", None) or {}
    num_ranks = getattr(model, "_tp_size", None) or 1
    # The plan names modules, with * for the number of a layer.
    modules = [re.escape(name).replace(r"\*", r"\d+") for name, style in plan.items() if style == SUMMED_BY_RANKS]
    if num_ranks == 1 or not modules:
        return []
    is_of_modules = re.compile(rf"(?:{'|'.join(modules)})\.[^.]+").fullmatch
    return [p for name, p in model.named_parameters() if p.requires_grad and is_of_modules(name)]


@contextmanager
def summed_once(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Sum the gradients of `parameters_summed_by_ranks` over ranks only once, for the one backward in this context.

    The norms of query and key heads are on all R ranks, and each rank has the gradient of its own heads. transformers
    sums these gradients over the ranks after each backward. But it sums the gradient that was accumulated so far: on
    two ranks, the second micro-batch sums the gradient of the first once more, which then counts twice, and after a
    third micro-batch four times. Here each backward begins without a gradient, and the earlier gradient is added
    afterwards. Can be removed when transformers sums once per optimizer step; see dev/upstream.md.
    """
    earlier_gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, earlier in zip(parameters, earlier_gradients, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad


@contextmanager
def train_mode_kept(model: nn.Module) -> Iterator[None]:
    """Let the first `model.train()` in this context do nothing if all modules are in training mode already.

    transformers calls it first in every micro-batch. It sets an attribute of each module, which takes 7 ms of the host
    for 2,665 modules (32 layers with LoRA). To look at all modules takes 0.5 ms. Later calls are those of the user's
    code, which may have set modules to evaluation mode. A model whose `train` may do something else, such as an engine,
    does not change. Can be removed when transformers calls `train` once per training.
    """
    known = (nn.Module.train, PreTrainedModel.train, nn.parallel.DistributedDataParallel.train)
    is_plain = type(model).train in known and "train" not in vars(model)
    if not is_plain or not all(module.training for module in walk_modules(model)):
        yield
        return

    def keep_mode(mode: bool = True) -> nn.Module:
        del vars(model)["train"]  # from now on, the method of the class
        return model if mode else model.train(mode)

    vars(model)["train"] = keep_mode
    try:
        yield
    finally:
        vars(model).pop("train", None)


def walk_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules of a model, a module in several places several times.

    For code that looks at all modules in every step: it takes 0.5 ms for 2,665 modules, and `model.modules()` 3.0 ms.
    """
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is not None:
            yield module
            modules.extend(module._modules.values())


def declare_whole_sizes(model: nn.Module) -> None:
    """Set `in_features` and `out_features` of adapters to the sizes of the whole matrix, where ranks have divided it.

    On layers that are divided by their input (`o_proj`, `down_proj`) peft 0.21 gives adapters the size of the shard on
    this rank. transformers takes it for the size of the whole matrix, and the first forward fails. Can be removed when
    peft sets the whole sizes; see dev/upstream.md.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            module.out_features, module.in_features = module.weight.shape


def load_renamed_weights(model: PreTrainedModel, checkpoint: str) -> None:
    """Load a checkpoint whose weights have other names than the parameters of the model, as for qwen2_5_vl and llava.

    transformers saves the weights of some model types under the names of their first release, and `from_pretrained`
    converts the names. When the Trainer resumes, it reads the file without conversion. So it warns of missing keys and
    continues with the initial weights. Can be removed when the Trainer converts names too; see dev/upstream.md.
    """
    converted = type(model).from_pretrained(checkpoint, dtype=model.dtype)
    model.load_state_dict(converted.state_dict())


def state_is_exact(dataset: "IterableDataset") -> bool:
    """Return whether `state_dict()` of a stream holds everything that a restart needs.

    The state does not hold the contents of shuffle buffers, and after a restart a batched map over Arrow tables may
    skip a batch. `datasets` has no public function that detects such a stream, so the steps of the stream are searched
    for both. Can be removed when `datasets` saves the buffers.
    https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration

    Below `datasets` 5.1 a restart from the state loses rows: in 4.8.4 of a stream with the step `map`, in 4.8.5 and 5.0
    of one with `filter`. In 5.0 the state also does not change any more after a restart.
    """
    import datasets
    from datasets.iterable_dataset import BufferShuffledExamplesIterable

    if Version(datasets.__version__) < Version("5.1"):
        return False
    if dataset._formatting is not None and dataset._formatting.is_table:  # the rows are Arrow tables
        return False
    sources = [dataset._ex_iterable]
    while sources:
        source = sources.pop()
        if isinstance(source, BufferShuffledExamplesIterable):
            return False
        sources += getattr(source, "ex_iterables", [])
        sources += [source.ex_iterable] if hasattr(source, "ex_iterable") else []
    return True


def name_wrapped_layers(plugin: "FullyShardedDataParallelPlugin | None", model: nn.Module) -> None:
    """Set the classes of layers that FSDP wraps, if the list of the model has classes that the model does not contain.

    Text models of Qwen3.5 list the blocks of a vision tower. accelerate looks for each class of the list, and raises an
    error for a class that it does not find. A list that the user has set stays. Can be removed when these models list
    only their own layers.
    """
    if plugin is None or plugin.transformer_cls_names_to_wrap is not None:
        return
    listed_classes = set(getattr(model, "_no_split_modules", None) or ())
    present_classes = listed_classes & {type(module).__name__ for module in model.modules()}
    if present_classes and present_classes != listed_classes:
        plugin.transformer_cls_names_to_wrap = sorted(present_classes)


@contextmanager
def whole_model_saved(plugin: "FullyShardedDataParallelPlugin | None") -> Iterator[None]:
    """Make `Trainer.save_model` write the whole weights within this context, even if FSDP's checkpoints are sharded.

    With sharded checkpoints, `save_model` writes no weights. Can be removed when it gathers them.
    https://huggingface.co/docs/transformers/fsdp
    """
    if plugin is None:
        yield
        return
    type_before = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")  # converts the name to the type that the plugin needs
    try:
        yield
    finally:
        plugin.state_dict_type = type_before


def forget_evaluation(accelerator: "Accelerator", model: nn.Module) -> bool:
    """Make accelerate prepare `model` for DDP again if it has prepared the model for evaluation.

    accelerate marks a model that it has prepared, and does not prepare it again. So ranks that evaluate a model first
    would train it without DDP, without exchanging gradients. DeepSpeed and FSDP prepare a model for both at once.
    accelerate sets the mark again. Can be removed when accelerate prepares a model for training after
    `evaluation_mode=True`; see dev/upstream.md.

    Returns:
        Whether the model was marked, under DDP.
    """
    is_marked = "_is_accelerate_prepared" in vars(model)
    if accelerator.distributed_type not in DDP or not is_marked:
        return False
    del model._is_accelerate_prepared
    if "_original_forward" in vars(model):  # accelerate will wrap it with autocast again
        model.forward = vars(model).pop("_original_forward")
    return True


class ReplacedValues:
    """Replace values in modules of another library between `enter` and `leave`, by several users at the same time.

    The namespace of a module belongs to the process. So a value is replaced from the first `enter` to the last `leave`,
    of all objects of this class, models and threads. What replaces a function must call the original function wherever
    it is not needed.

    The mixers of transformers' hybrid models call their convolutions and scans by name in the modeling module, and no
    interface of transformers reaches these functions (`features/hybrids/`). `saves_varlen_attention` is the other use.
    Can be removed when that function can be, and transformers passes boundaries to the functions of mixers, or lets
    them be chosen for one model.

    Args:
        places: where the values are, as pairs of the namespace of a module and a name in it.
        make_replacement: (value, name) -> the value that replaces it.
    """

    # The keys are pairs of the name of a module and a name in it.
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _count: ClassVar[Counter[tuple[str, str]]] = Counter()  # the number of `enter` without their `leave`
    _values: ClassVar[dict[tuple[str, str], tuple[Any, Any]]] = {}  # the original value, and the one that replaces it

    def __init__(self, places: Sequence[tuple[dict[str, Any], str]], make_replacement: Callable[[Any, str], Any]):
        self.places = places
        self._make_replacement = make_replacement

    def enter(self) -> None:
        """Replace the values, unless another object has replaced them already."""
        if not self.places:
            return
        with self._lock:
            for namespace, name in self.places:
                key = namespace["__name__"], name
                if self._count[key] == 0:
                    value = namespace[name]
                    namespace[name] = self._make_replacement(value, name)
                    self._values[key] = value, namespace[name]
                self._count[key] += 1

    def leave(self) -> None:
        """Put the original values back, unless another object still needs them replaced."""
        if not self.places:
            return
        with self._lock:
            for namespace, name in self.places:
                key = namespace["__name__"], name
                self._count[key] -= 1
                if self._count[key] > 0:
                    continue
                value, replacement = self._values.pop(key)
                if namespace[name] is replacement:  # other code may have set another value since
                    namespace[name] = value


NOTHING_REPLACED = ReplacedValues((), lambda value, name: value)


@contextmanager
def saves_varlen_attention() -> Iterator[None]:
    """Make TRL's selective checkpointing save the outputs of torch's varlen kernels, within this context.

    So these kernels run once, and not again in the backward. TRL has a list of operators whose outputs are saved, with
    the operators of `scaled_dot_product_attention` and of flash-attn. The operator that computes attention of packs is
    not in it. TRL reads the list when a trainer is constructed, so its construction is the context. Can be removed when
    TRL lists the operator; see dev/upstream.md.
    """
    list_name = "_ATEN_ATTENTION_PACKET_NAMES"
    try:
        namespace = vars(importlib.import_module("trl.models.selective_activation_checkpointing"))
    except ImportError:  # earlier releases
        namespace = {}

    def with_varlen_kernel(operators: tuple[str, ...], name: str) -> tuple[str, ...]:
        return operators if VARLEN_KERNEL in operators else (*operators, VARLEN_KERNEL)

    listed = ReplacedValues([(namespace, list_name)] if list_name in namespace else [], with_varlen_kernel)
    listed.enter()
    try:
        yield
    finally:
        listed.leave()


def change_checkpoint_functions(layers: list[nn.Module], change: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace the function that checkpoints each layer by the function that `change` returns for it.

    A layer that is recomputed must have the boundaries of its first forward, and no hook runs around a recomputation.
    The layers of transformers, and torch's wrapper for FSDP, have the checkpoint function as an attribute. The guard of
    a model makes the change in packed forwards, and undoes it when it is removed (`attention/forwards.py`). Can be
    removed when a recomputation can be given a context.
    """
    for layer in layers:
        for name in CHECKPOINT_FUNCTIONS:
            checkpoint = vars(layer).get(name)
            if checkpoint is None:
                continue
            changed = change(checkpoint)
            if changed is not checkpoint:  # most forwards find what the first one set
                vars(layer)[name] = changed


LORA_CAST = "_cast_input_dtype"  # the method of peft's LoRA layers that casts their input


def set_lora_cast(layers: list[Any], cast: Callable[..., torch.Tensor] | None) -> None:
    """Replace the method with which each LoRA layer of peft casts its input; None restores peft's method.

    peft has a switch for the cast, `cast_input_dtype_enabled`. But outside of packs the cast must stay, so it depends
    on the call. The hooks in `training/lora_inputs.py` replace the method when a model is prepared for packs, and
    restore it when they are removed. Can be removed when peft does not cast under autocast; see dev/upstream.md.
    """
    for layer in layers:
        vars(layer).pop(LORA_CAST, None)
        if cast is not None:
            vars(layer)[LORA_CAST] = MethodType(cast, layer)


def replace_forward(model: PreTrainedModel, forward: Callable[..., Any]) -> None:
    """Let the model call `forward(model, ...)` as its forward, from now on.

    TRL replaces the forward in the same way for its fused LM head. So engines such as FSDP wrap the code that computes
    the loss, and a hook would run outside of them. The change stays, as TRL's does: for other calls the new forward
    calls the model's own. Can be removed with support for TRL below 1.16, and when TRL's fused head supports every LM
    head; see `training/lm_head.py`.
    """
    model.forward = MethodType(forward, model)


def add_capped_head(model: PreTrainedModel, name: str, cap: float, *, mark: str) -> None:
    """Add TRL's fused LM head to a model once more, with the cap of its logits, and mark its forward.

    TRL reads the cap from one field of the config when it adds the head, and some model types have it in another field.
    So the config has TRL's field while the head is added. The head stays, as TRL's does. Can be removed when TRL knows
    the other fields (`dev/upstream/softcap_names.py`).

    Args:
        name: the field of the config that TRL reads.
        cap: logits become cap * tanh(logit / cap).
        mark: an attribute that is set on the forward with the head, and is found again after an engine has wrapped it.
    """
    from trl.trainer.utils import add_fused_lm_head  # TRL below 1.16 has none

    text = model.config.get_text_config()
    setattr(text, name, cap)
    try:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    finally:
        delattr(text, name)
    setattr(model.forward.__func__, mark, True)  # type: ignore[attr-defined]


def name_num_experts(config: PreTrainedConfig) -> None:
    """Set `num_experts` on the config of a mixture of experts that has `num_local_experts` only.

    TRL's fused head reads `num_experts` in every forward, so it stays. Can be removed when TRL reads both names.
    """
    if not hasattr(config, "num_experts"):
        config.num_experts = config.num_local_experts


def set_config_attention(config: Any, name: str) -> None:
    """Set the attention implementation of the modules that have this config.

    `set_attn_implementation` of transformers takes the names of nested configs, and some modules of a vision tower have
    a config without such a name. `features/images/tower_attention.py` sets it when a model is prepared for packs, and
    sets it back afterwards. Can be removed when transformers sets the attention of one module.
    """
    config._attn_implementation = name


@contextmanager
def callbacks_left_out(handler: Any, kinds: tuple[type[Any], ...]) -> Iterator[None]:
    """Keep the callback handler of a trainer from calling callbacks of these kinds, within this context.

    `pop_callback` and `add_callback` would change the order of callbacks. Can be removed when `Trainer.log` can leave
    callbacks out.
    """
    all_callbacks = handler.callbacks
    handler.callbacks = [callback for callback in all_callbacks if not isinstance(callback, kinds)]
    try:
        yield
    finally:
        handler.callbacks = all_callbacks


def call_first(handler: Any, callback: Any) -> None:
    """Add a callback to the handler of a trainer before all others.

    `pack_forward` returns an object whose `remove()` removes it. transformers adds callbacks at the end only. A
    callback that adds numbers to the log must run before the callback of a tracker sends the log. Can be removed when
    `add_callback` has an argument for the position.
    """
    handler.callbacks.insert(0, callback)


def keep_from_preparing(loader: Any) -> None:
    """Keep accelerate from dividing a loader between ranks that gives each rank its own batches.

    Without this mark accelerate divided the batches once more, and 53 of 97 documents were trained on 2 ranks, without
    an error. A loader is made for one training, so nothing is undone. Can be removed when `prepare_data_loader` of
    accelerate marks the loaders that it returns.
    """
    loader._is_accelerate_prepared = True


@contextmanager
def hooks_left_out(tables: list[tuple[dict[int, Any], dict[int, Any]]]) -> Iterator[None]:
    """Remove some hooks on gradients from torch's tables of hooks, within this context.

    torch calls all hooks, and has no switch. Afterwards each removed hook is in its place again, before the hooks that
    were registered after it. Can be removed when torch can run a backward without these hooks.

    Args:
        tables: pairs of a table of hooks, by key, and the entries that are removed from it.
    """
    tables_before = [dict(hooks) for hooks, _ in tables]
    for hooks, removed in tables:
        for key in removed:
            del hooks[key]
    try:
        yield
    finally:
        for (hooks, removed), hooks_before in zip(tables, tables_before, strict=True):
            # Hooks may have been added or removed within the context, and these changes stay. torch calls hooks in the
            # order of the dictionary, so it is filled anew: first with all hooks that were there before, in their
            # order.
            hooks_now = dict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in hooks_before.items() if key in removed or key in hooks_now})
            hooks.update(hooks_now)


@contextmanager
def not_logged(logger: logging.Logger) -> Iterator[None]:
    """Keep a logger of another library from showing records of this thread, within this context."""
    thread = threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
