"""What is verified: a script, and how to run, save and resume it.

From the command line and from `verify_file.py`.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..finding import Remark
from . import modules
from .base_policy import BasePolicy, base_policy
from .commands import valued
from .launchers import problem
from .parts import named
from .policy import Checkouts, Policy
from .reading.script import parse
from .settings import applied
from .verify_file import NAME as CONFIG
from .verify_file import PYPROJECT, CheckName, Entry, any_name, config_in, only_in, read
from .watch import Watched, watched
from .windows import Window, windows

ON_CPU = "cuda-on-cpu"  # a CUDA that computes on the CPU, also where the script would do without
DEVICES = ("auto", "cpu", "cuda", ON_CPU)
ISOLATIONS = ("auto", "overlay", "copy", "guard", "none")  # isolation/choose.py
WORDS = ("save_args", "resume_args", "single_args", "reshard_args", "reference")


@dataclass(frozen=True)
class Target:
    """`{checkpoint}` in any of the arguments is one fresh folder: shared by the train and the
    resumed runs, scratch for the others.
    """

    script: Path
    name: str = ""  # in a configuration with several targets
    # the team's decisions about the verdict, from the configuration
    policy: Policy = field(default_factory=Policy)
    module: str = ""  # as in `python -m`; `script` is its file
    root: Path | None = (
        # below it lies the user's own code; None: below the script's folder, or the module's
        # package
        None
    )
    nproc: int = 2
    reshard_to: tuple[int, ...] = ()
    steps: int = 0  # to compare; 0: as many as the survey run suggests
    # behind them: as the survey run suggests ("auto"), "none", or these
    windows: str | tuple[Window, ...] = "auto"
    timeout: float = 300.0
    device: str = "auto"
    launcher: str = "fork"
    # how runs are kept from the user's files: a name of isolation/choose.py
    isolation: str = "auto"
    allow_writes: tuple[Path, ...] = ()  # where they may write all the same
    oversubscribe: bool = False
    args: tuple[str, ...] = ()
    save_args: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()
    single_args: tuple[str, ...] = ()
    reshard_args: tuple[str, ...] = ()
    # absolute path of the script that is run once before all runs, and its arguments
    prepare: tuple[str, ...] = ()
    # absolute path of the script that this one was converted from, and its arguments
    reference: tuple[str, ...] = ()
    watch: tuple[Watched, ...] = ()
    sizes_chosen: bool = False  # reshard_to was given, not derived
    thorough: bool = False  # every moment of a crash and every damage, not one of each
    quick: bool = False  # only the train run, the reference and the resume
    full_size: bool = False  # in the simulated tier: on CUDA tensors without memory
    budget: float = math.inf  # seconds after which no further run begins
    cwd: Path = field(default_factory=Path.cwd)
    command: tuple[str, ...] = ()

    @property
    def project(self) -> Path:
        """The folder below which the user's own code lies."""
        return self.root or modules.root(self.script, self.module)

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those of its project, and of the script that it was converted from, which runs, too."""
        return (self.project, *(Path(script).parent for script in self.reference[:1]))

    def describe(self) -> dict[str, Any]:
        """The target as JSON data, for a report."""
        names = (
            "name",
            "command",
            "script",
            "module",
            "cwd",
            "nproc",
            "reshard_to",
            "steps",
            "device",
            "launcher",
        )
        found = {name: getattr(self, name) for name in (*names, "oversubscribe", "args", *WORDS)}
        joined = {name: shlex.join(found[name]) for name in ("command", "args", *WORDS)}
        return (
            found
            | joined
            | {
                "script": str(self.script),
                "cwd": str(self.cwd),
                "reshard_to": list(self.reshard_to),
            }
        )


def resolve(
    path: Path | None,
    flags: Mapping[str, Any],
    config: Path | None = None,
    name: str | None = None,
    unknown_rule: CheckName = any_name,
) -> Target:
    """The one target that `resolve_all` finds. Raises UserError if it finds several."""
    found = resolve_all(path, flags, config, name, unknown_rule)
    if len(found) > 1:
        raise UserError(
            f"several targets ({', '.join(target.name for target in found)}); choose one of them"
        )
    return found[0]


def resolve_all(
    path: Path | None,
    flags: Mapping[str, Any],
    config: Path | None = None,
    name: str | None = None,
    unknown_rule: CheckName = any_name,
    checkouts: Checkouts | None = None,
) -> list[Target]:
    """The targets at `path`: a script, or a folder (None: the current one) with a configuration or
    `train.py`, or the flag `module`.

    `flags` win over the file; `name` chooses one of its targets; `unknown_rule` says what is wrong
    with the name of a rule in it; `checkouts`: where the base branch lies, whose configuration the
    file can tighten, not loosen. Raises UserError if there is no such thing or a value is wrong.
    """
    where = path or Path()
    if not where.exists():
        raise UserError(f"{where}: no such file or folder")
    if not where.is_dir() and not where.is_file():
        raise UserError(f"{where}: neither a file nor a folder")
    if config is None and where.is_dir():
        config = config_in(where)
    entries = read(config, unknown_rule=unknown_rule) if config is not None else [Entry()]
    held, remarks = None, list[Remark]()
    if checkouts is not None:
        held = base_policy(checkouts, where, config, unknown_rule)
        if where.is_dir() and not flags.get("module"):
            own = entries if config is not None else []
            more, remarks = held.missing(own, config.parent if config is not None else where)
            entries = [*own, *more] or entries
    if name is not None:
        known = ", ".join(entry.name for entry in entries if entry.name) or "none"
        entries = [entry for entry in entries if entry.name == name]
        if not entries:
            raise UserError(
                f"--target {name}: no such target{f' in {config}' if config else ''}; known:"
                f" {known}"
            )
    if len(entries) > 1 and (where.is_file() or flags.get("module")):
        raise UserError(
            f"{config}: it has several targets; omit the script, or choose one with --target NAME"
        )
    found = [_one(path, flags, config, entry, unknown_rule, held) for entry in entries]
    policy = found[0].policy
    policy = replace(policy, remarks=(*remarks, *policy.remarks))
    return [replace(found[0], policy=policy), *found[1:]]


def _one(
    path: Path | None,
    flags: Mapping[str, Any],
    config: Path | None,
    entry: Entry,
    unknown_rule: CheckName,
    held: BasePolicy | None,
) -> Target:
    """The target of one entry of the configuration."""
    where = path or Path()
    base = where.parent if not where.is_dir() else where if config is None else config.parent
    if "folder" in entry.values and where.is_dir():
        base /= entry.values["folder"]
        if not base.is_dir():
            raise UserError(f"{config}: target {entry.name}: {base}: no such folder")
        entry = entry.over(only_in(base, unknown_rule))
    if held is None:
        policy = entry.policy
    else:
        entry, remarks = held.bounded(entry, config)
        policy = replace(entry.policy, remarks=remarks, checkouts=held.checkouts)
    values = {**entry.values, **{key: value for key, value in flags.items() if value is not None}}
    script = _script(where, base, values.pop("script", None), str(values.get("module", "")))
    parse(script)  # whether it is Python; what is verified is read later, by source/project.py
    cwd = base if where.is_dir() else Path.cwd()
    target = _build(script.resolve(), values, cwd.resolve())
    # what is wrong with them is known before anything runs
    for words in (target.save_args, target.resume_args, target.single_args, target.reshard_args):
        applied((*target.args, *words), target.cwd, "", Path())
    command = _command(path, flags, config, entry.name)
    target = replace(
        target, reference=_reference(target, cwd), prepare=_other("prepare", target.prepare, cwd)
    )
    if "require" in flags and flags["require"] is not None:
        parts = named(flags["require"])
        policy = replace(policy, require=tuple(dict.fromkeys((*policy.require, *parts))))
    return replace(target, name=entry.name, policy=policy, command=command)


def _script(where: Path, base: Path, own: str | None, module: str) -> Path:
    """The file of the module; of a folder its own script, or `train.py`; or what was given."""
    if module and not where.is_dir():
        raise UserError(f"-m {module}: give a module or a script, not both")
    if module:
        return modules.find(module, base)
    if not where.is_dir():
        return where
    script = base / (own or "train.py")
    if not script.is_file():
        raise UserError(
            f"{script}: no such file (a folder is verified through its {CONFIG} or its train.py)"
        )
    return script


def _reference(target: Target, base: Path) -> tuple[str, ...]:
    if not target.reference:
        return ()
    words = _other("reference", target.reference, base)
    parse(script := base / target.reference[0])
    if script.resolve() == target.script:
        raise UserError(
            f"reference: {script} is the script that is verified: name the one that it was"
            " converted from"
        )
    return words


def _other(key: str, words: tuple[str, ...], base: Path) -> tuple[str, ...]:
    """Another script and its arguments, with its whole path.

    Raises UserError if it is not there.
    """
    if not words:
        return ()
    script = base / words[0]
    if not script.is_file():
        raise UserError(f"{key}: {script}: no such file (first the script, then its arguments)")
    return (str(script.resolve()), *words[1:])


def _command(
    path: Path | None, flags: Mapping[str, Any], config: Path | None, name: str
) -> tuple[str, ...]:
    """The command line that verifies this target again."""
    words = ["fsdp2", "verify", *([str(path)] if path is not None else [])]
    if config is not None and config not in [
        (path or Path()) / known for known in (CONFIG, PYPROJECT)
    ]:
        words += ["--config", str(config)]
    words += ["--target", name] if name else []
    given = {key: value for key, value in flags.items() if value is not None}
    own = given.pop("args", [])
    for key, value in [
        (k, one) for k, v in given.items() for one in (v if k in ("watch", "allow_writes") else [v])
    ]:
        option, text = "-m" if key == "module" else "--" + key.replace("_", "-"), str(value)
        words += [option] if value is True else valued(option, text)
    return (*words, *(["--", *_words("args", own)] if own else []))


def _build(script: Path, values: dict[str, Any], cwd: Path) -> Target:
    ready = {key: _READ[key](key, values[key]) for key in _READ if key in values}
    if ready.get("oversubscribe") and (
        ready.get("device") != "cuda" or ready.get("launcher", "fork") != "fork"
    ):
        raise UserError(
            "oversubscribe: several ranks on one GPU need `--device cuda` and the launcher `fork`"
        )
    if ready.get("quick") and ready.get("thorough"):
        raise UserError("quick and thorough exclude each other")
    nproc = ready.get("nproc", Target.nproc)
    if "reshard_to" in values:
        ready["sizes_chosen"] = True
        given = values["reshard_to"]
        sizes = given if isinstance(given, list | tuple) else str(given).split(",")
        ready["reshard_to"] = tuple(
            _whole("reshard_to", size, 1) for size in sizes if str(size).strip()
        )
    elif ready.get("resume_args"):
        ready["reshard_to"] = tuple(n for n in (1, 2 * nproc) if n != nproc)
    if "root" in values:
        ready["root"] = _folder(cwd, values["root"], script)
    given = values.get("allow_writes", ())
    ready["allow_writes"] = tuple(
        _existing(cwd, path) for path in ([given] if isinstance(given, str) else given)
    )
    given = values.get("watch", ())
    ready["watch"] = tuple(watched(text) for text in ([given] if isinstance(given, str) else given))
    return Target(script=script, cwd=cwd, module=str(values.get("module", "")), **ready)


def _folder(cwd: Path, value: Any, script: Path) -> Path:
    folder = (cwd / str(value)).resolve()
    if not folder.is_dir() or not script.is_relative_to(folder):
        raise UserError(f"root: {value}: not a folder that holds {script}")
    return folder


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
        number = float(str(value).removesuffix("s"))
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


def _device(key: str, value: Any) -> Any:
    if value not in DEVICES:
        raise UserError(f"{key}: expected one of {', '.join(DEVICES)}, found {value!r}")
    return value


def _launcher(key: str, value: Any) -> str:
    if wrong := problem(str(value), os.environ):
        raise UserError(f"{key}: {wrong}")
    return str(value)


def _isolation(key: str, value: Any) -> str:
    if value not in ISOLATIONS:
        raise UserError(f"{key}: expected one of {', '.join(ISOLATIONS)}, found {value!r}")
    return str(value)


def _existing(cwd: Path, value: Any) -> Path:
    """A path to which runs may write."""
    if not os.path.lexists(path := cwd / str(value)):
        raise UserError(f"allow_writes: {path}: no such file or folder; make it first")
    return path.resolve()


def _truth(key: str, value: Any) -> bool:
    return str(value).lower() == "true"


# How the value of a key is read.
_READ: dict[str, Callable[[str, Any], Any]] = {
    "nproc": lambda key, value: _whole(key, value, 1),
    "steps": lambda key, value: 0 if value == "auto" else _whole(key, value, 2),
    "windows": lambda key, value: windows(value),
    **dict.fromkeys(("timeout", "budget"), _positive),
    "device": _device,
    "launcher": _launcher,
    "isolation": _isolation,
    **dict.fromkeys(("oversubscribe", "thorough", "quick"), _truth),
    **dict.fromkeys(("args", "prepare", *WORDS), _words),
}
