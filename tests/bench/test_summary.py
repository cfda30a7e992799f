"""Figures of the comparison with other engines, from samples that can be checked by hand."""

from __future__ import annotations

import pytest

from bench.summary import Row, Sample, summarise


def sample(engine: str, mode: str, first: int, output: list[int], seconds: float) -> Sample:
    return Sample(engine, mode, "chat", 1, first, [output], seconds, ttft=seconds / 10)


@pytest.fixture
def rows() -> dict[tuple[str, str], Row]:
    samples = [
        sample("forerun", "plain", 0, [1, 2, 3, 4], 2.0),
        sample("forerun", "plain", 1, [5, 6], 1.0),
        sample("forerun", "plain", 2, [7, 8], 4.0),
        sample("forerun", "ngram", 0, [1, 2, 3, 4], 1.0),
        sample("forerun", "ngram", 1, [5, 9], 1.0),
        sample("forerun", "ngram", 2, [7, 8], 1.0),
        sample("vllm", "ngram", 0, [1, 2, 3, 4], 8.0),
    ]
    return {(row.engine, row.mode): row for row in summarise(samples)}


def test_speeds_are_pooled_and_median(rows: dict[tuple[str, str], Row]) -> None:
    plain = rows["forerun", "plain"]
    assert plain.tok_s == 8 / 7  # not the mean of 2, 2 and 0.5
    assert plain.tok_s_median == 2
    assert plain.ttft_ms == 200


def test_ratios_pair_the_same_prompts(rows: dict[tuple[str, str], Row]) -> None:
    assert rows["forerun", "ngram"].vs_own_plain == 2  # of 2, 1 and 4
    assert rows["vllm", "ngram"].vs_forerun_plain == 0.25  # of the only prompt it was asked


def test_what_was_not_measured_is_none(rows: dict[tuple[str, str], Row]) -> None:
    assert rows["vllm", "ngram"].vs_own_plain is None
    assert rows["vllm", "ngram"].identical_to_own_plain is None
    assert rows["forerun", "plain"].vs_transformers_plain is None


def test_identical_counts_whole_outputs(rows: dict[tuple[str, str], Row]) -> None:
    assert rows["forerun", "ngram"].identical_to_own_plain == 2
    assert rows["forerun", "ngram"].prompts_compared == 3
