"""Any trainer of TRL computes its padded batches as packs."""
