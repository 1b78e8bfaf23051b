"""What no schema can say: values that must fit together. Each check runs only if all of its inputs are valid."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import data_files
from .document import Document
from .problems import KeyPath, dotted
from .validation import Fault

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


def _fault(key: str, message: str, *index: int) -> Fault:
    path: KeyPath = (*key.split("."), *index)
    return Fault(path, f"{dotted(path)} {message}", path)


@needs("model.width", "model.heads")
def heads_divide_width(values: Values) -> Iterator[Fault]:
    width, heads = values["model.width"], values["model.heads"]
    if width % heads:
        yield _fault("model.heads", f"must divide model.width {width}, found {heads}")
    elif width // heads % 2:
        message = f"{heads} gives heads of size {width // heads} (model.width {width}); RoPE needs an even size"
        yield _fault("model.heads", message)


@needs("model.heads", "model.kv_heads")
def kv_heads_divide_heads(values: Values) -> Iterator[Fault]:
    heads, kv_heads = values["model.heads"], values["model.kv_heads"]
    if kv_heads != "auto" and heads % kv_heads:
        yield _fault("model.kv_heads", f"must divide model.heads {heads}, found {kv_heads}")


@needs("data.kind", "model.vocabulary")
def bytes_fit_vocabulary(values: Values) -> Iterator[Fault]:
    if values["data.kind"] == "text" and values["model.vocabulary"] < 256:
        found = values["model.vocabulary"]
        yield _fault("model.vocabulary", f"must be at least 256 for text data (its tokens are bytes), found {found}")


@needs("model.import")
def import_is_python(values: Values) -> Iterator[Fault]:
    path = values["model.import"]
    for word in path.replace(":", ".").split("."):
        if keyword.iskeyword(word):
            yield _fault("model.import", f"cannot be imported: {word!r} is a word of Python")
            return


@needs("model.shard")
def shard_is_python(values: Values) -> Iterator[Fault]:
    for number, name in enumerate(values["model.shard"]):
        if keyword.iskeyword(name):
            yield _fault("model.shard", f"must be a class name, found {name!r}, a word of Python", number)


@needs("model.arguments")
def arguments_are_python(values: Values) -> Iterator[Fault]:
    for name in values["model.arguments"]:
        if keyword.iskeyword(name):
            path = ("model", "arguments", name)
            message = f"{dotted(path)} must be a Python argument name, found {name!r}, a word of Python"
            yield Fault(path, message, path, on_key=True)


@needs("data.files")
def files_can_be_read(values: Values) -> Iterator[Fault]:
    for number, message in data_files.faults(values["data.files"], values.base):
        yield _fault("data.files", message, number)


@needs("parallel.dp_shard", "parallel.dp_replicate", "verify.ranks")
def mesh_is_world(values: Values) -> Iterator[Fault]:
    shard, replicate = values["parallel.dp_shard"], values["parallel.dp_replicate"]
    ranks = values["verify.ranks"]
    if shard == "auto":
        if ranks % replicate:
            yield _fault("parallel.dp_replicate", f"must divide {values.named('verify.ranks')}, found {replicate}")
    elif shard * replicate != ranks:
        message = f"{shard} x dp_replicate {replicate} is {shard * replicate} ranks; {values.named('verify.ranks')}"
        yield _fault("parallel.dp_shard", f"{message} must be the same")


@needs("parallel.dp_shard", "parallel.dp_replicate", "verify.reshard_to")
def mesh_fits_other_worlds(values: Values) -> Iterator[Fault]:
    """A single rank always fits: there the mesh is left out. A dp_shard that is a number fits its own world only."""
    replicate, worlds = values["parallel.dp_replicate"], values["verify.reshard_to"]
    if values["parallel.dp_shard"] != "auto":
        return
    for number, world in enumerate(worlds):
        if world == 1 or world % replicate == 0:
            continue
        wanted = f"parallel.dp_replicate {replicate}"
        if values.written("verify.reshard_to"):
            yield _fault("verify.reshard_to", f"must be a multiple of {wanted}, found {world}", number)
        else:
            message = f"{replicate} does not divide {values.named('verify.reshard_to')}; set verify.reshard_to"
            yield _fault("parallel.dp_replicate", f"{message}, for example to [1, {2 * replicate}]")
            return


@needs("train.global_batch", "train.micro_batch", "verify.ranks")
def batch_divides(values: Values) -> Iterator[Fault]:
    batch, micro, ranks = values["train.global_batch"], values["train.micro_batch"], values["verify.ranks"]
    if batch % (micro * ranks):
        of = f"{values.named('train.micro_batch')} x {values.named('verify.ranks')} = {micro * ranks}"
        yield _fault("train.global_batch", f"must be a multiple of {of}, found {batch}")


@needs("train.global_batch", "train.micro_batch", "verify.ranks", "verify.reshard_to")
def batch_divides_in_other_worlds(values: Values) -> Iterator[Fault]:
    batch, micro = values["train.global_batch"], values["train.micro_batch"]
    if batch % (micro * values["verify.ranks"]):
        return
    for number, world in enumerate(values["verify.reshard_to"]):
        if batch % (micro * world) == 0:
            continue
        of = f"{values.named('train.micro_batch')} x {world} ranks = {micro * world}"
        if values.written("verify.reshard_to"):
            message = f"needs train.global_batch to be a multiple of {of}, found {batch}"
            yield _fault("verify.reshard_to", message, number)
        else:
            message = f"must be a multiple of {of}, found {batch}; or set verify.reshard_to"
            yield _fault("train.global_batch", f"{message}, which is {values['verify.reshard_to']} by default")


@needs("data.samples", "data.validation_fraction", "train.global_batch")
def samples_fill_a_batch(values: Values) -> Iterator[Fault]:
    samples, batch = values["data.samples"], values["train.global_batch"]
    left = samples - max(1, int(samples * values["data.validation_fraction"]))
    if left < batch:
        message = f"{samples} leaves {left} for training, fewer than train.global_batch {batch}"
        yield _fault("data.samples", message)


@needs("schedule.warmup_steps", "train.steps")
def warmup_ends(values: Values) -> Iterator[Fault]:
    warmup, steps = values["schedule.warmup_steps"], values["train.steps"]
    if warmup < steps:
        return
    if values.written("schedule.warmup_steps"):
        yield _fault("schedule.warmup_steps", f"must be less than train.steps {steps}, found {warmup}")
    else:
        yield _fault("train.steps", f"must be more than {values.named('schedule.warmup_steps')}, found {steps}")


@needs("verify.steps", "train.steps")
def verification_fits(values: Values) -> Iterator[Fault]:
    verified, steps = values["verify.steps"], values["train.steps"]
    if verified < steps:
        return
    if values.written("verify.steps"):
        yield _fault("verify.steps", f"must be less than train.steps {steps}, found {verified}")
    else:
        yield _fault("train.steps", f"must be more than {values.named('verify.steps')}, found {steps}")


@needs("precision.param_dtype", "precision.reduce_dtype")
def reduction_is_not_coarser(values: Values) -> Iterator[Fault]:
    if (values["precision.param_dtype"], values["precision.reduce_dtype"]) == ("float32", "bfloat16"):
        message = "must be 'float32' when precision.param_dtype is 'float32' (bfloat16 would round the gradients)"
        yield _fault("precision.reduce_dtype", message)
