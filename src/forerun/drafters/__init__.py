"""Everything that proposes tokens. A drafter is one file here and one line in `DRAFTERS`."""

from __future__ import annotations

from forerun.config import Settings, nearest
from forerun.drafters.auto import available
from forerun.drafters.base import DraftContext, Drafter
from forerun.drafters.combined import Combined
from forerun.drafters.corpus import CorpusDrafter
from forerun.drafters.dflash import DFlashDrafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.eagle import Eagle, EagleThree
from forerun.drafters.joined import Joined
from forerun.drafters.medusa import Medusa
from forerun.drafters.ngram import Ngram
from forerun.drafters.skip import SkipLayers
from forerun.drafters.spec import AUTO, DrafterSpec, parse
from forerun.drafters.suffix import Suffix
from forerun.errors import ConfigError
from forerun.interop.shipped import every

__all__ = ["DRAFTERS", "DraftContext", "Drafter", "check", "make_drafter"]

DRAFTERS: dict[str, type[Drafter]] = {
    drafter.name: drafter
    for drafter in (
        Ngram,
        Suffix,
        CorpusDrafter,
        DraftModel,
        SkipLayers,
        Medusa,
        DFlashDrafter,
        Eagle,
        EagleThree,
    )
}


def make_drafter(spec: str, context: DraftContext) -> Drafter | None:
    """The drafter that a draft spec describes (the grammar is in `spec.py`); None for `none`.

    Raises `ConfigError` for unknown drafters and options, for values that cannot be used and for
    drafters that do not fit the target.
    """
    parts = check(spec, context.target.info.name)
    drafters = [kind(options, context) for kind, options in parts]
    if len(drafters) > 1:
        return Combined(drafters) if context.independent_noise else Joined(drafters)
    return drafters[0] if drafters else None


def check(spec: str, model: str) -> list[tuple[type[Drafter], Settings]]:
    """The drafters that a draft spec names, with their options.

    model: its name, by which `auto` finds what ships for it; it need not be loaded.

    Raises `ConfigError` for unknown drafters and options and for values that cannot be used.
    """
    parts = [
        each for part in parse(spec) for each in (available(model) if part.name == AUTO else [part])
    ]
    kinds = [(_kind(part), part) for part in parts]
    return [(kind, _options(kind, part)) for kind, part in kinds]


def _kind(part: DrafterSpec) -> type[Drafter]:
    kind = DRAFTERS.get(part.name)
    if kind is None:
        raise ConfigError(
            f"no drafter '{part.name}'; {nearest(part.name, [*DRAFTERS, AUTO, 'none'])}"
        )
    return kind


def _options(kind: type[Drafter], part: DrafterSpec) -> Settings:
    """The checked options of one drafter."""
    values = dict(part.options)
    known = kind.options.model_fields
    for name in values:
        if name not in known:
            raise ConfigError(
                f"drafter '{kind.name}' has no option '{name}'; {nearest(name, known)}"
            )
    if part.argument is not None:
        if kind.argument is None:
            example = next(iter(known))
            raise ConfigError(
                f"'{kind.name}:{part.argument}' lacks the name of an option; "
                f"write for example {kind.name}:{example}=VALUE"
            )
        if kind.argument in values:
            raise ConfigError(f"drafter '{kind.name}' names its {kind.argument} twice; remove one")
        values[kind.argument] = part.argument
    if kind.argument is not None and kind.argument not in values:
        ships = [f", or {k}:{model}, which ships" for k, model, _ in every() if k == kind.name]
        raise ConfigError(
            f"drafter '{kind.name}' needs its {kind.argument}; "
            f"write {kind.name}:{kind.argument.upper()}{''.join(ships)}"
        )
    return kind.options(**values)
