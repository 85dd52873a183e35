"""TRL's trainer with packing: config, loss, evaluation, restarts."""
