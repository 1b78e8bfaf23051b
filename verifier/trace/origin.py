"""Whose code a frame runs: the user's, torch's, Python's, a library's or the verifier's.

Imports no torch.

It compares with the folders in which this interpreter has torch, its standard library and its
packages, and with whole path components, never with a part of a name: a user's project may be in
`/home/me/torch/` or `/home/me/verifier/`.
"""

import functools
import importlib.util
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Literal

Origin = Literal["user", "torch", "library", "python", "verifier"]

PACKAGES = ("site-packages", "dist-packages")
OURS = Path(__file__).parents[2]  # the folder that holds verifier/ and skill/


@functools.lru_cache(maxsize=4096)
def origin(file: str) -> Origin:
    """Whose code the file of a frame holds. `library`: an installed package other than torch."""
    if file.startswith("<"):  # <frozen importlib>, <string>, <eval_with_key>
        return "python"
    if within_torch(file):
        return "torch"
    if _below(file, _ours()):
        return "verifier"
    # Whole path components decide: a project may lie in /home/me/torch/ or /home/me/verifier/
    # (projects below folders named torch or verifier).
    if any(part in PACKAGES for part in Path(file).parts):
        return "library"
    if _below(file, _standard_library()):
        return "python"
    return "user"


def is_user(file: str) -> bool:
    """Whether a file is in no library, nor in Python or the verifier."""
    return origin(file) == "user"


def is_machinery(file: str) -> bool:
    """Whether a file is torch's, Python's or the verifier's.

    The script itself may be in another library.
    """
    return origin(file) in ("torch", "python", "verifier")


def within_torch(file: str) -> str:
    """The path of a file below the folder of torch, "" if it is not torch's:
    `distributed/fsdp/__init__.py`.
    """
    for folder in _torch():
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    for packages in PACKAGES:  # a frame from another interpreter
        _, found, rest = file.rpartition(f"{os.sep}{packages}{os.sep}torch{os.sep}")
        if found:
            return rest
    return ""


def place_in_ours(error: BaseException) -> str:
    """The innermost line of the verifier that an error passed through:
    `verifier/probe/session.py:91`.
    """
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if origin(f.filename) == "verifier"
    ]
    return f"{os.path.relpath(frames[-1].filename, OURS)}:{frames[-1].lineno}" if frames else ""


def _below(file: str, folders: tuple[str, ...]) -> bool:
    return file.startswith(tuple(folder + os.sep for folder in folders))


@functools.cache
def _torch() -> tuple[str, ...]:
    spec = importlib.util.find_spec(
        "torch"
    )  # does not import it: the script may want to do that itself
    return _places(Path(spec.origin).parent) if spec is not None and spec.origin else ()


@functools.cache
def _ours() -> tuple[str, ...]:
    return (*_places(OURS / "verifier"), *_places(OURS / "skill"))


@functools.cache
def _standard_library() -> tuple[str, ...]:
    folders = [
        Path(os.__file__).parent,
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    ]
    return tuple(dict.fromkeys(place for folder in folders for place in _places(folder)))


def _places(folder: Path) -> tuple[str, ...]:
    """The path of a folder, as given and with symbolic links resolved."""
    return tuple(dict.fromkeys((str(folder), str(folder.resolve()))))
