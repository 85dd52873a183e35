"""Stand for the package of this name in flash-linear-attention."""
