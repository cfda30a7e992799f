"""An answer while it comes: printed, kept, added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.core import SamplingParams
    from forerun.engine.llm import LLM
    from forerun.engine.outputs import Delta

FIELDS = ("index", "text", "token_ids", "sources", "finish_reason", "logprobs")


class Answer:
    """The outputs for one prompt, as far as they have come."""

    def __init__(self, llm: LLM, prompt: list[int], params: SamplingParams) -> None:
        from forerun.engine.outputs import Completion

        self.llm = llm
        self.prompt = prompt
        self.params = params
        self.outputs = [Completion(index) for index in range(params.n)]
        self.seconds = self.ttft_s = 0.0
        self.interrupted = False

    def follow(self, show: Callable[[Delta], str] | None) -> None:
        """Let the model write; the first output is printed as it comes, in the form `show` gives
        it. Ctrl-C ends it early and keeps what there is."""
        begin = perf_counter()
        try:
            for delta in self.llm.stream(self.prompt, self.params):
                self.seconds = perf_counter() - begin
                self.ttft_s = self.ttft_s or self.seconds
                self.outputs[delta.index].append(delta)
                if show and delta.index == 0:
                    print(show(delta), end="", flush=True)
        except KeyboardInterrupt:
            self.interrupted = True
            for output in self.outputs:
                output.finish_reason = output.finish_reason or "abort"
        if show and not self.outputs[0].text.endswith("\n"):
            print()

    def print_others(self) -> None:
        """Print the outputs behind the first, each under a line with its number."""
        for output in self.outputs[1:]:
            print(f"--- {output.index + 1} of {len(self.outputs)}", output.text, sep="\n")

    @property
    def tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def figures(self) -> str:
        """Speed and acceptance in one line."""
        stats = self.llm.stats
        return (
            f"{self.tokens} tokens in {self.seconds:.1f} s with the prompt, "
            f"{self.tokens / max(self.seconds, 1e-9):.1f} tok/s | "
            f"mean acceptance length {stats.acceptance_length:.2f}, "
            f"acceptance rate {stats.acceptance_rate:.0%}, "
            f"{stats.tokens_per_pass:.2f} tokens per pass"
        )

    def to_dict(self) -> dict[str, Any]:
        """Texts, tokens, times and counters, as JSON wants them."""
        stats = self.llm.stats
        means = (
            "acceptance_length",
            "acceptance_rate",
            "tokens_per_pass",
            "rows_per_pass",
            "plain_share",
            "calibration_error",
            "cost_error",
        )
        outputs = [asdict(output) for output in self.outputs]
        return {
            "prompt_tokens": len(self.prompt),
            "outputs": [{field: output[field] for field in FIELDS} for output in outputs],
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
            "tok_s": self.tokens / max(self.seconds, 1e-9),
            "stats": asdict(stats) | {name: getattr(stats, name) for name in means},
        }
