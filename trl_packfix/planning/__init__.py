"""Lengths in, packs and schedules out: integers and numpy, nothing of torch."""
