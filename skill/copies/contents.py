"""The files of an installed copy: all that its commands need, or the few of a thin one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from ... import __version__
from ...verifier.errors import UserError
from . import SOURCES, join
from .manifest import MANIFEST, content_of, digest_of, read

NAME = "verified-fsdp2"
PACK = Path(__file__).resolve().parents[2]
_FILES = ("SKILL.md", "LICENSE", "__init__.py")
_FOLDERS = ("references", "templates", "examples", "skill", "verifier")
# Examples of one option each, which `fsdp2 spec explain` shows as well, and of what a larger one
# holds.
_LEFT_OUT = {
    f"examples/{name}.yaml"
    for name in (
        "ac",
        "adamw8bit",
        "bf16",
        "chunked-loss",
        "compile",
        "export",
        "freeze",
        "hsdp",
        "jsonl",
        "mixture",
        "muon",
        "offload",
        "reshard-int",
        "transformers-tp",
        "two-nodes",
    )
} | {
    "examples/notes.jsonl",
    *(
        f"examples/day/{name}"
        for name in ("README.md", "chat.yaml", "pretrain.yaml", "tokenizer.py")
    ),
}
_SUFFIXES = (".py", ".md", ".j2", ".jinja", ".json", ".jsonl", ".yaml")
_READ = (
    "SKILL.md",
    "LICENSE",
    "references",
    "examples",
)  # what agents read: a thin copy, beside its launcher
_LAUNCHER = f'''\
#!/usr/bin/env python3
"""Calls verified-fsdp2, of the version that wrote this copy: in this Python, as `fsdp2` on the
path, or in the project's .venv.
"""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

try:
    found = metadata.version("{NAME}")
except metadata.PackageNotFoundError:
    found = ""
if found != "{__version__}":
    places = [None, *(folder / ".venv" / "bin" for folder in Path(__file__).resolve().parents[4:5])]
    for command in filter(None, (shutil.which("fsdp2", path=place) for place in places)):
        asked = subprocess.run([command, "--version"], capture_output=True, text=True)
        if asked.stdout.split()[-1:] == ["{__version__}"]:
            os.execv(command, [command, *sys.argv[1:]])
    there = f"has {NAME} {{found}}" if found else "has no {NAME}"
    needs = "this skill needs {__version__}: install that version,"
    print(f"fsdp2: {{sys.executable}} {{there}}; {{needs}}", file=sys.stderr)
    print("or the skill again, with --full: a copy that needs no install", file=sys.stderr)
    sys.exit(2)

from verified_fsdp2.skill.cli import main

sys.exit(main())
'''
# The tools of a project that holds a copy leave it alone: ruff takes the nearest configuration of a
# file; git no bytecode.
GUEST = {
    "ruff.toml": (
        b'# Linters of the project leave this copy alone.\nexclude = ["*"]\n\n[lint]\nselect = []\n'
    ),
    ".gitignore": b"__pycache__/\n",
}


def pack_files(pack: Path = PACK) -> dict[str, bytes]:
    """The files of an installed copy, path to content: the text of the skill, and what its commands
    need to run, in few files.
    """
    if (pack / SOURCES).is_dir():  # a copy itself
        return _of_copy(pack)
    return join(_of_pack(pack)) | GUEST


def _of_copy(copy: Path) -> dict[str, bytes]:
    """The files of the copy that is running."""
    manifest = read(copy)
    files = {name: content_of(copy / name) for name in manifest[1]} if manifest else {}
    found = {name: data for name, data in files.items() if data is not None}
    if not files or found != files:
        missing = ", ".join(name for name in files if name not in found) or MANIFEST
        raise UserError(f"{copy} is not a complete copy of {NAME}: {missing} is missing")
    return found


def _of_pack(pack: Path) -> dict[str, bytes]:
    """The files of the repository, or of an installed package, that belong in a copy."""
    found = list(_FILES)
    for folder in _FOLDERS:
        for path in sorted((pack / folder).rglob("*")):
            name = path.relative_to(pack)
            hidden = path.name[0] == "." or any(part[0] in "._" for part in name.parts[:-1])
            if (
                path.suffix in _SUFFIXES
                and path.is_file()
                and not hidden
                and name.as_posix() not in _LEFT_OUT
            ):
                found.append(name.as_posix())
    if missing := [name for name in found if not (pack / name).is_file()]:
        raise UserError(f"{pack} is not a complete copy of {NAME}: {', '.join(missing)} is missing")
    return {name: (pack / name).read_bytes() for name in found}


def thin_files(pack: Path = PACK) -> dict[str, bytes]:
    """The files of a thin copy: what an agent reads, and a launcher that calls the installed
    package of the same version.
    """
    read = {name: data for name, data in pack_files(pack).items() if name.split("/")[0] in _READ}
    return read | {"skill/__main__.py": _LAUNCHER.encode()} | GUEST


def files_for(folder: Path, thin: bool | None = None) -> dict[str, bytes]:
    """The files of a copy there; `thin` None: as the copy that is there, and of a new one thin if
    this package is installed.
    """
    if thin is None:
        _, there = read(folder) or ("", {})
        thin = not any(name.startswith("verifier/") for name in there) if there else _is_installed()
    return thin_files() if thin else pack_files()


def _is_installed() -> bool:
    """Whether a thin copy would find this package, of this version."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(NAME) == __version__ and not (PACK / SOURCES).is_dir()
    return False


def digest(files: Mapping[str, bytes]) -> str:
    """Of all files: what `--check` shows, and CI can pin."""
    return digest_of(
        "".join(f"{path} {digest_of(files[path])}\n" for path in sorted(files)).encode()
    )
