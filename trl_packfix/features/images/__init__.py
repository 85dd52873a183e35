"""Rows with images are packed, trained and proved with the pixels that the processor of a model makes of them."""
