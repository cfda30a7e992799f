"""forerun: speculative decoding for self-hosted language models."""
