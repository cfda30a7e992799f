"""One decoder for the Llama family: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ by numbers.

R rows, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.invariance import Invariance, measure
from forerun.models.layers import AttentionWeights, Math, make_math
from forerun.models.linear import Linear
from forerun.models.packing import pack
from forerun.models.rope import Rope
from forerun.models.target import Forward, Segment, TargetInfo

if TYPE_CHECKING:
    from forerun.models.weights import Weights


class Decoder:
    """A `Target` with fused weights. Loading takes every tensor of `weights` or fails."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> None:
        self.config = config
        self.dtype, self.device = dtype, device
        self.math = make_math(config, dtype, device)
        reader = _Reader(config, weights, dtype, device)
        self.embedding_VC = reader.matrix("model.embed_tokens.weight", config.vocab_size)
        self.layers = [_Layer(reader, index) for index in range(config.layers)]
        self.final_norm_C = reader.norm("model.norm.weight")
        self.head = self._head(reader)
        weights.finish()
        self.row_multiple = 1
        found = measure(self) if device.type == "cpu" else Invariance(1, rows=False, trees=False)
        self.row_multiple = found.row_multiple
        self.info = TargetInfo(
            name=name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=config.layers,
            max_length=config.max_length,
            dtype=dtype,
            device=device,
            row_invariant=found.rows,
            tree_invariant=found.trees,
        )

    def new_store(self, slots: int) -> KVStore:
        """An empty key/value store for `slots` tokens."""
        c = self.config
        return KVStore(c.layers, c.kv_heads, c.head_dim, slots, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        store: KVStore,
        taps: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> Forward:
        """See `Target.forward`. Taps other than those of the layers run are not available."""
        packed = pack(segments)
        self.math.begin(packed, store)
        hidden_RC = self._embed(self._padded(packed.tokens))
        run = range(self.config.layers) if layers is None else layers
        tapped = {}
        for index in run:
            if index in taps:
                tapped[index] = hidden_RC
            hidden_RC = self.layers[index](hidden_RC, self.math)
        tapped[self.config.layers] = hidden_RC
        taps_RTD = torch.stack([tapped[b][: packed.rows] for b in taps], 1) if taps else None
        return Forward(self._logits(hidden_RC, packed.wanted), taps_RTD)

    def _head(self, reader: _Reader) -> Linear:
        c = self.config
        tied = c.tied_embeddings and "lm_head.weight" not in reader.weights
        if tied:
            return Linear(self.embedding_VC)
        return Linear(reader.matrix("lm_head.weight", c.vocab_size))

    def _padded(self, rows: Sequence[int]) -> list[int]:
        """The rows, and repetitions of the last one up to the next multiple."""
        return [*rows, *[rows[-1]] * (-len(rows) % self.row_multiple)]

    def _embed(self, tokens: list[int]) -> Tensor:
        hidden_RC = self.embedding_VC[torch.tensor(tokens, device=self.device)]
        if self.config.embedding_scale == 1:
            return hidden_RC
        # The published Gemma code rounds the scale to the type of the embedding.
        return hidden_RC * torch.tensor(self.config.embedding_scale, dtype=self.dtype)

    def _logits(self, hidden_RC: Tensor, wanted: list[int]) -> Tensor:
        if not wanted:
            return hidden_RC.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        rows = self._padded(wanted)
        if rows != list(range(len(hidden_RC))):
            hidden_RC = hidden_RC[torch.tensor(rows, device=self.device)]
        logits_NV = self.head(self.math.norm(hidden_RC, self.final_norm_C))[: len(wanted)].float()
        cap = self.config.logit_softcap
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)


