"""What the figures of a benchmark mean, in the words shown beside them."""

DEFINITIONS = {
    "tok/s": "output tokens over wall time, prompts included",
    "speed-up": "tok/s over that of plain decoding: end to end, same prompts, same run",
    "decode": "plain time per token (TPOT) over this one's, the prompts' time left out; of medians",
    "accepted": "mean acceptance length: 1 + accepted tokens / passes with a draft",
    "tok/pass": "output tokens per pass of the model, passes without a draft included",
    "draft/verify/other": "milliseconds per pass and sequence, the prompts' time left out",
    "TTFT": "time to the first token, median",
    "same text": "prompts whose tokens are those of plain decoding",
    "memory": "largest resident memory of the whole process so far, model and all drafts together",
}
