"""One decoder for the Llama family: Llama, Mistral, Qwen2, Qwen3 and Gemma 3 differ by numbers.

R rows, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.models.architecture import DecoderConfig
from forerun.models.cache import KVStore
from forerun.models.invariance import Invariance, check_finite, measure, short_pass
from forerun.models.layers import Layer, Matrix, make_backend
from forerun.models.packing import pack
from forerun.models.rope import Rope
from forerun.models.target import Forward, Segment, TargetInfo

if TYPE_CHECKING:
    from forerun.models.weights import Weights


class Decoder:
    """An `OpenTarget` with fused weights. Loading takes every tensor of `weights` or fails.

    Raises `CheckpointError` when a tensor is missing, wrong or left over, or the logits are not
    finite.
    """

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
        self.backend = make_backend(config, dtype, device)
        reader = _Reader(self, weights)
        self.embedding_VC = reader.matrix("model.embed_tokens.weight", config.vocab_size)
        self.layers = [reader.layer(index) for index in range(config.layers)]
        self.final_norm_C = reader.norm("model.norm.weight")
        self.head = reader.head(self.embedding_VC)
        weights.finish()
        self.row_multiple = 1
        check_finite(short_pass(self), name)
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
            rope_base=config.rope_theta,
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
        self.backend.begin(packed, store)
        hidden_RC = self.embed(torch.tensor(self._padded(packed.tokens), device=self.device))
        run = self.layers if layers is None else [self.layers[index] for index in layers]
        if not taps:
            hidden_RC = self.backend.run(hidden_RC, run)
            return Forward(self._logits(hidden_RC, packed.wanted), None)
        if layers is not None:
            taps = [sum(index < boundary for index in layers) for boundary in taps]
        hidden_RC, taps_RTC = self.backend.run_tapped(hidden_RC, run, taps)
        return Forward(self._logits(hidden_RC, packed.wanted), taps_RTC[: packed.rows])

    def embed(self, tokens_N: Tensor, scaled: bool = True) -> Tensor:
        """See `OpenTarget.embed`."""
        hidden_NC = functional.embedding(tokens_N, self.embedding_VC)
        if self.config.embedding_scale == 1 or not scaled:
            return hidden_NC
        # The published Gemma code rounds the scale to the type of the embedding.
        return hidden_NC * torch.tensor(self.config.embedding_scale, dtype=self.dtype)

    def final_norm(self, hidden_NC: Tensor) -> Tensor:
        """See `OpenTarget.final_norm`."""
        return self.backend.norm(hidden_NC.to(self.dtype).contiguous(), self.final_norm_C)

    def head_logits(self, normed_NC: Tensor) -> Tensor:
        """See `OpenTarget.head_logits`."""
        states_NC = normed_NC.to(self.dtype).contiguous()
        return self._capped(self.backend.logits(states_NC, None, self.head))

    def _padded(self, rows: Sequence[int]) -> list[int]:
        """The rows, and repetitions of the last one up to the next multiple."""
        return [*rows, *[rows[-1]] * (-len(rows) % self.row_multiple)]

    def _logits(self, hidden_RC: Tensor, wanted: list[int]) -> Tensor:
        if not wanted:
            return hidden_RC.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        rows = self._padded(wanted)
        if rows != list(range(hidden_RC.shape[0])):
            hidden_RC = hidden_RC[torch.tensor(rows, device=self.device)]
        logits_NV = self.backend.logits(hidden_RC, self.final_norm_C, self.head)
        if len(rows) > len(wanted):
            logits_NV = logits_NV[: len(wanted)]
        return self._capped(logits_NV)

    def _capped(self, logits_NV: Tensor) -> Tensor:
        cap = self.config.logit_softcap
        return logits_NV if cap is None else cap * torch.tanh(logits_NV / cap)


class _Reader:
    """Takes tensors by their published names and fuses those that are used together."""

    def __init__(self, decoder: Decoder, weights: Weights) -> None:
        self.config, self.weights = decoder.config, weights
        self.dtype, self.device = decoder.dtype, decoder.device
        self.backend = decoder.backend
        c = self.config
        self.rope = Rope(c.head_dim, c.rope_theta, c.rope_scaling, c.max_length, self.device)
        self.local_rope = self.rope
        if c.rope_local_theta is not None:
            self.local_rope = Rope(c.head_dim, c.rope_local_theta, None, c.max_length, self.device)

    def matrix(self, name: str, rows: int, columns: int | None = None) -> Tensor:
        tensor = self.weights.take(name, rows, columns or self.config.hidden_size)
        return tensor.to(self.device, self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        return self.weights.take(name, size).to(self.device, self.dtype)

    def norm(self, name: str, size: int | None = None) -> Tensor:
        weight = self.weights.take(name, size or self.config.hidden_size)
        return (weight.to(self.device, torch.float32) + self.config.norm_offset).contiguous()

    def head(self, embedding_VC: Tensor) -> Matrix:
        c = self.config
        if c.tied_embeddings and "lm_head.weight" not in self.weights:
            return self.backend.matrix(embedding_VC)
        return self.backend.matrix(self.matrix("lm_head.weight", c.vocab_size))

    def layer(self, index: int) -> Layer:
        c = self.config
        at = f"model.layers.{index}."
        sliding = bool(c.sliding_layers) and c.sliding_layers[index]
        names = ("q_norm_D", "k_norm_D") if c.qk_norm else ()
        head_norms: dict[str, Any] = {
            n: self.norm(f"{at}self_attn.{n[:-2]}.weight", c.head_dim) for n in names
        }
        heads, kv_heads = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return Layer(
            index=index,
            qkv=self.fused(
                [f"{at}self_attn.{x}_proj" for x in "qkv"], (heads, kv_heads, kv_heads), c.qkv_bias
            ),
            o=self.linear(at + "self_attn.o_proj", c.hidden_size, heads, c.o_bias),
            gate_up=self.fused(
                [at + "mlp.gate_proj", at + "mlp.up_proj"], (c.intermediate_size,) * 2, c.mlp_bias
            ),
            down=self.linear(at + "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
            rope=self.local_rope if sliding else self.rope,
            window=(c.sliding_window or 0) if sliding else 0,
            **head_norms,
            **self.layer_norms(at),
        )

    def layer_norms(self, at: str) -> dict[str, Any]:
        places = {"before_attention_C": "input", "before_mlp_C": "post_attention"}
        if self.config.sandwich_norms:
            places["after_attention_C"] = "post_attention"
            places["before_mlp_C"] = "pre_feedforward"
            places["after_mlp_C"] = "post_feedforward"
        return {place: self.norm(f"{at}{name}_layernorm.weight") for place, name in places.items()}

    def linear(self, name: str, rows: int, columns: int, biased: bool) -> Matrix:
        bias = self.vector(name + ".bias", rows) if biased else None
        return self.backend.matrix(self.matrix(name + ".weight", rows, columns), bias)

    def fused(self, names: Sequence[str], sizes: Sequence[int], biased: bool) -> Matrix:
        parts = list(zip(names, sizes, strict=True))
        weight = torch.cat([self.matrix(name + ".weight", size) for name, size in parts])
        if not biased:
            return self.backend.matrix(weight)
        bias = torch.cat([self.vector(name + ".bias", size) for name, size in parts])
        return self.backend.matrix(weight, bias)
