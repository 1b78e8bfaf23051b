"""The sealed record of a save: what the state was, in some kilobytes, so that a resume on any
number of ranks can be held against it.

Records lie in a folder of the guard's own, `guard.records/` beside `guard.jsonl`, not in the
checkpoint: scripts list, count, hash and rename what is there. A checkpoint that was renamed is
found by its inode, one that was moved to another file system by its name.
"""

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KEPT = 64  # records; older ones are removed


@dataclass
class Record:
    """The state at a save. Sketches are modulo 2**64 of whole tensors, as hexadecimal numbers."""

    path: str
    step: int
    world: int
    inode: list[int] = field(default_factory=list)
    # {part: {name: sketch}}; of a file of one rank only weights
    sketches: dict[str, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # of optimizers and schedules
    # what the run that went on after the save used in its next step; {} until it is known
    next_settings: dict[str, Any] = field(default_factory=dict)
    # {rank: states of its generators before the first forward of its process, and at the save}
    drawn: dict[str, list[str]] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    epoch_rows: int = 0  # of the epoch, trained on
    seen: list[int] = field(default_factory=list)  # hashes of some of them
    share: int = 0  # which: those in which these bits are 0
    versions: dict[str, str] = field(default_factory=dict)


class Records:
    """The records of a run."""

    def __init__(self, out: str) -> None:
        path = Path(out)
        self.folder = path.with_name(f"{path.stem}.records")

    def write(self, record: Record) -> None:
        """Write a record, whole or not at all."""
        text = json.dumps(asdict(record))
        sealed = json.dumps({"seal": _seal(text), "record": text})
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{record.step:09d}-{zlib.crc32(record.path.encode()):08x}.json"
        beside = self.folder / f".{name}.{os.getpid()}"
        beside.write_text(sealed, encoding="utf-8")
        beside.replace(self.folder / name)
        for old in sorted(self.folder.glob("*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def of(self, path: str) -> Record | None:
        """The record of a checkpoint, None if there is none. Raises ValueError of a damaged one.

        By name alone only if what had that name is no longer where it was: it was moved or copied.
        """
        known = [self._read(file) for file in sorted(self.folder.glob("*.json"), reverse=True)]
        inode = inode_of(path)
        same: tuple[Any, ...] = (
            lambda one: inode and one.inode == inode,
            lambda one: one.path == str(Path(path).absolute()),
            lambda one: Path(one.path).name == Path(path).name and not Path(one.path).exists(),
        )
        return next((one for test in same for one in known if test(one)), None)

    def _read(self, file: Path) -> Record:
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            if held["seal"] != _seal(held["record"]):
                raise ValueError(f"{file} was changed after it was written")
            return Record(**json.loads(held["record"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} is no record of this version ({error})") from error


def inode_of(path: str) -> list[int]:
    """Device and inode of a checkpoint, which a rename keeps."""
    try:
        found = Path(path).stat()
    except OSError:
        return []
    return [found.st_dev, found.st_ino]


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
