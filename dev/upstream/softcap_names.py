"""TRL: the loss of RecurrentGemma and xLSTM leaves out the cap of the logits.

The fused LM head of TRL reads `final_logit_softcapping`. These two have their cap as `logits_soft_cap` and
`output_logit_soft_cap`, so a model is trained with other logits than it has: a loss of 58.0 for 27.9 where logits are
large.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, PrinterCallback, RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 1, "lru_width": 32, "tie_word_embeddings": False}
model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=300, **sizes)).float()
with torch.no_grad():
    model.lm_head.weight.copy_(4 * torch.randn_like(model.lm_head.weight))
    row = torch.randint(4, 300, (1, 40))
    expected = model(input_ids=row, labels=row).loss.item()
data = Dataset.from_dict({"input_ids": row.tolist()})
args = SFTConfig(tempfile.mkdtemp(), max_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True)
trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
trainer.remove_callback(PrinterCallback)
ratio = trainer.train().training_loss / expected
print(f"logged / loss = {ratio:.3f}, still there: {abs(ratio - 1) > 0.01}")
