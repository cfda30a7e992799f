"""Published checkpoints of trained drafters, in and out."""
