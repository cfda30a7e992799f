from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafting import make, paths, propose, replay, request
from fakes import FakeTarget, random_rule
from forerun import sampling
from forerun.drafters import corpus_file
from forerun.drafters.corpus import coupled, mixed
from forerun.drafters.corpus_file import FORMAT, Header, Tables
from forerun.drafters.counts import Trie
from forerun.errors import CheckpointError, ConfigError, ForerunError
from forerun.models.tokenizer import Tokenizer
from forerun.train.corpus import build
from tiny import tiny_tokenizer
from tiny_corpus import example

VOCAB = 16
HEADER = Header(model="fake", vocab_size=VOCAB, vocabulary="v", order=3, data="d", counted=9)


def tables(*texts: list[int]) -> Tables:
    return build([example(text) for text in texts for _ in range(3)], VOCAB, order=3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    corpus_file.write(
        tmp_path / "c", HEADER, tables([1, 2, 3, 4, 5, 6], [9, 2, 3, 7, 8], [9, 2, 3, 7, 8, 1])
    )
    return tmp_path / "c"


def test_it_proposes_what_followed_in_the_corpus(file: Path) -> None:
    found = paths(propose(make(f"corpus:{file}"), request([0, 2])))
    assert {(3,), (3, 7), (3, 4), (3, 7, 8)} <= found
    first = propose(make(f"corpus:{file},nodes=2"), request([0, 9, 2]))
    assert list(first.tokens) == [3, 7]


def test_the_request_outweighs_the_corpus_where_it_repeats_itself(file: Path) -> None:
    asked = request([11, 12, 9, 2, 3, 14, 13, 11, 12, 9, 2])
    assert propose(make(f"corpus:{file}"), asked).tokens[:2] == [3, 14]


def test_it_keeps_its_limits(file: Path) -> None:
    drafter = make(f"corpus:{file},nodes=3,k=2")
    draft = propose(drafter, request([9, 2]))
    assert len(draft) == 3
    assert max(map(len, paths(draft))) == 2
    assert len(propose(drafter, request([9, 2]), budget=1)) == 1
    assert propose(drafter, request([9, 2]), budget=0).tokens == ()
    assert propose(drafter, request([9, 2], max_tokens=1)).tokens == ()
    stopped = paths(propose(make(f"corpus:{file}"), request([9, 2], stop=[3])))
    assert all(3 not in path[:-1] for path in stopped)
    survival = propose(make(f"corpus:{file},min_prob=0.3"), request([9, 2])).survival
    assert survival
    assert min(survival) >= 0.3


def test_the_two_laws_are_mixed_by_the_length_of_the_ending() -> None:
    trie = Trie([5, 1, 2, 3, 1, 2], 16)
    trie.update()
    law = mixed({3: 0.2, 4: 0.5}, trie.endings(1.0))
    assert law == pytest.approx({3: 0.5 * 0.2 + 0.5 * 1, 4: 0.5 * 0.5})  # 2 / (2 + 2)
    unseen = Trie([5, 1], 16)
    unseen.update()
    assert mixed({3: 0.2}, unseen.endings(1.0)) == {3: 0.2}


def test_noise_of_one_token_is_that_of_the_tensor() -> None:
    ids = torch.tensor([0, 3, 49151])
    arrival = sampling.arrivals(11, 5)
    noise = [-math.log(arrival(token)) for token in ids.tolist()]
    assert noise == pytest.approx(sampling.gumbel(11, 5, ids).tolist(), abs=1e-5)


def test_coupling_finds_what_the_target_will_draw() -> None:
    """The target draws from this very law: its token stands first more often than the likeliest."""
    law = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.05}
    probs = torch.tensor([*law.values(), 0.05])
    drawn = [sampling.draw(probs, 7, place, sampling.Stream.TARGET) for place in range(2000)]
    chances = [coupled(law, 7, place) for place in range(2000)]
    best = [max(each, key=lambda token: each[token]) for each in chances]
    assert sum(map(int.__eq__, best, drawn)) > 1.5 * drawn.count(0)
    assert all(sum(each.values()) <= 1 + 1e-9 for each in chances)


def test_a_sampled_request_gets_another_draft_than_a_greedy_one(file: Path) -> None:
    drafter = make(f"corpus:{file}")
    greedy = propose(drafter, request([9, 2, 3], id=1)).survival
    sampled = propose(drafter, request([9, 2, 3], id=2, temperature=1.0)).survival
    assert list(greedy) != list(sampled)
    drafter = make(f"corpus:{file}", independent_noise=True)
    assert propose(drafter, request([9, 2, 3], id=3, temperature=1.0)).survival == greedy


