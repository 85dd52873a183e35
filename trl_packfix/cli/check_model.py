"""Check one model as training would: load it, choose its attention, run the leak probe, and repair it if it leaks.

`trl-packfix check` (`check.py`) calls `check_model`. A *leak* is a document in a pack that changes the outputs or the
gradients of another document. `PackedModel` (`isolation/packed_model.py`) finds leaks with a test, the *leak probe*,
and repairs them: each leaking module then gets one document at a time.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available
from trl.trainer.utils import create_model_from_path

from ..attention.mixer_support import mixer_support
from ..attention.models import base_model
from ..attention.varlen import ATTENTION_NAME
from ..feature import features_of
from ..isolation.isolation_report import IsolationReport, PackingLeakError
from ..isolation.packed_model import PackedModel
from ..isolation.shrinking import FIRST_WORD, VOCABULARY, random_model, tiny_like
from ..reporting.numbers import finite
from .configs import RunConfigs
from .flags import MODEL_HELP, setting_named


@dataclass(frozen=True)
class CheckResult:
    """The result of `trl-packfix check`. Its fields are those of the JSON output.

    Attributes:
        model: the name or folder that was checked.
        architecture: the class of the model.
        attention: the attention implementation of packs.
        reason: why it was chosen.
        attention_of_training: the attention that training with the same flags would choose, if it is another than the
            tested attention; else None.
        as_it_is: the report of the probe on the model with this attention.
        in_training: the report on what training runs: `as_it_is`, or a report after what `on_leak` did.
        is_unpacked: whether training runs padded rows in place of packs.
        repaired: a text for each repaired module.
        settings: for each of `share_prefixes` and `tokens_per_rank` that is set, what is found about such packs.
        refused_settings: those of `settings` with which training on this model is refused.
        implementations: for each attention implementation why it is not available, from `attention_obstacles`.
        missing_packages: packages for the kernels of recurrent mixers that are not installed; None without mixers.
        seconds: how long the check took.
    """

    model: str
    architecture: str
    device: str
    dtype: str
    max_length: int
    attention: str
    reason: str
    attention_of_training: str | None
    as_it_is: IsolationReport
    in_training: IsolationReport
    is_unpacked: bool
    repaired: list[str]
    settings: dict[str, str]
    refused_settings: list[str]
    implementations: dict[str, str]
    missing_packages: list[str] | None
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether training is correct, in the way that `verdict` names, and no setting of packs is refused."""
        return self.in_training.passed and not self.refused_settings

    @property
    def verdict(self) -> str:
        """The result in one word.

        Training is correct if documents are "isolated" (on packs, by the model as it is), "repaired" (on packs, after a
        repair) or "unpacked" (on padded rows). Training on packs is refused if the model "leaks" (documents change each
        other), is "wrong" (a document differs from itself alone), or "fails" (it does not run on packs).
        """
        report = self.in_training
        if report.passed:
            if self.is_unpacked:
                return "unpacked"
            return "repaired" if report.repaired else "isolated"
        if report.error is not None:
            return "fails"
        return "wrong" if report.isolated else "leaks"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, with None for infinity and NaN; "right" tells if training is correct."""
        return finite(asdict(self) | {"verdict": self.verdict, "right": self.is_right})

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield the lines to print, as pairs of a label and a text."""
        before = self.as_it_is
        after = self.in_training
        yield "model", f"{self.model} ({self.architecture}), {self.dtype} on {self.device}"
        yield "verdict", f"{self.verdict}: {after.summary()}"
        if after is not before:
            yield "as it is", before.summary()
        if before.error is None:
            gradient = "not tested" if before.max_gradient is None else f"{before.max_gradient:.1e}"
            yield "largest change", f"{before.max_change:.1e} of a document when another changed"
            yield "largest difference", f"{before.max_difference:.1e} of a document from itself alone"
            yield "gradient", f"{gradient} of a document by another's embeddings"
            yield "rounding", f"explains {before.tolerance:.1e}"
        for leak in before.leaks:
            yield "where", f"{leak.name} ({leak.module}), by {leak.change:.1e}"
        for text in self.repaired:
            yield "repaired", text
        if before.unreachable:  # settings of the model, such as its window, with an effect only in longer documents
            thresholds = ", ".join(f"{name} = {value:,}" for name, value in before.unreachable.items())
            yield "not tested", f"beyond max_length {self.max_length:,}: {thresholds}"
        yield from self.settings.items()
        yield "attention", f"{self.attention}: {self.reason}"
        if self.attention_of_training is not None:
            text = f"runs {self.attention_of_training} in its place, unless you set enforce_flash_attention=False"
            yield "training", text
        for name, obstacle in self.implementations.items():
            yield "implementation", f"{name}: {obstacle or 'available'}"
        if self.missing_packages:
            where = "" if self.device.startswith("cuda") else " on a machine with a GPU"
            command = f"`pip install {' '.join(self.missing_packages)}`"
            yield "kernels", f"mixers run in torch: right, slower. {command}{where}"
        elif self.missing_packages is not None:
            yield "kernels", "all packages of the mixers are installed"
        yield "took", f"{self.seconds:.1f} seconds"


