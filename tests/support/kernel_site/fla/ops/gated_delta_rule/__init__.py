"""The functions of fla/ops/gated_delta_rule, and the checks of chunk.py."""

import strict


def delta_rule(name, shape_of_decays):
    """Return a kernel with the arguments of both rules. transformers passes on only those that the signature has."""

    def compute(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
        lower_bound=None, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **other_options,
    ):  # fmt: skip
        strict.count(name, cu_seqlens=cu_seqlens, initial_state=initial_state)
        assert g.shape == shape_of_decays(k, v)
        assert beta.shape == v.shape[:3]
        assert not (use_gate_in_kernel or use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first)
        assert not (other_options or cp_context)
        if q.shape != k.shape or v.shape[2] % q.shape[2]:
            raise ValueError(f"{q.shape[2]} heads of queries, {k.shape[2]} of keys and {v.shape[2]} of values")
        if not {x.dtype for x in (q, k, v, g, beta)} <= strict.dtypes:
            raise ValueError("dtype")
        if cu_seqlens is not None:
            if q.shape[0] != 1:
                raise ValueError(
                    f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`."
                )
            if initial_state is not None and initial_state.shape[0] != len(cu_seqlens) - 1:
                raise ValueError(
                    "The number of initial states is expected to be equal to the number of input sequences"
                )
        if k.shape[-1] > 256:
            raise AssertionError("current kernel does not support head dimension larger than 256.")
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        out, final = strict.delta_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
        return out.to(q.dtype), final if output_final_state else None

    return compute


def fused_recurrent_gated_delta_rule(q, k, v, **kwargs):
    raise NotImplementedError("Backward pass is not implemented yet. Please use chunk_gated_delta_rule for training")


chunk_gated_delta_rule = delta_rule("chunk_gated_delta_rule", lambda k, v: v.shape[:3])
