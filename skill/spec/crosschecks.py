"""What no schema can say: values that must fit together. Each check runs only if all of its inputs are valid."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...verifier.config.reading.document import Document
from ...verifier.config.reading.problems import KeyPath, dotted
from ...verifier.config.reading.validation import Fault
from . import data_content, data_files
from . import schema as spec_schema

Check = Callable[["Values"], Iterator[Fault]]
CHECKS: list[tuple[tuple[str, ...], Check]] = []


class Values:
    """The values of a spec with its defaults filled in, by dotted key."""

    def __init__(self, filled: Any, document: Document, base: Path) -> None:
        self.filled, self.document, self.base = filled, document, base

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

    def named(self, key: str) -> str:
        """`verify.steps 5 (the default)`: the key and its value as they read in a message."""
        return f"{key} {self[key]}" + ("" if self.written(key) else " (the default)")


def faults(values: Values) -> list[Fault]:
    """Everything that does not fit together."""
    return [fault for inputs, check in CHECKS if all(key in values for key in inputs) for fault in check(values)]


def needs(*inputs: str) -> Callable[[Check], Check]:
    """Register a check that looks at these keys."""

    def register(check: Check) -> Check:
        CHECKS.append((inputs, check))
        return check

    return register


def fault(key: str, message: str, *index: int, on_key: bool = False) -> Fault:
    path: KeyPath = (*key.split("."), *index)
    return Fault(path, f"{dotted(path)} {message}", path, on_key=on_key)


def _not_importable(key: str, path: str) -> Iterator[Fault]:
    for word in path.replace(":", ".").split("."):
        if keyword.iskeyword(word):
            yield fault(key, f"cannot be imported: {word!r} is a word of Python")
            return


def _not_arguments(section: str, arguments: dict[str, Any]) -> Iterator[Fault]:
    for name in arguments:
        if keyword.iskeyword(name):
            path = (section, "arguments", name)
            message = f"{dotted(path)} must be a Python argument name, found {name!r}, a word of Python"
            yield Fault(path, message, path, on_key=True)


def _fewer_than_train_steps(values: Values, key: str) -> Iterator[Fault]:
    number, steps = values[key], values["train.steps"]
    if number >= steps and values.written(key):
        yield fault(key, f"must be less than train.steps {steps}, found {number}")
    elif number >= steps:
        yield fault("train.steps", f"must be more than {values.named(key)}, found {steps}")


@needs("model.width", "model.heads")
def heads_divide_width(values: Values) -> Iterator[Fault]:
    width, heads = values["model.width"], values["model.heads"]
    if width % heads:
        yield fault("model.heads", f"must divide model.width {width}, found {heads}")
    elif width // heads % 2:
        message = f"{heads} gives heads of size {width // heads} (model.width {width}); RoPE needs an even size"
        yield fault("model.heads", message)


@needs("model.heads", "model.kv_heads")
def kv_heads_divide_heads(values: Values) -> Iterator[Fault]:
    heads, kv_heads = values["model.heads"], values["model.kv_heads"]
    if kv_heads != "auto" and heads % kv_heads:
        yield fault("model.kv_heads", f"must divide model.heads {heads}, found {kv_heads}")


@needs("data.tokenizer", "model.vocabulary")
def bytes_fit_vocabulary(values: Values) -> Iterator[Fault]:
    if values["data.tokenizer"] is None and values["model.vocabulary"] < 256:
        found = values["model.vocabulary"]
        yield fault(
            "model.vocabulary", f"must be at least 256 without data.tokenizer (tokens are bytes), found {found}"
        )


@needs("model.kind", "model.sequence_length", "data.kind")
def sequences_have_a_length(values: Values) -> Iterator[Fault]:
    kind, data = values["model.kind"], values["data.kind"]
    if values["model.sequence_length"] is not None:
        if data == "images":
            yield fault("model.sequence_length", "must be left out: images are not sequences")
    elif kind != "import" or data not in ("images", "import"):
        what = f"{data} data" if kind == "import" else "a decoder" if kind == "decoder" else "a language model"
        yield fault("model.sequence_length", f"must be a number for {what}")


@needs("model.kind", "data.kind")
def images_need_a_model(values: Values) -> Iterator[Fault]:
    if values["model.kind"] != "import" and values["data.kind"] == "images":
        what = "the decoder" if values["model.kind"] == "decoder" else "a causal language model"
        yield fault("data.kind", f"images need model.kind: import ({what} reads token ids)")


@needs("data.import")
def data_import_is_python(values: Values) -> Iterator[Fault]:
    yield from _not_importable("data.import", values["data.import"])


@needs("data.arguments")
def data_arguments_are_python(values: Values) -> Iterator[Fault]:
    yield from _not_arguments("data", values["data.arguments"])


@needs("data.tokenizer", "model.vocabulary")
def tokenizer_fits(values: Values) -> Iterator[Fault]:
    if values["data.tokenizer"] is None:
        return
    path = Path(data_files.absolute(values["data.tokenizer"], values.base))
    message = data_content.tokenizer_fault(path) if path.is_file() else "is no file"
    if message:
        yield fault("data.tokenizer", f"{message}: {values['data.tokenizer']!r}")
    elif (size := data_content.tokenizer_size(path)) > values["model.vocabulary"]:
        found = values["model.vocabulary"]
        yield fault("model.vocabulary", f"must be at least {size}, the ids of data.tokenizer, found {found}")


@needs("data.folder")
def folder_is_there(values: Values) -> Iterator[Fault]:
    folder = Path(data_files.absolute(values["data.folder"], values.base))
    if not folder.is_dir():
        yield fault("data.folder", f"is no folder: {values['data.folder']!r}")
    elif not any(folder.iterdir()):
        yield fault("data.folder", f"is an empty folder: {values['data.folder']!r}")


@needs("data.folder", "data.image_size", "model.vocabulary")
def classes_are_the_folders(values: Values) -> Iterator[Fault]:
    folder = Path(data_files.absolute(values["data.folder"], values.base))
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    folders = data_content.class_folders(folder)
    classes = values["model.vocabulary"]
    if not folders:
        yield fault("data.folder", "must have a folder for each class")
    elif len(folders) != classes:
        message = f"must be {len(folders)}, the number of folders in data.folder (one a class), found {classes}"
        yield fault("model.vocabulary", message)
    for folder in folders:
        if not any(path.is_file() for path in folder.rglob("*")):
            yield fault("data.folder", f"has an empty class folder: {folder.name!r}")
            return


@needs("data.folder", "data.split", "data.field")
def dataset_fits(values: Values) -> Iterator[Fault]:
    folder = Path(data_files.absolute(values["data.folder"], values.base))
    if folder.is_dir() and any(folder.iterdir()):
        for key, message in data_content.dataset_faults(folder, values["data.split"], values["data.field"]):
            yield fault(f"data.{key}", message)


@needs("optimizer.groups")
def groups_are_patterns(values: Values) -> Iterator[Fault]:
    for number, group in enumerate(values["optimizer.groups"]):
        try:
            re.compile(group["match"])
        except re.error as error:
            path: KeyPath = ("optimizer", "groups", number, "match")
            yield Fault(path, f"{dotted(path)} is not a regular expression: {error}", path)


@needs("operation.mfu", "data.kind")
def mfu_counts_tokens(values: Values) -> Iterator[Fault]:
    if values["operation.mfu"] and values["model.sequence_length"] is None:
        yield fault("operation.mfu", "counts FLOPs for each token: it needs model.sequence_length")


@needs("operation.mfu", "operation.peak_tflops")
def peak_without_mfu(values: Values) -> Iterator[Fault]:
    if values["operation.peak_tflops"] is not None and not values["operation.mfu"]:
        yield fault("operation.peak_tflops", "does nothing without operation.mfu: true")


@needs("model.import")
def import_is_python(values: Values) -> Iterator[Fault]:
    yield from _not_importable("model.import", values["model.import"])


@needs("model.shard", "model.kind")
def shard_is_python(values: Values) -> Iterator[Fault]:
    if values["model.shard"] == "auto":
        if values["model.kind"] == "import" and values.written("model.shard"):
            yield fault("model.shard", "must be class names: only a transformers model names them itself")
        elif values["model.kind"] == "import":
            message = "missing key 'shard' in model; for example 'shard: [\"TransformerBlock\"]'"
            yield Fault(("model", "shard"), message, ("model",), on_key=True)
        return
    for number, name in enumerate(values["model.shard"]):
        if keyword.iskeyword(name):
            yield fault("model.shard", f"must be a class name, found {name!r}, a word of Python", number)


@needs("model.arguments")
def arguments_are_python(values: Values) -> Iterator[Fault]:
    yield from _not_arguments("model", values["model.arguments"])


@needs("data.files", "data.kind")
def files_can_be_read(values: Values) -> Iterator[Fault]:
    files, base = values["data.files"], values.base
    found = data_files.faults(files, base, data_content.text_fault)
    if values["data.kind"] == "jsonl" and "data.field" in values:
        field = values["data.field"]
        found = data_files.faults(files, base, lambda path, name: data_content.json_lines_fault(path, name, field))
    elif values["data.kind"] == "tokens" and "data.dtype" in values:
        dtype = values["data.dtype"]
        found = data_files.faults(
            files, base, lambda path, name: data_content.token_file_fault(path, name, dtype), cost=0
        )
    for number, message in found:
        yield fault("data.files", message, number)


@needs("data.samples", "data.validation_fraction", "train.global_batch")
def samples_fill_a_batch(values: Values) -> Iterator[Fault]:
    samples, batch = values["data.samples"], values["train.global_batch"]
    left = samples - max(1, int(samples * values["data.validation_fraction"]))
    if left < batch:
        message = f"{samples} leaves {left} for training, fewer than train.global_batch {batch}"
        yield fault("data.samples", message)


@needs("schedule.warmup_steps", "train.steps")
def warmup_ends(values: Values) -> Iterator[Fault]:
    yield from _fewer_than_train_steps(values, "schedule.warmup_steps")


@needs("schedule.decay_steps", "schedule.warmup_steps", "train.steps")
def decay_fits(values: Values) -> Iterator[Fault]:
    decay, left = values["schedule.decay_steps"], values["train.steps"] - values["schedule.warmup_steps"]
    if decay != "auto" and decay > left > 0:
        message = f"must be at most {left} (train.steps without schedule.warmup_steps), found {decay}"
        yield fault("schedule.decay_steps", message)


@needs("verify.steps", "train.steps")
def verification_fits(values: Values) -> Iterator[Fault]:
    yield from _fewer_than_train_steps(values, "verify.steps")


@needs("precision.param_dtype", "precision.reduce_dtype")
def reduction_is_not_coarser(values: Values) -> Iterator[Fault]:
    if (values["precision.param_dtype"], values["precision.reduce_dtype"]) == ("float32", "bfloat16"):
        message = "must be 'float32' when precision.param_dtype is 'float32' (bfloat16 would round the gradients)"
        yield fault("precision.reduce_dtype", message)
