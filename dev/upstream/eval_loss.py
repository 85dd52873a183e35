"""transformers: `eval_loss` is a mean over batches, not over tokens.

Users who change `per_device_eval_batch_size`, packing or the number of GPUs get another `eval_loss` for the same model
and data, and with it another best checkpoint.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=1.0, **sizes))
rows = Dataset.from_dict({"input_ids": [torch.randint(4, 300, (n,)).tolist() for n in (3, 60, 4, 50, 5, 40)]})
losses = []
for batch_size in (1, 6):
    args = SFTConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True)
    args.per_device_eval_batch_size = batch_size
    trainer = SFTTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    losses.append(trainer.evaluate()["eval_loss"])
print(f"by batch size: {losses[0]:.3f} and {losses[1]:.3f}, still there: {abs(losses[0] - losses[1]) > 1e-3}")
