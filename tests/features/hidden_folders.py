"""Hide folders of features in forks of this process, and print as JSON what the core does without each of them.

    python tests/features/hidden_folders.py FOLDER hybrids images pack_forward prefixes

The libraries are imported once, before the forks. The package is imported in each fork, behind a finder that does not
find the hidden folder.
"""

import json
import os
import sys
import traceback
import warnings
from importlib import import_module
from typing import Any

from support.paths import ROOT  # isort: skip - sets the environment before torch is imported
import peft  # noqa: F401
import trl.trainer.sft_trainer  # noqa: F401 # with torch, transformers, datasets and accelerate

PACKAGE = ROOT / "trl_packfix"


class FinderWithoutFolder:
    """A finder of modules that does not find the folder of a feature.

    Args:
        finder: finds everything else.
        hidden: the name of the folder's package.
    """

    def __init__(self, finder: Any, hidden: str):
        self._finder = finder
        self._hidden = hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_hidden = name == self._hidden or name.startswith(self._hidden + ".")
        return None if is_hidden else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def core_modules() -> list[str]:
    """Return the names of all modules outside of `features/`."""
    files = [file.relative_to(ROOT).with_suffix("") for file in PACKAGE.rglob("*.py")]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files if file.name != "__main__"]
    return sorted(name for name in names if not name.startswith("trl_packfix.features"))


def train(folder: str, model_type: str, **settings: Any) -> tuple[int, bool]:
    """Train two steps of a tiny model; return the number of steps, and whether packs were proved."""
    runs_module = import_module("support.runs")
    trainer = runs_module.build_trainer(folder, runs_module.texts(), model_type, max_steps=2, **settings)
    trainer.train()
    packed_model = getattr(trainer, "packed_model", None)
    return trainer.state.global_step, packed_model is not None and packed_model.is_proved


def refusal(function: Any, *arguments: Any, **settings: Any) -> str | None:
    """Return the message of the error that a call raises; None if it raises none."""
    try:
        function(*arguments, **settings)
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def facts_without(feature: str, folder: str) -> dict[str, Any]:
    """Hide the folder of a feature from this process, and return what the core does."""
    hidden = f"trl_packfix.features.{feature}"
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl_packfix"]:
        del sys.modules[name]
    sys.meta_path[:] = [FinderWithoutFolder(finder, hidden) for finder in sys.meta_path]
    for name in core_modules():
        import_module(name)
    facts: dict[str, Any] = {"num_modules": len(core_modules())}
    facts["plain"] = train(folder, "llama")
    if feature == "hybrids":
        facts["refusal"] = refusal(train, folder, "lfm2")
        facts["unpacked_steps"] = train(folder, "lfm2", packing=False)[0]
    if feature == "images":
        vision = import_module("support.vision")
        facts["refusal"] = refusal(vision.make, folder, "llava", max_steps=2)
        facts["refusal_of_turns"] = refusal(vision.make, folder, "llava", packing=False, assistant_only_loss=True)
        unpacked = vision.make(folder, "llava", packing=False, max_steps=2)
        unpacked.train()
        facts["unpacked_steps"] = unpacked.state.global_step
    if feature == "pack_forward":
        facts["refusal"] = refusal(getattr, import_module("trl_packfix"), "pack_forward")
    if feature == "prefixes":
        config = import_module("trl_packfix").SFTConfig
        settings = {"packing": True, "max_length": 64, "use_cpu": True, "bf16": False}
        messages = [refusal(config, folder, share_prefixes=value, **settings) for value in ("pack", "family")]
        facts["refusal"], facts["refusal_of_families"] = messages
    facts["hidden_modules"] = [name for name in sys.modules if name.startswith(hidden)]
    return facts


if __name__ == "__main__":
    output_folder, *features = sys.argv[1:]
    warnings.simplefilter("ignore")
    for feature in features:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            try:
                print(json.dumps({"feature": feature} | facts_without(feature, output_folder)), flush=True)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if status:
            sys.exit(f"the core failed without the folder of {feature}")
