"""What a machine costs and what a drafter is worth there, in TOML; `machines/` has some.

Every file says which of its figures were published where, which were fitted to them, and which are
assumed.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from forerun.config import Settings, nearest
from forerun.engine.costs import Costs
from forerun.errors import ConfigError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

MACHINES = files("forerun.simulate") / "machines"

Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Chance = Annotated[float, Field(ge=0, le=1)]


class Target(Settings):
    """Milliseconds of a pass, as `Costs` adds them up.

    rows: number of rows -> one sequence without a prefix; straight lines between and beyond them.
    sequence: each further sequence. key: each token of prefix. row_key: each token and row.
    """

    title = "[target]"

    rows: dict[int, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    sequence: Milliseconds = 0.0
    key: Milliseconds = 0.0
    row_key: Milliseconds = 0.0

    @field_validator("rows")
    @classmethod
    def _some(cls, rows: dict[int, float]) -> dict[int, float]:
        if not rows or min(rows) < 1:
            raise ValueError("give the milliseconds of 1 row, at least, as rows = {1 = 10.0}")
        return rows


class Round(Settings):
    """Milliseconds of drafting for some requests together.

    fixed: whenever anybody is asked. depth: for each token of the longest path.
    node: for each node of all drafts.
    """

    title = "[round]"

    fixed: Milliseconds = 0.0
    depth: Milliseconds = 0.0
    node: Milliseconds = 0.0


class Drafter(Settings):
    """A drafter of chains. acceptance: chance of its first, second, ... token if those before it
    are right. claimed: what it takes that chance for; None: what it is."""

    title = "[drafter]"

    acceptance: Annotated[tuple[Chance, ...], Field(min_length=1)]
    claimed: tuple[Chance, ...] | None = None

    @property
    def claims(self) -> tuple[float, ...]:
        return self.acceptance if self.claimed is None else self.claimed


class Table(Settings):
    """A machine with a target, and a drafter for it.

    published: (batch, drafted tokens, speed-up) as they were measured there.
    """

    title = "table"

    name: str
    source: str
    fitted: str = ""
    assumed: str = ""
    target: Target
    round: Round = Round()
    drafter: Drafter | None = None
    published: tuple[tuple[int, int, float], ...] = ()

    def costs(self) -> Costs:
        """Seconds of a pass, as an engine on that machine would have measured them."""
        target = self.target
        return Costs(
            {rows: taken / 1000 for rows, taken in target.rows.items()},
            sequence=target.sequence / 1000,
            key=target.key / 1000,
            row_key=target.row_key / 1000,
            learns=True,
        )

    def round_seconds(self, depth: int, nodes: int) -> float:
        """Seconds of drafting so many nodes for all requests, the deepest path so long."""
        round = self.round
        return (round.fixed + round.depth * depth + round.node * nodes) / 1000


def built_in() -> list[str]:
    """The names of the tables that come with forerun."""
    return sorted(entry.name.removesuffix(".toml") for entry in MACHINES.iterdir())


def load_table(name: str) -> Table:
    """A built-in table by its name, or a file. Raises `ConfigError`."""
    if name in built_in():
        return Table(**tomllib.loads((MACHINES / f"{name}.toml").read_text(encoding="utf-8")))
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"no table and no file is called '{name}'; {nearest(name, built_in())}")
    try:
        return Table(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give a file in TOML") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