def check_model(name: str, configs: RunConfigs, *, config_only: bool) -> CheckResult:
    """Load a model as TRL does, and test it as the trainer does before training.

    Args:
        name: the name or folder of the model.
        configs: the configs of the run. Two settings have other defaults here: the weights are bfloat16 on CUDA and
            float32 elsewhere, and an attention that the run sets is tested even if training would enforce another.
        config_only: test a tiny random model with this config, without loading weights.

    Raises:
        ValueError: the model cannot be loaded.
    """
    start_time = time.perf_counter()
    training = configs.training
    assert training.max_length is not None  # `SFTConfig` refuses packing without it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    init_kwargs: Any = training.model_init_kwargs or {}  # as in training, they override the flags below
    dtype = init_kwargs.get("dtype", configs.model.dtype if "dtype" in configs.names_set else None)
    if dtype is None or dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError(
            f"`dtype={dtype!r}` was given. torch has no type of this name, so no model can be tested in it. Set "
            '`dtype` to "bfloat16", "float16" or "float32", also in `model_init_kwargs`.'
        )
    torch_dtype = getattr(torch, dtype)
    attn_implementation = init_kwargs.get("attn_implementation", configs.model.attn_implementation)
    shares_packs = training.tokens_per_rank is not None
    # Without `trust_remote_code` transformers may ask a question on the terminal.
    model_settings: dict[str, Any] = {"revision": configs.model.model_revision}
    model_settings["trust_remote_code"] = training.trust_remote_code
    model_settings |= {k: v for k, v in init_kwargs.items() if k not in ("dtype", "attn_implementation", "device_map")}
    with setting_named(f"check {name}", MODEL_HELP):
        config = AutoConfig.from_pretrained(name, **model_settings)
    model: Any
    if config_only:
        model = tiny_model(config, model_settings["trust_remote_code"]).to(torch_dtype)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
    else:
        create: Any = create_model_from_path  # mypy would match `**model_settings` with `architecture`
        model_settings |= {"dtype": torch_dtype, "attn_implementation": attn_implementation}
        model = create(name, device_map=None, **model_settings)
    model.to(device)
    make_packed_model = partial(
        PackedModel,
        model,
        torch_dtype,
        device.type,
        training.max_length,
        shares_packs=shares_packs,  # decides the attention. Such packs are not tested: they need several ranks
        feature=features_of(training),
    )
    attention_of_training = None
    enforce_flash_attention = training.enforce_flash_attention
    if "enforce_flash_attention" not in configs.names_set:
        enforce_flash_attention = attn_implementation is None
        if attn_implementation is not None:
            # Construct what training would construct, only to see which attention it chooses. The model stays as it is
            model_of_training = make_packed_model(on_leak="raise")
            if model_of_training.attention.name != attn_implementation:
                attention_of_training = model_of_training.attention.name
    # First test the model as it is: with "raise" it is not repaired. If it leaks and `on_leak` says so, test it again
    # with a repair or without packing.
    packed = make_packed_model(on_leak="raise", enforce_flash_attention=enforce_flash_attention)
    as_it_is = packed.prove(model)  # the report of the leak probe
    in_training = as_it_is
    if not as_it_is.passed and training.on_leak != "raise":
        packed.restore_own_attention()
        packed = make_packed_model(on_leak=training.on_leak, enforce_flash_attention=enforce_flash_attention)
        in_training = packed.prove(model)
    settings: dict[str, str] = {}
    refused_settings: list[str] = []
    if in_training.passed:
        settings, refused_settings = _check_settings(packed, model, shares_packs)
    base = base_model(model)
    return CheckResult(
        model=name,
        architecture=type(base).__name__ + (", tiny and random" if config_only else ""),
        device=str(device),
        dtype=str(torch_dtype).removeprefix("torch."),
        max_length=training.max_length,
        attention=packed.attention.name,
        reason=packed.attention.reason,
        attention_of_training=attention_of_training,
        as_it_is=as_it_is,
        in_training=in_training,
        is_unpacked=packed.is_unpacked,
        repaired=[str(repair) for repair in packed.repaired],
        settings=settings,
        refused_settings=refused_settings,
        implementations=attention_obstacles(base),
        missing_packages=mixer_support().missing_packages(base),  # mixers: recurrent layers, such as Mamba's
        seconds=time.perf_counter() - start_time,
    )


