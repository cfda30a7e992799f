from __future__ import annotations

import json

import pytest

from drafting import make, refuse, request
from fakes import FakeTarget, random_rule
from forerun.drafters import DRAFTERS, DraftContext, make_drafter
from forerun.drafters.spec import VLLM_METHODS, DrafterSpec, parse
from forerun.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("none", []),
        ("ngram", [DrafterSpec("ngram")]),
        (" ngram:max=4, k=8 ", [DrafterSpec("ngram", None, {"max": "4", "k": "8"})]),
        ("model:org/name", [DrafterSpec("model", "org/name")]),
        ("model:C:\\m\\x.gguf,k=4", [DrafterSpec("model", "C:\\m\\x.gguf", {"k": "4"})]),
        ("skip:2", [DrafterSpec("skip", "2")]),
        (
            "ngram:min=3+model:a/b,k=2",
            [DrafterSpec("ngram", None, {"min": "3"}), DrafterSpec("model", "a/b", {"k": "2"})],
        ),
    ],
)
def test_a_line_names_drafters_and_options(text: str, parts: list[DrafterSpec]) -> None:
    assert parse(text) == parts


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            {
                "method": "ngram",
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
                "num_speculative_tokens": 8,
            },
            DrafterSpec("ngram", None, {"max": 4, "min": 2, "k": 8}),
        ),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 24,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_min_token_prob": 0.1,
            },
            DrafterSpec("suffix", None, {"order": 24, "shared": 0, "min_prob": 0.1}),
        ),
        (
            {"model": "a+b,c=d", "num_speculative_tokens": 3},
            DrafterSpec("model", None, {"model": "a+b,c=d", "k": 3}),
        ),
    ],
)
def test_the_json_of_vllm_means_the_same(given: dict[str, object], part: DrafterSpec) -> None:
    assert parse(json.dumps(given)) == [part]


def test_every_key_of_vllm_leads_to_an_option() -> None:
    for name, keys in VLLM_METHODS.values():
        assert set(keys.values()) <= set(DRAFTERS[name].options.model_fields)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngramm", "no drafter 'ngramm'; did you mean 'ngram'"),
        ("telepathy", "choose one of: auto, corpus, dflash, .*model, ngram, none, skip, suffix"),
        ("ngram+none", "none stands alone; take it out"),
        ("none + ngram", "none stands alone; take it out"),
        ("ngram:kk=4", "'ngram' has no option 'kk'; did you mean 'k'"),
        ("ngram:k=many", "NgramOptions: k: .*integer"),
        ("ngram:k=0", "NgramOptions: k: .*greater than or equal to 1"),
        ("ngram:min=5,max=3", "min 5 is above max 3; raise max"),
        ("ngram:8", "'ngram:8' lacks the name of an option; write for example ngram:max=VALUE"),
        ("ngram:k=4,k=5", "sets k twice; remove one"),
        ("ngram:k=4,8", "'8' in draft spec 'ngram:k=4,8' is no option; write NAME=VALUE"),
        ("suffix:min_prob=2", "SuffixOptions: min_prob: .*less than or equal to 1"),
        ("model", "'model' needs its model; write model:MODEL"),
        ("model:a,model=b", "names its model twice; remove one"),
        ("skip:k=3", "'skip' needs its layers; write skip:LAYERS"),
        ("corpus", "write corpus:FILE, or corpus:smollm2-135m, which ships"),
        ("skip:two", "SkipOptions: layers: .*integer"),
        ("auto:k=4", "auto has no options; to set those of a drafter, name it"),
        ("autos", "did you mean 'auto'"),
        ("", "lacks a drafter"),
        ("ngram+", "lacks a drafter"),
        ('{"method": "ngram"', "no valid JSON"),
        ('{"method": "eagle9"}', "no draft method 'eagle9'"),
        ('{"method": "sufix"}', "did you mean 'suffix'"),
        ('{"method": []}', "no draft method"),
        ("{}", "names no method; add"),
        (
            '{"method": "ngram", "prompt_lookup_mx": 4}',
            "'ngram' has no 'prompt_lookup_mx'; did you mean 'prompt_lookup_max'",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "NgramOptions: k"),
    ],
)
def test_a_wrong_spec_is_refused_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(spec)
    assert "\n" not in str(caught.value)


def test_none_is_no_drafter() -> None:
    target = FakeTarget(random_rule())
    assert make_drafter("none", DraftContext(target, target.new_store(8), None, refuse)) is None


def test_defaults_are_those_of_the_options() -> None:
    assert make("ngram:k=8")._options == DRAFTERS["ngram"].options(k=8)  # type: ignore[attr-defined]


def test_the_registry_knows_each_drafter_by_its_name() -> None:
    for name, drafter in DRAFTERS.items():
        assert drafter.name == name
        assert parse(drafter.example)[0].name == name
        assert drafter.argument is None or drafter.argument in drafter.options.model_fields


def test_both_forms_draft_the_same() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    line = make("ngram:max=2,min=2,k=3").propose([request(tokens)], [8])
    given = {
        "method": "ngram",
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 3,
    }
    assert make(json.dumps(given)).propose([request(tokens)], [8]) == line
    assert line[0].tokens == [3, 4, 5]
