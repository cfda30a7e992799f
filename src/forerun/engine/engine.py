"""One step of the engine: schedule, draft, plan, forward, verify, commit, emit."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from forerun import sampling
from forerun.config import nearest
from forerun.core import Request, SamplingParams, StepStats, TokenLogprobs
from forerun.drafters.base import Drafter, Way
from forerun.engine import rows
from forerun.engine.choices import Choices, members
from forerun.engine.cost_file import measure
from forerun.engine.costs import Costs
from forerun.engine.emit import Generation
from forerun.engine.outputs import Delta
from forerun.engine.plan import Plan
from forerun.engine.scheduler import (
    MAX_BATCH_ROWS,
    MAX_NUM_SEQS,
    Batch,
    Scheduler,
    Took,
    Turn,
)
from forerun.engine.static import Static
from forerun.errors import ConfigError, PromptError
from forerun.models.cache import KVStore
from forerun.models.target import Forward, Target
from forerun.models.tokenizer import Tokenizer
from forerun.verify.base import Verifier


class Engine:
    """Runs many requests over one target, one pass at a time.

    tokenizer: None works on tokens alone; texts are then empty and stop strings refused.
    stop_ids: the model's own end-of-sequence tokens.
    max_num_seqs: sequences that run at once; max_batch_rows: tokens in one pass.
    static: check all that is drafted; otherwise as much as pays.
    costs: of a pass by its rows; None measures them, where they are needed, in a few passes,
        or takes what was measured before.
    Raises `ConfigError` for parts that do not fit each other.
    """

    def __init__(
        self,
        target: Target,
        *,
        store: KVStore,
        verifier: Verifier,
        drafter: Drafter | None = None,
        tokenizer: Tokenizer | None = None,
        stop_ids: frozenset[int] = frozenset(),
        max_num_seqs: int = MAX_NUM_SEQS,
        max_batch_rows: int = MAX_BATCH_ROWS,
        static: bool = False,
        costs: Costs | None = None,
    ) -> None:
        self.target = target
        self.store = store
        self.verifier = verifier
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.scheduler = Scheduler(store, max_num_seqs, max_batch_rows)
        self.max_length = min(target.info.max_length, store.slots)
        self._ended = StepStats()  # of streams that are no more
        self._members = members(drafter)
        self._generations: dict[int, Generation] = {}
        self._ids = itertools.count()
        if drafter:
            _check_taps(drafter, target)
            reads = [bool(way.taps) for way in drafter.ways]
            self.plan: Plan = Static() if static else Plan(costs or measure(target, store), reads)

    @property
    def stats(self) -> StepStats:
        """Counters of all streams so far."""
        total = StepStats()
        for stats in (self._ended, *(each.stats for each in self._generations.values())):
            total.add(stats)
        return total

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return self.scheduler.busy

    def add(
        self, prompt: Sequence[int], params: SamplingParams, call: int | None = None
    ) -> list[Generation]:
        """Queue a prompt; gives `params.n` streams of output, which differ in their seeds.

        call: of an earlier stream's request, if somebody waits for all of them together; those of
        one prompt always belong to one.
        max_tokens is cut to where the model or the store ends. Raises `PromptError` for a prompt
        that can never be served, `ConfigError` for parameters that do not suit the model.
        """
        self.check(prompt, params)
        params = self._choose(params)
        room = self.max_length - len(prompt)
        if params.max_tokens > room:
            params = params.model_copy(update={"max_tokens": room})
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.stop_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        generations = []
        for index in range(params.n):
            id = next(self._ids)
            call = id if call is None else call
            request = Request(
                id=id,
                tokens=list(prompt),
                prompt_length=len(prompt),
                params=params,
                seed=seed_of(seed, index),
                stop_ids=stop_ids,
                call=call,
            )
            stream = self.tokenizer.stream(params.skip_special_tokens) if self.tokenizer else None
            generation = Generation(request, index, stream)
            self._generations[request.id] = generation
            self.scheduler.add(request)
            generations.append(generation)
        return generations

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise what `add` would raise."""
        self._check_prompt(prompt)
        sampling.check_vocabulary(params, self.target.info.vocab_size)
        if params.stop and not self.tokenizer:
            raise ConfigError("stop strings need a tokenizer; use stop_token_ids instead")
        draft = params.speculation.draft
        if draft is not None and draft not in (names := ["none", *self._members]):
            raise ConfigError(f"no draft '{draft}' was loaded; {nearest(draft, names)}")

    def _choose(self, params: SamplingParams) -> SamplingParams:
        """The same, with a draft only where it is one of several."""
        wanted = params.speculation
        if wanted.draft is None:
            return params
        changed: dict[str, object] = {}
        if wanted.draft == "none":
            changed = {"draft": None, "enabled": False}
        elif len(self._members) == 1:
            changed = {"draft": None}
        elif not isinstance(self.plan, Choices):
            self.plan = Choices(self.plan, self._members)
        return params.model_copy(update={"speculation": wanted.model_copy(update=changed)})

    def abort(self, request_id: int) -> None:
        """End a request now: it brings no more deltas. Ids of ended requests are ignored."""
        if generation := self._generations.get(request_id):
            generation.request.finish_reason = "abort"
            self._end(generation.request)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Run one pass; what it added to each stream."""
        batch = self._schedule()
        lap = batch.clock.lap
        lap("schedule")
        self._draft(batch)
        lap("draft")
        self._plan(batch)
        lap("plan")
        result = self._forward(batch)
        lap("forward")
        self._verify(batch, result)
        lap("verify")
        self._commit(batch)
        lap("commit")
        deltas = self._emit(batch, result)
        lap("emit")
        self._learn(batch, result)
        lap("draft")
        self._close(batch)
        return deltas

    def _schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch.turns or not self.busy, "requests wait, but none can run"
        if self.drafter:
            for request in batch.preempted:
                self.drafter.release(request)
        return batch

    def _draft(self, batch: Batch) -> None:
        """Ask the drafter for those whose tokens all lie in the store but the last."""
        if not self.drafter:
            return
        batch.clock.lap("draft")
        if self.drafter.taps:
            for turn in batch.turns:
                turn.followed = self.plan.follows(turn.request)
                if not turn.followed:
                    self.drafter.unfollow(turn.request)
        turns = [turn for turn in batch.turns if turn.decoding]
        if self.plan.rests(turns):
            batch.rests = True
            batch.clock.lap("plan")
            return
        crowded = bool(self.scheduler.waiting)
        budgets = self.plan.budgets(turns, batch.rows_left, crowded)
        batch.clock.lap("plan")
        for turn, budget in zip(turns, budgets, strict=True):
            turn.budget = self._make_room(turn, budget)
        batch.clock.lap("draft")
        groups: dict[Way, list[Turn]] = {}
        for turn in batch.asked:
            groups.setdefault(self._way_of(turn), []).append(turn)
        for way, asked in groups.items():
            requests = [turn.request for turn in asked]
            drafts = way.propose(requests, [turn.budget for turn in asked])
            seconds = batch.clock.lap("draft")
            for turn, draft in zip(asked, drafts, strict=True):
                assert len(draft) <= turn.budget, "a draft is larger than its budget"
                turn.draft = draft
                turn.drafting = seconds / len(asked)

    def _way_of(self, turn: Turn) -> Way:
        """How the drafter is asked, or the one of several that the request wants."""
        assert self.drafter
        name = turn.request.params.speculation.draft
        drafter = self.drafter if name is None else self._members[name]
        return drafter.ways[turn.way]

    def _make_room(self, turn: Turn, budget: int) -> int:
        """Reserve slots for up to `budget` nodes, as many as fit; nobody is preempted for them.

        Done before drafting: the length of a sampled draft depends on its tokens, so to drop one
        that turns out too long would bias the output.
        """
        span = turn.request.span
        assert span
        room = span.capacity - span.length - turn.rows
        if budget > room:
            budget = min(budget, self.store.free_slots + room)
            self.store.reserve(span, turn.rows + budget)
        return budget

    def _plan(self, batch: Batch) -> None:
        """Keep the nodes that are worth a row."""
        if not self.drafter or batch.rests:
            return
        if batch.asked:
            turns = batch.deciding
            certain = sum(turn.rows for turn in batch.turns)
            drafts = self.plan.keep(turns, certain, batch.clock.speculating)
            for turn, draft in zip(turns, drafts, strict=True):
                turn.draft = draft
        batch.predicted_seconds = self.plan.predict(batch.turns)

    def _forward(self, batch: Batch) -> Forward:
        followed = any(turn.followed for turn in batch.turns)
        taps = self.drafter.taps if self.drafter and followed else ()
        segments = [rows.segment(turn) for turn in batch.turns]
        return self.target.forward(segments, self.store, taps)

    def _verify(self, batch: Batch, result: Forward) -> None:
        """Let the verifier decide what survives and what follows."""
        turns = batch.deciding
        requests = [turn.request for turn in turns]
        drafts = [turn.draft for turn in turns]
        verdicts = self.verifier.judge(requests, drafts, result.logits_NV) if turns else []
        for turn, verdict in zip(turns, verdicts, strict=True):
            turn.verdict = verdict

    def _commit(self, batch: Batch) -> None:
        """Keep the surviving rows in the store and append their tokens and the one that follows."""
        for turn in batch.turns:
            request, verdict = turn.request, turn.verdict
            assert request.span
            self.store.commit(request.span, rows.kept(turn))
            if verdict:
                request.tokens += [turn.draft.tokens[node] for node in verdict.path]
                request.tokens.append(verdict.next_token)

    def _emit(self, batch: Batch, result: Forward) -> list[Delta]:
        """Turn the new tokens into text, and end the requests that one of them ends."""
        deltas = []
        first_row = 0
        for turn in batch.deciding:
            generation = self._generations[turn.request.id]
            sources = self._sources(turn)
            logprobs = _logprobs(turn, result.logits_NV, first_row)
            delta = generation.emit(len(sources), sources, logprobs)
            emitted = len(delta.token_ids)
            accepted = min(len(sources) - 1, emitted)
            stats = generation.stats
            stats.record(len(turn.draft), accepted, emitted)
            stats.asked += turn.budget > 0
            if turn.draft:
                assert turn.verdict
                stats.compare(turn.draft.survival, turn.verdict.path)
            deltas.append(delta)
            first_row += 1 + len(turn.draft)
        return deltas

    def _sources(self, turn: Turn) -> list[str]:
        """Per token that the pass decided, who proposed it."""
        assert turn.verdict
        if not turn.verdict.path:
            return [""]
        sources = turn.draft.sources or [self._way_of(turn).name] * len(turn.draft)
        return [*(sources[node] for node in turn.verdict.path), ""]

    def _learn(self, batch: Batch, result: Forward) -> None:
        """Tell the drafter what became of the proposals."""
        if not self.drafter or (batch.rests and not self.drafter.taps):
            return
        living = [
            turn
            for turn in batch.turns
            if (turn.budget or (turn.followed and self.drafter.taps))
            and not turn.request.finish_reason
        ]
        if not living:
            return
        requests = [turn.request for turn in living]
        taps_RTD = result.taps_RTD
        taps = rows.taps(batch, living, taps_RTD) if taps_RTD is not None else ()
        self.drafter.observe(requests, [rows.outcome(turn) for turn in living], taps)

    def _close(self, batch: Batch) -> None:
        """Share the pass's time among those who were decoding; let go of those who have ended.

        A share is the time of one's rows. That of prompts counts for nobody: it is what the time
        to the first token tells.
        """
        seconds = batch.clock.seconds
        step_seconds, predicted = batch.clock.total, batch.predicted_seconds
        missed = abs(step_seconds - batch.clock.speculating - predicted) if predicted else 0.0
        total = sum(turn.rows + len(turn.draft) for turn in batch.turns)
        if self.drafter:
            if batch.rests:
                self.plan.rested(step_seconds)
            else:
                took = Took(total, step_seconds, batch.clock.speculating, predicted)
                self.plan.learn(batch.asked, took)
            batch.clock.lap("plan")
            step_seconds = batch.clock.total
        for turn in batch.turns:
            if turn.decoding:
                share = (turn.rows + len(turn.draft)) / total
                stats = self._generations[turn.request.id].stats
                stats.spend(share, seconds, step_seconds, predicted, missed)
        for turn in batch.turns:
            if turn.request.finish_reason:
                self._end(turn.request)

    def _end(self, request: Request) -> None:
        """Forget a request everywhere."""
        if self.drafter:
            self.drafter.release(request)
            self.plan.forget(request)
        self.scheduler.remove(request)
        self._ended.add(self._generations.pop(request.id).stats)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        info = self.target.info
        if not prompt:
            raise PromptError("the prompt is empty; give at least one token to continue")
        if len(prompt) >= self.max_length:
            cure = "raise kv_tokens" if self.store.slots < info.max_length else "shorten it"
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and {info.name} has room for "
                f"{self.max_length}, answer included; {cure}"
            )
        if not 0 <= min(prompt) <= max(prompt) < info.vocab_size:
            raise PromptError(
                f"the prompt has token ids outside 0 to {info.vocab_size - 1}; "
                f"encode it with the tokenizer of {info.name}"
            )


def seed_of(seed: int, index: int) -> int:
    """The seed of a request's output number `index`; the first has the request's own."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _logprobs(turn: Turn, logits_NV: Tensor, first_row: int) -> list[TokenLogprobs] | None:
    """Per token that the pass decided, from the row it was decided on; None if not asked for."""
    k = turn.request.params.logprobs
    if k is None:
        return None
    assert turn.verdict
    path = turn.verdict.path
    deciders = [first_row, *(first_row + 1 + node for node in path)]
    tokens = [*(turn.draft.tokens[node] for node in path), turn.verdict.next_token]
    return [
        sampling.logprobs(logits_NV[row], token, k)
        for row, token in zip(deciders, tokens, strict=True)
    ]


def _check_taps(drafter: Drafter, target: Target) -> None:
    layers = target.info.layers
    wrong = [boundary for boundary in drafter.taps if not 0 <= boundary <= layers]
    if wrong:
        raise ConfigError(
            f"the {drafter.name} draft reads layer boundary {wrong[0]}, but {target.info.name} has "
            f"{layers} layers; choose a draft made for this model"
        )
