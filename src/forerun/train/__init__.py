"""Training: prompts, the target's answers to them, and the drafts that learn from these.

`trainer.py` is the loop, `objectives/` what it minimises.
"""
