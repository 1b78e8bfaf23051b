"""The whole way from a file to a Spec: read, rename, override, hold against the schema,
cross-check, build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...verifier.config.reading import files
from ...verifier.config.reading.problems import NotValid, Place
from ..output import log
from . import crosschecks, presets, pretrained, questions, renamed, schema, sizes
from . import crosschecks_context as crosschecks_context  # it registers its checks
from . import crosschecks_copies as crosschecks_copies  # it registers its checks
from . import crosschecks_data as crosschecks_data  # it registers its checks
from . import crosschecks_decoder as crosschecks_decoder  # it registers its checks
from . import crosschecks_experts as crosschecks_experts  # it registers its checks
from . import crosschecks_launch as crosschecks_launch  # it registers its checks
from . import crosschecks_model as crosschecks_model  # it registers its checks
from . import crosschecks_parallel as crosschecks_parallel  # it registers its checks
from . import crosschecks_run as crosschecks_run  # it registers its checks
from . import crosschecks_size as crosschecks_size  # it registers its checks
from . import crosschecks_weights as crosschecks_weights  # it registers its checks
from . import urls as urls  # it registers its checks
from .build import build
from .model import Spec
from .overrides import apply

NOUN = "a spec"


def load(path: Path, overrides: Sequence[str] = (), offline: bool = False) -> Spec:
    """The Spec in the file at `path`, with `--set` style `key=value` overrides applied.

    `offline`: data, tokenizer and pretrained weights need not be here, and are not looked at.
    A note for each old name goes to stderr. Raises SpecError with every problem, in file order.
    """
    path = Path(path)
    return parse(files.read_bytes(path, NOUN), path, overrides, log, offline)


def place(path: Path, overrides: Sequence[str], key: str) -> Place:
    """Where the value of a key of a valid spec is written: in the file, in an override, or what
    should hold it.
    """
    found = files.parsed(files.read_bytes(path, NOUN), path, NOUN)
    renamed.apply(found)
    apply(found, overrides)
    return found.place(tuple(key.split(".")))


def parse(
    data: bytes,
    path: Path,
    overrides: Sequence[str] = (),
    note: Callable[[str], None] = lambda text: None,
    offline: bool = False,
) -> Spec:
    """The Spec in these bytes, as `load` reads it when they are the file at `path`; `note` gets its
    notes.
    """
    found = files.parsed(data, path, NOUN)
    if found.empty and not found.problems:
        raise files.unreadable(found.source, "the file is empty; a spec starts with 'version: 1'")
    if () not in found.bad:
        renamed.apply(found)
        apply(found, overrides)
        renamed.apply(found)  # keys and values in an override
        presets.apply(found, path.parent)
        pretrained.apply(found, path.parent)
        sizes.apply(found)
        files.validate(found, schema.FORM)
    filled = schema.filled(found.data)
    values = crosschecks.Values(filled, found, path.parent, offline)
    files.note(found, crosschecks.faults(values))
    if not found.problems:
        found.notes += questions.asked(values)
    for text in found.notes:
        note(text)
    if found.problems:
        raise NotValid(found.problems)
    return build(filled, path.parent)
