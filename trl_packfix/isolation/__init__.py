"""Test whether packing changes what a model computes for a document, and repair the model if it does."""
