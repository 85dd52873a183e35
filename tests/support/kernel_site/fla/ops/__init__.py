"""As in flash-linear-attention."""