def test_survival_is_honest(tmp_path: Path) -> None:
    """Of the nodes that should survive with a chance of p, about p do."""
    dice = random.Random(3)

    def markov(length: int) -> list[int]:
        text = [0, 1]
        while len(text) < length:
            a, b = text[-2:]
            text.append((a * 5 + b) % 12 if dice.random() < 0.6 else dice.randrange(12))
        return text

    counted = build([example(markov(300)) for _ in range(20)], VOCAB, order=3)
    corpus_file.write(tmp_path / "c", HEADER, counted)
    drafter = make(f"corpus:{tmp_path / 'c'}")
    expected = seen = 0.0
    for id in range(4):
        text = markov(500)
        for draft, right in replay(drafter, request(text[:50], id=id, max_tokens=999), text[50:]):
            expected += sum(draft.survival)
            seen += right
    assert seen > 500
    assert seen == pytest.approx(expected, rel=0.15)


def test_requests_are_forgotten(file: Path) -> None:
    drafter = make(f"corpus:{file}")
    one, two = request([1, 2], id=1), request([9, 2], id=2)
    for law in drafter.laws([one, two], [4, 4]):
        assert law.nodes
    drafter.release(one)
    assert list(drafter._tries) == [2]  # type: ignore[attr-defined]


# ---- the file ---------------------------------------------------------------------------------


def test_what_is_written_is_read(file: Path) -> None:
    read = corpus_file.read(file)
    assert read.header == HEADER
    known = corpus_file.Corpus(
        HEADER, tables([1, 2, 3, 4, 5, 6], [9, 2, 3, 7, 8], [9, 2, 3, 7, 8, 1])
    )
    for ending in ([], [2], [1, 2, 3], [9, 2, 3], [15, 3]):
        assert read.law(ending) == known.law(ending)


def test_tokens_of_a_large_vocabulary_fit(tmp_path: Path) -> None:
    large = HEADER.model_copy(update={"vocab_size": 200_000})
    corpus_file.write(tmp_path / "c", large, build([example([1, 199_999] * 3)], 200_000, order=3))
    assert 199_999 in corpus_file.read(tmp_path / "c").law([1])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def scramble(path: Path) -> None:
    path.write_bytes(b"no corpus at all")


def rewrite(
    change: Callable[[dict[str, torch.Tensor], dict[str, str]], None],
) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        metadata = {"format": FORMAT, "header": HEADER.model_dump_json()}
        change(tensors, metadata)
        save_file(tensors, path, metadata)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        truncate,
        scramble,
        rewrite(lambda _, metadata: metadata.update(format="forerun corpus 0")),
        rewrite(lambda _, metadata: metadata.pop("format") and None),
        rewrite(lambda _, metadata: metadata.pop("header") and None),
        rewrite(lambda _, metadata: metadata.update(header='{"model": "fake"}')),
        rewrite(lambda tensors, _: tensors.pop("begins_C1").sum() and None),
        rewrite(lambda tensors, _: tensors.update(keys_C=tensors["begins_C1"].clone())),
        rewrite(lambda tensors, _: tensors.update(begins_C1=tensors["begins_C1"] - 1)),
        rewrite(lambda tensors, _: tensors["keys_C"].numpy()[::-1].sort()),
        rewrite(lambda tensors, _: tensors["followers_E"].fill_(VOCAB)),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(file: Path, spoil: Callable[[Path], None]) -> None:
    spoil(file)
    with pytest.raises(CheckpointError, match="forerun train corpus") as caught:
        corpus_file.read(file)
    assert "\n" not in str(caught.value)


def test_rewriting_alone_does_not_damage(file: Path) -> None:
    rewrite(lambda tensors, metadata: None)(file)
    corpus_file.read(file)


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="forerun train corpus"):
        make(f"corpus:{tmp_path / 'nothing'}")
    with pytest.raises(ForerunError, match="corpus:FILE"):
        make("corpus")


def test_a_corpus_for_another_vocabulary_is_refused(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        make(f"corpus:{file}", FakeTarget(random_rule(VOCAB + 1)))
    with pytest.raises(ConfigError, match="vocabulary"):
        make(f"corpus:{file}", tokenizer=Tokenizer(tiny_tokenizer()))
    ours = corpus_file.fingerprint(Tokenizer(tiny_tokenizer()))
    assert ours != corpus_file.fingerprint(Tokenizer(tiny_tokenizer(1)))
    fitting = HEADER.model_copy(update={"vocabulary": ours})
    corpus_file.write(tmp_path / "d", fitting, tables([1, 2, 3]))
    make(f"corpus:{tmp_path / 'd'}", tokenizer=Tokenizer(tiny_tokenizer()))


def test_it_is_mapped_not_copied(file: Path) -> None:
    keys = np.asarray(corpus_file.read(file)._keys)
    assert keys.base is not None
