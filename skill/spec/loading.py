"""The whole way from a file to a Spec: read, override, hold against the schema, cross-check, build."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from . import crosschecks, document, schema, validation
from . import crosschecks_launch as crosschecks_launch  # it registers its checks
from . import crosschecks_model as crosschecks_model  # it registers its checks
from . import crosschecks_parallel as crosschecks_parallel  # it registers its checks
from .build import build
from .document import Document
from .model import Spec
from .overrides import apply
from .problems import LINE_BREAK, Place, Problem, Source, SpecError, dotted
from .validation import Fault

MAX_BYTES = 64 * 1024


def load(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """The Spec in the file at `path`, with `--set` style `key=value` overrides applied.

    Raises SpecError with every problem, in file order.
    """
    path = Path(path)
    return parse(_read(path), path, overrides)


def parse(data: bytes, path: Path, overrides: Sequence[str] = ()) -> Spec:
    """The Spec in these bytes, as `load` reads it when they are the file at `path`."""
    found = _document(data, path)
    if () not in found.bad:
        apply(found, overrides)
        _validate(found)
    filled = schema.filled(found.data)
    _note(found, crosschecks.faults(crosschecks.Values(filled, found, path.parent)))
    if found.problems:
        raise SpecError(found.problems)
    return build(filled, path.parent)


def _validate(found: Document) -> None:
    """Hold the data against the schema; what was refused while reading is not judged again."""
    refused = frozenset(found.bad)
    faults = validation.faults(found.data)
    _note(found, [fault for fault in faults if not any(fault.key[: len(bad)] == bad for bad in refused)])
    for fault in faults:
        found.bad |= {fault.key, *fault.doubtful}


def _note(found: Document, faults: Iterable[Fault]) -> None:
    found.problems += [
        Problem(found.place(fault.at, fault.on_key), fault.message, dotted(fault.key)) for fault in faults
    ]


def _read(path: Path) -> bytes:
    source = Source(str(path), ())
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _unreadable(source, "no such file") from None
    except IsADirectoryError:
        raise _unreadable(source, "this is a folder, not a spec file") from None
    except OSError as error:
        raise _unreadable(source, f"cannot be read: {error.strerror}") from None


def _document(data: bytes, path: Path) -> Document:
    source = Source(str(path), ())
    if len(data) > MAX_BYTES:
        raise _unreadable(source, f"larger than {MAX_BYTES // 1024} KiB; this is not a spec")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(source, data, error.start) from None
    found = document.read(text, Source(str(path), tuple(LINE_BREAK.split(text))))
    if found.empty and not found.problems:
        raise _unreadable(found.source, "the file is empty; a spec starts with 'version: 1'")
    return found


def _unreadable(source: Source, message: str) -> SpecError:
    return SpecError([Problem(Place(source), message)])


def _not_utf8(source: Source, data: bytes, offset: int) -> SpecError:
    before = data[:offset]
    line = before.count(b"\n") + 1
    column = len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1
    message = f"the file is not UTF-8 text (byte 0x{data[offset]:02x}); save it as UTF-8"
    return SpecError([Problem(Place(source, line, column), message)])
