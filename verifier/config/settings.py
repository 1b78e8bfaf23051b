"""Arguments with `{checkpoint}` and `set:KEY=VALUE`, applied to copies of the configuration files
that they name.

`train.py --config run.yaml set:checkpoint.every=3`: the script is given a copy of run.yaml with
that value. `set:+KEY=VALUE` adds a key. A file that contains `{checkpoint}` is copied, too, with
the folder in its place. The user's files are never changed.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from .option import PLACE, SET
from .reading import inputs

READERS: dict[str, Callable[[str], Any]] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".json": json.loads,
    ".toml": tomllib.loads,
}
_LARGEST, _DEEPEST = 1 << 20, 6  # bytes of a file, levels of keys


def applied(
    arguments: Sequence[str], cwd: Path, checkpoint: str, folder: Path
) -> tuple[list[str], dict[Path, str]]:
    """(the arguments that the script is given, {path below `folder`: text of a copy}).

    Raises UserError for a `set:` that fits no configuration file of the arguments.
    """
    words = [word for word in arguments if not word.startswith(SET)]
    changes = [word.removeprefix(SET).partition("=") for word in arguments if word.startswith(SET)]
    if wrong := next((key for key, equals, _ in changes if not equals), None):
        raise UserError(f"{SET}{wrong}: expected {SET}KEY=VALUE")
    files = {path: load(path) for path in configs(words, cwd)}
    if changes and not files:
        raise UserError(
            f"{SET}{changes[0][0]}: the arguments name no configuration file (.yaml, .json) whose"
            " keys could be set"
        )
    copies: dict[Path, str] = {}
    for path, data in files.items():
        own = [(key, value) for key, _, value in changes if path == _holder(key, files)]
        text = _text(path)
        if own:
            text = _changed(
                path, data, [(key, value.replace(PLACE, checkpoint)) for key, value in own]
            )
        if own or PLACE in text:
            copies[path] = text.replace(PLACE, checkpoint)
    # Two files may have one name.
    named = {
        path: folder / (f"{number}-{path.name}" if number else path.name)
        for number, path in enumerate(copies)
    }
    given = [_renamed(word, named, cwd).replace(PLACE, checkpoint) for word in words]
    return given, {named[path]: text for path, text in copies.items()}


def configs(args: Sequence[str], cwd: Path) -> list[Path]:
    """The configuration files that arguments name: `config.yaml`, `--config=config.yaml`,
    `config=config.yaml`.
    """
    paths = [cwd / word.rpartition("=")[2] for word in args if word.endswith(tuple(READERS))]
    return [path for path in paths if path.is_file() and path.stat().st_size < _LARGEST]


def load(path: Path) -> Any:
    """The data of a configuration file; None if it cannot be read."""
    try:
        return READERS[path.suffix](inputs.text(path, _LARGEST))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def _text(path: Path) -> str:
    """The text of a configuration file; "" if it cannot be read: the script will report that."""
    try:
        return inputs.text(path, _LARGEST)
    except (OSError, ValueError):
        return ""


def flat(data: Any, above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings."""
    for key, value in data.items() if isinstance(data, Mapping) and depth < _DEEPEST else ():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{above}{key}.", depth + 1)
        elif not isinstance(value, list):
            yield f"{above}{key}", "" if value is None else value


def _holder(key: str, files: Mapping[Path, Any]) -> Path:
    """The file in which a key is set. Raises UserError if there is none, or several."""
    if key.startswith("+"):
        return next(iter(files))
    keys = {path: [name for name, _ in flat(data)] for path, data in files.items()}
    having = [path for path, names in keys.items() if key in names]
    if len(having) == 1:
        return having[0]
    every = [name for names in keys.values() for name in names]
    near = difflib.get_close_matches(key, every, 1)
    hint = f"; did you mean {near[0]}?" if near else f"; {SET}+{key}=... adds it"
    raise UserError(
        f"{SET}{key}: "
        + (
            f"several files have it: {', '.join(map(str, having))}"
            if having
            else f"no such key{hint}"
        )
    )


def _changed(path: Path, data: Any, changes: Iterable[tuple[str, str]]) -> str:
    if path.suffix == ".toml":
        raise UserError(
            f"{path}: keys of a TOML file cannot be set: write the value into a copy, or {PLACE}"
            " into the file"
        )
    for key, value in changes:
        *above, last = key.removeprefix("+").split(".")
        place = data
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise UserError(f"{SET}{key}: {path} has no mapping there to hold it")
        try:
            place[last] = yaml.safe_load(value)
        except (ValueError, RecursionError, yaml.YAMLError):
            raise UserError(f"{SET}{key}: the value is not valid YAML") from None
    try:
        return (
            json.dumps(data, indent=2)
            if path.suffix == ".json"
            else yaml.safe_dump(data, sort_keys=False)
        )
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None


def _renamed(word: str, named: Mapping[Path, Path], cwd: Path) -> str:
    """The argument with the path of the copy in the place of that of the file."""
    head, equals, path = word.rpartition("=")
    return f"{head}{equals}{named[cwd / path]}" if cwd / path in named else word
