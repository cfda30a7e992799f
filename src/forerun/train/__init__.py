"""Training: drafts for a target, made from its own answers. `trainer.py` is the loop."""
