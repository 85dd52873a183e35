"""Tiny random models: of every model type of transformers, and of a given config."""
