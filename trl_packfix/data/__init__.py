"""From a table or a stream of tokens to batches: documents, collator, loaders, caches."""
