"""Run by the Python of an environment with the speculators package: its logits for some drafts.

    python speculators_eagle3.py FOLDER ...

Each folder holds `draft` and `inputs.safetensors` (`features` [R, F] and the `tokens` [R] behind
them). It gets `outputs.safetensors`, the logits of each step [S, R, U] (in step s the last s rows
are padding), and `saved`, the draft as the package writes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

STEPS = 3


def run(folder: Path) -> None:
    config = SpeculatorModelConfig.from_pretrained(str(folder / "draft"))
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(str(folder / "draft"), config=config).eval()
    given = load_file(folder / "inputs.safetensors")
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: found.append(out[0]))
    with torch.no_grad():
        model(
            hidden_states=given["features"][None],
            input_ids=given["tokens"][None],
            document_ids=torch.zeros_like(given["tokens"])[None],
            ttt_steps=STEPS,
        )
    save_file({"logits": torch.stack(found).contiguous()}, folder / "outputs.safetensors")
    model.save_pretrained(str(folder / "saved"))


for name in sys.argv[1:]:
    run(Path(name))
