"""bitsandbytes: a forward in evaluation ends the training of 4-bit models on CPUs with `avx512_bf16`.

pip install bitsandbytes

Users who try QLoRA on such a CPU and evaluate once train other adapters: 0.74 of their change in three steps of a tiny
Llama. The forward repacks the weights, and the operator for repacked weights has no gradient.
"""

import torch
from bitsandbytes.nn import Linear4bit, Params4bit

torch.manual_seed(0)
layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
layer.weight = Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
layer = layer.to("cpu")


def gradient():
    x = torch.ones(4, 64, requires_grad=True)
    (layer.train()(x) ** 2).sum().backward()
    return x.grad


before = gradient()
with torch.no_grad():
    layer.eval()(torch.ones(4, 64))
after = gradient()
print("no gradient passes after it, still there:", after is None or not torch.allclose(before, after))
