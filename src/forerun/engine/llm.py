"""Offline use: prompts in, texts out, as one list, one by one or as a stream."""

from __future__ import annotations

import itertools
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from forerun.core import SamplingParams, StepStats
from forerun.drafters import DraftContext, Drafter, make_drafter
from forerun.engine.emit import Generation
from forerun.engine.engine import Engine
from forerun.engine.outputs import Completion, Delta, RequestOutput
from forerun.engine.scheduler import MAX_BATCH_ROWS, MAX_NUM_SEQS
from forerun.errors import CapacityError, ConfigError, PromptError
from forerun.models.cache import KVStore
from forerun.models.hub import LoadedModel, load
from forerun.models.target import Target
from forerun.verify import make_verifier

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]

TOKENS_PER_SEQUENCE = 4096  # that the default store has room for, on average
MEMORY_SHARE = 0.5  # of the free memory, at most, for the default store


class LLM:
    """A model, and perhaps a drafter that runs ahead of it.

        llm = LLM("smollm2-135m", draft="suffix")
        llm.generate("Once upon a time", SamplingParams(max_tokens=64, temperature=0))

    model: a folder, a .gguf file, a packaged model, a Hub id, or a model already loaded.
    draft: a draft spec such as `ngram`, `suffix`, `model:ID`, `suffix+model:ID`, `auto`; or a
        drafter of one's own; None for none.
    static: check all that the draft proposes, even where less would be faster.
    verifier: `follow` (the text of plain decoding), `rejection` (its law), `typical` (lossy).
    max_num_seqs: sequences that run at once. max_batch_rows: tokens in one pass.
    kv_tokens: tokens the key/value store holds for all running sequences together.
    Raises `ModelError`, `ConfigError` or `CapacityError` where they cannot be used.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        draft: str | Drafter | None = None,
        verifier: str = "follow",
        dtype: str = "auto",
        device: str = "auto",
        max_num_seqs: int = MAX_NUM_SEQS,
        max_batch_rows: int = MAX_BATCH_ROWS,
        kv_tokens: int | None = None,
        static: bool = False,
    ) -> None:
        for name, count in (
            ("max_num_seqs", max_num_seqs),
            ("max_batch_rows", max_batch_rows),
            ("kv_tokens", kv_tokens or 0),
        ):
            if not isinstance(count, int):
                raise ConfigError(f"{name} is {count!r}; give a whole number")
        judge = make_verifier(verifier)
        loaded = model if isinstance(model, LoadedModel) else load(str(model), dtype, device)
        store = new_store(loaded.target, max_num_seqs, kv_tokens)
        context = DraftContext(
            target=loaded.target,
            store=store,
            tokenizer=loaded.tokenizer,
            load=partial(load, dtype=dtype, device=device),
            independent_noise=judge.independent_noise,
        )
        self.model = loaded
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(
            loaded.target,
            store=store,
            verifier=judge,
            drafter=make_drafter(draft, context) if isinstance(draft, str) else draft,
            tokenizer=loaded.tokenizer,
            stop_ids=loaded.stop_ids,
            max_num_seqs=max_num_seqs,
            max_batch_rows=max_batch_rows,
            static=static,
        )
        self._jobs: dict[int, _Job] = {}  # by the ids of their streams
        self._ids = itertools.count()

    @property
    def stats(self) -> StepStats:
        """Counters of all that this engine has done."""
        return self.engine.stats

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue raw texts (or token ids); outputs in the order of the prompts.

        params: for all prompts, or one per prompt. Raises `PromptError` and `ConfigError` before
        anything runs.
        """
        return sorted(self.generate_iter(prompts, params), key=lambda output: output.request_id)

    def generate_iter(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but each output as soon as it has ended.

        What is still running when the iterator is closed, or interrupted, is aborted.
        """
        jobs = self._submit(_as_list(prompts), params)
        try:
            while jobs:
                self._advance()
                for job in [job for job in jobs if job.ended]:
                    jobs.remove(job)
                    yield job.output()
        finally:
            self._abort(jobs)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, through the model's chat template. One must not be empty."""
        one = not messages or isinstance(messages, Mapping) or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if one else messages)
        for each in conversations:
            if not each or not all(isinstance(message, Mapping) for message in each):
                raise PromptError(
                    "a conversation is a list of at least one message; "
                    "write for example [{'role': 'user', 'content': 'Hello'}]"
                )
        return self.generate([self.tokenizer.chat(each) for each in conversations], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one text; what each step brings, as it comes.

        Raises `PromptError` and `ConfigError` now; the text is queued when the first step is asked
        for, so that nothing is left behind by a stream that nobody reads.
        """
        ids = self._encode(prompt)
        (params,) = _one_each(params, 1)
        self.engine.check(ids, params)
        return self._stream(ids, params)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        jobs = self._submit([ids], params)
        (job,) = jobs
        try:
            while job.deltas or not job.ended:
                if not job.deltas:  # another stream's passes may have brought some
                    self._advance()
                yield from job.take_deltas()
        finally:
            self._abort(jobs)

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Job]:
        """Queue all prompts, or none if one of them cannot be served."""
        params = _one_each(params, len(prompts))
        jobs: list[_Job] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                ids = self._encode(prompt)
                call = jobs[0].stream_ids[0] if jobs else None
                job = _Job(next(self._ids), prompt, ids, self.engine.add(ids, each, call))
                jobs.append(job)
                self._jobs.update(dict.fromkeys(job.stream_ids, job))
        except BaseException:
            self._abort(jobs)
            raise
        return jobs

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [index(token) for token in prompt]
        except TypeError:
            raise PromptError(
                f"{reprlib.repr(prompt)} is no prompt; give a text or a list of token ids"
            ) from None

    def _advance(self) -> None:
        """Run one pass for everybody, and hand each delta to its job."""
        for delta in self.engine.step():
            self._jobs[delta.request_id].append(delta)
            if delta.finish_reason:
                del self._jobs[delta.request_id]

    def _abort(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            for stream_id in job.stream_ids:
                self.engine.abort(stream_id)
                self._jobs.pop(stream_id, None)


class _Job:
    """A prompt on its way, and what its streams have brought so far."""

    def __init__(
        self, request_id: int, prompt: Prompt, ids: list[int], generations: list[Generation]
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt if isinstance(prompt, str) else None
        self.ids = ids
        self.generations = generations
        self.completions = [Completion(g.index, seed=g.request.seed) for g in generations]
        self.deltas: list[Delta] = []  # those not yet handed to a stream

    @property
    def stream_ids(self) -> list[int]:
        return [generation.request.id for generation in self.generations]

    @property
    def ended(self) -> bool:
        return all(completion.finish_reason for completion in self.completions)

    def append(self, delta: Delta) -> None:
        self.completions[delta.index].append(delta)
        self.deltas.append(delta)

    def take_deltas(self) -> list[Delta]:
        """Those that came since the last call."""
        deltas, self.deltas = self.deltas, []
        return deltas

    def output(self) -> RequestOutput:
        stats = StepStats()
        for generation in self.generations:
            stats.add(generation.stats)
        begin = self.generations[0].added_at
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            outputs=self.completions,
            stats=stats,
            ttft_s=min(generation.first_at for generation in self.generations) - begin,
            seconds=max(generation.ended_at for generation in self.generations) - begin,
        )


def new_store(target: Target, max_num_seqs: int, kv_tokens: int | None) -> KVStore:
    """A key/value store of `kv_tokens`, by default for what may run at once.

    Raises `CapacityError` when there is no memory for it.
    """
    token_bytes = target.new_store(1).kv.nbytes
    free = _free_memory(target.info.device) // token_bytes
    if kv_tokens is None:
        longest = target.info.max_length
        wanted = max(longest, max_num_seqs * min(longest, TOKENS_PER_SEQUENCE))
        kv_tokens = min(wanted, int(free * MEMORY_SHARE))
    if not 0 < kv_tokens <= free:
        raise CapacityError(
            f"there is no key/value store of {kv_tokens} tokens here; "
            f"ask for 1 to {free} with kv_tokens"
        )
    return target.new_store(kv_tokens)


def _free_memory(device: torch.device) -> int:
    """Bytes that could be taken now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text or a single list of token ids is one prompt; arrays count as lists."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [cast("Prompt", prompts)]
    tolist = getattr(prompts, "tolist", None)  # of numpy and torch
    found = list(tolist() if tolist else prompts)
    return [found] if found and isinstance(found[0], Real) else found


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> Sequence[SamplingParams]:
    """One for every prompt. Raises `ConfigError`."""
    if not isinstance(params, Sequence):
        params = [SamplingParams() if params is None else params] * prompts
    if len(params) != prompts:
        raise ConfigError(
            f"{prompts} prompts came with {len(params)} SamplingParams; "
            "give one for all, or one per prompt"
        )
    for each in params:
        if not isinstance(each, SamplingParams):
            raise ConfigError(
                f"{reprlib.repr(each)} is no SamplingParams; write SamplingParams(...)"
            )
    return params
