"""From logits to tokens: the only place where temperature, truncation, penalties and noise exist.

The order is vLLM's (docstring of `vllm.v1.sample.sampler.Sampler`):

    min_tokens -> logit_bias -> repetition, frequency, presence penalty       logits are edited
    -> temperature -> min_p -> top_k -> top_p                                 the law is formed
    -> argmax of (log law + Gumbel noise)                                     the token is chosen

Every truncation is a threshold on the likelihood, and tokens that tie with the last one kept are
kept too, so the law depends on the logits alone. The noise is a hash of (seed, position, token
id), never a running stream: the token at a place is a pure function of the logits, the request and
the tokens before it, whoever asks and however often. Greedy is the case without noise; ties go to
the lowest token id. No result depends on the other rows of a call.

On processors with compiled kernels a token is chosen from float32 logits in one call:
kernels/choosing.c. All else takes the general path here, which differs where rounding decides only.

Shapes: N rows or kept tokens, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from forerun.core import Request, SamplingParams, TokenLogprobs
from forerun.errors import ConfigError
from forerun.models import kernels
from forerun.models.topk import best


@dataclass(frozen=True, slots=True)
class Place:
    """The row that follows `request.tokens` and then `drafted`."""

    request: Request
    drafted: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Of the token to be chosen here."""
        return len(self.request.tokens) + len(self.drafted)

    @property
    def forbids_stop(self) -> bool:
        """Whether `min_tokens` has not been reached."""
        return self.request.output_length + len(self.drafted) < self.request.params.min_tokens

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the largest logit as it stands."""
        return takes_largest(self.request, len(self.drafted))


def takes_largest(request: Request, drafted: int = 0) -> bool:
    """`Place.is_argmax` behind so many drafted tokens; drafters ask in every round, without a place
    for each request."""
    return request.params.temperature == 0 and leaves_logits(request, drafted)


def leaves_logits(request: Request, drafted: int = 0) -> bool:
    """Whether logits decide as they stand, behind so many drafted tokens and behind more."""
    params = request.params
    reached = not params.min_tokens or request.output_length + drafted >= params.min_tokens
    return reached and not params.edits_logits


# ---- tokens -------------------------------------------------------------------------------------


def choose(
    logits_NV: Tensor, places: Sequence[Place], rows: Sequence[int] | None = None
) -> list[int]:
    """The target's own next token at each place; `places[i]` belongs to row i, or to `rows[i]`.

    logits_NV: float32 or float64. One argmax serves all rows that are greedy without edits.
    """
    assert len(places) == len(logits_NV if rows is None else rows), "one place per row"
    plain = [i for i, place in enumerate(places) if place.is_argmax]
    if rows is None:
        if len(plain) == len(places):
            return argmax(logits_NV)
        rows = range(len(places))
    chosen = {}
    if plain:
        chosen = dict(zip(plain, argmax(logits_NV[[rows[i] for i in plain]]), strict=True))
    sampled = {}
    for i, place in enumerate(places):
        if i in chosen:
            continue
        edited_V = edited(logits_NV[rows[i]], place)
        if place.request.params.greedy:
            chosen[i] = argmax(edited_V[None])[0]
        else:
            sampled[i] = edited_V
    tokens = _drawn(list(sampled.values()), [places[i] for i in sampled])
    chosen.update(zip(sampled, tokens, strict=True))
    return [chosen[i] for i in range(len(places))]


def argmax(logits_NV: Tensor) -> list[int]:
    """Index of the largest value of each row, the lowest index in a tie."""
    if logits_NV.device.type == "cpu":
        indices: list[int] = logits_NV.detach().numpy().argmax(-1).tolist()  # ten times as fast
        return indices
    return logits_NV.argmax(-1).tolist()


def largest_of(logits_NV: Tensor) -> Callable[[int], int]:
    """`argmax` row by row. Processors scan the rows that are asked for and no others, which in a
    tree are few; elsewhere one call for all rows costs less than one per row."""
    if logits_NV.device.type != "cpu":
        return argmax(logits_NV).__getitem__
    rows = logits_NV.detach().numpy()
    return lambda row: int(rows[row].argmax())


def law(logits_V: Tensor, place: Place) -> Tensor:
    """The distribution that `choose` draws from, [V]; one-hot when greedy.

    float32, or float64 where the logits are.
    """
    edited_V = edited(logits_V, place)
    probs_V = torch.zeros_like(edited_V)
    if place.request.params.greedy:
        probs_V[argmax(edited_V[None])[0]] = 1
    else:
        ids_N, weights_N = _kept(edited_V, place.request.params)
        probs_V[ids_N] = weights_N.softmax(-1)
    return probs_V


def draw(probs_V: Tensor, seed: int, position: int, stream: int) -> int:
    """One token drawn from a law with the noise of (seed, position, stream)."""
    ids_N = probs_V.nonzero().squeeze(1)
    return _race(probs_V[ids_N].log(), ids_N, seed, position, stream)


def contenders(
    logits_NV: Tensor, place: Place, ids_V: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Columns of the likeliest tokens of rows at one place, and the scores that they race with.

    For drafts: the law and noise that `choose` would use, over many rows at once, but only the
    `count` likeliest tokens of a row take part. [N, C] each; the score is -inf where truncation
    leaves a token out. Logits are taken as they are, without edits.
    ids_V: token ids of the columns where they are not 0, 1, 2, ...
    """
    params = place.request.params
    weights_NV = logits_NV.float() / params.temperature
    columns_NC, shares_NC = best(weights_NV, min(count, weights_NV.shape[1]))
    top_NC = weights_NV.gather(1, columns_NC)
    # Shares of the lesser ones may be too small for their logarithm; the best one's never is.
    logs_NC = top_NC - top_NC[:, :1] + shares_NC[:, :1].log()
    kept_NC = _kept_of_ranked(logs_NC, params)
    ids_NC = columns_NC if ids_V is None else ids_V[columns_NC]
    noise_NC = gumbel(place.request.seed, place.position, ids_NC)
    return columns_NC, (logs_NC + noise_NC).masked_fill_(~kept_NC, -math.inf)


