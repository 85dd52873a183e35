"""Check one model as training would: load it, choose its attention, run the leak probe, repair it if it leaks."""

import time
from dataclasses import asdict, dataclass
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

from ..attention.mixers import missing_packages
from ..attention.models import base_model
from ..attention.varlen import ATTENTION_NAME
from ..isolation.isolation_report import IsolationReport, finite
from ..isolation.packed_model import OnLeak, PackedModel
from ..isolation.shrinking import FIRST_WORD, VOCABULARY, random_model, tiny_like
from .flags import MODEL_HELP, setting_named


@dataclass(frozen=True)
class CheckResult:
    """What `trl-packfix check` found, and what it prints as JSON."""

    model: str
    architecture: str
    device: str
    dtype: str
    max_length: int
    attention: str
    reason: str
    as_it_is: IsolationReport  # with the attention chosen for the model
    in_training: IsolationReport  # of what training runs: the same, or after what `on_leak` did
    is_unpacked: bool  # whether training runs padded rows
    repaired: list[str]
    implementations: dict[str, str]
    missing_packages: list[str] | None  # for the kernels of recurrent mixers; None without such mixers
    seconds: float

    @property
    def verdict(self) -> str:
        """PACKED (as it is), REPAIRED or UNPACKED (correct, but padded); or LEAK, WRONG or REFUSED."""
        found = self.in_training
        if found.passed:
            return "UNPACKED" if self.is_unpacked else "REPAIRED" if found.repaired else "PACKED"
        return "REFUSED" if found.error is not None else "WRONG" if found.isolated else "LEAK"

    def to_dict(self) -> dict[str, Any]:
        return finite(asdict(self) | {"verdict": self.verdict, "right": self.in_training.passed})

    def lines(self) -> list[tuple[str, str]]:
        before = self.as_it_is
        after = self.in_training
        rows = [
            ("model", f"{self.model} ({self.architecture}), {self.dtype} on {self.device}"),
            ("verdict", f"{self.verdict}: {after.summary()}"),
        ]
        if after is not before:
            rows.append(("as it is", before.summary()))
        if before.error is None:
            gradient = "not tested" if before.max_gradient is None else f"{before.max_gradient:.1e}"
            rows += [
                ("largest change", f"{before.max_change:.1e} of a document when another changed"),
                ("largest difference", f"{before.max_difference:.1e} of a document from itself alone"),
                ("gradient", f"{gradient} of a document by another's embeddings"),
                ("rounding", f"explains {before.tolerance:.1e}"),
            ]
        rows += [("where", f"{leak.name} ({leak.module}), by {leak.change:.1e}") for leak in before.leaks]
        rows += [("repaired", text) for text in self.repaired]
        if before.unreachable:
            beyond = ", ".join(f"{name} = {value:,}" for name, value in before.unreachable.items())
            rows.append(("not tested", f"beyond max_length {self.max_length:,}: {beyond}"))
        rows.append(("attention", f"{self.attention}: {self.reason}"))
        rows += [("implementation", f"{name}: {why or 'available'}") for name, why in self.implementations.items()]
        if self.missing_packages is not None:
            where = "" if self.device.startswith("cuda") else " on a machine with a GPU"
            install = f"mixers run in torch: right, slower. `pip install {' '.join(self.missing_packages)}`{where}"
            rows.append(("kernels", install if self.missing_packages else "all packages of the mixers are installed"))
        rows.append(("took", f"{self.seconds:.1f} seconds"))
        return rows


def check_model(
    name: str,
    config_only: bool = False,
    max_length: int = 1024,
    *,
    dtype: str | None = None,
    attn_implementation: str | None = None,
    enforce_flash_attention: bool = True,
    on_leak: OnLeak = "repair",
    trust_remote_code: bool = False,
) -> CheckResult:
    """Load a model as TRL does and test it as the trainer does; of its config only, a tiny random one.

    A `dtype` of None is bfloat16 on CUDA and float32 elsewhere. Packs run on the attention that training would choose;
    with `enforce_flash_attention=False` on `attn_implementation`.
    """
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found_dtype = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    trust = {"trust_remote_code": trust_remote_code}  # if it is not passed, transformers prompts on standard input
    with setting_named(f"check {name}", MODEL_HELP):
        config = AutoConfig.from_pretrained(name, **trust)
    model: Any
    if config_only:
        model = tiny_model(config, **trust).to(found_dtype)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
    else:
        create: Any = create_model_from_path
        model = create(name, dtype=found_dtype, attn_implementation=attn_implementation, device_map=None, **trust)
    model.to(device)
    settings: dict[str, Any] = {"enforce_flash_attention": enforce_flash_attention}
    packed = PackedModel(model, found_dtype, device.type, max_length, on_leak="raise", **settings)
    as_it_is = in_training = packed.prove(model)
    if not packed.is_proved and on_leak != "raise":
        packed.restore_own_attention()
        packed = PackedModel(model, found_dtype, device.type, max_length, on_leak=on_leak, **settings)
        in_training = packed.prove(model)
    base = base_model(model)
    return CheckResult(
        model=name,
        architecture=type(base).__name__ + (", tiny and random" if config_only else ""),
        device=str(device),
        dtype=str(found_dtype).removeprefix("torch."),
        max_length=max_length,
        attention=packed.attention.name,
        reason=packed.attention.reason,
        as_it_is=as_it_is,
        in_training=in_training,
        is_unpacked=packed.is_unpacked,
        repaired=[str(repair) for repair in packed.repaired],
        implementations=attention_obstacles(base),
        missing_packages=missing_packages(base),
        seconds=time.perf_counter() - start,
    )


def attention_obstacles(model: PreTrainedModel) -> dict[str, str]:
    """Attention implementation -> why it is not available for this model here; "" if it is."""
    unsupported = f"{type(model).__name__} does not take it"
    unavailable = "" if model._supports_flash_attn else unsupported
    reasons = {"eager": "", "sdpa": "" if model._supports_sdpa else unsupported}
    installed = {2: is_flash_attn_2_available, 3: is_flash_attn_3_available, 4: is_flash_attn_4_available}
    for version, is_installed in installed.items():
        missing = "" if is_installed() else f"flash-attn {version} is not installed, or finds no GPU"
        reasons[f"flash_attention_{version}"] = unavailable or missing
    reasons["flex_attention"] = "" if model._supports_flex_attn else unsupported
    takes_ours = model._supports_attention_backend or model._supports_sdpa
    has_own = not takes_ours or not model._can_set_attn_implementation()
    reasons[ATTENTION_NAME] = f"{type(model).__name__} has its own attention code" if has_own else ""
    return reasons


def tiny_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """A tiny random model in fp32 with all features of a config except its sizes."""

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        known = getattr(transformers, (config.architectures or [""])[0], None)
        if known is not None:
            return known(config)
        is_multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto: Any = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        return auto.from_config(config, trust_remote_code=trust_remote_code)

    action = "build"
    try:
        tiny = tiny_like(config, build)
        model = random_model(lambda: build(tiny))
        action = "run, on one document that is not packed,"
        with torch.no_grad():
            model(input_ids=torch.arange(FIRST_WORD, VOCABULARY)[None], use_cache=False)
    except Exception as error:  # any error of transformers or of the model's own code
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"`--config-only` was given, and transformers {transformers.__version__} cannot {action} a tiny model of "
            f"type {config.model_type!r} from this config ({reason}). So nothing was tested. Correct the config, add "
            "`--trust-remote-code` where the model has its own code, or run `check` without `--config-only`."
        ) from error
    return model
