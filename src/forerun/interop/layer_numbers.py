"""What the settings of every draft network with decoder layers share."""

from __future__ import annotations

from typing import Any

from forerun.models.architecture import DecoderConfig


def layer_numbers(numbers: DecoderConfig) -> dict[str, Any]:
    """The sizes, norm and rotary numbers of a decoder's layers, by the names of the settings."""
    return {
        "vocab_size": numbers.vocab_size,
        "hidden_size": numbers.hidden_size,
        "intermediate_size": numbers.intermediate_size,
        "layers": numbers.layers,
        "heads": numbers.heads,
        "kv_heads": numbers.kv_heads,
        "head_dim": numbers.head_dim,
        "max_length": numbers.max_length,
        "norm_eps": numbers.norm_eps,
        "rope_theta": numbers.rope_theta,
        "rope_scaling": numbers.rope_scaling,
    }
