"""For generation only; training must not reach it."""


def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    raise AssertionError("a training reached selective_state_update, which is for generation")
