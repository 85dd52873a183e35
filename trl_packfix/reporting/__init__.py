"""What packing did, in numbers, pictures and text."""
