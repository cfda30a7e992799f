"""transformers `generate` in bf16. Modes: plain, lookup (prompt lookup of 8 tokens)."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from protocol import FirstToken, Generate, Options, Prompts, serve

LOOKUP = 8


class FirstTokens(BaseStreamer):
    """Tells when the first tokens come; `generate` hands the prompt over before them."""

    def __init__(self, first: FirstToken) -> None:
        self.first, self.calls = first, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first()

    def end(self) -> None:
        pass


def load(options: Options) -> Generate:
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    lookup = {"prompt_lookup_num_tokens": LOOKUP} if options.mode == "lookup" else {}

    def generate(prompts: Prompts, max_tokens: int, first: FirstToken) -> list[list[int]]:
        ids = torch.tensor(prompts)  # batches of one: no padding
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=options.stop_ids,
            streamer=FirstTokens(first),
            **lookup,
        )
        return [output[0, ids.shape[1] :].tolist()]

    return generate


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
