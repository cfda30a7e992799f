"""A trace through the plan, on a clock that a table of costs moves.

The steps are those of `Engine.step`, without a model: the plan's own code decides whom to ask and
which nodes to keep, the trace says what is proposed and what is right, the table what it took.
Prompts are not counted: a text begins with its first token there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from forerun.core import Draft, Request, SamplingParams, Speculation, StepStats, Verdict
from forerun.drafters.tree import depths, prune
from forerun.engine.outlook import MAX_NODES
from forerun.engine.plan import Plan
from forerun.engine.scheduler import Took, Turn
from forerun.engine.static import Static
from forerun.models.cache import Span
from forerun.simulate.tables import Table
from forerun.simulate.traces import RIGHT, Text, Trace

PLAIN, PLAN = "none", "plan"
TEXTS_EACH = 4  # texts behind each other, for each of those that run together


@dataclass(slots=True)
class Result:
    """What some way to speculate brought. seconds: on the simulated clock."""

    stats: StepStats = field(default_factory=StepStats)
    seconds: float = 0.0

    @property
    def tok_s(self) -> float:
        return self.stats.emitted_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One line of results. draft: none, the number of tokens of a static draft, or plan.

    speedup: tokens per second against `none`. published: the same as it was measured.
    asked_share: passes (of a request) before which the drafter was asked.
    """

    batch: int
    draft: str
    tok_s: float
    speedup: float
    published: float | None
    tokens_per_pass: float
    rows_per_pass: float
    plain_share: float
    asked_share: float


def run(
    table: Table,
    trace: Trace,
    batches: Sequence[int],
    budgets: Sequence[int],
    compare: bool = True,
) -> Iterator[Row]:
    """For each batch size: plain, static drafts of so many nodes, the plan.

    compare: with what was published; the trace is of that very drafter.
    """
    lines = table.published if compare else ()
    published = {(batch, tokens): speedup for batch, tokens, speedup in lines}
    for batch in batches:
        plain = replay(table, trace, batch, Static(), Speculation(enabled=False))
        results = {(PLAIN, 0): plain}
        for nodes in budgets:
            limit = Speculation(max_draft_tokens=nodes)
            results[str(nodes), nodes] = replay(table, trace, batch, Static(), limit)
        results[PLAN, 0] = replay(table, trace, batch, Plan(table.costs()))
        for (draft, nodes), result in results.items():
            yield _row(batch, draft, result, plain, published.get((batch, nodes)))


def replay(
    table: Table,
    trace: Trace,
    batch: int,
    plan: Plan,
    speculation: Speculation = Speculation(),  # noqa: B008, it is frozen
) -> Result:
    """`batch` texts of the trace at once, the next one where one ends, as long as all are busy."""
    costs = table.costs()
    queue = islice(cycle(trace.texts), max(len(trace.texts), TEXTS_EACH * batch))
    waiting = (_Stream.begin(id, text, speculation) for id, text in enumerate(queue) if text.steps)
    running = list(islice(waiting, batch))
    result = Result()
    while len(running) == batch:
        turns = [Turn(stream.request, 1, True, True) for stream in running]
        spent = _draft(plan, running, turns, table)
        predicted = plan.predict(turns)
        prefixes = [turn.request.cached for turn in turns]
        rows = [1 + len(turn.draft) for turn in turns]
        passed = costs.seconds(prefixes, rows)
        for turn in turns:
            _verify(turn, result.stats)
        asked = [turn for turn in turns if turn.budget]
        plan.learn(asked, Took(sum(rows), spent + passed, spent, predicted))
        result.seconds += spent + passed
        for stream in running:
            if not stream.request.remaining:
                plan.forget(stream.request)
        running = [stream for stream in running if stream.request.remaining]
        running += islice(waiting, batch - len(running))
    return result


@dataclass(slots=True)
class _Stream:
    """A text on its way. Its request's tokens say nothing but how many there are."""

    request: Request
    text: Text

    @classmethod
    def begin(cls, id: int, text: Text, speculation: Speculation) -> _Stream:
        length = len(text.steps) + 1
        params = SamplingParams(max_tokens=length, speculation=speculation)
        span = Span(0, text.prompt_tokens + length)
        span.length = text.prompt_tokens
        tokens = [RIGHT] * (text.prompt_tokens + 1)
        return cls(Request(id, tokens, text.prompt_tokens, params, seed=0, span=span), text)

    def propose(self, budget: int) -> Draft:
        """The `budget` likeliest nodes of what was proposed at this place."""
        draft = self.text.steps[self.request.output_length - 1].draft()
        if len(draft) <= budget:
            return draft
        kept: set[int] = set()
        for node in sorted(range(len(draft)), key=lambda node: -draft.survival[node]):
            if len(kept) < budget and (draft.parents[node] < 0 or draft.parents[node] in kept):
                kept.add(node)
        return prune(draft, kept)


def _draft(plan: Plan, running: Sequence[_Stream], turns: Sequence[Turn], table: Table) -> float:
    """Give the turns the drafts that the plan asks for and keeps; seconds of drafting."""
    budgets = plan.budgets(turns, MAX_NODES * len(turns), crowded=True)
    for stream, turn, budget in zip(running, turns, budgets, strict=True):
        turn.budget = budget
        if budget:
            turn.draft = stream.propose(budget)
    if not any(budgets):
        return 0.0
    drafts = [turn.draft for turn in turns]
    deepest = max(1 + max(depths(draft.parents), default=-1) for draft in drafts)
    spent = table.round_seconds(deepest, sum(map(len, drafts)))
    for turn, draft in zip(turns, plan.keep(turns, len(turns), spent), strict=True):
        turn.draft = draft
    return spent


def _verify(turn: Turn, stats: StepStats) -> None:
    """Accept what is right, and count it."""
    path = [node for node, token in enumerate(turn.draft.tokens) if token == RIGHT]
    turn.verdict = Verdict(path, RIGHT)
    request = turn.request
    request.tokens += [RIGHT] * (len(path) + 1)
    assert request.span
    request.span.length = len(request.tokens) - 1
    stats.record(len(turn.draft), len(path), len(path) + 1)
    stats.asked += turn.budget > 0


def _row(batch: int, draft: str, result: Result, plain: Result, published: float | None) -> Row:
    stats = result.stats
    return Row(
        batch=batch,
        draft=draft,
        tok_s=result.tok_s,
        speedup=result.tok_s / plain.tok_s,
        published=published,
        tokens_per_pass=stats.tokens_per_pass,
        rows_per_pass=stats.rows_per_pass,
        plain_share=stats.plain_share,
        asked_share=stats.asked / stats.passes,
    )
