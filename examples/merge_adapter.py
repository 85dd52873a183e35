"""Merge a LoRA adapter into its base model. The result is an ordinary checkpoint, which does not need peft.

python examples/merge_adapter.py ADAPTER_FOLDER MERGED_FOLDER
"""

import argparse

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="folder or hub name of the adapter; its config names the base model")
    parser.add_argument("output", help="folder for the merged model and the tokenizer")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="as saved")
    args = parser.parse_args()
    # Merged in fp32 and rounded once. In bf16, updates smaller than a rounding step of the base weight would be lost.
    model = AutoPeftModelForCausalLM.from_pretrained(args.adapter, dtype=torch.float32)
    model.merge_and_unload().to(getattr(torch, args.dtype)).save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.adapter).save_pretrained(args.output)
    print(f"Merged model saved in {args.output}")
