"""Data files behind URLs: prepare.py reads them by fsspec, span by span; training reads what it has
written.
"""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec import AbstractFileSystem, register_implementation
from fsspec.spec import AbstractBufferedFile

from data_project import Project
from records import cases
from scripts import Command
from test_scaffold import DECODER, load
from test_scaffold_corpus import TOKENIZER, inputs
from trees import SPEC
from verified_fsdp2.skill import scaffold

JSONL = {"kind": "jsonl", "separator": "", "validation_fraction": 0.1}
LINES = [
    json.dumps({"text": f"{number} {'x' * (number % 90)}"}).encode() + b"\n"
    for number in range(300)
]


class StoredFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        found: bytes = self.fs.content[self.path][start:end]
        self.fs.requests.append(len(found))
        return found


class Store(AbstractFileSystem):  # type: ignore[misc]
    """As much of an object store as fsspec's own classes need; its names have a bucket and no
    leading slash.
    """

    protocol = "store"
    content: ClassVar[dict[str, bytes]]
    requests: ClassVar[list[int]]
    down: ClassVar[bool]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        if self.down:
            raise ConnectionError("no route to the store")
        path = self._strip_protocol(path).rstrip("/")
        found = [
            self.entry(name) for name in self.content if name.startswith(f"{path}/") or name == path
        ]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [one["name"] for one in found]

    def entry(self, name: str) -> dict[str, Any]:
        content = self.content[name]
        return {"name": name, "size": len(content), "type": "file", "ETag": str(hash(content))}

    def _open(self, path: str, mode: str = "rb", **more: Any) -> StoredFile:
        return StoredFile(self, path, mode, **{**more, "block_size": 2**10})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[Store]:
    register_implementation("store", Store, clobber=True)
    for name, value in (("content", {}), ("requests", []), ("down", False)):
        monkeypatch.setattr(Store, name, value, raising=False)
    return Store


def samples(project: Project, keys: dict[str, Any]) -> Iterator[list[list[int]]]:
    data = project.load(keys)
    project.prepare()
    return (inputs(part) for part in data.load_data(*((8, 256) if "tokenizer" in keys else (8,))))


