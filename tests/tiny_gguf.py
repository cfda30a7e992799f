"""Random GGUF files of a few thousand weights, as llama.cpp's converter would write them.

    path = write_gguf(tmp_path / "tiny.gguf", llama_state())

The tensors are given under their published names; the writer renames them, orders the rows of q and
k in pairs for Llama and adds one to the norms of Gemma, so that readers have something to undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 4, 2, 16, 40

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def shapes(architecture: str = "llama", layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of a decoder with tied embeddings."""
    gemma = architecture == "gemma3"
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "post_attention_layernorm": (HIDDEN,),
    }
    if gemma:
        block |= {"pre_feedforward_layernorm": (HIDDEN,), "post_feedforward_layernorm": (HIDDEN,)}
        block |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
    for layer in range(layers):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return found


def random_state(architecture: str = "llama", seed: int = 0) -> dict[str, Tensor]:
    """Random float32 tensors under their published names."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=noise) * 0.3
        for name, shape in shapes(architecture).items()
    }


def metadata(architecture: str = "llama") -> dict[str, Any]:
    """What a converter writes about the model, with a byte tokenizer."""
    own: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma3":
        own["attention.sliding_window"] = 8
    tokens = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(VOCAB - 3))]
    return {f"{architecture}.{key}": value for key, value in own.items()} | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * VOCAB,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (VOCAB - 3)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_gguf(
    path: Path,
    state: Mapping[str, Tensor],
    architecture: str = "llama",
    *,
    extra: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
    quantisation: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """extra: metadata on top of the usual. quantisation: of the matrices; None: float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata(architecture) | dict(extra or {})).items():
        _add(writer, key, value)
    for name, tensor in state.items():
        values = _converted(name, tensor, architecture).numpy()
        if quantisation is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, quantisation)
            writer.add_tensor(_renamed(name, architecture), packed, raw_dtype=quantisation)
        else:
            writer.add_tensor(_renamed(name, architecture), values)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _renamed(name: str, architecture: str) -> str:
    names = _GEMMA_NAMES if architecture == "gemma3" else _NAMES
    stem, kind = name.rsplit(".", 1)
    if stem in names:
        return f"{names[stem]}.{kind}"
    layer, inner = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{names[inner]}.{kind}"


def _converted(name: str, tensor: Tensor, architecture: str) -> Tensor:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = HEADS if "q_proj" in name else KV_HEADS
        rows = np.arange(tensor.shape[0]).reshape(heads, -1)
        first, second = np.split(rows, 2, axis=1)
        pairs = np.stack([first, second], axis=2).reshape(-1)
        return tensor[torch.from_numpy(pairs)].contiguous()
    return tensor
