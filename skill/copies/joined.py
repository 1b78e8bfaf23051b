"""Imports the modules of an installed copy, whose files are sections of the files in `sources/`.

Each section begins with a line `# ==== PATH`, and holds the file PATH of the repository, unchanged:
a traceback names PATH and the line in it. Bytecode is kept in the user's cache, never in the copy,
as Python keeps it: only where PYTHONDONTWRITEBYTECODE does not forbid it. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

PACKAGE = "verified_fsdp2"
SOURCES = "sources"
HEADING = re.compile(r"^# ==== (\S+)\n", re.MULTILINE)


class Sections:
    """The sections of the copy in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    @cached_property
    def found(self) -> Mapping[str, bytes]:
        """Path to content, of all."""
        found: dict[str, bytes] = {}
        for file in sorted(Path(self.root, SOURCES).iterdir()):
            _, *parts = HEADING.split(file.read_text(encoding="utf-8"))
            found |= {
                path: text.encode() for path, text in zip(parts[::2], parts[1::2], strict=True)
            }
        return found

    def below(self, path: str) -> str | None:
        """A path within the copy, as a section's; None outside."""
        path = os.path.normpath(path)
        inside = path.startswith(self.root + os.sep)
        return path[len(self.root) + 1 :].replace(os.sep, "/") if inside else None


class Loader(SourceFileLoader):
    """Loads a module from its section."""

    def __init__(self, name: str, path: str, sections: Sections) -> None:
        super().__init__(name, path)
        self._sections = sections

    def get_data(self, path: str) -> bytes:
        """A section, a file beside it, or the bytecode of a module."""
        if path.endswith(".pyc"):
            return super().get_data(self._cached(path))
        data = self._sections.found.get(self._sections.below(path) or "")
        return super().get_data(path) if data is None else data

    def path_stats(self, path: str) -> dict[str, Any]:
        """In place of the time of a change, a checksum: bytecode is that of its section, whenever
        the copy was written.
        """
        data = self.get_data(path)
        return {"mtime": zlib.crc32(data), "size": len(data)}

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Keep bytecode in the cache."""
        super().set_data(self._cached(path), data, _mode=_mode)

    def _cached(self, path: str) -> str:
        """Where the bytecode is that Python would keep at `path`, in the copy."""
        return str(cache(self._sections.root) / f"{self.name}.{Path(path).name.partition('.')[2]}")


class Finder:
    """Finds the modules of the copy, before any other finder: an installed package of the same name
    is another version.
    """

    def __init__(self, sections: Sections) -> None:
        self._sections = sections

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module `name`; None if it is none of the copy."""
        top, _, rest = name.partition(".")
        if top != PACKAGE:
            return None
        module = rest.replace(".", "/")
        for file in (f"{module}/__init__.py", f"{module}.py"):
            if file in self._sections.found:
                place = Path(self._sections.root, file)
                folders = [str(place.parent)] if place.name == "__init__.py" else None
                loader = Loader(name, str(place), self._sections)
                return spec_from_file_location(
                    name, place, loader=loader, submodule_search_locations=folders
                )
        return None


class Listing:
    """What pkgutil asks for the modules of one package of the copy."""

    def __init__(self, sections: Sections, package: str) -> None:
        self._sections, self._start = sections, f"{package}/".lstrip("/")

    def find_spec(self, name: str, target: object = None) -> None:
        """Nothing: `Finder` has found it before."""

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """(name, whether it is a package) of each module."""
        for path in self._sections.found:
            if path.startswith(self._start) and path.endswith(".py"):
                name, _, rest = path[len(self._start) :].partition("/")
                if rest == "__init__.py" or (not rest and name != "__init__.py"):
                    yield prefix + name.removesuffix(".py"), bool(rest)


def cache(root: str) -> Path:
    """The folder for the bytecode of the copy at `root`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~", ".cache").expanduser()
    return Path(
        home, "verified-fsdp2", hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:16]
    )


def install(root: Path) -> None:
    """Let Python find the modules of the copy at `root`."""
    sections = Sections(root)

    def listing(path: str) -> Listing:
        package = sections.below(path)
        if package is None or f"{package}/__init__.py" not in sections.found:
            raise ImportError(f"no package of the copy: {path}", path=path)
        return Listing(sections, package)

    sys.meta_path.insert(0, Finder(sections))
    sys.path_hooks.insert(0, listing)


if __package__ == PACKAGE:  # in a copy, whose __init__.py this file is
    install(Path(__file__).resolve().parent)
