"""What a token of each request is worth to those who wait for it.

Who asks for several texts at once waits for the last of them, and a pass takes hardly longer with
those that have ended before. So where nobody waits for their places, tokens of texts that are ahead
bring that end nearer by the time of their own rows only, and those of texts behind by whole passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from forerun.core import Request
from forerun.engine.costs import Costs

TURNS = 0.1  # of the tokens that are left: a lead as large may yet be lost, or a text end before


def urgencies(requests: Sequence[Request], costs: Costs) -> dict[int, float]:
    """By request, its tokens' worth; 1 on the mean over those of a call, and for those left out.

    With chance p a request of a call of n is the last to end, and saves with a token what a pass
    takes anyway, the share s of its time; what rows take, all save alike: 1 - s + s n p.
    """
    calls: dict[int, list[Request]] = {}
    for request in requests:
        if request.call is not None:
            calls.setdefault(request.call, []).append(request)
    groups = [group for group in calls.values() if len(group) > 1]
    found: dict[int, float] = {}
    if not groups:
        return found
    common = _common(requests, costs)
    for group in groups:
        most = max(request.remaining for request in group)
        scale = 1 + TURNS * most
        odds = [exp((request.remaining - most) / scale) for request in group]
        mean = sum(odds) / len(odds)
        for request, each in zip(group, odds, strict=True):
            found[request.id] = 1 - common + common * each / mean
    return found


def _common(requests: Sequence[Request], costs: Costs) -> float:
    """The share of a plain pass that does not depend on how many requests are in it."""
    prefixes = [request.cached for request in requests]
    one, all_ = costs.plain(prefixes[:1]), costs.plain(prefixes)
    further = (all_ - one) / (len(prefixes) - 1)
    return (one - further) / all_ if one > further else 0.0
