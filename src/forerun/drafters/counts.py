"""What followed each context: a trie of all runs of up to N tokens, grown token by token.

A run that occurred once is not stored at all: it is a position in the text, where its only
continuation can be read. A node is made when a run occurs for the second time, so novel text costs
one dictionary entry per token and order that was seen before.

    text     a b c a b d         root ── a ── Node(2) ── b ── Node(2) ── c ── 3
    index    0 1 2 3 4 5                 │                          └─── d ── 6
                                         ├── b ── Node(2) ── ...
                                         └── c ── 3: the text from index 3 on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

END = -1  # stands between texts; nothing is known to follow


class Matches(Protocol):
    """The endings of one text that one source of counts knows, of `longest` tokens down to one.

    weight: how many sightings one counted here is worth.
    """

    weight: float
    longest: int

    def followers(self, order: int) -> list[tuple[int, int]]:
        """The tokens that followed the last `order` ones, and how often."""
        ...

    def advance(self, token: int) -> Matches:
        """The endings of the text with one more token."""
        ...


class _Node(dict[int, "_Node | int"]):
    """A run of tokens that occurred `count` >= 2 times: token -> the run that is one longer."""

    __slots__ = ("count",)

    count: int


class Trie:
    """Counts over a growing list of tokens, for contexts of up to `order` tokens.

    tokens: read, never changed; whoever appends to it calls `update`.
    """

    def __init__(self, tokens: list[int], order: int) -> None:
        self.tokens = tokens
        self.order = order
        self._root = _Node()
        self._endings: list[_Node] = []  # of the text, longest first, as far as they are nodes
        self._read = 0

    def update(self) -> None:
        """Count what came since the last call."""
        for position in range(self._read, len(self.tokens)):
            token = self.tokens[position]
            self._endings = [] if token == END else self._append(token, position)
        self._read = len(self.tokens)

    def _append(self, token: int, position: int) -> list[_Node]:
        endings = []
        for node in (*self._endings, self._root):
            child = node.get(token)
            if child is None:
                node[token] = position + 1
                continue
            if isinstance(child, int):
                child = node[token] = self._split(child)
            else:
                child.count += 1
            endings.append(child)
        # A run seen before has endings seen before: the list holds one node for each order.
        return endings[1:] if len(endings) > self.order else endings

    def _split(self, position: int) -> _Node:
        """The node of a run that occurs for the second time, the first continued at `position`."""
        token = self.tokens[position]
        node = _Node() if token == END else _Node({token: position + 1})
        node.count = 2
        return node

    def endings(self, weight: float) -> TrieMatches:
        """The endings of the trie's own text."""
        return TrieMatches(self, weight, self._endings)

    def match(self, tokens: Sequence[int], weight: float) -> TrieMatches:
        """The known endings of another text."""
        matches = TrieMatches(self, weight, [])
        for token in tokens[-self.order :]:
            matches = matches.advance(token)
        return matches


class TrieMatches:
    """Endings that a trie knows: nodes, or positions in its text for runs that occurred once."""

    __slots__ = ("_contexts", "_trie", "longest", "weight")

    def __init__(self, trie: Trie, weight: float, contexts: Sequence[_Node | int]) -> None:
        self._trie = trie
        self._contexts = contexts
        self.weight = weight
        self.longest = len(contexts)

    def followers(self, order: int) -> list[tuple[int, int]]:
        context = self._contexts[self.longest - order]
        if isinstance(context, int):
            tokens = self._trie.tokens
            follows = context < len(tokens) and tokens[context] != END
            return [(tokens[context], 1)] if follows else []
        return [
            (token, 1 if isinstance(child, int) else child.count)
            for token, child in context.items()
        ]

    def advance(self, token: int) -> TrieMatches:
        trie = self._trie
        tokens = trie.tokens
        longer: list[_Node | int] = []
        for context in (*self._contexts, trie._root):
            if isinstance(context, int):
                if context < len(tokens) and tokens[context] == token:
                    longer.append(context + 1)
            else:
                child = context.get(token)
                if child is not None:
                    longer.append(child)
        return TrieMatches(trie, self.weight, longer[-trie.order :])


def mixture(sources: Sequence[Matches], floor: float) -> Iterable[tuple[int, float]]:
    """The probability of each token that followed a known ending, longer endings first.

    Each ending keeps the share c / (c + d) of the probability that longer ones left over, where it
    was followed by d different tokens c times, and spreads it by their counts; the rest goes to the
    next (Witten-Bell smoothing, interpolated: Chen & Goodman 1999, section 2.6). What the shortest
    leaves over belongs to no token. Ends when less than `floor` is left.
    """
    found: dict[int, float] = {}
    left = 1.0
    for order in range(max(source.longest for source in sources), 0, -1):
        for source in sources:
            followers = source.followers(order) if order <= source.longest else ()
            if not followers:
                continue
            seen = source.weight * sum(count for _, count in followers)
            share = left * source.weight / (seen + len(followers))
            for token, count in followers:
                found[token] = found.get(token, 0.0) + share * count
            left *= len(followers) / (seen + len(followers))
            if left < floor:
                return found.items()
    return found.items()
