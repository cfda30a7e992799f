"""Verifiers: what survives of a draft, and which token follows."""
