"""Text to tokens and back, streams, chat templates; compared with transformers."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tiny
import tiny_gguf
from forerun.errors import ModelError, PromptError
from forerun.models import packaged
from forerun.models.chat_template import ChatTemplate
from forerun.models.gguf_file import GGUFFile
from forerun.models.gguf_tokenizer import build_tokenizer
from forerun.models.tokenizer import Tokenizer, folder_tokenizer, gguf_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces, three   spaces, and trailing  ",
    "tabs\tand\n\nnewlines\r\n",
    "It's we'll I'M they'VE don't 'quoted'",
    "1 22 333 4444 3.14159 1,000,000",
    "def f(x):\n    return x ** 2  # squared\n",
    "grüße, ça va? Ñandú. 日本語のテキスト。 Привет, мир! שלום नमस्ते",
    "emoji 👍🏽 👨‍👩‍👧‍👦 🇩🇪 and combining e\u0301",
    "<html><b>bold</b></html>",
    "\u00a0non-breaking\u2003spaces\u200b",
    "a" * 70,
    "\U00010348 \ufffd \x00 \x7f",
]


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(tiny.tiny_tokenizer(), tiny.CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def spelled() -> Tokenizer:
    """SentencePiece as a GGUF file describes it: bytes, letters, pieces, runs of spaces."""
    return Tokenizer(build_tokenizer(sentencepiece()))


def sentencepiece(**extra: Any) -> dict[str, Any]:
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁abc", "aa"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "  ", "\n", *pieces]
    kinds = [2, 3, 3, *[6] * 256, 4, 4, *[1] * len(pieces)]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))]
    found = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": False,
        **extra,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


# Streams ----------------------------------------------------------------------------------------


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_is_the_whole_text(text: str, spelled: Tokenizer) -> None:
    for tokenizer in (byte_tokenizer(), spelled):
        ids = tokenizer.encode(text)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_stream_of_any_tokens_is_the_whole_text(spelled: Tokenizer) -> None:
    """Special tokens and, where bytes are decoded one by one, broken characters in any order."""
    choose = random.Random(0)
    single = [[token] for token in range(tiny.VOCAB)]
    whole = [[token] for token in range(spelled.vocab_size) if not 3 <= token < 3 + 256]
    whole += [[3 + byte for byte in character.encode()] for character in "zé語👍"]
    for tokenizer, parts in ((byte_tokenizer(), single), (spelled, whole)):
        for _ in range(200):
            chosen = choose.choices(parts, k=choose.randrange(60))
            ids = list(itertools.chain.from_iterable(chosen))
            for skip in (True, False):
                assert "".join(streamed(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_stream_never_loses_text_behind_broken_characters(spelled: Tokenizer) -> None:
    """SentencePiece decodes a run of bytes all or not at all, so that what was one may break."""
    ids = [3 + byte for byte in "é".encode()] + [3 + 0xFF] + spelled.encode("abc", special=False)
    assert spelled.decode(ids) == "\ufffd\ufffd\ufffdabc"
    assert "".join(streamed(spelled, ids)) == "é\ufffd\ufffdabc"


def test_a_character_comes_when_it_is_complete() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a👍b")
    assert streamed(tokenizer, ids) == ["a", "", "", "", "👍", "b", ""]
    assert streamed(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_in_a_stream() -> None:
    tokenizer = byte_tokenizer()
    ids = [tiny.START, *tokenizer.encode("x"), tiny.END]
    assert streamed(tokenizer, ids) == ["", "x", "", ""]
    assert streamed(tokenizer, ids, skip=False) == ["<|start|>", "x", "<|end|>", ""]


def test_long_streams_decode_a_window_only() -> None:
    tokenizer = byte_tokenizer()
    longest = 0

    class Counting(Tokenizer):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids, skip_special_tokens)

    counting = Counting(tokenizer.backend)
    text = "words and words. " * 20
    assert "".join(streamed(counting, tokenizer.encode(text))) == text
    assert longest < 30


def test_a_leading_space_survives_the_window(spelled: Tokenizer) -> None:
    """Where decoding strips the first space, a stream must not strip one in the middle."""
    metadata = sentencepiece(add_space_prefix=True, add_bos_token=False)
    tokenizer = Tokenizer(build_tokenizer(metadata))
    text = " ".join(["abc", "ab", "a"] * 20)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(streamed(tokenizer, ids)) == text


# Vocabularies -----------------------------------------------------------------------------------


def test_same_vocabulary() -> None:
    one, other = byte_tokenizer(), byte_tokenizer()
    assert one.same_vocabulary(other)
    assert not one.same_vocabulary(Tokenizer(tiny.tiny_tokenizer(extra=1)))
    swapped = json.loads(one.backend.to_str())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    assert not one.same_vocabulary(Tokenizer(Backend.from_str(json.dumps(swapped))))


def test_sentencepiece_merges_by_score(spelled: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        return [spelled.backend.id_to_token(i) for i in spelled.encode(text, special=False)]

    # `▁a` has the best score of all pairs, so `▁ab` then `▁abc` grow from it; bc loses to it
    assert pieces(" abc") == ["▁abc"]
    assert pieces("abc") == ["abc"]
    assert pieces("bc") == ["bc"]
    assert pieces("a  b\n") == ["a", "  ", "b", "\n"]  # user-defined tokens are found first
    assert pieces("aé") == ["a", "<0xC3>", "<0xA9>"]
    assert spelled.decode(spelled.encode("a  b é abc")) == "a  b é abc"


def test_first_token() -> None:
    metadata = sentencepiece()
    assert Tokenizer(build_tokenizer(metadata)).encode("ab")[0] == 1  # as llama.cpp defaults
    assert Tokenizer(build_tokenizer(metadata)).encode("ab", special=False)[0] != 1
    without = sentencepiece(add_bos_token=False)
    assert Tokenizer(build_tokenizer(without)).encode("ab")[0] != 1


def byte_level(pre: str, merges: list[str]) -> Tokenizer:
    letters = list(json.loads(tiny.tiny_tokenizer().to_str())["model"]["vocab"])
    tokens = letters + [merge.replace(" ", "") for merge in merges]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": merges,
    }
    return Tokenizer(
        build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    )


def split(tokenizer: Tokenizer, text: str) -> list[str]:
    return [piece for piece, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


def test_splitting_rules_differ_at_digits() -> None:
    text = "a 123  45"
    assert split(byte_level("gpt-2", ["a b"]), text) == ["a", "Ġ123", "Ġ", "Ġ45"]
    assert split(byte_level("smollm", ["a b"]), text) == ["a", "Ġ", *"123", "ĠĠ", *"45"]
    assert split(byte_level("llama-bpe", ["a b"]), text) == ["a", "Ġ", "123", "Ġ", "Ġ", "45"]
    assert split(byte_level("qwen2", ["a b"]), text) == ["a", "Ġ", *"123", "Ġ", "Ġ", *"45"]


def test_unknown_splitting_rule() -> None:
    with pytest.raises(ModelError, match=r"by the rule 'qwen3'.*did you mean 'qwen2'"):
        byte_level("qwen3", ["a b"])


def test_unknown_kind_of_gguf_tokenizer() -> None:
    with pytest.raises(ModelError, match="of kind 'bert' are not read"):
        build_tokenizer({"tokenizer.ggml.model": "bert"})


def test_gguf_without_a_tokenizer(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.random_state())
    file = GGUFFile(path)
    del file.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match=r"lacks the metadata 'tokenizer\.ggml\.tokens'"):
        gguf_tokenizer(file)


# Folders ----------------------------------------------------------------------------------------


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        folder_tokenizer(tmp_path)


def test_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("[]", "holds no JSON object"),
        ("{", "is not valid JSON"),
        ('{"chat_template": [{"a": 1}]}', "neither a text nor a list"),
        ('{"chat_template": ["a"]}', "neither a text nor a list"),
        ('{"chat_template": 5}', "neither a text nor a list"),
    ],
)
def test_damaged_settings(tmp_path: Path, settings: str, message: str) -> None:
    (tiny.tiny_folder(tmp_path) / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ModelError, match=message):
        folder_tokenizer(tmp_path)


def test_special_tokens_without_a_text_are_left_out(tmp_path: Path) -> None:
    path = tiny.tiny_folder(tmp_path) / "tokenizer_config.json"
    path.write_text('{"eos_token": {"lstrip": false}, "bos_token": "<|start|>", "pad_token": null}')
    assert folder_tokenizer(tmp_path).special_tokens == {"bos_token": "<|start|>"}


def test_where_a_chat_template_may_lie(tmp_path: Path) -> None:
    folder = tiny.tiny_folder(tmp_path)
    settings_path = folder / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    messages = [{"role": "user", "content": "hi"}]

    settings["chat_template"] = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "named {{ bos_token }}"},
    ]
    settings["bos_token"] = {"content": "<|start|>", "lstrip": False}
    settings_path.write_text(json.dumps(settings))
    tokenizer = folder_tokenizer(folder)
    assert tokenizer.decode(tokenizer.chat(messages), False) == "named <|start|>"

    (folder / "chat_template.jinja").write_text("from a file")
    tokenizer = folder_tokenizer(folder)
    assert tokenizer.decode(tokenizer.chat(messages)) == "from a file"

    (folder / "chat_template.jinja").unlink()
    del settings["chat_template"]
    settings_path.write_text(json.dumps(settings))
    tokenizer = folder_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match="has no chat template"):
        tokenizer.chat(messages)


# Chat templates ---------------------------------------------------------------------------------

TEMPLATES = [
    tiny.CHAT_TEMPLATE,
    # what templates in the wild use: blocks that eat lines, loop controls, tojson, namespaces
    """{{ bos_token }}
{%- for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- set role = namespace(name=message['role']) %}
{{ role.name | upper }}: {{ message['content'] | trim | tojson }}
    {% if not loop.last %}
