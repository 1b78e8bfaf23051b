"""What generated modules read from the disk: right files give the right samples, bad ones an error
with file and place.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from data_project import Project
from records import Capsys, cases

WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "[END]": 4}
TOKENIZER = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    "padding": None,
    "added_tokens": [
        {"id": 4, "content": "[END]", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
}
TOKENS = {"kind": "tokens", "files": ["corpus"], "validation_fraction": 0.2}
JSONL = {"kind": "jsonl", "files": ["corpus"], "validation_fraction": 0.2}
TEXT = {"kind": "text", "files": ["corpus"], "validation_fraction": 0.2}
WITH_TOKENIZER = {"tokenizer": "tokenizer.json", "separator": "[END]"}


def write(project: Project, files: dict[str, bytes]) -> None:
    (project.folder / "corpus").mkdir(exist_ok=True)
    for path in (project.folder / "corpus").iterdir():
        path.unlink()
    for name, content in files.items():
        (project.folder / "corpus" / name).write_bytes(content)
    (project.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))


def npy(project: Project, values: Any, cut: int = 0) -> bytes:
    path = project.folder / "array.npy"
    np.save(path, values)
    content = path.read_bytes()
    return content[: len(content) - cut]


def inputs(samples: Any) -> list[list[int]]:
    return [samples[index][0].tolist() for index in range(len(samples))]


def row(tokens: Any) -> list[int]:
    found: list[int] = tokens[0 : len(tokens)].tolist()
    return found


def corpus(project: Project, keys: dict[str, Any]) -> list[int]:
    project.load(keys)
    project.prepare()
    arguments = (256,) if "tokenizer" in keys else ()
    return row(sys.modules["corpus"].load_corpus(*arguments))


def test_token_files_are_one_row_whatever_their_format(project: Project) -> None:
    parts = {
        "a.bin": np.arange(20, dtype="<u2").tobytes(),
        "b.npy": npy(project, np.arange(20, 21)),
        "c.npy": npy(project, np.arange(21, 60, dtype="u1")),
        "d.bin": np.arange(60, 101, dtype="<u2").tobytes(),
    }
    write(project, parts)
    data = project.load(TOKENS)
    train, held_out = data.load_data(project.out, 8, 256)
    assert row(train.tokens) == list(range(101))
    assert [token for sample in inputs(train) for token in sample][:80] == list(range(80))
    assert [len(train), len(held_out)] == [10, 3]  # 81 tokens and 20
    assert inputs(held_out)[2] == [97, 98, 99, 0, 0, 0, 0, 0]
    assert held_out[2][1].tolist() == [98, 99, 100] + [data.IGNORE_INDEX] * 5


def test_token_files_are_checked_once(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, {"a.bin": np.arange(100, dtype="<u2").tobytes()})
    data = project.load(TOKENS)
    for _ in range(2):
        data.load_data(project.out, 8, 256)
    assert capsys.readouterr().out.count("checked") == 1
    with pytest.raises(data.SetupError, match=r"a\.bin: token 99 is 99, not one of 99 ids"):
        data.load_data(project.out, 8, 99)  # another vocabulary is another check
    write(project, {"a.bin": np.arange(200, 500, dtype="<u2").tobytes()})
    with pytest.raises(data.SetupError, match=r"a\.bin: token 56 is 256, not one of 256 ids"):
        data.load_data(project.out, 8, 256)


def test_tokens_of_text_end_to_end(project: Project) -> None:
    write(project, {"a.txt": b"one two\nthree one one\n", "b.txt": b"three four"})
    assert corpus(project, {**TEXT, **WITH_TOKENIZER}) == [1, 2, 3, 1, 1, 4, 3, 0, 4]


def test_text_is_read_in_pieces_of_whole_lines(project: Project) -> None:
    lines = [f"one two {'three ' * (number % 9)}".encode() for number in range(20_000)]
    write(project, {"a.txt": b"\n".join(lines)})
    wanted = [WORDS[word] for line in lines for word in line.decode().split()]
    assert corpus(project, {**TEXT, **WITH_TOKENIZER}) == [*wanted, WORDS["[END]"]]


def test_records_of_json_lines(project: Project) -> None:
    lines = b'{"text": "one two three"}\n\n{"text": "", "other": 1}\n{"text": "two"}'
    write(project, {"a.jsonl": lines})
    assert corpus(project, {**JSONL, **WITH_TOKENIZER}) == [1, 2, 3, 4, 4, 2, 4]
    assert bytes(corpus(project, {**JSONL, "separator": "|"})) == b"one two three||two|"


def test_one_document_a_sample(project: Project) -> None:
    texts = ["abc", "", "abcdefghijkl", "ab", "xyz"]
    write(project, {"a.jsonl": b"\n".join(json.dumps({"text": text}).encode() for text in texts)})
    data = project.load({**JSONL, "packing": False, "separator": ".", "too_long": "truncate"})
    project.prepare()
    train, held_out = data.load_data(8)
    assert [bytes(sample) for sample in inputs(train)] == [
        b"abc" + bytes(5),
        b"abcdefgh",
        b"ab" + bytes(6),
    ]
    assert train[1][1].tolist() == list(b"bcdefghi")
    assert train[2][1].tolist() == [*b"b.", *[data.IGNORE_INDEX] * 6]
    assert [bytes(sample) for sample in inputs(held_out)] == [b"xyz" + bytes(5)]


def test_tokens_are_made_once_and_anew_when_a_file_changes(
    project: Project, capsys: Capsys
) -> None:
    def made() -> int:
        return len(list((project.folder / "project" / "tokens").glob("*/complete.json")))

    write(project, {"a.jsonl": b'{"text": "one two three"}\n'})
    for _ in range(2):
        assert corpus(project, {**JSONL, **WITH_TOKENIZER}) == [1, 2, 3, 4]
    assert made() == 1
    write(project, {"a.jsonl": b'{"text": "two"}\n' * 3})
    with pytest.raises(
        sys.modules["corpus"].SetupError, match=r"other data or settings: run python prepare\.py"
    ):
        sys.modules["corpus"].load_corpus(256)
    assert corpus(project, {**JSONL, **WITH_TOKENIZER}) == [2, 4] * 3
    assert corpus(project, {**JSONL, **WITH_TOKENIZER, "separator": ""}) == [2] * 3
    assert made() == 3
    assert not list((project.folder / "project" / "tokens").glob("*/parts"))


def test_training_without_tokens_names_the_command(project: Project) -> None:
    write(project, {"a.jsonl": b'{"text": "one two three"}\n'})
    data = project.load(JSONL)
    with pytest.raises(data.SetupError, match=r"not made yet: run python prepare\.py first"):
        data.load_data(8)


def test_what_is_encoded_is_kept(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts of several files; the second start encodes only what the first has not."""
    lines = [b'{"text": "%d %s"}\n' % (number, b"x" * (number % 7)) for number in range(40)]
    write(project, {"a.jsonl": b"".join(lines[:25]), "b.jsonl": b"".join(lines[25:])})
    data = project.load({**JSONL, "packing": False, "separator": "", "validation_fraction": 0.1})
    prepare = importlib.import_module("prepare")
    monkeypatch.setattr(prepare, "PART", 64)
    encode, calls = prepare.encode_part, []

    def stops(folder: Path, job: Any) -> None:
        calls.append(job[0])
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        encode(folder, job)

    monkeypatch.setattr(prepare, "encode_part", stops)
    with pytest.raises(OSError, match="No space left"):
        project.prepare()
    with pytest.raises(data.SetupError, match=r"run python prepare\.py"):
        data.load_data(8)
    project.prepare()
    assert calls == [0, 1, 2, 3, 4, *range(4, calls[-1] + 1)]
    assert calls[-1] > 8
    train, held_out = data.load_data(8)
    found = [bytes(tokens).rstrip(b"\0") for tokens in inputs(train) + inputs(held_out)]
    assert found == [json.loads(line)["text"][:-1].encode() for line in lines]


