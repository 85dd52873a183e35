import numpy as np
import pytest
from datasets import Dataset
from support.models import build_tiny_model, build_tokenizer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a folder with a model, its tokenizer and conversations of 40 to about 160 tokens.

    The conversations are there as JSON lines and as parquet.
    """
    folder = tmp_path_factory.mktemp("cli")
    build_tiny_model("qwen3").save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(50):
        question, answer = ("x" * int(rng.integers(0, longest)) for longest in (40, 60))
        prompt = [{"role": "user", "content": f"the question {i}\n{question}"}]
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": f"answer {i} {answer}"}]})
    Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    return folder


@pytest.fixture
def lengths_file(tmp_path):
    """Return a function that writes lengths into a file, and returns its path."""

    def write(lengths):
        np.savetxt(tmp_path / "lengths.txt", lengths, fmt="%d")
        return tmp_path / "lengths.txt"

    return write
