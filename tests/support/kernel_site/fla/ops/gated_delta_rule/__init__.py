"""The functions of fla/ops/gated_delta_rule with their signatures, and the checks of chunk.py."""

import strict


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):
    strict.count("chunk_gated_delta_rule", cu_seqlens=cu_seqlens, initial_state=initial_state)
    assert g.shape == beta.shape == v.shape[:3]
    assert not (kwargs or use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first or cp_context)
    return run(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def fused_recurrent_gated_delta_rule(q, k, v, **kwargs):
    raise NotImplementedError("Backward pass is not implemented yet. Please use chunk_gated_delta_rule for training")


def run(q, k, v, g, beta, scale, initial_state, output_final_state, normalise, cu_seqlens):
    if q.shape != k.shape or v.shape[2] % q.shape[2]:
        raise ValueError(f"{q.shape[2]} heads of queries, {k.shape[2]} of keys and {v.shape[2]} of values")
    if not {x.dtype for x in (q, k, v, g, beta)} <= strict.dtypes:
        raise ValueError("dtype")
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`.")
        if initial_state is not None and initial_state.shape[0] != len(cu_seqlens) - 1:
            raise ValueError("The number of initial states is expected to be equal to the number of input sequences")
    if k.shape[-1] > 256:
        raise AssertionError("current kernel does not support head dimension larger than 256.")
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out, final = strict.delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, normalise)
    return out.to(q.dtype), final if output_final_state else None
