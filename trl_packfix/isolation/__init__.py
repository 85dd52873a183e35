"""Is a document in a pack what it is alone, on this model; and what is done where it is not."""
