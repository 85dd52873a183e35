"""Watch a real pretrained chat model learn from packed conversations, on a CPU, in a few minutes.

    make demo                                              # installs what it needs, then runs this file
    python examples/demo.py --dataset conversations.jsonl  # your own conversations
    python examples/demo.py --tiny                         # a tiny random model, in seconds, to test the installation

SmolLM2-135M-Instruct (from a package, no hub is needed) is fine-tuned with LoRA to write orders as JSON. Documents are
packed: several conversations run through the model in one row, and none of them influences another. The demo prints the
packing report, the loss on held-out conversations before and after training, and the answer to a held-out order before
and after training, the latter from the saved adapter, and whether it is right. It trains on the same 48 conversations
everywhere, in about 70 CPU seconds where the CPU multiplies bfloat16 (elsewhere in 90), and needs 3 GiB of memory.

A JSONL file has one conversation a line: {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}.
"""

import argparse
import contextlib
import gc
import json
import time
from pathlib import Path
from typing import Any

from trl_packfix.cli.torch_environment import set_torch_environment

if __name__ == "__main__":
    set_torch_environment()  # before torch is imported

import torch
from datasets import Dataset, load_dataset
from offline import gguf_file, multiplies_bf16, orders, smollm2
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, ProgressCallback

from trl_packfix import SFTConfig, SFTTrainer


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", metavar="FILE", help="JSONL file of conversations (default: orders)")
    parser.add_argument("--num_documents", type=int, default=48, help="conversations to train on (default: 48)")
    parser.add_argument("--max_length", type=int, default=256, help="tokens a document may have (default: 256)")
    parser.add_argument("--output_dir", default="demo_output", help="where the adapter is saved (default: demo_output)")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and 16 documents")
    return parser.parse_args()


def random_miniature(folder: str) -> str:
    """A two-layer Llama of random weights with SmolLM2's tokenizer, saved in `folder`."""
    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """The training set, and a held-out set of a tenth of its size."""
    num_held_out = max(4, args.num_documents // 10)
    num = args.num_documents + num_held_out
    dataset = load_dataset("json", data_files=args.dataset, split="train") if args.dataset else orders(num)
    if len(dataset) < num:
        most = min(len(dataset) - 4, len(dataset) * 10 // 11)
        raise SystemExit(
            f"{args.dataset} has {len(dataset)} conversations; {num} are needed ({args.num_documents} to train on and "
            f"{num_held_out} to hold out). Set --num_documents to {most} or less."
        )
    dataset = dataset.shuffle(seed=0).select(range(num))
    return dataset.select(range(num_held_out, num)), dataset.select(range(num_held_out))


class Bar(ProgressCallback):
    """The bar of transformers, begun with the first step: not before the proof and the first evaluation."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.current_step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is None:
            super().on_train_begin(args, state, control, **kwargs)


def question(row: dict) -> list[dict]:
    """The turns of `row` before the first answer. A plain prompt, or the start of a text, becomes a user's turn."""
    turns = row.get("messages") or row.get("prompt") or row["text"][:400]
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    roles = [turn["role"] for turn in turns]
    return turns[: roles.index("assistant")] if "assistant" in roles else turns


def answer(model: torch.nn.Module, tokenizer: Any, turns: list[dict], max_new_tokens: int) -> str:
    """The answer up to its end, or up to `max_new_tokens`, with dots."""
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.eval().generate(**inputs.to(model.device), max_new_tokens=max_new_tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True).strip()
    return text if new[-1] == tokenizer.eos_token_id else f"{text} ..."


def grade(found: str, expected: str) -> str:
    """Whether an answer is the expected one: as data where both are JSON, else letter by letter."""
    with contextlib.suppress(ValueError):
        found, expected = json.loads(found), json.loads(expected)
    return "RIGHT: it says what the data say." if found == expected else "WRONG: it does not say what the data say."


def peak_gib() -> float:
    """The most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux `ru_maxrss` of a process begins with the memory of the one that started it
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 2**20
    import resource  # macOS

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30


def show(title: str, text: str) -> None:
    print(f"\n--- {title}\n{text}", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    args = parse_args()
    started = time.perf_counter()
    started_cpu = time.process_time()
    if args.tiny:
        args.num_documents = min(args.num_documents, 16)
        say("The model is tiny and random: its loss falls, but its answers stay nonsense.")
        name = random_miniature(f"{args.output_dir}/miniature")
    else:
        say("The model is SmolLM2-135M-Instruct. It is unpacked at the first start (14 CPU seconds) ...")
        name = smollm2()
    say("Loading it ...")
    tokenizer = AutoTokenizer.from_pretrained(name)
    # The frozen weights are multiplied in bfloat16 where the CPU can: kept so, they are not converted in each step.
    dtype = torch.bfloat16 if multiplies_bf16() and not args.tiny else torch.float32
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    train, held_out = conversations(args)
    turns = question(held_out[0])
    expected = held_out[0].get("completion")
    show("A held-out question", turns[-1]["content"])
    before = answer(model, tokenizer, turns, 16 if args.tiny else 24)
    show("Its answer before training", before)
    show("Training", "tokenisation, the test that documents are isolated, a first evaluation, then the steps")

    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        args=SFTConfig(
            output_dir=args.output_dir,
            packing=True,
            max_length=args.max_length,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            num_train_epochs=1,
            learning_rate=2e-2 if args.tiny else 1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            gradient_checkpointing=False,
            bf16=multiplies_bf16(),
            use_cpu=not torch.cuda.is_available(),
            eval_on_start=True,
            eval_strategy="epoch",
            logging_steps=0.1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Bar)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()

    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    show(
        f"Mean loss per trained token on the {len(held_out)} conversations held out",
        f"before {losses[0]:.3f}, after {losses[-1]:.3f}",
    )
    size = sum(file.stat().st_size for file in Path(args.output_dir).glob("adapter_*")) / 2**20
    saved = f"the adapter, {size:.1f} MiB, and its model card, with the report of packing, in {args.output_dir}"
    show("Saved", f"{saved}; the model itself is unchanged")
    del trainer, model
    gc.collect()
    adapted = AutoPeftModelForCausalLM.from_pretrained(args.output_dir)
    after = answer(adapted, tokenizer, turns, 16 if args.tiny else 120)
    show("The question again", turns[-1]["content"])
    show("Before training", before)
    show("After training (the saved adapter, loaded with peft)", after)
    if expected:
        expected = expected[-1]["content"] if isinstance(expected, list) else expected
        show("In the data", expected)
        show("The answer after training is", grade(after, expected))
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - started_cpu
    say(
        f"\nDone in {seconds:.0f} seconds ({cpu_seconds:.0f} CPU seconds), with at most {peak_gib():.1f} GiB of memory."
    )


if __name__ == "__main__":
    main()
