"""Models: where they come from, their weights, and one pass over packed rows."""
