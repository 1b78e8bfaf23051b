"""Chat records: which tokens are answers, and which records are refused, by file and line."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from data_project import DECODER, Project
from records import cases

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = {**DECODER, "vocabulary": 258, "sequence_length": 64}
CHAT = {
    "kind": "chat",
    "files": ["chats.jsonl"],
    "tokenizer": "tokenizer",
    "validation_fraction": 0.2,
}
PLAIN = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{%"
    " endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '' }}<|end|>{%"
    " endfor %}"
)
REFUSES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{"
    " m.content }}{% endfor %}"
)


def said(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


def put(project: Project, records: list[Any], template: str | None = None) -> None:
    folder = project.folder / "tokenizer"
    shutil.copytree(EXAMPLES / "chat-tokenizer", folder, dirs_exist_ok=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (project.folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def written(project: Project, records: list[Any], template: str | None = None, **keys: Any) -> Any:
    put(project, records, template)
    return project.load({**CHAT, **keys}, MODEL)


def shown(ids: Any) -> str:
    """`_` is a target that does not count, `|` a mark of the template."""
    return "".join("_" if one < 0 else "|" if one > 255 else chr(one) for one in ids.tolist())


@pytest.mark.parametrize("marks", [True, False])
def test_only_answers_count(project: Project, marks: bool) -> None:
    """With generation marks, and without: there an answer goes up to the next message, its newline
    included.
    """
    records = [said("Hi", "Yo", "And?", "No"), {"prompt": "Tea", "completion": "Yes"}]
    data = written(project, [*records, *records], None if marks else PLAIN, packing=False)
    project.prepare()
    train, _ = data.load_data(64, 258)
    end = "|" if marks else "|\n"
    rest = "_" if marks else ""
    text = "|user\nHi|\n|assistant\nYo|\n|user\nAnd?|\n|assistant\nNo|\n"
    assert shown(train[0][0])[: len(text) - 1] == text[:-1]
    wanted = "_" * 20 + "Yo" + end + rest + "_" * 23 + "No" + end + rest
    assert shown(train[0][1]) == wanted.ljust(64, "_")
    wanted = "_" * 21 + "Yes" + end
    assert shown(train[1][1]) == wanted.ljust(64, "_")


def test_conversations_share_a_sample_but_not_positions(project: Project) -> None:
    data = written(project, [said("a", "b")] * 5)
    project.prepare()
    train, held_out = data.load_data(64, 258)
    assert [len(train), len(held_out)] == [2, 1]  # two of 22 inputs in a sample
    inputs, targets, positions = train[0]
    assert shown(inputs[:22]) == "|user\na|\n|assistant\nb|"
    assert shown(targets) == ("_" * 19 + "b|_") * 2 + "_" * 20
    assert positions.tolist() == [*range(22), *range(22), *[0] * 20]


@cases(
    "bad, message",
    ({"messages": [{"role": "user", "content": "x"}]}, "has no answer"),
    ({"messages": []}, "has no answer"),
    (said("a", ""), "has an empty answer"),
    ({"prompt": "x"}, "has no messages, and no prompt with a completion"),
    ({"prompt": "x", "completion": ""}, "has an empty answer"),
    ({"messages": ["x"]}, "has messages that are not each a role with a content"),
    ({"messages": [{"role": "user"}]}, "has messages that are not each a role with a content"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "starts with an answer"),
    ([1], "is no record"),
    ('{"messages"', "Expecting"),
    (said("a" * 60, "b"), r"has 82 tokens, a sample has room for 65: .*truncate or drop"),
)
def test_a_bad_record_is_named(project: Project, bad: Any, message: str) -> None:
    data = written(project, [said("a", "b")] * 3)
    put(project, [said("a", "b"), "", bad])
    with pytest.raises(data.SetupError, match=rf"chats\.jsonl:3:? {message}"):
        project.prepare()


@cases(
    "template, record, message",
    (FORGETS, said("a", "b", "c", "d"), "message 1 is not written alike .* needs generation marks"),
    (
        REFUSES,
        {"messages": [{"role": "tool", "content": "x"}, *said("a", "b")["messages"]]},
        "refuses it: no tools",
    ),
    (
        "{% for m in messages %}{{ m.role }}{% endfor %}{% generation %}{% endgeneration %}",
        said("a", "b"),
        "shows no answer",
    ),
)
def test_a_template_that_does_not_fit(
    project: Project, template: str, record: Any, message: str
) -> None:
    data = written(project, [record], template)
    with pytest.raises(data.SetupError, match=rf"chats\.jsonl:1: .*{message}"):
        project.prepare()


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_a_long_conversation(
    project: Project, too_long: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has no answer left is left out, and counted."""
    records = [said("a", "b"), said("a" * 60, "b"), said("a", "b" * 60), said("a", "c")]
    data = written(project, records, packing=False, too_long=too_long)
    project.prepare()
    assert "2 too long" in capsys.readouterr().out
    train, _ = data.load_data(64, 258)
    assert [shown(train[n][1]).strip("_") for n in range(len(train))] == (
        ["b|", "b" * 45] if too_long == "truncate" else ["b|"]
    )


def test_a_tokenizer_without_a_template(project: Project) -> None:
    data = written(project, [said("a", "b")])
    (project.folder / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(data.SetupError, match="tokenizer has no chat template"):
        project.prepare()


def test_a_tokenizer_larger_than_the_model(project: Project) -> None:
    data = written(project, [said("a", "b")])
    encoder = importlib.import_module("chat").Encoder
    with pytest.raises(data.SetupError, match="has 258 token ids, the model 257"):
        encoder(str(project.folder / "tokenizer"), 257)


def test_a_missing_package_is_named(project: Project) -> None:
    data = written(project, [said("a", "b")])
    project.monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(data.SetupError, match="pip install transformers"):
        project.prepare()


def test_records_in_parquet(project: Project) -> None:
    """Several row groups; the fields that a message lacks are absent for the template."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [said("a", "b"), said("c", "d", "e", "f"), said("g", "h")]
    rows[1]["messages"][0]["name"] = "Ann"
    parquet.write_table(
        pa.Table.from_pylist(rows), project.folder / "chats.parquet", row_group_size=2
    )
    keys = {"format": "parquet", "files": ["chats.parquet"], "packing": False}
    data = written(project, [], **keys)
    project.prepare()
    train, held_out = data.load_data(64, 258)
    answers = [
        shown(part[n][1]).replace("_", "") for part in (train, held_out) for n in range(len(part))
    ]
    assert answers == ["b|", "d|f|", "h|"]
    rows.append({"messages": [{"role": "user", "content": "x", "name": None}]})
    parquet.write_table(
        pa.Table.from_pylist(rows), project.folder / "chats.parquet", row_group_size=2
    )
    with pytest.raises(data.SetupError, match=r"chats\.parquet: row 3: has no answer"):
        project.prepare()
    content = bytearray((project.folder / "chats.parquet").read_bytes())
    content[4:60] = bytes(56)
    (project.folder / "chats.parquet").write_bytes(content)
    with pytest.raises(data.SetupError, match=r"chats\.parquet: row group 0 cannot be read"):
        project.prepare()
