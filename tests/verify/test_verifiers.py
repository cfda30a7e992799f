from __future__ import annotations

from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.verify import VERIFIERS, make_verifier


def test_every_name_makes_its_verifier() -> None:
    assert set(VERIFIERS) == {"follow", "rejection", "typical", "reference"}
    for name, kind in VERIFIERS.items():
        assert isinstance(make_verifier(name), kind)
        assert kind.name == name
    assert [name for name, kind in VERIFIERS.items() if not kind.lossless] == ["typical"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("folow", {}, "there is no verifier 'folow'; did you mean 'follow'?"),
        ("xyz", {}, "choose one of: follow, reference, rejection, typical"),
        ("follow", {"k": 1}, "verifier 'follow' has no option 'k'; it takes none"),
        ("typical", {"epsilom": 1}, "no option 'epsilom'; did you mean 'epsilon'?"),
        ("typical", {"delta": 3.0}, "delta is 3.0; choose a number in"),
        ("typical", {"epsilon": 0.0}, "epsilon is 0.0; choose a number in"),
    ],
)
def test_what_cannot_be_made_says_what_to_do(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_verifier(name, **options)
    assert message in str(error.value)
