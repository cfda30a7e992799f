"""Random models of a few thousand weights, written to a folder as published ones are.

    folder = tiny_folder(tmp_path)          # config.json, model.safetensors, tokenizer.json, ...
    model = tiny_llama(tmp_path, seed=1)    # the same, loaded through forerun.models.hub

The tokenizer has one token per byte, `<|start|>`, `<|end|>` (the end of a sequence) and `<|pad|>`,
so that any text can be encoded and characters outside ASCII are split over tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from forerun.models.hub import LoadedModel

SPECIALS = ("<|start|>", "<|end|>", "<|pad|>")
START, END, PAD = 256, 257, 258
VOCAB = 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_tokenizer(extra: int = 0) -> Tokenizer:
    """One token per byte, the special ones behind them; `extra` more, which nothing encodes to."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # byte b is token b: the byte-level alphabet maps printable bytes to themselves
    plain = [chr(b) for b in range(256) if chr(b) in alphabet]
    moved = iter(sorted(set(alphabet) - set(plain)))
    letters = [chr(b) if chr(b) in alphabet else next(moved) for b in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIALS, *(f"<|extra{i}|>" for i in range(extra))])
    return tokenizer


def tiny_folder(
    folder: Path, *, vocab: int = VOCAB, layers: int = 2, seed: int = 0, max_length: int = 512
) -> Path:
    """Write a random Llama: `vocab` tokens, hidden size 32, 4 query and 2 key heads.

    Its laws are neither flat nor certain: two to five bits of entropy per token.
    """
    assert vocab >= VOCAB, "one token per byte and the special ones"
    folder.mkdir(parents=True, exist_ok=True)
    hidden, heads, kv_heads, head_dim, inner = 32, 4, 2, 16, 48
    noise = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=noise) * scale

    weights = {
        "model.embed_tokens.weight": random(vocab, hidden, scale=1.0),
        "model.norm.weight": 1 + random(hidden, scale=0.1),
        "lm_head.weight": random(vocab, hidden, scale=0.6),
    }
    for i in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.{name}.weight"] = random(*shape, scale=shape[1] ** -0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + random(hidden, scale=0.1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": START,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    ends = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": PAD}
    _write(folder / "config.json", config)
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "generation_config.json", ends)
    tiny_tokenizer(vocab - VOCAB).save(str(folder / "tokenizer.json"))
    return folder


def tiny_llama(
    folder: Path, *, vocab: int = VOCAB, layers: int = 2, seed: int = 0, max_length: int = 512
) -> LoadedModel:
    """A random Llama in float32 on the CPU, loaded as any other model."""
    from forerun.models.hub import load

    tiny_folder(folder, vocab=vocab, layers=layers, seed=seed, max_length=max_length)
    return load(str(folder), dtype="float32", device="cpu")


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2))
