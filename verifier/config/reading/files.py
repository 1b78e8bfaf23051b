"""From a file to a Document: read it, refuse what is no such file, hold it against its form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import document, inputs, validation
from .document import Document
from .problems import LINE_BREAK, NotValid, Place, Problem, Source, dotted
from .schema import Form
from .validation import Fault

MAX_BYTES = 64 * 1024


def read_bytes(path: Path, noun: str, limit: int = MAX_BYTES) -> bytes:
    """What is in the file; `noun` is what it should be. Raises NotValid."""
    source = Source(str(path), ())
    try:
        return inputs.head(path, limit + 1)
    except FileNotFoundError:
        raise unreadable(source, "no such file") from None
    except IsADirectoryError:
        raise unreadable(source, f"this is a folder, not {noun} file") from None
    except OSError as error:
        raise unreadable(source, f"cannot be read: {error.strerror}") from None


def decoded(data: bytes, path: Path, noun: str, limit: int = MAX_BYTES) -> tuple[str, Source]:
    """The text in these bytes, as what messages point into. Raises NotValid."""
    source = Source(str(path), ())
    if len(data) > limit:
        raise unreadable(source, f"larger than {limit // 1024} KiB; this is not {noun}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(source, data, error.start) from None
    return text, Source(str(path), tuple(LINE_BREAK.split(text)), noun=noun)


def parsed(data: bytes, path: Path, noun: str) -> Document:
    """The YAML in these bytes. Raises NotValid if they are no text."""
    text, source = decoded(data, path, noun)
    return document.read(text, source)


def validate(found: Document, form: Form) -> None:
    """Hold the data against the form; what was refused while reading is not judged again."""
    refused = frozenset(found.bad)
    faults = validation.faults(found.data, form)
    note(
        found,
        [fault for fault in faults if not any(fault.key[: len(bad)] == bad for bad in refused)],
    )
    for fault in faults:
        found.bad |= {fault.key, *fault.doubtful}


def note(found: Document, faults: Iterable[Fault]) -> None:
    """Add the faults to the problems of the document, each with its place."""
    found.problems += [
        Problem(found.place(fault.at, fault.on_key), fault.message, dotted(fault.key))
        for fault in faults
    ]


def unreadable(source: Source, message: str) -> NotValid:
    """What is raised if the file as a whole is wrong."""
    return NotValid([Problem(Place(source), message)])


def _not_utf8(source: Source, data: bytes, offset: int) -> NotValid:
    before = data[:offset]
    line = before.count(b"\n") + 1
    column = len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1
    message = f"the file is not UTF-8 text (byte 0x{data[offset]:02x}); save it as UTF-8"
    return NotValid([Problem(Place(source, line, column), message)])