class Rows:
    """What the code uses of `datasets.Dataset`; benchmarks/data_kinds.py runs the package
    itself.
    """

    def __init__(self, texts: list[Any]) -> None:
        self.column_names, self.texts = ["text", "id"], texts

    def select_columns(self, names: list[str]) -> Rows:
        assert names == ["text"]
        return self

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {"text": self.texts[rows]}


class Splits(dict[str, Rows]):
    pass


def datasets(project: Project, content: object, split: str | None) -> None:
    """`content` is what the package gives; on the disk is what `fsdp2 spec check` looks for."""
    folder = project.folder / "corpus" / (split or "")
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    if split:
        (project.folder / "corpus" / "dataset_dict.json").write_text(
            json.dumps({"splits": [split]})
        )
    (project.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    package = ModuleType("datasets")
    package.DatasetDict = Splits  # type: ignore[attr-defined]

    def load_from_disk(folder: str) -> object:
        assert folder == str(project.folder / "corpus")
        if isinstance(content, Exception):
            raise content
        return content

    package.load_from_disk = load_from_disk  # type: ignore[attr-defined]
    project.monkeypatch.setitem(sys.modules, "datasets", package)


@pytest.mark.parametrize("split", [None, "train"])
def test_rows_of_a_dataset(project: Project, split: str | None) -> None:
    rows = Rows(["one two", "three", "two"])
    datasets(project, rows if split is None else Splits(test=Rows([]), train=rows), split)
    keys = {"kind": "datasets", "folder": "corpus", "split": split, **WITH_TOKENIZER}
    assert corpus(project, keys) == [1, 2, 4, 3, 4, 2, 4]


@cases(
    "content, keys, message",
    (FileNotFoundError("neither a Dataset"), {}, "corpus cannot be read: neither a Dataset"),
    (Splits(train=Rows([]), test=Rows([])), {}, r"no split None; it has \['train', 'test'\]"),
    (Splits(train=Rows([])), {"split": "valid"}, r"no split 'valid'; it has \['train'\]"),
    (Rows([]), {"split": "train"}, r"no split 'train'; it has \[None\]"),
    (Rows([]), {"field": "body"}, r"no field 'body'; it has \['text', 'id'\]"),
    (Rows(["one", "two", None]), {}, "row 2 has no text in 'text'"),
    (Rows([]), {}, "hold no text"),
)
def test_bad_datasets(
    project: Project, content: object, keys: dict[str, str], message: str
) -> None:
    datasets(project, content, keys.get("split"))
    data = project.load({"kind": "datasets", "folder": "corpus", **keys})
    with pytest.raises(data.SetupError, match=message):
        project.prepare()


Content = bytes | Callable[[Project], bytes]


@cases(
    "keys, name, content, message",
    ({**TOKENS, "files": ["corpus/*.bin"]}, "other", b"", r"no file matches .*corpus/\*\.bin"),
    (TOKENS, "a.bin", b"", r"a\.bin cannot be read: cannot mmap an empty file"),
    (TOKENS, "a.bin", b"123", r"a\.bin cannot be read: .* multiple of the data-type size"),
    (TOKENS, "a.bin", b"\0\1" * 9, r"a\.bin: token 0 is 256, not one of 256 ids"),
    (TOKENS, "a.npy", b"123", r"a\.npy cannot be read"),
    (TOKENS, "a.npy", b"no array at all", r"a\.npy cannot be read: .*magic string"),
    (TOKENS, "a.npy", lambda p: npy(p, np.arange(9), cut=1), r"a\.npy cannot be read: mmap length"),
    (
        TOKENS,
        "a.npy",
        lambda p: npy(p, np.ones(9, "f4")),
        r"a\.npy must hold .* float32 of shape \(9,\)",
    ),
    (
        TOKENS,
        "a.npy",
        lambda p: npy(p, np.ones((3, 3), "i4")),
        r"a\.npy must hold .* int32 of shape \(3, 3\)",
    ),
    (TOKENS, "a.npy", lambda p: npy(p, np.array([], "i4")), r"a\.npy (must hold|cannot be read)"),
    (
        TOKENS,
        "a.npy",
        lambda p: npy(p, np.array([1, 2, -1])),
        r"a\.npy: token 2 is -1, not one of 256 ids",
    ),
    (
        TOKENS,
        "a.npy",
        lambda p: npy(p, np.array([5, 256])),
        r"a\.npy: token 1 is 256, not one of 256 ids",
    ),
    (TOKENS, "a.npy", lambda p: npy(p, np.array([1, 2])), "2 tokens are too few"),
    (
        JSONL,
        "a.jsonl",
        b'{"text": "a"}\n{"text": "b}',
        r"a\.jsonl:2 cannot be read: Unterminated string",
    ),
    (
        JSONL,
        "a.jsonl",
        b'{"text": "a"}\n\n{"txt": "b"}',
        r"a\.jsonl:3 has no text in the field 'text'",
    ),
    (JSONL, "a.jsonl", b'{"text": 7}', r"a\.jsonl:1 has no text in the field 'text'"),
    (JSONL, "a.jsonl", b'["text"]', r"a\.jsonl:1 has no text in the field 'text'"),
    (JSONL, "a.jsonl", b'{"text": "\xff"}', r"a\.jsonl:1 cannot be read: 'utf-8' codec"),
    (
        JSONL,
        "a.jsonl",
        b'{"text": "\\ud83d"}',
        r"a\.jsonl:1 cannot be read: .*surrogates not allowed",
    ),
    (JSONL, "a.jsonl", b"\n", "hold no text"),
    (TEXT, "a.txt", b"good \xff bad", r"a\.txt is not UTF-8 text \(byte offset 5\)"),
    (TEXT, "a.txt", b" \n", "the files hold no text"),
    ({**TEXT, "separator": ""}, "a.txt", b"x", "1 tokens are too few"),
    (
        {**TEXT, **WITH_TOKENIZER},
        "a.txt",
        b"one\n" * 30_000 + b"\xff",
        r"a\.txt is not .* \(byte offset 120000\)",
    ),
)
def test_bad_files(
    project: Project, keys: dict[str, Any], name: str, content: Content, message: str
) -> None:
    good = b'{"text": "one two three"}\n' if keys["kind"] == "jsonl" else b"123456"
    write(project, {"fine.bin": good})
    data = project.load(keys)
    write(project, {name: content(project) if callable(content) else content})
    arguments = (8, 256) if "tokenizer" in keys or keys["kind"] == "tokens" else (8,)
    out = (project.out,) if keys["kind"] == "tokens" else ()
    with pytest.raises(data.SetupError, match=message):
        if (project.folder / "project" / "prepare.py").exists():
            project.prepare()
        data.load_data(*out, *arguments)


@cases(
    "content, vocabulary, message",
    ("{}", 256, "tokenizer.json is no tokenizer"),
    (json.dumps(TOKENIZER), 4, "tokenizer.json has token ids up to 4, the model has 4"),
)
def test_bad_tokenizers(project: Project, content: str, vocabulary: int, message: str) -> None:
    write(project, {"a.txt": b"one two"})
    data = project.load({**TEXT, **WITH_TOKENIZER})
    (project.folder / "tokenizer.json").write_text(content)
    project.monkeypatch.setattr(importlib.import_module("prepare"), "VOCABULARY", vocabulary)
    with pytest.raises(data.SetupError, match=message):
        project.prepare()


@pytest.mark.parametrize(
    ("package", "keys"),
    [
        ("tokenizers", {**TEXT, **WITH_TOKENIZER}),
        ("datasets", {"kind": "datasets", "folder": "corpus"}),
    ],
)
def test_a_missing_package_is_named_with_the_command(
    project: Project, package: str, keys: dict[str, Any]
) -> None:
    write(project, {"a.txt": b"one two", "state.json": b"{}"})
    data = project.load(keys)
    project.monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(data.SetupError, match=f"pip install {package}"):
        project.prepare()


def test_a_folder_that_cannot_be_written(project: Project) -> None:
    write(project, {"a.jsonl": b'{"text": "one two three"}\n'})
    project.load(JSONL)
    (project.folder / "project" / "tokens").write_text("a file is in the way")
    with pytest.raises((FileExistsError, NotADirectoryError)):  # one line for the user, by `main`
        project.prepare()
    data = project.load(TOKENS)
    project.out.write_text("a file is in the way")
    with pytest.raises(NotADirectoryError):  # one line for the user, by `rank_0_first`
        data.load_data(project.out, 8, 1 << 16)