def _check_settings(
    packed: PackedModel, model: PreTrainedModel, shares_packs: bool
) -> tuple[dict[str, str], list[str]]:
    """Check settings with which packs hold more than whole documents on one rank. Plain packs must have passed.

    Returns:
        `settings` and `refused_settings` of `CheckResult`.
    """
    findings = {}
    refused = []
    if packed.feature.is_on:
        name = next(iter(packed.feature.settings))  # "share_prefixes", the field that switches the feature on
        findings[name] = "documents with a common prefix are what they are alone"
        reason = packed.prove_feature(model)
        if reason is not None:
            findings[name] = f"documents are packed whole: {reason}"
            # `refuse_model` raises if training on whole documents is not possible or not wanted; otherwise it warns
            try:
                packed.feature.refuse_model(reason, packed.on_leak)
            except PackingLeakError as error:
                findings[name] = f"training refuses: {error}"
                refused.append(name)
    if shares_packs:
        name = "tokens_per_rank"
        findings[name] = "not tested: packs that ranks share. The trainer tests them on its ranks before the first step"
        reason = packed.reason_against_sharing()
        if reason is not None:
            findings[name] = f"training refuses packs that ranks share: {reason}"
            refused.append(name)
    return findings, refused


def attention_obstacles(model: PreTrainedModel) -> dict[str, str]:
    """Return by attention implementation why it is not available for this model on this machine; "" if it is."""
    unsupported = f"{type(model).__name__} does not take it"
    flash_unsupported = "" if model._supports_flash_attn else unsupported
    reasons = {"eager": "", "sdpa": "" if model._supports_sdpa else unsupported}
    installed = {2: is_flash_attn_2_available, 3: is_flash_attn_3_available, 4: is_flash_attn_4_available}
    for version, is_installed in installed.items():
        missing = "" if is_installed() else f"flash-attn {version} is not installed, or finds no GPU"
        reasons[f"flash_attention_{version}"] = flash_unsupported or missing
    reasons["flex_attention"] = "" if model._supports_flex_attn else unsupported
    # transformers lets a model run attention of other packages if it declares one of these; older ones declare only
    # sdpa
    supports_other_attention = model._supports_attention_backend or model._supports_sdpa
    has_own_code = not supports_other_attention or not model._can_set_attn_implementation()
    reasons[ATTENTION_NAME] = f"{type(model).__name__} has its own attention code" if has_own_code else ""
    return reasons


def tiny_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a tiny random model in fp32 that has all features of a config except its sizes.

    Raises:
        ValueError: the model cannot be built, or does not run.
    """

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        """Return a model with random weights, of the class that the config names if transformers has it."""
        model_class = getattr(transformers, (config.architectures or [""])[0], None)
        if model_class is not None:
            return model_class(config)
        is_multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto_class: Any = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        return auto_class.from_config(config, trust_remote_code=trust_remote_code)

    action = "build"
    try:
        tiny = tiny_like(config, build)  # the config with the smallest sizes with which `build` works
        model = random_model(lambda: build(tiny))
        action = "run, on one document that is not packed,"
        with torch.no_grad():
            model(input_ids=torch.arange(FIRST_WORD, VOCABULARY)[None], use_cache=False)
    except Exception as error:  # transformers and the model's own code may raise any error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"`--config-only` was given, and transformers {transformers.__version__} cannot {action} a tiny model of "
            f"type {config.model_type!r} from this config ({reason}). So nothing was tested. Correct the config, add "
            "`--trust-remote-code` where the model has its own code, or run `check` without `--config-only`."
        ) from error
    return model
