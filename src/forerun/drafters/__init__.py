"""Drafters: one way to guess per file, all behind one contract."""
