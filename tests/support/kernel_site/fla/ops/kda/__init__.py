"""The functions of fla/ops/kda, and the checks of chunk.py."""

from ..gated_delta_rule import delta_rule
from ..gated_delta_rule import fused_recurrent_gated_delta_rule as fused_recurrent_kda  # noqa: F401

chunk_kda = delta_rule("chunk_kda", lambda k, v: (*v.shape[:3], k.shape[-1]))
