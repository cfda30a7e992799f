"""Built-in prompts, and files of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ConfigError
from forerun.tune.workloads import BUILT_IN, MIX, load_workload


def contents(name: str) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in load_workload(name).prompts]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_hold_enough_different_prompts(name: str) -> None:
    prompts = load_workload(name).prompts
    assert len(prompts) >= 12
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len(set(contents(name))) == len(prompts)
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)


def test_code_edit_prompts_hold_one_file_of_40_to_80_lines() -> None:
    for text in contents("code-edit"):
        instruction, block, rest = text.split("```")
        assert instruction.strip()
        assert not rest.strip()
        assert 40 <= len(block.strip().split("\n")) - 1 <= 80  # the first line names the language


def test_texts_to_summarise_have_150_to_350_words() -> None:
    for text in contents("summarise"):
        assert 150 <= len(text.split("\n\n", 1)[1].split()) <= 350


def test_mix_takes_from_each_in_turn() -> None:
    prompts = load_workload(MIX).prompts
    kinds = [prompt.id.rsplit("-", 1)[0] for prompt in prompts]
    assert kinds == list(BUILT_IN) * 3
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_hash_depends_on_words_and_order_only(tmp_path: Path) -> None:
    def hashed(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        return load_workload(str(path)).hash

    same = hashed("a.txt", "one\ntwo\n")
    assert hashed("b.jsonl", '{"prompt": "one"}\n\n{"id": 7, "turns": ["two", "three"]}\n') == same
    assert hashed("a.txt", "two\none\n") != same
    assert hashed("a.txt", "one\ntwo!\n") != same
    assert load_workload("chat").hash != load_workload("code").hash


def test_file_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"id": "a", "prompt": "one\\u2028line"}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
        '{"turns": ["first", "second"]}\n',
        encoding="utf-8",
    )
    workload = load_workload(str(path))
    assert workload.name == "mine"
    assert [prompt.id for prompt in workload.prompts] == ["a", "2", "3"]
    assert [len(prompt.messages) for prompt in workload.prompts] == [1, 2, 1]
    assert workload.prompts[0].messages[0]["content"] == "one\u2028line"
    assert [prompt.cut for prompt in workload.prompts] == [False, False, True]
    assert [prompt.id for prompt in workload.first(2).prompts] == ["a", "2"]


def test_json_lines_are_seen_whatever_the_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('\n{"prompt": "one"}\n')
    assert contents(str(path)) == ["one"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x"', "line 2 is not JSON"),
        ('["x"]', "line 2: no prompt in it; give an object with one of: messages, prompt, turns"),
        ('{"text": "x"}', "line 2: no prompt in it"),
        ('{"prompt": " "}', "line 2: 'prompt' must hold text"),
        ('{"prompt": ["x"]}', "line 2: 'prompt' must hold text"),
        ('{"turns": []}', "line 2: 'turns' must hold text"),
        ('{"messages": []}', "line 2: 'messages' must be a list"),
        ('{"messages": [{"role": "user"}]}', "line 2: 'messages' must be a list"),
        ('{"messages": [[]]}', "line 2: 'messages' must be a list"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"mine\.jsonl line 2") as caught:
        load_workload(str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_names_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a file or one of: chat, code, code-edit"):
        load_workload("code_edit")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_workload(str(tmp_path / "empty.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        load_workload(str(tmp_path / "binary.txt"))


class Speller:
    """A tokenizer whose ids are the characters; its template marks each message."""

    def __init__(self, has_chat_template: bool) -> None:
        self.has_chat_template = has_chat_template

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


@pytest.mark.parametrize(
    ("template", "raw", "expected"),
    [(True, False, "<system>s<user>u"), (True, True, "s\n\nu"), (False, False, "s\n\nu")],
)
def test_prompts_use_the_chat_template_unless_raw(
    tmp_path: Path, template: bool, raw: bool, expected: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
    )
    prompt = load_workload(str(path)).prompts[0]
    ids = prompt.encode(Speller(template), raw)  # type: ignore[arg-type]
    assert "".join(map(chr, ids)) == expected
