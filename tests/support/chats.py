"""Messages, and tokenizers with chat templates."""

from pathlib import Path

import trl
from transformers import PreTrainedTokenizerFast

from .models import build_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
PLAIN = (  # without markers, and unknown to TRL
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer_with(name: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template of TRL that has this name, or with `PLAIN`; None is ChatML with markers."""
    tokenizer = build_tokenizer()
    if name is not None:
        tokenizer.chat_template = PLAIN if name == "plain" else (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}
