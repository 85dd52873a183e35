"""transformers: a resumed run starts from the initial weights where names are converted.

Users who resume a run of llava, qwen2_vl, qwen2_5_vl and others lose what was trained, with a warning of missing keys.
These types are saved under the names of their first release. `from_pretrained` converts them back, and the Trainer does
not.
"""

import tempfile

import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
vision = CLIPVisionConfig(**sizes, image_size=24, patch_size=6)
text = LlamaConfig(**sizes, vocab_size=300)
saved, other = (LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)) for _ in range(2))
checkpoint = tempfile.mkdtemp()
saved.save_pretrained(checkpoint)
trainer = Trainer(other, TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[]))
trainer._load_from_checkpoint(checkpoint)  # as `train(resume_from_checkpoint=checkpoint)` does
same = all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters(), strict=True))
print("the weights are not those of the checkpoint, still there:", not same)