def logprobs(logits_V: Tensor, chosen: int, k: int) -> TokenLogprobs:
    """Log-probability of the chosen token and of the k likeliest, before any transform."""
    logprobs_V = logits_V.log_softmax(-1)
    values, ids = logprobs_V.topk(min(k, len(logprobs_V)))
    return TokenLogprobs(
        chosen=logprobs_V[chosen].item(), top=dict(zip(ids.tolist(), values.tolist(), strict=True))
    )


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise `ConfigError` where the parameters name tokens that the vocabulary does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"{name} names token {token}; use ids from 0 to {vocab_size - 1}, "
                    "the vocabulary of this model"
                )
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise ConfigError(f"logit_bias of token {token} is {bias}; use a finite number or -inf")


def _drawn(rows_V: Sequence[Tensor], places: Sequence[Place]) -> list[int]:
    """The choices of requests that sample, each from its edited row."""
    if not rows_V:
        return []
    lib = kernels.for_scores(rows_V[0])
    if lib is not None:
        return _drawn_compiled(lib, [row_V.contiguous() for row_V in rows_V], places)
    tokens = []
    for logits_V, place in zip(rows_V, places, strict=True):
        request = place.request
        ids_N, weights_N = _kept(logits_V, request.params)
        tokens.append(_race(weights_N, ids_N, request.seed, place.position, Stream.TARGET))
    return tokens


def _drawn_compiled(
    lib: ctypes.CDLL, rows_V: Sequence[Tensor], places: Sequence[Place]
) -> list[int]:
    count = len(rows_V)
    draws = (kernels.Draw * count)()
    for one, logits_V, place in zip(draws, rows_V, places, strict=True):
        params = place.request.params
        one.logits = logits_V.data_ptr()
        one.key = _key(place.request.seed, place.position, Stream.TARGET)
        one.temperature = params.temperature
        one.least = math.log(params.min_p) if params.min_p else -math.inf
        one.top_k = params.top_k
        one.top_p = params.top_p
    tokens = (ctypes.c_int64 * count)()
    lib.choose(draws, count, len(rows_V[0]), tokens)
    return list(tokens)


