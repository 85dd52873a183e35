"""Attention that reads document boundaries, and the forward that carries them."""
