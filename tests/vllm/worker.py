"""Runs a model, perhaps with a draft, in vLLM. For the interpreter of vLLM's own environment.

argv[1]   job: {"options": {"model": DIR, "speculative_config": {...}, ...},
          "prompts": [[id, ...], ...], "max_tokens": n}
argv[2]   where the answer goes: {"outputs": [[id, ...], ...], "counts": [[n, ...], ...],
          "metrics": {name: count}}

counts: per prompt, how many tokens each step of the engine brought; the first is the prompt's.
metrics: vLLM's own spec_decode counters over the whole run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        **job["options"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        enforce_eager=True,  # compiling takes longer than these few prompts
        disable_log_stats=False,  # they hold the counters
    )
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    engine, prompts = llm.llm_engine, job["prompts"]
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), TokensPrompt(prompt_token_ids=ids), params)
    outputs: list[list[int]] = [[] for _ in prompts]
    counts: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = int(output.request_id)
            tokens = list(output.outputs[0].token_ids)
            if new := len(tokens) - len(outputs[number]):
                counts[number].append(new)
            outputs[number] = tokens
    metrics = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    return {"outputs": outputs, "counts": counts, "metrics": metrics}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(run(job)), encoding="utf-8")
