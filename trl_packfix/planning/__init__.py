"""Lengths of documents in, packs and schedules out. Integers and numpy only, no torch."""
