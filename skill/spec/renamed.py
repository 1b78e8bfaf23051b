"""Old names of keys and values: read as the new ones, with a note for each, until a version that
refuses them. What was taken out is refused, unless it asked for nothing.
"""

from __future__ import annotations

from ...verifier.config.reading.document import Document
from ...verifier.config.reading.problems import KeyPath, Place, Problem, dotted

UNTIL = "0.3"
KEYS = {
    "train.clip_norm": "train.max_norm",
    "verify.ranks": "verify.nproc",
}  # both are in the same section
VALUES = {"launch.device": {"gpu": "cuda"}}
REMOVED = {  # the value with which it did nothing, and what to write instead
    "memory.every": (2, "memory.activation_checkpointing: full"),
    "operation.plot": (False, "operation.tensorboard: true or operation.wandb: true"),
    "parallel.gathered_blocks": (0, "parallel.reshard_after_forward: false"),
}


def current(path: KeyPath) -> KeyPath:
    """The path with the new name of its key."""
    new = KEYS.get(dotted(path[:2]))
    return (*new.split("."), *path[2:]) if new else path


def position(place: Place) -> str:
    """The file and the line, or the override, as a note begins with it."""
    source = place.source
    return f"{source.name}:{place.line}" if source.is_file else source.name


def note(place: Place, old: str, new: str, what: str = "name") -> str:
    """`spec.yaml:4: train.clip_norm is now train.max_norm; the old name is accepted until 0.3`."""
    return f"{position(place)}: {old} is now {new}; the old {what} is accepted until {UNTIL}"


def apply(document: Document) -> None:
    """Give keys and values their new names, at the place of the old ones; a key under both names is
    a problem.
    """
    for old, new in KEYS.items():
        _rename_key(document, old, new)
    for key, renamed in VALUES.items():
        section, name = key.split(".")
        values = _section(document, section)
        found = values.get(name)
        if isinstance(found, str) and found in renamed:
            values[name] = renamed[found]
            place = document.place((section, name))
            document.notes.append(note(place, f"{key}: {found}", f"{key}: {values[name]}", "value"))
    for key, (nothing, instead) in REMOVED.items():
        _remove_key(document, key, nothing, instead)


def _remove_key(document: Document, key: str, nothing: object, instead: str) -> None:
    path = tuple(key.split("."))
    values = _section(document, path[0])
    if path[1] not in values:
        return
    place, value = document.place(path, on_key=True), values.pop(path[1])
    if type(value) is type(nothing) and value == nothing:
        document.notes.append(f"{position(place)}: {key} is no key any more; remove it")
    else:
        message = f"{key} is no key any more; write {instead}"
        document.problems.append(Problem(place, message, key))


def _rename_key(document: Document, old: str, new: str) -> None:
    section, key = path = tuple(old.split("."))
    values, name = _section(document, section), new.rpartition(".")[2]
    if key not in values:
        return
    place, value = document.place(path, on_key=True), values.pop(key)
    if name in values:
        message = f"{old} is the old name of {new}, which is set too; remove {old}"
        document.problems.append(Problem(place, message, old))
        return
    values[name] = value
    for places in (document.keys, document.values):
        for known in [known for known in places if known[:2] == path]:
            places[current(known)] = places.pop(known)
    document.bad = {current(bad) for bad in document.bad}
    document.notes.append(note(place, old, new))


def _section(document: Document, name: str) -> dict[str, object]:
    """The values of a section; empty if there is no such mapping."""
    values = document.data.get(name) if isinstance(document.data, dict) else None
    return values if isinstance(values, dict) else {}
