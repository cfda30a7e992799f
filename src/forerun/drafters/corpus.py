"""`corpus:FILE`: a tree of what the model's own earlier answers and this request make likely.

Two laws are mixed at every node: one counted in advance (`corpus_file.py`), one counted in the
request (`counts.py`), which is trusted the more, the longer the ending that it has seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

from pydantic import Field

from forerun import sampling
from forerun.config import Settings
from forerun.core import Request
from forerun.drafters import corpus_file
from forerun.drafters.base import DraftContext, Known
from forerun.drafters.corpus_file import Header, fingerprint
from forerun.drafters.counting import Counting, CountingRounds
from forerun.drafters.counts import Matches, Trie, mixture
from forerun.drafters.laws import Law
from forerun.drafters.lookup import LawLookup
from forerun.errors import ConfigError
from forerun.interop import shipped

REQUEST_ORDER = 16  # longest ending that is looked for in the request
REQUEST_WEIGHT = 1.0  # sightings that one there counts for
NEGLIGIBLE = 1e-2  # probability left over at which shorter endings no longer matter
EQUAL_TRUST = 2.0  # length of an ending from which on the request is trusted more than the corpus

# Weight of the target's noise. 1 would be right if the corpus had the target's own law; it has an
# average over contexts, so that a token may be certain here that is unlikely there.
COUPLING = 0.5
UNKNOWN_NOISE = 3.141592653589793**0.5  # mean of exponential numbers ** -COUPLING
NOISELESS = 0.003  # tokens less likely than this are left out where the target samples


class CorpusOptions(Settings):
    """Options of `corpus`.

    file: made by `forerun train corpus`, or the model that one ships for. k: longest path. nodes:
    most tokens proposed. min_prob: nodes that are less likely to survive are not proposed.
    """

    file: str
    k: Annotated[int, Field(ge=1)] = 16
    nodes: Annotated[int, Field(ge=1)] = 15
    min_prob: Annotated[float, Field(ge=0, le=1)] = 0.02


class _State(NamedTuple):
    """A place in the tree: the last tokens, what the request knows of them, the next position."""

    ending: tuple[int, ...]
    matches: Matches
    position: int


class CorpusDrafter(LawLookup):
    """Proposes the most probable paths. State: the counts of each request."""

    name = "corpus"
    options = CorpusOptions
    argument = "file"
    example = "corpus:corpus"

    def __init__(self, options: CorpusOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        self._options = options
        self._corpus = corpus_file.read(shipped.locate(self.name, options.file))
        _check(self._corpus.header, options.file, context)
        self._couples = not context.independent_noise
        self._tries: dict[int, Trie] = {}
        counting = Counting(
            corpus=self._corpus,
            order=REQUEST_ORDER,
            weight=REQUEST_WEIGHT,
            negligible=NEGLIGIBLE,
            equal_trust=EQUAL_TRUST,
            floor=options.min_prob,
            noiseless=NOISELESS,
            coupling=COUPLING,
            unknown_noise=UNKNOWN_NOISE,
        )
        self._rounds = CountingRounds.make(counting, options.nodes, options.k, self._couples)

    @classmethod
    def look(cls, options: Settings, known: Known) -> None:
        assert isinstance(options, CorpusOptions)
        shipped.locate(cls.name, options.file)

    def release(self, request: Request) -> None:
        self._tries.pop(request.id, None)
        super().release(request)

    def _law(self, request: Request) -> Law:
        order = self._corpus.order
        return Law(
            _State(tuple(request.tokens[-order:]), self._matches(request), len(request.tokens)),
            self._successors(request),
            lambda state, token: _State(
                (*state.ending, token)[-order:], state.matches.advance(token), state.position + 1
            ),
            nodes=self._options.nodes,
            depth=self._options.k,
            floor=self._options.min_prob,
        )

    def _matches(self, request: Request) -> Matches:
        trie = self._tries.get(request.id)
        if trie is None:
            trie = self._tries[request.id] = Trie(request.tokens, REQUEST_ORDER)
        trie.update()
        return trie.endings(REQUEST_WEIGHT)

    def _successors(self, request: Request) -> Callable[[_State], Iterable[tuple[int, float]]]:
        """The tokens that may follow in a state, as the target would choose among them."""

        def greedy(state: _State) -> Iterable[tuple[int, float]]:
            return mixed(self._corpus.law(state.ending), state.matches).items()

        def sampled(state: _State) -> Iterable[tuple[int, float]]:
            law = mixed(self._corpus.law(state.ending), state.matches)
            return coupled(law, request.seed, state.position).items()

        return sampled if self._couples and not request.params.greedy else greedy


def mixed(law: dict[int, float], matches: Matches) -> dict[int, float]:
    """The law of the corpus, mixed with what followed the known endings in the request.

    With an ending of L tokens, the request's law has the weight L / (L + 2).
    """
    followed = mixture([matches], NEGLIGIBLE) if matches.longest else ()
    known = sum(chance for _, chance in followed)
    if not known:
        return law
    trust = matches.longest / (matches.longest + EQUAL_TRUST)
    found = {token: (1 - trust) * chance for token, chance in law.items()}
    for token, chance in followed:
        found[token] = found.get(token, 0.0) + trust * chance / known
    return found


def coupled(law: dict[int, float], seed: int, position: int) -> dict[int, float]:
    """The chance of each token to be chosen, given the noise with which the target will choose.

    The target takes the largest log p + noise. Here p is known only roughly, and so is what the
    noise does: each chance is multiplied by exp(noise / 2) and all are scaled to sum up to 1. What
    belongs to no token known here counts with the mean of this factor.
    """
    arrival = sampling.arrivals(seed, position)
    weights = {
        token: chance * arrival(token) ** -COUPLING
        for token, chance in law.items()
        if chance >= NOISELESS
    }
    unknown = max(0.0, 1 - sum(law.values())) * UNKNOWN_NOISE
    total = unknown + sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _check(header: Header, file: str, context: DraftContext) -> None:
    info = context.target.info
    ours = fingerprint(context.tokenizer) if context.tokenizer else header.vocabulary
    if header.vocab_size != info.vocab_size or header.vocabulary != ours:
        raise ConfigError(
            f"{file} was counted in answers of {header.model}, whose vocabulary is not that of "
            f"{info.name}; make one with: forerun train corpus"
        )
