"""INSTALLED.json of a copy: its version, and the hash of each file that was installed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ... import __version__
from ...verifier.config.reading import inputs
from ...verifier.errors import UserError
from ..atomic_write import is_inside

MANIFEST = "INSTALLED.json"


def read(folder: Path) -> tuple[str, dict[str, str]] | None:
    """(version, {path: hash}) of the copy in a folder; None if there is none.

    Raises UserError if it is damaged.
    """
    path = folder / MANIFEST
    try:
        data = json.loads(inputs.whole(path, inputs.RECORD))
        version, files = str(data["version"]), dict(data["files"])
        valid = data["manifest"] == 1 and all(
            isinstance(files[name], str) and is_inside(name) for name in files
        )
        valid = valid and MANIFEST not in files
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(
            f"{path} is not what `fsdp2 install` wrote; move {folder} away and install again"
        )
    return version, files


def record_of(hashes: Mapping[str, str]) -> bytes:
    return (
        json.dumps({"manifest": 1, "version": __version__, "files": dict(hashes)}, indent=1) + "\n"
    ).encode()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]  # enough to detect an edit


def hash_of(path: Path) -> str | None:
    """The hash of a file; None if it does not exist.

    A link was never installed, whatever its target.
    """
    if path.is_symlink():
        return "a link"
    data = content_of(path)
    return None if data is None else digest_of(data)


def content_of(path: Path) -> bytes | None:
    try:
        return inputs.whole(path, inputs.WHOLE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
