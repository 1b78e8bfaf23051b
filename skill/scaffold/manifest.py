"""How a project was made: `.fsdp2/manifest.json`, and the text of each file as it was written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ...verifier.config.reading import inputs
from ...verifier.errors import UserError
from ..atomic_write import is_inside

FOLDER = ".fsdp2"
MANIFEST = f"{FOLDER}/manifest.json"
BASE = f"{FOLDER}/base"
FORMAT = 1
SPEC_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The version that wrote the project, and the hash of each file as written.

    `others`: further keys of the manifest.
    """

    generator: str
    files: dict[str, str]
    others: dict[str, Any]


def base_path(path: str) -> str:
    """Where the text of a file is kept; because of the suffix linters, formatters and test runners
    ignore it.
    """
    return f"{BASE}/{path}.base"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def record(files: Mapping[str, bytes], others: Mapping[str, Any] | None = None) -> dict[str, bytes]:
    """The files by which `update` distinguishes an edit of the user from a change of the
    templates.
    """
    hashes = {path: sha256(data) for path, data in files.items()}
    text = {
        "manifest": FORMAT,
        "spec_version": SPEC_VERSION,
        "generator": __version__,
        "files": hashes,
        **(others or {}),
    }
    bases = {base_path(path): data for path, data in files.items()}
    return {**bases, MANIFEST: (json.dumps(text, indent=2) + "\n").encode()}


def read(out: Path) -> Manifest:
    """The manifest of the project in this folder; refuses what this version cannot update."""
    path = out / MANIFEST
    if not out.is_dir():
        raise UserError(f"{out}: {'not a folder' if out.exists() else 'no such folder'}")
    try:
        data = json.loads(inputs.whole(path, inputs.RECORD))
    except FileNotFoundError:
        message = (
            f"{out} is not a project of `fsdp2 new`: it has no {MANIFEST} (commit {FOLDER} with the"
            " project)"
        )
        raise UserError(message) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise _broken(
            f"{path}:{error.lineno}:{error.colno}", f"not valid JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"not valid JSON: {error}") from None
    return _checked(data, path)


def _checked(data: Any, path: Path) -> Manifest:
    if not isinstance(data, dict) or not isinstance(data.get("manifest"), int):
        raise _broken(path, "it must be an object with the key 'manifest', a number")
    generator, files, spec_version = (
        data.get("generator"),
        data.get("files"),
        data.get("spec_version"),
    )
    by = generator if isinstance(generator, str) else "unknown"
    if (
        data["manifest"] > FORMAT
        or (isinstance(spec_version, int) and spec_version > SPEC_VERSION)
        or _numbers(by) > _numbers(__version__)
    ):
        message = (
            f"{path}: this project was written by the newer version {by}; this is {__version__}"
        )
        raise UserError(f"{message}: update verified-fsdp2 first")
    if by == "unknown" or data["manifest"] != FORMAT or spec_version != SPEC_VERSION:
        raise _broken(
            path,
            f"expected manifest {FORMAT}, spec_version {SPEC_VERSION} and the generator's version",
        )
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise _broken(path, "'files' must map paths to hashes")
    for name in files:
        if not is_inside(name) or name.partition("/")[0] == FOLDER:
            raise _broken(path, f"{name!r} is not a path of a file in the project")
    own = ("manifest", "spec_version", "generator", "files")
    return Manifest(by, files, {key: value for key, value in data.items() if key not in own})


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _broken(place: object, message: str) -> UserError:
    return UserError(f"{place}: {message}; restore {MANIFEST} from version control")
