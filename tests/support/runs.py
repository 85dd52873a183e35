"""Trainers on tiny models and data, and what their runs are compared by."""

import json

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig

from trl_packfix import SFTConfig, SFTTrainer
from trl_packfix.isolation.packed_model import PackedModel

from .models import build_tiny_model, build_tokenizer

PROMPT = [{"role": "user", "content": "how many words"}]
ANSWER = [{"role": "assistant", "content": "four of them"}]
TOOL = json.dumps([{"type": "function", "function": {"name": "count", "parameters": {}}}])


# Settings of a trainer in fp32 that saves nothing, and logs every step
PLAIN_RUN = {"bf16": False, "gradient_checkpointing": False, "report_to": [], "save_strategy": "no", "logging_steps": 1}
PLAIN_RUN |= {"disable_tqdm": True}


def config(folder, config_class=SFTConfig, **kwargs):
    defaults = PLAIN_RUN | {"packing": True, "max_length": 64, "per_device_train_batch_size": 2, "use_cpu": True}
    defaults |= {"packing_report": False} if config_class is SFTConfig else {}
    defaults |= {f"{name}_strategy": "steps" for name in ("save", "eval") if f"{name}_steps" in kwargs}
    return config_class(str(folder), **(defaults | kwargs))


# Arguments of trainers; all others are settings of their config
OF_TRAINERS = "eval_dataset peft_config callbacks compute_metrics compute_loss_func formatting_func".split()
OF_TRAINERS += ["preprocess_logits_for_metrics", "data_collator"]


def build_trainer(folder, dataset, model="llama", trainer_class=SFTTrainer, processing_class=None, **kwargs):
    trainer_kwargs = {name: kwargs.pop(name) for name in OF_TRAINERS if name in kwargs}
    model = build_tiny_model(model) if isinstance(model, str) else model
    return trainer_class(
        model,
        config(folder, **kwargs),
        train_dataset=dataset,
        processing_class=processing_class or build_tokenizer(),
        **trainer_kwargs,
    )


def run_training(*args, checkpoint=None, **kwargs):
    """Return a trainer of `build_trainer` that has trained, from a checkpoint on if one is given."""
    trainer = build_trainer(*args, **kwargs)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer


def stock(folder, dataset, model="llama", **kwargs):
    """Return the trainer of TRL that trains the same without packing."""
    return build_trainer(
        folder, dataset, model, trainer_class=trl.SFTTrainer, config_class=trl.SFTConfig, packing=False, **kwargs
    )


def plain_sgd(learning_rate, **more):
    """Return settings of SGD at a constant rate, without clipping: the weights show every fault of a gradient."""
    rate = {"learning_rate": learning_rate, "lr_scheduler_type": "constant"}
    return {"optim": "sgd", "max_grad_norm": 0.0} | rate | more


def checkpointing(reentrant):
    """Return settings of checkpointing, reentrant or not; for None there is none."""
    if reentrant is None:
        return {}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


def random_lora():
    """Return LoRA on all linear layers whose adapters change the model from the start."""
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def packed_model(model, dtype=torch.float32, device="cpu", max_length=64, **settings):
    """Return a model that is set up for packs, and not yet proved."""
    return PackedModel(model, dtype, device, max_length, **settings)


def proved(model, **settings):
    """Return the `packed_model` with these settings, and the report of its proof."""
    packed = packed_model(model, **settings)
    return packed, packed.prove(model)


def texts(num=40, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset.from_dict({"text": ["".join(rng.choice(list("abcdef "), n)) for n in rng.integers(3, 60, num)]})


def tokenised(rng, lengths, first_trained=lambda i, length: 0, **columns):
    """Return tokenised rows of these lengths, in which the tokens before the first trained one have no label.

    The first trained token of row i is `first_trained(i, length)`, and its value of a further column is `column(i)`.
    """
    rows = []
    for i, length in enumerate(lengths):
        tokens = rng.integers(4, 260, length).tolist()
        first = first_trained(i, length)
        values = {name: value(i) for name, value in columns.items()}
        rows.append({"input_ids": tokens, "labels": [-100] * first + tokens[first:]} | values)
    return Dataset.from_list(rows)


def log_of_steps(trainer):
    """Return the entries of the log that have the loss of a step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer):
    return weights_of(trainer.model)


def start_weights(model="llama"):
    return weights_of(build_tiny_model(model))


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient_of(model):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def samples_of(rows):
    """Return (tokens, labels) of each tokenised row."""
    return [(list(row["input_ids"]), list(row["labels"])) for row in rows]


def documents_of_rows(rows):
    """Return the rows as `all_documents` returns them: the first token of a document is not trained."""
    return sorted((tokens, [-100, *labels[1:]]) for tokens, labels in samples_of(rows))


def logged(trainer, name):
    """Return the value of each entry of the log that has this name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def all_documents(trainer):
    """Return the documents of all packs of a run, sorted."""
    return sorted(document for batch in trainer.get_train_dataloader() for document in documents_of(batch))


def documents_of(batch):
    """Return (tokens, labels) of each document of a packed or padded batch, sorted; padding is left out."""
    if "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
        pairs = zip(batch["input_ids"][0].split(lengths), batch["labels"][0].split(lengths), strict=True)
    else:
        rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True)
        pairs = ((tokens[is_real], labels[is_real]) for tokens, labels, is_real in rows)
    return sorted((tokens.tolist(), labels.tolist()) for tokens, labels in pairs)


def record_steps(trainer):
    """Return a list to which training adds the micro-batches of each optimizer step."""
    steps = []
    fetch = trainer.get_batch_samples

    def fetch_and_note(*args):
        batches, num_items = fetch(*args)
        if batches:
            steps.append([dict(batch) for batch in batches])
        return batches, num_items

    trainer.get_batch_samples = fetch_and_note
    return steps


def interrupt_forward(module, number=1):
    """Let Ctrl-C come once, in the forward of this number of a module, counted from now on."""
    forwards = iter(range(1, number + 1))

    def hook(*call):
        if next(forwards) == number:
            handle.remove()
            raise KeyboardInterrupt

    handle = module.register_forward_pre_hook(hook)
