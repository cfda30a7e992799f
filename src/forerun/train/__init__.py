"""Training: prompts, the target's answers to them, and the networks that learn to draft them."""