class _Layer:
    """Attention and gated MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, reader: _Reader, index: int) -> None:
        c = reader.config
        self.index = index
        at = f"model.layers.{index}."
        self.qkv = reader.qkv(at)
        self.o = reader.linear(at + "self_attn.o_proj", c.hidden_size, c.o_bias)
        self.gate_up = reader.gate_up(at)
        self.down = reader.linear(at + "mlp.down_proj", c.hidden_size, c.mlp_bias)
        self.attention = reader.attention(index, at)
        self.before_attention_C = reader.norm(at + "input_layernorm.weight")
        self.after_attention_C: Tensor | None = None
        self.after_mlp_C: Tensor | None = None
        if c.sandwich_norms:
            self.after_attention_C = reader.norm(at + "post_attention_layernorm.weight")
            self.before_mlp_C = reader.norm(at + "pre_feedforward_layernorm.weight")
            self.after_mlp_C = reader.norm(at + "post_feedforward_layernorm.weight")
        else:
            self.before_mlp_C = reader.norm(at + "post_attention_layernorm.weight")

    def __call__(self, x_RC: Tensor, math: Math) -> Tensor:
        qkv_RC = self.qkv(math.norm(x_RC, self.before_attention_C))
        heads_RC = math.attention(self.index, self.attention, qkv_RC)
        x_RC = self._add(x_RC, self.o, heads_RC, self.after_attention_C, math)
        inner_RC = math.gated(self.gate_up(math.norm(x_RC, self.before_mlp_C)))
        return self._add(x_RC, self.down, inner_RC, self.after_mlp_C, math)

    @staticmethod
    def _add(x_RC: Tensor, linear: Linear, y_RC: Tensor, norm_C: Tensor | None, math: Math) -> Tensor:
        if norm_C is None:
            return linear(y_RC, residual_RO=x_RC)
        return math.norm(linear(y_RC), norm_C, residual_RC=x_RC)


class _Reader:
    """Takes tensors by their published names and fuses those that are used together."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = dtype, device
        c = config
        self.rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling, c.max_length, device)
        self.local_rope = self.rope
        if c.rope_local_theta is not None:
            self.local_rope = Rope(c.head_dim, c.rope_local_theta, None, c.max_length, device)

    def matrix(self, name: str, rows: int, columns: int | None = None) -> Tensor:
        tensor = self.weights.take(name, rows, columns or self.config.hidden_size)
        return tensor.to(self.device, self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        return self.weights.take(name, size).to(self.device, self.dtype)

    def norm(self, name: str, size: int | None = None) -> Tensor:
        weight = self.weights.take(name, size or self.config.hidden_size)
        return (weight.to(self.device, torch.float32) + self.config.norm_offset).contiguous()

    def linear(self, name: str, rows: int, biased: bool) -> Linear:
        columns = self.columns(name)
        bias = self.vector(name + ".bias", rows) if biased else None
        return Linear(self.matrix(name + ".weight", rows, columns), bias)

    def columns(self, name: str) -> int:
        c = self.config
        return c.heads * c.head_dim if name.endswith("o_proj") else c.intermediate_size

    def qkv(self, at: str) -> Linear:
        c = self.config
        sizes = (c.heads * c.head_dim, *(c.kv_heads * c.head_dim,) * 2)
        return self.fused([at + f"self_attn.{x}_proj" for x in "qkv"], sizes, c.qkv_bias)

    def gate_up(self, at: str) -> Linear:
        c = self.config
        names = [at + "mlp.gate_proj", at + "mlp.up_proj"]
        return self.fused(names, (c.intermediate_size,) * 2, c.mlp_bias)

    def fused(self, names: Sequence[str], sizes: Sequence[int], biased: bool) -> Linear:
        parts = list(zip(names, sizes, strict=True))
        weight = torch.cat([self.matrix(name + ".weight", size) for name, size in parts])
        if not biased:
            return Linear(weight)
        return Linear(weight, torch.cat([self.vector(name + ".bias", size) for name, size in parts]))

    def attention(self, index: int, at: str) -> AttentionWeights:
        c = self.config
        sliding = bool(c.sliding_layers) and c.sliding_layers[index]
        q_norm = k_norm = None
        if c.qk_norm:
            q_norm = self.norm(at + "self_attn.q_norm.weight", c.head_dim)
            k_norm = self.norm(at + "self_attn.k_norm.weight", c.head_dim)
        return AttentionWeights(
            q_norm,
            k_norm,
            self.local_rope if sliding else self.rope,
            (c.sliding_window or 0) if sliding else 0,
        )