def local(project: Project, files: dict[str, bytes]) -> None:
    (project.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (project.folder / "bucket").mkdir(exist_ok=True)
    for name, content in files.items():
        (project.folder / "bucket" / name).write_bytes(content)


@cases(
    "keys, pattern",
    (JSONL, "store://bucket/*.jsonl"),
    (JSONL, "store://bucket"),
    ({**JSONL, "packing": "documents", "too_long": "drop"}, "store://bucket/*"),
    ({"kind": "text", "tokenizer": "tokenizer.json"}, "store://bucket/*.jsonl"),
)
def test_the_samples_are_those_of_the_same_files_here(
    project: Project, store: type[Store], keys: dict[str, Any], pattern: str
) -> None:
    files = {"a.jsonl": b"".join(LINES[:200]), "b.jsonl": b"".join(LINES[200:])}
    local(project, files)
    wanted = list(samples(project, {**keys, "files": ["bucket/*"]}))
    store.content.update({f"bucket/{name}": content for name, content in files.items()})
    assert list(samples(project, {**keys, "files": [pattern]})) == wanted
    assert list(samples(project, {**keys, "files": ["bucket/a.jsonl", pattern.replace("*", "b*")]}))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_parquet_of_a_url(project: Project, scheme: str) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    fsspec = importlib.import_module("fsspec")
    texts = [json.loads(line)["text"] for line in LINES]
    local(project, {})
    parquet.write_table(
        pyarrow.table({"text": texts}), project.folder / "bucket" / "a.parquet", row_group_size=40
    )
    keys = {**JSONL, "kind": "parquet"}
    wanted = list(samples(project, {**keys, "files": ["bucket/a.parquet"]}))
    place = project.folder / "bucket" if scheme == "file" else Path("/test_parquet")
    content = (project.folder / "bucket" / "a.parquet").read_bytes()
    with fsspec.open(f"{scheme}://{place}/a.parquet", "wb") as file:
        file.write(content)
    assert list(samples(project, {**keys, "files": [f"{scheme}://{place}/*.parquet"]})) == wanted


def test_a_file_is_read_once_span_by_span(
    project: Project, store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.content["bucket/a.jsonl"] = content = b"".join(LINES * 40)
    project.load({**JSONL, "files": ["store://bucket/a.jsonl"]})
    monkeypatch.setattr(importlib.import_module("prepare"), "PART", 2**17)
    project.prepare()
    spans = -(-len(content) // 2**17)
    assert spans > 4 and len(store.requests) <= 2 * spans + 1
    assert sum(store.requests) - len(content) <= spans * 2**16  # where lines end
    assert max(store.requests) < 2**17 + 200


def test_training_asks_no_server_and_a_change_is_seen_by_the_next_start(
    project: Project, store: type[Store]
) -> None:
    store.content["bucket/a.jsonl"] = b"".join(LINES)
    data = project.load({**JSONL, "files": ["store://bucket/*"]})
    with pytest.raises(
        data.SetupError, match=r"store://bucket/\* is not read yet: run python prepare\.py first"
    ):
        data.load_data(8)
    project.prepare()
    store.down = True
    before = len(data.load_data(8)[0])
    with pytest.raises(
        data.SetupError, match=r"store://bucket/\* cannot be read: no route to the store"
    ):
        project.prepare()
    store.down = False
    store.content["bucket/a.jsonl"] += b"".join(LINES)
    assert len(data.load_data(8)[0]) == before
    project.prepare()
    assert len(data.load_data(8)[0]) > before


def test_a_change_while_it_is_read_is_an_error(
    project: Project, store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.content["bucket/a.jsonl"] = b"".join(LINES)
    data = project.load({**JSONL, "files": ["store://bucket/*"]})
    prepare = importlib.import_module("prepare")
    join = prepare.join_parts

    def changed(*arguments: Any) -> None:
        join(*arguments)
        store.content["bucket/b.jsonl"] = LINES[0]

    monkeypatch.setattr(prepare, "join_parts", changed)
    with pytest.raises(data.SetupError, match="has changed meanwhile"):
        project.prepare()


@cases(
    "pattern, content, message",
    ("store://bucket/*.json", b"", r"no file matches store://bucket/\*\.json"),
    ("nowhere://bucket/a", b"", "nowhere://bucket/a cannot be read: Protocol not known: nowhere"),
    (
        "store://bucket/a.jsonl",
        b'{"text": "a"}\n\n{"txt": 1}\n',
        "a.jsonl: line 3 after byte 0 has no text in the field",
    ),
    (
        "store://bucket/a.jsonl",
        b'{"text": "a"}\n{"text"\n',
        "a.jsonl: line 2 after byte 0 cannot be read",
    ),
)
def test_what_is_wrong_is_named(
    project: Project, store: type[Store], pattern: str, content: bytes, message: str
) -> None:
    store.content["bucket/a.jsonl"] = content
    data = project.load({**JSONL, "files": [pattern]})
    with pytest.raises(data.SetupError, match=message):
        project.prepare()


def test_a_size_that_is_not_known_is_named(
    project: Project, store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.content["bucket/a.jsonl"] = LINES[0]
    entry = store.entry
    monkeypatch.setattr(store, "entry", lambda self, name: {**entry(self, name), "size": None})
    data = project.load({**JSONL, "files": ["store://bucket/a.jsonl"]})
    with pytest.raises(
        data.SetupError, match=r"store://bucket/a\.jsonl: its server does not give its size"
    ):
        project.prepare()


def test_a_version_is_a_hash_else_a_date(project: Project, store: type[Store]) -> None:
    project.load({**JSONL, "files": ["store://bucket/a.jsonl"]})
    version = sys.modules["remote"].version
    date = datetime(2026, 1, 1, tzinfo=UTC)
    assert version({"ETag": '"a"', "LastModified": date, "size": 1}) == '"a"'
    assert (
        version({"LastModified": date, "StorageClass": "x"})
        == version({"LastModified": date})
        == str(date)
    )
    assert version({"size": 1}) != version({"size": 2})


def test_without_urls_there_is_no_trace(tmp_path: Path) -> None:
    for kind, file in (
        ("jsonl", "a.jsonl"),
        ("parquet", "a.parquet"),
        ("text", "a.txt"),
        ("tokens", "a.bin"),
    ):
        files = scaffold.render(
            load(tmp_path, {**DECODER, "data": {"kind": kind, "files": [file]}})
        )
        assert not [
            path for path, text in files.items() if re.search(r"Remote|fsspec|URLs|list_urls", text)
        ]


def test_no_worker_shares_an_event_loop(tmp_path: Path) -> None:
    """A fork of a process that has listed an http or s3 URL stops its loop: the next listing waited
    without end.
    """
    for file, start in (("https://example.com/a.jsonl", "spawn"), ("a.jsonl", "fork")):
        files = scaffold.render(
            load(tmp_path, {**DECODER, "data": {"kind": "jsonl", "files": [file]}})
        )
        assert re.findall(r'get_context\("(\w+)"\)', files["prepare.py"]) == [start]


def test_urls_in_the_output_and_the_requirements(tmp_path: Path, command: Command) -> None:
    urls = "['s3://bucket/web/*.jsonl', 'gs://bucket/a.jsonl']"
    (tmp_path / "spec.yaml").write_text(
        SPEC.replace("{kind: synthetic}", f"{{kind: jsonl, files: {urls}}}")
    )
    line = (
        "not looked at (URLs): s3://bucket/web/*.jsonl, gs://bucket/a.jsonl; prepare.py reads them"
        " where it runs"
    )
    settings = ("--set", "model.vocabulary=256")
    assert line in command("spec", "check", tmp_path / "spec.yaml", *settings).out.replace(
        "\n", " "
    )
    assert line in command("new", tmp_path / "spec.yaml", tmp_path / "out", *settings).out.replace(
        "\n", " "
    )
    wanted = (tmp_path / "out" / "pyproject.toml").read_text()
    assert [name for name in ("fsspec", "gcsfs", "s3fs", "adlfs") if f'"{name}"' in wanted] == [
        "fsspec",
        "gcsfs",
        "s3fs",
    ]
