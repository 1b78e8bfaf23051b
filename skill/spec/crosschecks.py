"""Checks across keys, which a schema cannot express.

Each check runs only if all of its inputs are valid.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ...verifier.config.reading.document import Document
from ...verifier.config.reading.problems import KeyPath, dotted
from ...verifier.config.reading.validation import Fault
from . import data_content, data_files
from . import schema as spec_schema

Check = Callable[..., Iterator[Fault]]  # (values, the value of each key that it needs)
CHECKS: list[tuple[tuple[str, ...], Check]] = []
# those that open data, a tokenizer or weights: not done where these are not
OF_FILES: set[Check] = set()
# those that count the ranks of the mesh: what they find where a dimension is refused follows from
# that
OF_MESH: set[Check] = set()
DIMENSIONS = {("parallel", key) for key in ("dp_replicate", "dp_shard", "tp", "cp", "ep")}


class Values:
    """The values of a spec with its defaults filled in, by dotted key."""

    def __init__(self, filled: Any, document: Document, base: Path, offline: bool = False) -> None:
        self.filled, self.document, self.base, self.offline = filled, document, base, offline

    def __contains__(self, key: str) -> bool:
        path: KeyPath = tuple(key.split("."))
        value = self.filled
        for part in path:
            if not isinstance(value, dict) or part not in value:
                return False
            value = value[part]
        return self.document.trusted(path)

    def __getitem__(self, key: str) -> Any:
        value = self.filled
        for part in key.split("."):
            value = value[part]
        return value

    def written(self, key: str) -> bool:
        return tuple(key.split(".")) in self.document.values

    def is_default(self, key: str) -> bool:
        return bool(self[key] == (spec_schema.at(tuple(key.split("."))) or {})["default"])

    def elsewhere(self, key: str) -> bool:
        """Whether the file or folder that this key names is not to be opened here."""
        return self.offline or (
            key in self and isinstance(self[key], str) and data_files.is_url(self[key])
        )

    def named(self, key: str) -> str:
        """`verify.steps 5 (the default)`: the key and its value as they read in a message."""
        return f"{key} {self[key]}" + ("" if self.written(key) else " (the default)")


def faults(values: Values) -> list[Fault]:
    """Everything that does not fit together."""
    checks = [
        (inputs, check)
        for inputs, check in CHECKS
        if not (check in OF_FILES and values.elsewhere(inputs[0]))
    ]
    ready = [(inputs, check) for inputs, check in checks if all(key in values for key in inputs)]
    others = _found(values, [one for one in ready if one[1] not in OF_MESH])
    if any(fault.key in DIMENSIONS for fault in others):
        return others
    return others + _found(values, [one for one in ready if one[1] in OF_MESH])


def _found(values: Values, checks: list[tuple[tuple[str, ...], Check]]) -> list[Fault]:
    return [
        fault
        for inputs, check in checks
        for fault in check(values, *(values[key] for key in inputs))
    ]


def needs(*inputs: str) -> Callable[[Check], Check]:
    """Register a check of these keys; it runs if all of them are valid, with their values as
    arguments.
    """

    def register(check: Check) -> Check:
        CHECKS.append((inputs, check))
        return check

    return register


def opens_files(check: Check) -> Check:
    """Mark a check that opens data, a tokenizer or weights, which its first key names: `--offline`
    leaves it out.
    """
    OF_FILES.add(check)
    return check


def counts_ranks(check: Check) -> Check:
    """Mark a check that counts the ranks of the mesh: it is left out where a dimension is
    refused.
    """
    OF_MESH.add(check)
    return check


def fault(key: str, message: str, *below: str | int, on_key: bool = False) -> Fault:
    """What is wrong with a key, or with what is below it."""
    path: KeyPath = (*key.split("."), *below)
    return Fault(path, f"{dotted(path)} {message}", path, on_key=on_key)


def needs_each(*keys: str) -> Callable[[Check], Check]:
    """Register a check of one key for each of these keys; the key comes before its value."""

    def register(check: Check) -> Check:
        for key in keys:
            needs(key)(lambda values, value, key=key: check(values, key, value))
        return check

    return register


def path_of(values: Values, pattern: str) -> Path:
    """The absolute path of a path of the spec."""
    return Path(data_files.absolute(pattern, values.base))


@needs_each("data.import", "model.import")
def import_is_python(values: Values, key: str, path: str) -> Iterator[Fault]:
    word = next(
        (word for word in path.replace(":", ".").split(".") if keyword.iskeyword(word)), None
    )
    if word:
        yield fault(key, f"cannot be imported: {word!r} is a Python keyword")


@needs_each("data.arguments", "model.arguments")
def arguments_are_python(values: Values, key: str, arguments: dict[str, Any]) -> Iterator[Fault]:
    for name in filter(keyword.iskeyword, arguments):
        yield fault(
            key,
            f"must be a Python argument name, found {name!r}, a Python keyword",
            name,
            on_key=True,
        )


@needs_each("schedule.warmup_steps", "verify.steps")
def fewer_than_train_steps(values: Values, key: str, number: int) -> Iterator[Fault]:
    if "train.steps" not in values or number < (steps := values["train.steps"]):
        return
    if values.written(key):
        yield fault(key, f"must be less than train.steps {steps}, found {number}")
    else:
        yield fault("train.steps", f"must be more than {values.named(key)}, found {steps}")


@needs("model.width", "model.heads")
def heads_divide_width(values: Values, width: int, heads: int) -> Iterator[Fault]:
    if width % heads:
        yield fault("model.heads", f"must divide model.width {width}, found {heads}")
    elif width // heads % 2:
        message = (
            f"{heads} gives heads of size {width // heads} (model.width {width}); RoPE needs an"
            " even size"
        )
        yield fault("model.heads", message)


@needs("model.heads", "model.kv_heads")
def kv_heads_divide_heads(values: Values, heads: int, kv_heads: Any) -> Iterator[Fault]:
    if kv_heads != "auto" and heads % kv_heads:
        yield fault("model.kv_heads", f"must divide model.heads {heads}, found {kv_heads}")


@needs("model.sequence_length", "model.kind", "data.kind")
def sequences_have_a_length(
    values: Values, length: int | None, kind: str, data: str
) -> Iterator[Fault]:
    if length is not None:
        if data == "images":
            yield fault("model.sequence_length", "must be left out: images are not sequences")
    elif kind != "import" or data not in ("images", "import"):
        what = (
            f"{data} data"
            if kind == "import"
            else "a decoder"
            if kind == "decoder"
            else "a language model"
        )
        yield fault("model.sequence_length", f"must be a number for {what}")


@needs("model.kind", "data.kind")
def images_need_a_model(values: Values, kind: str, data: str) -> Iterator[Fault]:
    if kind != "import" and data == "images":
        what = "the decoder" if kind == "decoder" else "a causal language model"
        yield fault("data.kind", f"images need model.kind: import ({what} reads token ids)")


@needs("data.tokenizer", "model.vocabulary", "data.kind")
def bytes_fit(values: Values, tokenizer: str | None, found: int, kind: str) -> Iterator[Fault]:
    if tokenizer is None and found < 256 and kind != "chat":
        message = f"must be at least 256 without data.tokenizer (tokens are bytes), found {found}"
        yield fault("model.vocabulary", message)


@needs("data.tokenizer", "model.vocabulary", "data.kind")
@opens_files
def tokenizer_fits(values: Values, tokenizer: str | None, found: int, kind: str) -> Iterator[Fault]:
    if kind == "chat":
        return
    if tokenizer is None:
        return
    path = path_of(values, tokenizer)
    message = data_content.tokenizer_fault(path) if path.is_file() else "is no file"
    if message:
        yield fault("data.tokenizer", f"{message}: {tokenizer!r}")
    elif (size := data_content.tokenizer_size(path)) > found:
        yield fault(
            "model.vocabulary", f"must be at least {size}, the ids of data.tokenizer, found {found}"
        )


@needs("data.folder")
@opens_files
def folder_exists(values: Values, name: str) -> Iterator[Fault]:
    folder = path_of(values, name)
    if not folder.is_dir() or not any(folder.iterdir()):
        yield fault("data.folder", f"is {'an empty' if folder.is_dir() else 'no'} folder: {name!r}")


@needs("data.folder", "model.vocabulary", "data.image_size")
@opens_files
def classes_are_the_folders(values: Values, name: str, classes: int, size: int) -> Iterator[Fault]:
    folder = path_of(values, name)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    folders = data_content.class_folders(folder)
    if not folders:
        yield fault("data.folder", "must have a folder for each class")
    elif len(folders) != classes:
        message = (
            f"must be {len(folders)}, the number of folders in data.folder (one a class), found"
            f" {classes}"
        )
        yield fault("model.vocabulary", message)
    for folder in folders:
        if not any(path.is_file() for path in folder.rglob("*")):
            yield fault("data.folder", f"has an empty class folder: {folder.name!r}")
            return


@needs("data.folder", "data.split", "data.field")
@opens_files
def dataset_fits(values: Values, name: str, split: str | None, field: str) -> Iterator[Fault]:
    folder = path_of(values, name)
    if folder.is_dir() and any(folder.iterdir()):
        for key, message in data_content.dataset_faults(folder, split, field):
            yield fault(f"data.{key}", message)


@needs("optimizer.groups")
def groups_are_patterns(values: Values, groups: list[dict[str, Any]]) -> Iterator[Fault]:
    for number, group in enumerate(groups):
        try:
            re.compile(group["match"])
        except re.error as error:
            yield fault(
                "optimizer.groups", f"is not a regular expression: {error}", number, "match"
            )


@needs("operation.mfu", "data.kind")
def mfu_counts_tokens(values: Values, mfu: bool, kind: str) -> Iterator[Fault]:
    if mfu and values["model.sequence_length"] is None:
        yield fault("operation.mfu", "counts FLOPs for each token: it needs model.sequence_length")


@needs("operation.mfu", "operation.peak_tflops")
def peak_without_mfu(values: Values, mfu: bool, peak: float | None) -> Iterator[Fault]:
    if peak is not None and not mfu:
        yield fault("operation.peak_tflops", "does nothing without operation.mfu: true")


@needs("model.shard", "model.kind")
def shard_is_python(values: Values, shard: Any, kind: str) -> Iterator[Fault]:
    if shard == "auto" and kind == "import":
        if values.written("model.shard"):
            yield fault(
                "model.shard", "must be class names: only a transformers model names them itself"
            )
        else:
            message = "missing key 'shard' in model; for example 'shard: [\"TransformerBlock\"]'"
            yield Fault(("model", "shard"), message, ("model",), on_key=True)
    for number, name in enumerate(shard if shard != "auto" else ()):
        if keyword.iskeyword(name):
            yield fault(
                "model.shard", f"must be a class name, found {name!r}, a Python keyword", number
            )


def file_lists(values: Values) -> Iterator[tuple[str, tuple[str | int, ...], str | list[str]]]:
    """Each key that holds a path or a list of paths, where below it they are, and the paths."""
    yield "data.files", (), values["data.files"]
    for number, source in enumerate(values["data.mixture"]):
        yield "data.mixture", (number, "files"), source["files"]
    validation = values["data.validation"]
    sets = (
        {(name,): files for name, files in validation.items()}
        if isinstance(validation, dict)
        else {(): validation}
    )
    for below, files in sets.items():
        yield "data.validation", below, files or []


@needs("data.files", "data.mixture", "data.validation", "data.kind")
@opens_files
def files_can_be_read(
    values: Values, _files: Any, _mixture: Any, _validation: Any, kind: str
) -> Iterator[Fault]:
    check, cost = data_content.text_fault, data_content.MAX_READ
    if kind == "jsonl" and "data.field" in values:
        check = partial(data_content.json_lines_fault, field=values["data.field"])
    elif kind == "parquet" or (kind == "chat" and values["data.format"] == "parquet"):
        check, cost = data_content.parquet_fault, 0
    elif kind == "chat":
        check = data_content.chat_fault
    elif kind == "tokens" and "data.dtype" in values:
        check, cost = partial(data_content.token_file_fault, dtype=values["data.dtype"]), 0
    for key, below, files in file_lists(values):
        several = [files] if isinstance(files, str) else files
        for number, message in data_files.faults(several, values.base, check, cost):
            yield fault(key, message, *below, *([number] if several is files else []))


@needs("data.samples", "data.validation_fraction", "train.global_batch")
def samples_fill_a_batch(
    values: Values, samples: int, fraction: float, batch: int
) -> Iterator[Fault]:
    left = samples - max(1, int(samples * fraction))
    if left < batch:
        message = f"{samples} leaves {left} for training, fewer than train.global_batch {batch}"
        yield fault("data.samples", message)


@needs("schedule.decay_steps", "schedule.warmup_steps", "train.steps")
def decay_fits(values: Values, decay: Any, warmup: int, steps: int) -> Iterator[Fault]:
    left = steps - warmup
    if decay != "auto" and decay > left > 0:
        message = (
            f"must be at most {left} (train.steps without schedule.warmup_steps), found {decay}"
        )
        yield fault("schedule.decay_steps", message)


@needs("optimizer.kind", "optimizer.betas", "schedule.kind")
def free_of_a_schedule(
    values: Values, kind: str, betas: list[float], schedule: str
) -> Iterator[Fault]:
    if kind == "schedule_free" and schedule != "constant":
        if values.written("schedule.kind"):
            yield fault(
                "schedule.kind",
                f"must be 'constant' for optimizer.kind schedule_free, found {schedule!r}",
            )
        else:
            yield fault(
                "optimizer.kind",
                f"schedule_free needs schedule.kind constant, found the default {schedule!r}",
            )
    if kind == "schedule_free" and betas[0] == 0:
        yield fault(
            "optimizer.betas",
            "must begin above 0 for optimizer.kind schedule_free, which averages, found 0",
        )


@needs("precision.param_dtype", "precision.reduce_dtype")
def reduction_is_not_coarser(values: Values, parameters: str, reduction: str) -> Iterator[Fault]:
    if (parameters, reduction) == ("float32", "bfloat16"):
        message = (
            "must be 'float32' when precision.param_dtype is 'float32' (bfloat16 would round the"
            " gradients)"
        )
        yield fault("precision.reduce_dtype", message)
