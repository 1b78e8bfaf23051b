"""What a spec check can say of the data themselves, without the packages that read them; no more
than a few MiB are read.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...verifier.config.reading import inputs

MAX_READ = 1 << 20
MAX_JSON = 1 << 27  # a tokenizer.json of a large vocabulary has some 30 MiB


def text_fault(path: Path, name: str) -> str:
    """Why the file is no UTF-8 text; what is beyond the first MiB is not looked at."""
    head, whole = _head(path)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError as error:
        return (
            f"must be UTF-8 text, found byte 0x{head[error.start]:02x} at offset {error.start} of"
            f" {name}"
        )
    return ""


def json_lines_fault(path: Path, name: str, field: str) -> str:
    """The first line that is not a JSON record with a text in this field."""
    wanted = f"records with a text in data.field {field!r}"
    return _records_fault(path, name, wanted, lambda record: isinstance(record.get(field), str))


def chat_fault(path: Path, name: str) -> str:
    """The first line that is not a JSON record with `messages`, or with `prompt` and
    `completion`.
    """
    wanted = "records with messages, or with prompt and completion"
    return _records_fault(
        path,
        name,
        wanted,
        lambda record: "messages" in record or {"prompt", "completion"} <= set(record),
    )


def _records_fault(
    path: Path, name: str, wanted: str, fits: Callable[[dict[str, Any]], bool]
) -> str:
    head, whole = _head(path)
    lines = head.split(b"\n")
    for number, line in enumerate(lines if whole else lines[:-1], start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"must be JSON lines, line {number} of {name} is not JSON: {error}"
        if not isinstance(record, dict) or not fits(record):
            return f"must be {wanted}, line {number} of {name} is not"
    return ""


def parquet_fault(path: Path, name: str) -> str:
    """Why the file cannot be Parquet: its first or last bytes."""
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(-min(4, path.stat().st_size), 2)
        whole = magic == b"PAR1" == file.read(4)
    return "" if whole else f"must be Parquet files, {name} does not start and end with PAR1"


def chat_tokenizer_fault(folder: Path) -> str:
    """Why the folder is no tokenizer with a chat template."""
    config = read_json(folder / "tokenizer_config.json")
    if not isinstance(config, dict):
        return (
            "is no folder of a tokenizer: it has no tokenizer_config.json (`save_pretrained` writes"
            " one)"
        )
    if not config.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        return "has no chat template: neither chat_template.jinja nor one in tokenizer_config.json"
    return ""


def token_file_fault(path: Path, name: str, dtype: str) -> str:
    """Why the file cannot be a row of token ids: its size, or what its header says."""
    size = path.stat().st_size
    if size == 0:
        return f"must be token ids, {name} is empty"
    if path.suffix != ".npy":
        whole = size * 8 % int(dtype.removeprefix("u").removeprefix("int")) == 0
        return "" if whole else f"must be token ids of type {dtype}, {name} has {size} bytes"
    from numpy.lib.format import open_memmap

    try:
        tokens = open_memmap(path, mode="r")
    except ValueError as error:
        return f"must be token ids, {name} cannot be read: {error}"
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        return f"must be a row of token ids, {name} holds {tokens.dtype} of shape {tokens.shape}"
    return ""


def tokenizer_fault(path: Path) -> str:
    """Why the file is no tokenizer.json."""
    found = read_json(path)
    return (
        ""
        if isinstance(found, dict) and isinstance(found.get("model"), dict)
        else "is no tokenizer.json"
    )


def tokenizer_size(path: Path) -> int:
    """The largest token id of a tokenizer.json, and one."""
    found = read_json(path)
    vocabulary, tokens = found["model"].get("vocab", ()), found.get("added_tokens")
    ids: Iterable[Any] = range(len(vocabulary)) if isinstance(vocabulary, list) else ()
    if isinstance(vocabulary, dict):
        ids = vocabulary.values()
    listed = tokens if isinstance(tokens, list) else []
    added = (token.get("id") for token in listed if isinstance(token, dict))
    return max((number for number in (*ids, *added) if isinstance(number, int)), default=-1) + 1


def class_folders(folder: Path) -> list[Path]:
    """The folders of images, one for each class."""
    return sorted(path for path in folder.glob("*") if path.is_dir())


def dataset_faults(folder: Path, split: str | None, field: str) -> Iterator[tuple[str, str]]:
    """Which key does not fit a dataset that `save_to_disk` has written, and why."""
    splits = read_json(folder / "dataset_dict.json")
    listed = splits.get("splits") if isinstance(splits, dict) else None
    names: Sequence[Any] = listed if isinstance(listed, list) else ()
    part = folder / split if split is not None and split in names else folder
    if names and split not in names:
        found = "null" if split is None else repr(split)
        yield "split", f"must be one of {', '.join(map(repr, names))}, found {found}"
    elif not names and split is not None:
        yield "split", f"must be null (the dataset was saved without splits), found {split!r}"
    elif not (part / "state.json").is_file():
        yield "folder", "is no dataset: it has no state.json (`save_to_disk` writes one)"
    else:
        about = read_json(part / "dataset_info.json")
        features = about.get("features") if isinstance(about, dict) else None
        if isinstance(features, dict) and features and field not in features:
            yield "field", f"must be one of {', '.join(map(repr, features))}, found {field!r}"


def _head(path: Path) -> tuple[bytes, bool]:
    """The first MiB, and whether that is all."""
    head = inputs.head(path, MAX_READ)
    return head, len(head) < MAX_READ


def read_json(path: Path, most: int = MAX_JSON) -> Any:
    """What is in the file, of which `most` bytes are read; None for what is not there or is not
    JSON.
    """
    try:
        return json.loads(inputs.head(path, most))
    except (OSError, ValueError, RecursionError):
        return None
