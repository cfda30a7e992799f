"""DFlash written down literally: one query at a time, everything recomputed, nothing kept.

From the paper (arXiv 2602.06036) and what published checkpoints say, in float64. `state` holds the
tensors of the z-lab layout; layers are counted by their outputs, as `target_layer_ids` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def block_hidden(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    layer_outputs: Sequence[Tensor],
    block: Tensor,
    context_first: Callable[[int, int], int] = lambda layer, slot: 0,
    causal: Sequence[bool] | None = None,
) -> Tensor:
    """Hidden states of the slots behind the final norm, [slots, C].

    layer_outputs: per target layer, its output for the tokens before the anchor, [tokens, E].
    block: embeddings of the anchor and the mask tokens, [slots, C].
    context_first: (layer, slot) -> the first context token that is seen (windows).
    """
    state = {name: tensor.double() for name, tensor in state.items()}
    taps = [layer_outputs[layer].double() for layer in config["target_layer_ids"]]
    context = [
        _norm(
            state["fc.weight"] @ torch.cat([tap[token] for tap in taps]),
            state["hidden_norm.weight"],
        )
        for token in range(len(taps[0]))
    ]
    hidden = list(block.double())
    for layer in range(config["num_hidden_layers"]):
        weights = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in state.items()
            if name.startswith(f"layers.{layer}.")
        }
        inputs = [_norm(x, weights["input_layernorm.weight"]) for x in hidden]
        after = []
        for slot, x in enumerate(hidden):
            seen = list(range(context_first(layer, slot), len(context)))
            last = slot if causal and causal[layer] else len(hidden) - 1
            keys = [(position, context[position]) for position in seen]
            keys += [(len(context) + other, inputs[other]) for other in range(last + 1)]
            attended = _attention(weights, config, inputs[slot], len(context) + slot, keys)
            x = x + attended
            y = _norm(x, weights["post_attention_layernorm.weight"])
            gate = weights["mlp.gate_proj.weight"] @ y
            up = weights["mlp.up_proj.weight"] @ y
            after.append(x + weights["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        hidden = after
    return torch.stack([_norm(x, state["norm.weight"]) for x in hidden])


def _attention(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    query_input: Tensor,
    position: int,
    keys: Sequence[tuple[int, Tensor]],
) -> Tensor:
    size, heads, groups = config["head_dim"], config["num_attention_heads"], config["kv_heads"]
    theta = config["rope_theta"]
    out = []
    for head in range(heads):
        group = head // (heads // groups)
        mine = slice(head * size, (head + 1) * size)
        theirs = slice(group * size, (group + 1) * size)
        query = _norm(
            weights["self_attn.q_proj.weight"][mine] @ query_input,
            weights["self_attn.q_norm.weight"],
        )
        query = _turn(query, position, theta)
        scores, values = [], []
        for key_position, key_input in keys:
            key = weights["self_attn.k_proj.weight"][theirs] @ key_input
            key = _turn(_norm(key, weights["self_attn.k_norm.weight"]), key_position, theta)
            scores.append(float(query @ key) / math.sqrt(size))
            values.append(weights["self_attn.v_proj.weight"][theirs] @ key_input)
        total = sum(math.exp(score) for score in scores)
        parts = [math.exp(s) / total * value for s, value in zip(scores, values, strict=True)]
        out.append(torch.stack(parts).sum(0))
    return weights["self_attn.o_proj.weight"] @ torch.cat(out)


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Turn component i against component i + half by position * theta^(-2 i / size)."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        a, b = float(x[i]), float(x[i + half])
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned
