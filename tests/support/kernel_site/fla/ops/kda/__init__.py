"""The functions of fla/ops/kda with their signatures, and the checks of chunk.py."""

import strict

from ..gated_delta_rule import run


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):
    strict.count("chunk_kda", cu_seqlens=cu_seqlens, initial_state=initial_state)
    assert g.shape == (*v.shape[:3], k.shape[-1]) and beta.shape == v.shape[:3]
    assert not (kwargs or use_gate_in_kernel or use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first)
    assert not (cp_context or return_intermediate_states)
    return run(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def fused_recurrent_kda(q, k, v, **kwargs):
    raise NotImplementedError("Backward pass is not implemented yet.")
