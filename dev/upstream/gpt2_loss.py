"""TRL: the loss of GPT-2 is divided by labels that are no targets.

Users who fine-tune gpt2, gpt-sw3, openai-gpt, ctrl, bert, bert-generation, reformer, xlm or xlnet get a loss and
gradients that are too small, by 1 / length of a document: 20 % with five tokens. `loss_type` is read from the name of
the class, and these are not named `...ForCausalLM`.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
torch.manual_seed(0)
sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=300, bos_token_id=0, eos_token_id=0, **sizes))
rows = torch.randint(4, 300, (8, 5))
with torch.no_grad():
    expected = model(input_ids=rows, labels=rows).loss.item()
data = Dataset.from_dict({"input_ids": rows.tolist()})
args = SFTConfig(tempfile.mkdtemp(), max_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True)
trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
trainer.remove_callback(PrinterCallback)
ratio = trainer.train().training_loss / expected
print(f"logged / loss = {ratio:.3f}, still there: {ratio < 0.99}")