def _race(weights_N: Tensor, ids_N: Tensor, seed: int, position: int, stream: int) -> int:
    """Gumbel-max: the token with the largest log weight plus noise. `ids_N` ascends."""
    winner = argmax((weights_N + gumbel(seed, position, ids_N, stream))[None])[0]
    return int(ids_N[winner])


# ---- editing logits -----------------------------------------------------------------------------


def edited(logits_V: Tensor, place: Place) -> Tensor:
    """The logits after min_tokens, bias and penalties, [V]; the input is left alone."""
    params = place.request.params
    if logits_V.dtype != torch.float64:
        logits_V = logits_V.float()
    if not params.edits_logits and not place.forbids_stop:
        return logits_V
    logits_V = logits_V.clone()
    if place.forbids_stop:
        stop_ids = [token for token in place.request.stop_ids if token < len(logits_V)]
        logits_V[stop_ids] = -math.inf
    if params.logit_bias:
        _add(logits_V, params.logit_bias)
    if params.repetition_penalty != 1:
        _penalise_repetition(logits_V, place)
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(place.request.output)
        counts.update(place.drafted)
        _add(
            logits_V,
            {
                token: -(params.frequency_penalty * count + params.presence_penalty)
                for token, count in counts.items()
            },
        )
    return logits_V


def _add(logits_V: Tensor, amounts: dict[int, float]) -> None:
    ids = torch.tensor(list(amounts), device=logits_V.device, dtype=torch.int64)
    logits_V[ids] += torch.tensor(
        list(amounts.values()), device=logits_V.device, dtype=logits_V.dtype
    )


def _penalise_repetition(logits_V: Tensor, place: Place) -> None:
    """Tokens of prompt and output become less likely (CTRL, arXiv 1909.05858, section 4.1)."""
    seen = list({*place.request.tokens, *place.drafted})
    ids = torch.tensor(seen, device=logits_V.device)
    values = logits_V[ids]
    penalty = place.request.params.repetition_penalty
    logits_V[ids] = torch.where(values > 0, values / penalty, values * penalty)


# ---- forming the law ----------------------------------------------------------------------------