,
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'A: ' + eos_token }}{% endif %}""",
    "{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}",
]
CONVERSATIONS = [
    [{"role": "user", "content": "hi <b> 'there' & grüße"}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "1 < 2?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "sure?"},
    ],
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_as_transformers_renders_it(template: str, messages: list[dict[str, str]]) -> None:
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny.tiny_tokenizer(), **special)
    theirs.chat_template = template
    options = {"add_generation_prompt": True}
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    ours = Tokenizer(tiny.tiny_tokenizer(), template, special)
    assert ours.chat_template is not None
    assert ours.chat_template.render(messages) == text
    assert ours.chat(messages) == ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'x' + messages[0]['missing'] }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content.index('?') }}", "substring not found"),
    ],
)
def test_refused_messages(template: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        ChatTemplate(template, {}).render(CONVERSATIONS[0])


def test_broken_template() -> None:
    """Is in the way of conversations only, not of raw prompts."""
    tokenizer = Tokenizer(tiny.tiny_tokenizer(), "{% for %}")
    assert tokenizer.has_chat_template
    assert tokenizer.encode("ab") == [97, 98]
    with pytest.raises(ModelError, match="chat template of this model is broken"):
        tokenizer.chat(CONVERSATIONS[0])


# The packaged models ----------------------------------------------------------------------------


def pulled(name: str) -> Path:
    path = packaged.path(name)
    if path is None:
        pytest.skip(f"{name} is not pulled")
    return path


@functools.cache
def both(name: str) -> tuple[Tokenizer, Any]:
    path = pulled(name)
    if name == "gemma3-270m" and not os.environ.get("FORERUN_SLOW_TESTS"):
        pytest.skip("transformers needs half a minute to read it; set FORERUN_SLOW_TESTS=1")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return gguf_tokenizer(GGUFFile(path)), theirs


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_packaged_models_as_transformers_encodes(name: str) -> None:
    ours, theirs = both(name)
    words = ["hello", "world", "\n", " ", "a", "1", "é", "=", "x", "'s"]
    choose = random.Random(1)
    mixed = ["".join(choose.choices(words, k=choose.randrange(1, 12))) for _ in range(300)]
    for text in [*TEXTS, *mixed]:
        if name == "smollm2-135m" and digits_behind_spaces(text):
            continue
        assert ours.encode(text) == theirs(text)["input_ids"], repr(text)
        ids = ours.encode(text)
        assert "".join(streamed(ours, ids)) == ours.decode(ids)
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def digits_behind_spaces(text: str) -> bool:
    """Where transformers, which knows no rule `smollm`, splits as GPT-2 does."""
    return any(a.isspace() and b.isnumeric() for a, b in itertools.pairwise(text))


def test_smollm_digits() -> None:
    """Each digit is a token of its own, and spaces before it stay together."""
    tokenizer = gguf_tokenizer(GGUFFile(pulled("smollm2-135m")))
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("in  2024")]
    assert pieces == ["in", "ĠĠ", "2", "0", "2", "4"]


def test_smollm_chat() -> None:
    ours, theirs = both("smollm2-135m")
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert ours.chat(messages) == expected
