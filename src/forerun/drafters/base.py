"""What a drafter is, and what it is given when it is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from torch import Tensor

from forerun.config import Settings
from forerun.core import Draft, Request, Verdict
from forerun.drafters.laws import Law, of_draft
from forerun.drafters.sources import Source
from forerun.models.cache import KVStore
from forerun.models.target import Target, TargetInfo

if TYPE_CHECKING:
    from forerun.models.hub import LoadedModel
    from forerun.models.tokenizer import Tokenizer


# What is known of a target that need not be loaded yet; None: nothing.
Known: TypeAlias = Callable[[], TargetInfo | None]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may use.

    target, store: the model to run ahead of and its keys and values.
    load: reads another model by folder, file, Hub id or name.
    independent_noise: the verifier's rule needs drafts drawn from their own noise, with their law.
    """

    target: Target
    store: KVStore
    tokenizer: Tokenizer | None
    load: Callable[[str], LoadedModel]
    independent_noise: bool = False


class Way(Protocol):
    """One way to ask a drafter: all of it, or some of its parts."""

    @property
    def name(self) -> str:
        """Who proposes all nodes of drafts that do not say so themselves."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Layer boundaries of the target that this way needs."""
        ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """As `Drafter.propose`."""
        ...


class Drafter(ABC):
    """Proposes what could follow. Guesses may be arbitrarily bad; they cost speed, never text.

    State per request is the drafter's own, keyed by `request.id`; `request.tokens` is the truth,
    and a drafter that was not asked for a while catches up from it.
    """

    name: ClassVar[str]  # as in a draft spec
    options: ClassVar[type[Settings]]  # what a draft spec may say behind the name
    argument: ClassVar[str | None] = None  # the option that stands first and without its name
    example: ClassVar[str]  # a draft spec that works with every target of three layers or more
    makes_trees: bool = False
    samples: bool = False  # can draw from a law of its own, so that `rejection` applies
    taps: Sequence[int] = ()  # layer boundaries of the target that `observe` needs
    runs_network: bool = True  # so that its rounds take time

    @classmethod  # noqa: B027, most need nothing
    def look(cls, options: Settings, known: Known) -> None:
        """Refuse what can be told to be wrong before the target is loaded.

        Raises `ConfigError` and `ModelError`.
        """

    def __init__(self, options: Settings, context: DraftContext) -> None:  # noqa: B027
        """options: an instance of the class's `options`. Raises `ConfigError` where they do not
        fit the target."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One draft of at most `budget` nodes per request, in order; empty where it has nothing.

        A request's tokens all lie in the store except the last one.
        """

    @property
    def ways(self) -> Sequence[Way]:
        """In which ways it can be asked; the last one asks all of it."""
        return (self,)

    def laws(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Law]:
        """Instead of `propose`: what is believed on all paths, so that others can be joined."""
        return [of_draft(draft) for draft in self.propose(requests, budgets)]

    @property
    def has_sources(self) -> bool:
        """Whether `sources` say what `laws` do: not where a drafter brings only laws of its own."""
        kind = type(self)
        return kind.laws is Drafter.laws or kind.sources is not Drafter.sources

    def sources(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Source]:
        """The same beliefs as `laws`, for compiled code."""
        return [Source.of_draft(draft) for draft in self.propose(requests, budgets)]

    def observe(  # noqa: B027, most drafters need not know
        self, requests: Sequence[Request], verdicts: Sequence[Verdict], taps: Sequence[Tensor]
    ) -> None:
        """Learn what became of the proposals, after the tokens were committed.

        requests: those that were asked for; with taps, all that the drafter is to follow, too.
        taps: per request, the hidden states of its newly cached rows, [rows, T, hidden], none of
        one that is not followed; empty when no request is, or the drafter declares no taps. They
        may be views, which keep the states of a whole pass alive: copy what is kept for longer
        than until the next ones come.
        """

    def unfollow(self, request: Request) -> None:  # noqa: B027, most read none
        """No more hidden states of the request will come: forget those that are kept. Called in
        every step of such a request."""

    def release(self, request: Request) -> None:  # noqa: B027, most keep no state
        """The request has ended (or was put back in the queue): forget its state."""
