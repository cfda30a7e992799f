"""Run by the Python of an environment with the speculators package: its logits for a draft.

    python speculators_dflash.py FOLDER INPUTS OUTPUTS SAVED

INPUTS holds `taps` [K, T * E], `tokens` [K] and `anchors` [N]; embedding and head come from the
target that the draft names. OUTPUTS gets the `logits` of all slots [N, B, U]. SAVED gets the model
as the package writes it.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


@torch.no_grad()
def main(folder: str, inputs: str, outputs: str, saved: str) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    given = load_file(inputs)
    tokens, anchors = given["tokens"], given["anchors"]
    # Anchors are drawn from what the loss covers: as many as there are, so all of them.
    loss_mask = torch.zeros_like(tokens)
    loss_mask[anchors] = 1
    _, logits, *_ = model._backbone_forward(
        hidden_states=given["taps"][None],
        input_ids=tokens[None],
        loss_mask=loss_mask[None],
        verifier_last_hidden_states=given["taps"][None, :, : config.target_hidden_size],
        document_ids=torch.zeros_like(tokens)[None],
        max_anchors=len(anchors),
    )
    save_file({"logits": logits[0].unflatten(0, (len(anchors), -1)).contiguous()}, outputs)
    model.save_pretrained(saved)


main(*sys.argv[1:])
