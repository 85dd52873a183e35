"""The functions of flash-attn 2.8 with their signatures."""

from .strict import attend


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Rows of one length: (B, L, H, D), (B, M, G, D), (B, M, G, D) -> (B, L, H, D)."""
    assert alibi_slopes is None, "the stand-in has neither alibi nor attention weights"
    assert not return_attn_probs, "the stand-in has neither alibi nor attention weights"
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return attend("rows", q, k, v, None, None, q.shape[1], k.shape[1], *options)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """Documents end to end: (T, H, D), (T, G, D), (T, G, D) -> (T, H, D)."""
    assert alibi_slopes is None, "the stand-in has neither alibi nor attention weights"
    assert not return_attn_probs, "the stand-in has neither alibi nor attention weights"
    assert block_table is None, "the stand-in has no paged cache"
    options = (dropout_p, softmax_scale, causal, window_size, softcap)
    return attend("varlen", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def flash_attn_with_kvcache(*args, **options):
    """For generation only; training must not reach it."""
    raise AssertionError("a training reached flash_attn_with_kvcache, which is for generation")
