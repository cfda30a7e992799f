"""The numbers that make one decoder a Llama, a Qwen or a Gemma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the parametrised decoder needs to know, whatever the file it was read from."""

    architecture: str  # model_type of the published config: llama, mistral, qwen2, ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None  # as published, key `rope_type`; None: default
    rope_local_theta: float | None = None  # base of the sliding layers where it differs (Gemma 3)
    sliding_window: int | None = None  # keys a sliding layer sees, its own included
    sliding_layers: tuple[bool, ...] = ()  # per layer; empty: none
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k
    sandwich_norms: bool = False  # norms behind attention and MLP, too (Gemma)
    norm_offset: float = 0.0  # norms multiply by (offset + weight); Gemma: 1
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
