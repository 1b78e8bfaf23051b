"""The world of one run as data: the verifier prepares it, the process that manages the run enters
it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .mounts import is_in

OVERLAY, COPY, GUARD, NONE = "overlay", "copy", "guard", "none"
MECHANISMS = (OVERLAY, COPY, GUARD)  # the best one first
FILES, CHECKPOINT = (
    "files",
    "checkpoint",
)  # in the folder of a world: what lies beside `{checkpoint}`, and that itself
DENIED = "denied.json"  # in the folder of a run: the write that was stopped


@dataclass(frozen=True)
class World:
    """Where a run works. Paths are absolute; those of `roots` and `allowed` are the user's own."""

    mechanism: str
    work: str  # all that the verifier itself writes
    folder: str  # of this world: layers, or the private copy
    checkpoint: str  # what `{checkpoint}` stands for in this run
    bases: tuple[str, ...] = ()  # folders of the worlds whose files it finds, the latest first
    allowed: tuple[str, ...] = ()  # where the user lets runs write
    # (a cache of the user's, what stands in its place for all runs)
    caches: tuple[tuple[str, str], ...] = ()
    holder: int = 0  # the process that holds the namespaces
    mirror: str = ""  # the copy of the root folder, with the parts that the run uses
    roots: tuple[str, ...] = ()  # the project, the working folder and, in a mirror, the home folder
    environment: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The world as JSON data."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> World:
        """The world from JSON data."""
        return cls(**{name: _tuples(value) for name, value in data.items()})

    def inside(self, path: str) -> str:
        """Where the run finds what the user has at a path."""
        if not self.mirror or is_in(path, self.work) or not self._is_mirrored(path):
            return path
        return self.mirror + path

    def _is_mirrored(self, path: str) -> bool:
        return any(
            is_in(name, root) for name in (path, str(Path(path).resolve())) for root in self.roots
        )

    def inside_words(self, text: str) -> str:
        """A word of a command line or a value of the environment, where paths in it are meant in
        the mirror.

        Paths may stand alone, after `=`, or in a list with colons.
        """
        before, equals, after = text.rpartition("=")
        parts = [self.inside(part) if part.startswith("/") else part for part in after.split(":")]
        return before + equals + ":".join(parts)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
