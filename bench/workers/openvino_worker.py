"""OpenVINO GenAI. Modes: plain, lookup (prompt lookup of 6 tokens)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino_genai
from openvino import Tensor

from protocol import FirstToken, Generate, Options, Prompts, serve

LOOKUP = {"num_assistant_tokens": 6, "max_ngram_size": 3}


class FirstTokens(openvino_genai.StreamerBase):
    """Tells when the first tokens come."""

    def __init__(self, first: FirstToken) -> None:
        super().__init__()
        self.first, self.waiting = first, True

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        if self.waiting:
            self.first()
            self.waiting = False
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def load(options: Options) -> Generate:
    looks_up = options.mode == "lookup"
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # each lane computes each prompt, repeated or not
    pipeline = openvino_genai.LLMPipeline(
        options.model,
        "CPU",
        scheduler_config=scheduler,
        INFERENCE_NUM_THREADS=options.threads,
        **({"prompt_lookup": True} if looks_up else {}),
    )

    def generate(prompts: Prompts, max_tokens: int, first: FirstToken) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            stop_token_ids=set(options.stop_ids),
            **(LOOKUP if looks_up else {}),
        )
        ids = Tensor(np.array(prompts, dtype=np.int64))
        result = pipeline.generate(ids, config, FirstTokens(first))
        return [list(tokens) for tokens in result.tokens]

    return generate


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino"])
