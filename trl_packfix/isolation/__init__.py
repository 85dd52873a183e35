"""Test whether packing changes what a model computes for a document, and repair a model on which it does."""
