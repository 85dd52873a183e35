"""Tiny random models with the config of a checkpoint."""
