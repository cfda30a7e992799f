"""forerun in bf16. The mode is the draft spec; plain is `none`."""

from __future__ import annotations

import torch

from forerun.core import SamplingParams
from forerun.engine.llm import LLM
from protocol import FirstToken, Generate, Options, Prompts, serve


def load(options: Options) -> Generate:
    torch.set_num_threads(options.threads)
    draft = "none" if options.mode == "plain" else options.mode
    llm = LLM(options.model, draft=draft, dtype="bfloat16")

    def generate(prompts: Prompts, max_tokens: int, first: FirstToken) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        if len(prompts) > 1:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
        tokens: list[int] = []
        for delta in llm.stream(prompts[0], params):
            if not tokens:
                first()
            tokens.extend(delta.token_ids)
        return [tokens]

    return generate


if __name__ == "__main__":
    serve(load, ["forerun", "torch"])
