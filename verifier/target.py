"""What is verified: a script, and how to run, save and resume it. From the command line and from `verify.yaml`."""

from __future__ import annotations

import ast
import difflib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import UserError
from .modules import find

CONFIG = "verify.yaml"
DEVICES = ("auto", "cpu", "cuda")
LAUNCHERS = ("fork", "torchrun")


@dataclass(frozen=True)
class Target:
    """`{checkpoint}` in any of the arguments is one fresh folder: shared by the train and the resumed runs, scratch for the others."""

    script: Path
    module: str = ""  # as in `python -m`; `script` is its file
    nproc: int = 2
    reshard_to: tuple[int, ...] = ()
    steps: int = 5
    timeout: float = 300.0
    device: str = "auto"
    launcher: str = "fork"
    oversubscribe: bool = False
    args: tuple[str, ...] = ()
    save_args: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()
    single_args: tuple[str, ...] = ()
    reshard_args: tuple[str, ...] = ()
    reference: tuple[
        str, ...
    ] = ()  # the script that this one was converted from (its absolute path), and its arguments
    sizes_chosen: bool = False  # reshard_to was given, not worked out
    thorough: bool = False  # every moment of a crash and every damage, not one of each
    cwd: Path = field(default_factory=Path.cwd)
    command: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The target as it stands in a report."""
        lists = ("args", "save_args", "resume_args", "single_args", "reshard_args", "reference")
        return {
            "command": shlex.join(self.command),
            "script": str(self.script),
            "module": self.module,
            "cwd": str(self.cwd),
            "nproc": self.nproc,
            "reshard_to": list(self.reshard_to),
            "steps": self.steps,
            "device": self.device,
            "launcher": self.launcher,
            "oversubscribe": self.oversubscribe,
            **{name: shlex.join(getattr(self, name)) for name in lists},
        }


def resolve(path: Path | None, flags: Mapping[str, Any], config: Path | None = None) -> Target:
    """The target at `path`: a script, or a folder (None: the current one) with `verify.yaml` or `train.py`, or the flag `module`.

    `flags` win over the file. Raises UserError if there is no such thing or a value is wrong.
    """
    given = path
    path = path or Path()
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if not path.is_dir() and not path.is_file():
        raise UserError(f"{path}: neither a file nor a folder")
    folder = path if path.is_dir() else path.parent
    if config is None and path.is_dir() and (folder / CONFIG).is_file():
        config = folder / CONFIG
    values = _read(config) if config is not None else {}
    named = values.pop("script", None)
    values |= {key: value for key, value in flags.items() if value is not None}
    module = str(values.get("module", ""))
    base = config.parent if config is not None and path.is_dir() else folder
    if module and not path.is_dir():
        raise UserError(f"-m {module}: give a module or a script, not both")
    if module and named and "module" not in flags:
        raise UserError(f"{config}: give `module` or `script`, not both")
    if module:
        script = find(module, base)
    elif path.is_dir():
        script = base / (named or "train.py")
        if not script.is_file():
            raise UserError(f"{script}: no such file (a folder is verified through its {CONFIG} or its train.py)")
    else:
        script = path
    _must_be_python(script)
    cwd = base if module else script.parent if path.is_dir() else Path.cwd()
    target = replace(_build(script.resolve(), values, cwd.resolve()), command=_command(given, flags, config))
    return replace(target, reference=_reference(target, base if path.is_dir() else Path.cwd()))


def _reference(target: Target, base: Path) -> tuple[str, ...]:
    if not target.reference:
        return ()
    script = base / target.reference[0]
    if not script.is_file():
        raise UserError(f"reference: {script}: no such file (first the script, then its arguments)")
    _must_be_python(script)
    if script.resolve() == target.script:
        raise UserError(f"reference: {script} is the script that is verified: name the one that it was converted from")
    return (str(script.resolve()), *target.reference[1:])


def _must_be_python(script: Path) -> None:
    """Raises UserError, with the place, for a file that Python cannot even read."""
    try:
        ast.parse(script.read_bytes(), filename=str(script))
    except SyntaxError as error:
        place = f"{script}:{error.lineno or 1}:{error.offset or 1}"
        raise UserError(f"{place}: this is not Python: {error.msg}\n    {(error.text or '').strip()}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{script}: cannot be read as Python: {error}") from None


def _command(path: Path | None, flags: Mapping[str, Any], config: Path | None) -> tuple[str, ...]:
    """The command line that verifies this target again."""
    words = ["fsdp2", "verify", *([str(path)] if path is not None else [])]
    if config is not None and config != (path or Path()) / CONFIG:
        words += ["--config", str(config)]
    given = {key: value for key, value in flags.items() if value is not None}
    own = given.pop("args", [])
    for key, value in given.items():
        option = "-m" if key == "module" else "--" + key.replace("_", "-")
        words += [option, *([] if value is True else [str(value)])]
    return (*words, *(["--", *_words("args", own)] if own else []))


def _build(script: Path, values: dict[str, Any], cwd: Path) -> Target:
    ready: dict[str, Any] = {}
    for key in ("nproc", "steps"):
        if key in values:
            ready[key] = _whole(key, values[key], 1 if key == "nproc" else 2)
    if "timeout" in values:
        ready["timeout"] = _positive("timeout", values["timeout"])
    for key, known in (("device", DEVICES), ("launcher", LAUNCHERS)):
        if key in values:
            ready[key] = values[key]
            if ready[key] not in known:
                raise UserError(f"{key}: expected one of {', '.join(known)}, found {ready[key]!r}")
    if "oversubscribe" in values:
        ready["oversubscribe"] = values["oversubscribe"] is True or str(values["oversubscribe"]).lower() == "true"
    if ready.get("oversubscribe") and (ready.get("device") != "cuda" or ready.get("launcher") == "torchrun"):
        raise UserError("oversubscribe: several ranks on one GPU need `--device cuda` and the launcher `fork`")
    for key in ("args", "save_args", "resume_args", "single_args", "reshard_args", "reference"):
        if key in values:
            ready[key] = _words(key, values[key])
    if "thorough" in values:
        ready["thorough"] = values["thorough"] is True or str(values["thorough"]).lower() == "true"
    nproc = ready.get("nproc", Target.nproc)
    if "reshard_to" in values:
        ready["sizes_chosen"] = True
        given = values["reshard_to"]
        sizes = given if isinstance(given, list | tuple) else str(given).split(",")
        ready["reshard_to"] = tuple(_whole("reshard_to", size, 1) for size in sizes if str(size).strip())
    elif ready.get("resume_args"):
        ready["reshard_to"] = tuple(n for n in (1, 2 * nproc) if n != nproc)
    return Target(script=script, cwd=cwd, module=str(values.get("module", "")), **ready)


def _whole(key: str, value: Any, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        raise UserError(f"{key}: expected a whole number, found {value!r}") from None
    if number < least:
        raise UserError(f"{key}: must be at least {least}, found {number}")
    return number


def _positive(key: str, value: Any) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise UserError(f"{key}: expected a number of seconds, found {value!r}") from None
    if not 0 < number < float("inf"):
        raise UserError(f"{key}: must be a positive number of seconds, found {value}")
    return number


def _words(key: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(str(word) for word in value)
    try:
        return tuple(shlex.split(str(value)))
    except ValueError as error:
        raise UserError(f"{key}: {error}: {value!r}") from None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:1:1: expected `key: value` lines")
    known = (
        "script",
        "module",
        "nproc",
        "reshard_to",
        "steps",
        "timeout",
        "device",
        "launcher",
        "oversubscribe",
        "args",
        "save_args",
        "resume_args",
        "single_args",
        "reshard_args",
        "reference",
        "thorough",
    )
    for key, _ in node.value:
        if key.value not in known:
            near = difflib.get_close_matches(key.value, known, 1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"
            place = f"{path}:{key.start_mark.line + 1}:{key.start_mark.column + 1}"
            raise UserError(f"{place}: unknown key '{key.value}'{hint}")
    return values
