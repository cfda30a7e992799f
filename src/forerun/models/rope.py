"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and how models stretch them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# The kinds of scaling, and the numbers each cannot do without.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class Rope:
    """Tables of cosines and sines, [positions, head_dim / 2] in float32, grown on demand."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: dict[str, Any] | None,
        max_length: int,
        device: torch.device,
    ) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.frequencies = theta**-exponents
        self.factor = 1.0  # cosines and sines are multiplied by it
        self.device = device
        kind = (scaling or {}).get("rope_type", "default")
        if scaling is not None and kind == "linear":
            self.frequencies = self.frequencies / scaling["factor"]
        elif scaling is not None and kind == "llama3":
            self.frequencies = _llama3(self.frequencies, scaling)
        elif scaling is not None and kind == "yarn":
            self.frequencies, self.factor = _yarn(
                self.frequencies, theta, head_dim, scaling, max_length
            )
        else:
            assert kind == "default", kind
        self.cosine_PD = self.sine_PD = torch.empty(0)

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least the first `positions` positions."""
        if len(self.cosine_PD) < positions:
            grown = max(positions, 2 * len(self.cosine_PD), 1024)
            angles = torch.outer(torch.arange(grown, dtype=torch.float64), self.frequencies)
            self.cosine_PD = (angles.cos() * self.factor).to(self.device, torch.float32)
            self.sine_PD = (angles.sin() * self.factor).to(self.device, torch.float32)
        return self.cosine_PD, self.sine_PD


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, those between blended."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = frequencies * (kept + (1 - kept) / scaling["factor"])
    return stretched


def _yarn(
    frequencies: Tensor, theta: float, head_dim: int, scaling: dict[str, Any], max_length: int
) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2 and 3.4)."""
    original = scaling.get("original_max_position_embeddings") or max_length
    factor = scaling["factor"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float64) - low
    stretched = (ramp / max(high - low, 0.001)).clamp(0, 1)
    blended = frequencies * (1 - stretched) + frequencies / factor * stretched
    return blended, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