def _kept(logits_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The tokens that stay possible, ascending, and their log weights (the largest is 0).

    Sorting a whole vocabulary takes milliseconds. The few hundred largest weights are enough if
    the threshold lies above the smallest of them; otherwise more are taken, up to all.
    """
    weights_V = (logits_V - logits_V.max()) / params.temperature
    size = len(weights_V)
    if not (0 < params.top_k < size or params.top_p < 1 or params.min_p > 0):
        return torch.arange(size, device=weights_V.device), weights_V
    for count in (max(256, params.top_k + 1), max(4096, params.top_k + 1), size):
        top_N, ids_N = weights_V.topk(min(count, size))
        threshold = _threshold(top_N, weights_V, params)
        if threshold > top_N[-1] or len(top_N) == size:
            break
    ids_N = ids_N[top_N >= threshold].sort().values
    return ids_N, weights_V[ids_N]


def _threshold(top_N: Tensor, weights_V: Tensor, params: SamplingParams) -> Tensor:
    """The smallest weight that is kept, if it is above top_N[-1]; else anything up to that.

    top_N: the largest weights, descending, more than top_k of them (or all).
    """
    threshold = top_N.new_tensor(math.log(params.min_p) if params.min_p else -math.inf)
    if 0 < params.top_k < len(weights_V):
        threshold = torch.maximum(threshold, top_N[params.top_k - 1])
    if params.top_p < 1:
        # The mass to cover is that of the tokens which min_p and top_k left.
        left_V = top_N if threshold > top_N[-1] else weights_V
        if threshold > -math.inf:
            left_V = left_V[left_V >= threshold]
        covered_N = top_N.exp().cumsum(0) >= params.top_p * left_V.exp().sum()
        last = covered_N.sum().neg().clamp(max=-1)  # the first that reaches the mass
        threshold = torch.maximum(threshold, top_N[last])
    return threshold


def _kept_of_ranked(logs_NC: Tensor, params: SamplingParams) -> Tensor:
    """Which of the likeliest tokens, best first, stay in the law."""
    kept_NC = torch.ones_like(logs_NC, dtype=torch.bool)
    if params.min_p:
        kept_NC &= logs_NC >= logs_NC[:, :1] + math.log(params.min_p)
    if params.top_k > 0:
        kept_NC[:, params.top_k :] = False
    if params.top_p < 1:
        truncated = params.min_p > 0 or params.top_k > 0
        probs_NC = logs_NC.exp() * kept_NC
        mass_N1 = probs_NC.sum(-1, keepdim=True) if truncated else 1.0
        kept_NC &= probs_NC.cumsum(-1) - probs_NC < params.top_p * mass_N1
    return kept_NC


# ---- noise --------------------------------------------------------------------------------------


class Stream(IntEnum):
    """Independent families of noise; mixing two of them would bias the rejection rule."""

    TARGET = 0  # the target's own choice, and drafts that are coupled to it
    DRAFT = 1  # drafts that are sampled from their own law
    ACCEPT = 2
    RESIDUAL = 3


def gumbel(seed: int, position: int, ids_N: Tensor, stream: int = Stream.TARGET) -> Tensor:
    """Standard Gumbel noise of the given tokens at a position, float32, on the device of `ids_N`.

    52 bits of the hash are a uniform number v, taken near 0 so that float32 keeps its precision
    where it decides: -log(1 - v) is exponential, the smallest wins, -log of that is Gumbel.
    """
    bits_N = _hash_N(_key(seed, position, stream), ids_N)
    bits_N = bits_N.bitwise_right_shift_(12).bitwise_and_(2**52 - 1)
    v_N = bits_N.float().add_(0.5).mul_(2.0**-52).clamp_(max=1 - 2.0**-24)
    return v_N.neg_().log1p_().neg_().log_().neg_()


def arrivals(seed: int, position: int) -> Callable[[int], float]:
    """exp(-noise) of the target's choice at a position, for one token at a time.

    These are exponential numbers, and the smallest of number / probability is chosen. For drafts of
    a few tokens, where a tensor would take longer.
    """
    key = _key(seed, position, Stream.TARGET)
    (first, times), (second, again), (third, _) = _ROUNDS

    def arrival(token: int) -> float:
        z = key + token * _STEP & _MASK  # `_mix` without its loop, which would take twice as long
        z = (z ^ (z >> first)) * times & _MASK
        z = (z ^ (z >> second)) * again & _MASK
        return -math.log1p(-(((z ^ (z >> third)) >> 12) + 0.5) * 2.0**-52)

    return arrival


def uniform(seed: int, position: int, stream: int, index: int) -> float:
    """A uniform number in (0, 1), the index-th of a position."""
    bits = _mix(_key(seed, position, stream) + index * _STEP)
    return ((bits >> 12) + 0.5) * 2.0**-52


# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a counter times the golden ratio, then a mixer.
# Tensors have no unsigned 64 bits: products wrap all the same, shifts need a mask.
_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    value &= _MASK
    for shift, factor in _ROUNDS:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value


def _key(seed: int, position: int, stream: int) -> int:
    key = 0
    for part in (seed, position, stream):
        key = _mix(key + part + _STEP)
    return key


def _hash_N(key: int, ids_N: Tensor) -> Tensor:
    """`_mix(key + id * _STEP)` for every id, as int64."""
    z_N = ids_N * _signed(_STEP) + _signed(key)
    for shift, factor in _ROUNDS:
        z_N ^= (z_N >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        z_N *= _signed(factor)
    return z_N
