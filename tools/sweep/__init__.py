"""Judge packed training on every model type of transformers, with tiny random models: `make sweep`."""
