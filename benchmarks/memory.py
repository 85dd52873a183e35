"""The predicted peak of a training step (`plan --memory`) against what torch counts, at the sizes of real models.

    python benchmarks/memory.py --csv memory.csv

Tensors have shapes and no memory: nothing is computed. Counted are weights, gradients and all storages that live at
once in a forward and a backward, by `torch.distributed._tools.mem_tracker.MemTracker` for full training and by the
storages themselves for LoRA. Left out on both sides: states of the optimizer and the work space inside of kernels.
"""

from common import describe, make_parser, tell, write_csv
from support.memory import fused_peaks, packed_peaks
from transformers import AutoConfig

from trl_packfix.data.model_memory import GIB

TOKENS = 8192
WIDE = {"num_key_value_heads": 8, "head_dim": 128}
MODELS = {
    "Llama-3-8B": ("llama", WIDE | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
                   | {"num_attention_heads": 32, "vocab_size": 128256}),
    "Qwen3-30B-A3B": ("qwen3_moe", {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
                      | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
                      | {"num_experts": 128, "num_experts_per_tok": 8}),
    "Gemma-3-4B": ("gemma3_text", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
                   | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}),
}  # fmt: skip


def main() -> None:
    args = make_parser(__doc__).parse_args()
    print(describe())
    rows = []
    for name, (model_type, sizes) in MODELS.items():
        config = AutoConfig.for_model(model_type, **sizes)
        for checkpointing in (True, False):
            cases = {
                "full, bfloat16, plain loss": lambda: packed_peaks(config, checkpointing, TOKENS),  # noqa: B023
                "LoRA, fused loss": lambda: fused_peaks(config, True, checkpointing, TOKENS),  # noqa: B023
            }
            for training, peaks in cases.items():
                predicted, counted = peaks()
                row = {"model": name, "training": training, "checkpointing": checkpointing, "tokens": TOKENS}
                rows.append(
                    row | {"predicted_gib": predicted / GIB, "counted_gib": counted / GIB, "ratio": predicted / counted}
                )
                tell(rows[-1], ".3f")
                write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
