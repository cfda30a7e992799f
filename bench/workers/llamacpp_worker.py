"""llama.cpp through llama-cpp-python. Mode: plain."""

from __future__ import annotations

from llama_cpp import Llama

from protocol import FirstToken, Generate, Options, Prompts, serve


def load(options: Options) -> Generate:
    llm = Llama(
        options.model,
        n_ctx=4096,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )

    def generate(prompts: Prompts, max_tokens: int, first: FirstToken) -> list[list[int]]:
        output: list[int] = []
        llm.reset()  # otherwise a repeated prompt would be taken from the cache
        for token in llm.generate(prompts[0], temp=0.0, repeat_penalty=1.0):
            if not output:
                first()
            output.append(token)
            if token in options.stop_ids or len(output) == max_tokens:
                break
        return [output]

    return generate


if __name__ == "__main__":
    serve(load, ["llama-cpp-python"])
