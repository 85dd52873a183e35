"""Test packing on every model type of transformers, with tiny random models."""
