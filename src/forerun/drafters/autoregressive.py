"""What `model` and `skip` share: drafting token by token with a causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun import sampling
from forerun.core import Draft, Request, Verdict
from forerun.drafters.base import Drafter
from forerun.drafters.calibration import Calibration
from forerun.drafters.tree import chain
from forerun.models.cache import KVStore, Span
from forerun.models.target import Segment, Target
from forerun.sampling import Place, Stream

CHUNK = 512  # rows of a prompt per pass


@dataclass(slots=True)
class Lane:
    """One request on its way through a draft: tokens up to span.length lie in the store."""

    request: Request
    span: Span
    depth: int  # most tokens to draft, at least 1
    tokens: list[int] = field(default_factory=list)
    beliefs: list[float] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    survival: float = 1.0

    @property
    def pending(self) -> list[int]:
        """What is not in the store yet, the last drafted token included."""
        committed = self.request.tokens
        cached = self.span.length
        if cached < len(committed):
            return committed[cached:] + self.tokens
        return self.tokens[cached - len(committed) :]


class AutoregressiveDrafter(Drafter):
    """Drafts a chain, all requests of a batch together, one pass per token.

    Under coupled noise a token is chosen as the target would choose it from these logits: same
    parameters, seed and position, so that two models that agree on the law agree on the draw. Under
    independent noise it is drawn from a law of its own, which goes with the draft.
    """

    samples = True

    def __init__(
        self,
        model: Target,
        store: KVStore,
        layers: Sequence[int] | None,
        vocab_size: int,
        min_prob: float,
        independent_noise: bool,
    ) -> None:
        self._model = model
        self._store = store
        self._layers = layers
        self._vocab_size = vocab_size
        self._min_prob = min_prob
        self._independent_noise = independent_noise
        self._calibration = Calibration()

    def observe(
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        for request in requests:
            self._calibration.settle(request)

    def release(self, request: Request) -> None:
        self._calibration.forget(request)

    def _run(self, lanes: Sequence[Lane]) -> None:
        """Draft in every lane. Room must have been reserved; all fed tokens are committed."""
        for lane in lanes:
            self._catch_up(lane)
        running = list(lanes)
        while running:
            logits_NV = self._feed(running)
            self._extend(running, logits_NV)
            running = [lane for lane in running if self._goes_on(lane)]

    def _catch_up(self, lane: Lane) -> None:
        """Feed all but the last chunk of what the store lacks."""
        while len(rows := lane.pending) > CHUNK:
            segment = Segment(lane.span, rows[:CHUNK], logits_from=CHUNK)
            self._model.forward([segment], self._store, layers=self._layers)
            self._store.extend(lane.span, CHUNK)

    def _feed(self, lanes: Sequence[Lane]) -> Tensor:
        """Feed what is pending; logits [N, V] of the last row of each lane, in the target's V."""
        segments = []
        for lane in lanes:
            rows = lane.pending
            segments.append(Segment(lane.span, rows, logits_from=len(rows) - 1))
        logits_NV = self._model.forward(segments, self._store, layers=self._layers).logits_NV
        for segment in segments:
            self._store.extend(segment.span, len(segment.tokens))
        missing = self._vocab_size - logits_NV.shape[-1]
        if missing:  # models of one family pad their vocabularies to different sizes
            logits_NV = torch.nn.functional.pad(logits_NV, (0, missing), value=-torch.inf)
        return logits_NV

    def _extend(self, lanes: Sequence[Lane], logits_NV: Tensor) -> None:
        tokens = self._propose_tokens(lanes, logits_NV)
        chosen_N1 = torch.tensor(tokens, device=logits_NV.device)[:, None]
        log_beliefs_N = logits_NV.gather(1, chosen_N1)[:, 0] - logits_NV.logsumexp(-1)
        for lane, token, belief in zip(lanes, tokens, log_beliefs_N.exp().tolist(), strict=True):
            lane.tokens.append(token)
            lane.beliefs.append(min(belief, 1.0))
            lane.survival *= self._calibration.estimate(lane.request, lane.beliefs[-1])

    def _propose_tokens(self, lanes: Sequence[Lane], logits_NV: Tensor) -> list[int]:
        places = [Place(lane.request, lane.tokens) for lane in lanes]
        if not self._independent_noise:
            return sampling.choose(logits_NV, places)
        tokens = []
        for lane, place, logits_V in zip(lanes, places, logits_NV, strict=True):
            if lane.request.params.greedy:
                tokens += sampling.choose(logits_V[None], [place])
                continue
            law_V = sampling.law(logits_V, place)
            lane.laws.append(law_V)
            tokens.append(sampling.draw(law_V, lane.request.seed, place.position, Stream.DRAFT))
        return tokens

    def _goes_on(self, lane: Lane) -> bool:
        """Whether to draft behind the last token. The token itself stays whatever it is: to drop
        a sampled one for its own value would bias the rejection rule."""
        return (
            len(lane.tokens) < lane.depth
            and lane.survival >= self._min_prob
            and lane.tokens[-1] not in lane.request.stop_ids
        )

    def _draft(self, lane: Lane) -> Draft:
        nodes = len(lane.tokens)
        probs_NV = torch.stack(lane.laws) if lane.laws else None
        return self._calibration.propose(
            lane.request, lane.tokens, chain(nodes), lane.beliefs, probs_NV
        )
