"""The networks of trained drafters: plain PyTorch modules, the same for drafting and training."""
