"""For generation only; training must not reach it."""


def selective_state_update(*args, **options):
    raise AssertionError("a training reached selective_state_update, which is for generation")
