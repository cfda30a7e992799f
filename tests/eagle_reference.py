"""EAGLE-1 and EAGLE-3 written down literally: one row at a time, one head at a time, in float64.

For judging the fast ones. One layer; see models/heads/eagle.py for what the rows mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, sin

import torch
from torch import Tensor

from forerun.models.heads.eagle import Eagle1, Eagle3, Eagle3Settings

Embed = Callable[[int], Tensor]
Head = Callable[[Tensor], Tensor]


class Literal:
    """A draft network that remembers the keys and values of its rows.

    embed, head: the target's, where the draft has none of its own.
    """

    def __init__(self, module: Eagle1 | Eagle3, embed: Embed, head: Head) -> None:
        self.c = module.settings
        self.w = {name: tensor.double() for name, tensor in module.state_dict().items()}
        own = "embed_tokens.weight" in self.w
        self.embed = (lambda token: self.w["embed_tokens.weight"][token]) if own else embed
        self.head = head
        self.keys: list[list[Tensor]] = []  # per row and kv head
        self.values: list[list[Tensor]] = []
        self.positions: list[int] = []

    def fuse(self, feature_F: Tensor) -> Tensor:
        """From what the target computed for one token to the state that its row is fed."""
        feature_F = feature_F.double()
        if not isinstance(self.c, Eagle3Settings):
            return feature_F
        if self.c.norm_before_fc:
            feature_F = self._norm(feature_F, "input_norm")
        if self.c.fc_norm:
            width = self.c.target_hidden_size
            parts = [feature_F[i * width : (i + 1) * width] for i in range(self.c.tap_count)]
            parts = [self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
            feature_F = torch.cat(parts)
        return self.w["fc.weight"] @ feature_F

    def row(self, hidden_C: Tensor, token: int, position: int, sees: Sequence[int]) -> Tensor:
        """Run one row, which sees the rows `sees` and itself; what it hands on."""
        embedding_C = self.embed(token).double()
        if isinstance(self.c, Eagle3Settings):
            normed_C = self._norm(hidden_C, "layers.0.hidden_norm")
            read = torch.cat([self._norm(embedding_C, "layers.0.input_layernorm"), normed_C])
            residual = normed_C if self.c.norm_before_residual else hidden_C
        else:
            read = self.w["fc.weight"] @ torch.cat([embedding_C, hidden_C])
            if self.c.fc_bias:
                read = read + self.w["fc.bias"]
            residual = read
        x_C = residual + self._attention(read, position, sees)
        normed_C = self._norm(x_C, "layers.0.post_attention_layernorm")
        gate = self._linear("layers.0.mlp.gate_proj", normed_C)
        up = self._linear("layers.0.mlp.up_proj", normed_C)
        x_C = x_C + self._linear("layers.0.mlp.down_proj", gate / (1 + (-gate).exp()) * up)
        if isinstance(self.c, Eagle3Settings) and self.c.norm_output:
            x_C = self._norm(x_C, "norm")
        return x_C

    def logits(self, hidden_C: Tensor) -> Tensor:
        """Of the draft's tokens, behind a row that handed on this."""
        if not isinstance(self.c, Eagle3Settings):
            return self.head(hidden_C)
        if not self.c.norm_output:
            hidden_C = self._norm(hidden_C, "norm")
        return self.w["lm_head.weight"] @ hidden_C if self.c.own_head else self.head(hidden_C)

    def target_id(self, token: int) -> int:
        return token + int(self.w["d2t"][token]) if "d2t" in self.w else token

    def _attention(self, read: Tensor, position: int, sees: Sequence[int]) -> Tensor:
        c, at = self.c, "layers.0.self_attn."
        q, k, v = (self._linear(f"{at}{x}_proj", read).view(-1, c.head_dim).unbind() for x in "qkv")
        if c.qk_norm:
            q = [self._norm(head, f"{at}q_norm") for head in q]
            k = [self._norm(head, f"{at}k_norm") for head in k]
        self.keys.append([self._rotate(head, position) for head in k])
        self.values.append(list(v))
        self.positions.append(position)
        rows = [*sees, len(self.keys) - 1]
        if c.sliding_window:
            rows = [row for row in rows if position - self.positions[row] < c.sliding_window]
        found = []
        for head, query in enumerate(q):
            group = head * c.kv_heads // c.heads
            query = self._rotate(query, position)
            scores = torch.stack([query @ self.keys[row][group] for row in rows])
            weights = (scores / c.head_dim**0.5).softmax(0)
            found.append(sum(w * self.values[r][group] for w, r in zip(weights, rows, strict=True)))
        return self._linear(f"{at}o_proj", torch.cat(found))

    def _rotate(self, x_D: Tensor, position: int) -> Tensor:
        half = self.c.head_dim // 2
        turned = x_D.clone()
        for i in range(half):
            angle = position * self.c.rope_theta ** (-2 * i / self.c.head_dim)
            turned[i] = x_D[i] * cos(angle) - x_D[i + half] * sin(angle)
            turned[i + half] = x_D[i + half] * cos(angle) + x_D[i] * sin(angle)
        return turned

    def _norm(self, x_C: Tensor, name: str) -> Tensor:
        rms = (x_C.square().mean() + self.c.norm_eps).sqrt()
        return x_C / rms * self.w[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y


class LiteralDrafter:
    """Grows the tree of one request the way EAGLE-2 says, with dictionaries and lists."""

    def __init__(self, network: Literal) -> None:
        self.network = network

    def propose(
        self, features_RF: Tensor, tokens: Sequence[int], depth: int, top_k: int, nodes: int
    ) -> dict[tuple[int, ...], float]:
        """Token path -> chance, of the `nodes` likeliest nodes. `tokens` are one more than rows."""
        network = self.network
        rows: list[int] = []
        hidden = torch.empty(0)
        for position, feature_F in enumerate(features_RF):
            fed = network.fuse(feature_F)
            hidden = network.row(fed, tokens[position + 1], position, rows)
            rows = [*rows, len(network.keys) - 1]
        pool: dict[tuple[int, ...], float] = {}
        frontier = [((), 1.0, hidden, rows)]
        for level in range(depth):
            candidates = []
            for path, reached, parent_hidden, sees in frontier:
                probs = network.logits(parent_hidden).softmax(-1)
                for token in probs.topk(top_k).indices.tolist():
                    chance = reached * min(0.99, float(probs[token]))
                    candidates.append(
                        ((*path, network.target_id(token)), chance, parent_hidden, sees)
                    )
            pool |= {path: chance for path, chance, _, _ in candidates}
            candidates.sort(key=lambda candidate: -candidate[1])
            frontier = []
            for path, chance, parent_hidden, sees in (
                candidates[:top_k] if level < depth - 1 else ()
            ):
                position = len(features_RF) + level
                hidden = network.row(parent_hidden, path[-1], position, sees)
                frontier.append((path, chance, hidden, [*sees, len(network.keys) - 1]))
        best = sorted(pool.items(), key=lambda item: -item[1])
        return dict(best[:nodes])
