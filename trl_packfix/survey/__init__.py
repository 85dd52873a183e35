"""Every model type of transformers, judged on tiny random models."""
