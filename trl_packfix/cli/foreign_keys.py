"""Keys of other trainers' files, and what they are called here.

From the configuration pages of axolotl, LLaMA-Factory, unsloth, ms-swift and earlier versions of TRL and transformers.
A key that is a field here, too, is not in the table.
"""

from collections.abc import Iterable

# Other name -> field. A value after the colon is the one that means the same.
RENAMED = {
    # models and adapters
    "base_model": "model_name_or_path",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "torch_dtype": "dtype",
    "attn_impl": "attn_implementation",
    "flash_attn": "attn_implementation: flash_attention_2",
    "flash_attention": "attn_implementation: flash_attention_2",
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
    "sdp_attention": "attn_implementation: sdpa",
    "adapter": "use_peft: true",
    "finetuning_type": "use_peft: true",
    "train_type": "use_peft: true",
    "tuner_type": "use_peft: true",
    "lora_rank": "lora_r",
    "r": "lora_r",
    "lora_target": "lora_target_modules",
    "target_modules": "lora_target_modules",
    "lora_target_linear": "lora_target_modules: all-linear",
    "additional_target": "lora_modules_to_save",
    "peft_use_rslora": "use_rslora",
    "peft_use_dora": "use_dora",
    "quantization_bit": "load_in_4bit",
    # data
    "dataset": "dataset_name",
    "preprocessing_num_workers": "dataset_num_proc",
    "dataset_processes": "dataset_num_proc",
    "num_proc": "dataset_num_proc",
    "chat_template": "chat_template_path",
    "template": "chat_template_path",
    "val_set_size": "test_split_size",
    "val_size": "test_split_size",
    "split_dataset_ratio": "test_split_size",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "excess_length_strategy": "overlong",
    "truncation_strategy": "overlong",
    # what is trained
    "train_on_inputs": "assistant_only_loss",
    "train_on_prompt": "assistant_only_loss",
    "roles_to_train": "assistant_only_loss: true",
    "loss_scale": "assistant_only_loss: true",
    "train_on_responses_only": "assistant_only_loss: true",
    "mask_history": "assistant_turns: last",
    "message_field_training": "message_train_key",  # of the whole file, not of an entry
    # packing
    "sample_packing": "packing",
    "neat_packing": "packing",
    "eval_sample_packing": "eval_packing",
    "batch_flattening": "packing_strategy: minibatch",
    "context_parallel_size": "tokens_per_rank",
    "context_parallel_degree": "tokens_per_rank",
    "sequence_parallel_size": "tokens_per_rank",
    # training
    "micro_batch_size": "per_device_train_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps",
    "random_state": "seed",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "evaluation_strategy": "eval_strategy",
    "evals_per_epoch": "eval_steps",
    "saves_per_epoch": "save_steps",
    "group_by_length": "train_sampling_strategy",
    "enable_liger_kernel": "use_liger_kernel",
    "liger_kernel": "use_liger_kernel",
    "use_liger": "use_liger_kernel",
    "auto_resume_from_checkpoints": "resume_from_checkpoint: newest",
    "no_cuda": "use_cpu",
    "wandb_name": "run_name",
}
# What has another form here
EXPLAINED = {
    **dict.fromkeys(("val_set_size", "val_size", "split_dataset_ratio"), "of a mixture in `datasets`"),
    "warmup_ratio": "a value below 1 is the share of all steps",
    "train_on_inputs": "with the opposite value",
    "train_on_prompt": "with the opposite value",
    "loss_scale": "without it every token of `messages` is trained",
    "quantization_bit": "or `load_in_8bit`, with the value true",
    "excess_length_strategy": '"truncate", "drop" or "raise"',
    "truncation_strategy": '"truncate" or "drop"',
    "chat_template": "a file, or a model whose template is taken",
    "template": "a file, or a model whose template is taken; unset, that of the model",
    "context_parallel_size": "most tokens of a pack on one rank; how many ranks share it is chosen",
    "context_parallel_degree": "most tokens of a pack on one rank; how many ranks share it is chosen",
    "sequence_parallel_size": "most tokens of a pack on one rank; how many ranks share it is chosen",
    "evals_per_epoch": "a value below 1 is a share of all steps",
    "saves_per_epoch": "a value below 1 is a share of all steps",
    "tuner_type": "or false for full training",
    "train_type": "or false for full training",
    "finetuning_type": "or false for full training",
    "adapter": "with `load_in_4bit: true` for qlora",
}
# Keys without a counterpart, and why they can be removed
NOT_NEEDED = {
    "pad_to_sequence_len": "packs are not padded",
    "multipack_real_batches": "a micro-batch is one row",
    "sample_packing_group_size": "packs are planned over the whole dataset",
    "sample_packing_bin_size": "a pack holds as many documents as fit",
    "overwrite_cache": "`datasets` sees changed data and settings itself",
    "dataset_prepared_path": "`datasets` caches; `trl-packfix prepare` writes a folder",
    "lazy_tokenize": "tokens are read from disk",
    "stage": "this command trains as `sft` does",
    "model_type": "it is in the config of the model",
    "tokenizer_type": "it is in the config of the tokenizer",
    "overwrite_output_dir": "`resume_from_checkpoint: newest` continues, anything else begins anew",
    "wandb_project": "set the environment variable WANDB_PROJECT",
    "use_hf": "models and datasets come from the Hugging Face hub",
    "save_safetensors": "weights are always saved as safetensors",
    "use_unsloth": "`attn_implementation` and `use_liger_kernel` choose kernels",
    "shuffle_merged_datasets": "every epoch is shuffled",
    # of an entry of `datasets`
    "type": "the form of a row is known from its columns",
    "ds_type": "the kind of a file is known from its name",
    "field_messages": "name the column `messages` or `conversations`",
    "message_property_mappings": "name the keys `role` and `content`, or `from` and `value`",
    "train_on_eos": "the end of a turn is trained with it",
}


def hints(names: Iterable[str]) -> str:
    """Sentences that say what keys of other trainers are called here, to be put into a message; "" if none is known.

    >>> hints(["sequence_len", "train_on_inputs", "learning_rat"])
    ' `sequence_len` is `max_length` here. `train_on_inputs` is `assistant_only_loss` here (with the opposite value).'
    """
    sentences = ""
    for name in names:
        if name in RENAMED:
            note = f" ({EXPLAINED[name]})" if name in EXPLAINED else ""
            sentences += f" `{name}` is `{RENAMED[name]}` here{note}."
        elif name in NOT_NEEDED:
            sentences += f" `{name}` can be removed: {NOT_NEEDED[name]}."
    return sentences
