"""Run by the Python of an environment with the dflash package: what it computes for a draft.

    python published_dflash.py blocks FOLDER INPUTS OUTPUTS
    python published_dflash.py texts FOLDER TARGET PROMPT TOKENS OUTPUT

blocks: INPUTS holds `taps` [K, T * E], `lengths` [N] and `blocks` [N, B, C]; round n drafts behind
the first `lengths[n]` tokens, and OUTPUTS gets the `hidden` states [N, B, C].
texts: decodes greedily from PROMPT (JSON list of ids); OUTPUT gets the tokens, and how many of them
each round brought, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache, dflash_generate
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


@torch.no_grad()
def blocks(folder: str, inputs: str, outputs: str) -> None:
    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    given = load_file(inputs)
    cache = _make_cache(model.config)
    found, done = [], 0
    for length, block_BC in zip(given["lengths"].tolist(), given["blocks"], strict=True):
        hidden = model(
            target_hidden=given["taps"][None, done:length],
            noise_embedding=block_BC[None],
            position_ids=torch.arange(done, length + len(block_BC))[None],
            past_key_values=cache,
            use_cache=True,
        )
        _crop_to(cache, length)
        done = length
        found.append(hidden[0])
    save_file({"hidden": torch.stack(found)}, outputs)


def texts(folder: str, target: str, prompt: str, tokens: str, output: str) -> None:
    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    large = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    torch.cuda.synchronize = lambda: None  # its clock asks for a GPU
    ids = torch.tensor([json.loads(prompt)])
    found = dflash_generate(model, large, ids, int(tokens), None, return_stats=True)
    written = {"tokens": found.output_ids[0].tolist(), "rounds": found.acceptance_lengths}
    Path(output).write_text(json.dumps(written))


{"blocks": blocks, "texts": texts}[sys.argv[1]](*sys.argv[2:])
