"""The content of `verify.yaml`, or of `[tool.fsdp2]` in pyproject.toml: the targets with their
keys, and the policy of the team.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..trace.events import Place
from .policy import Policy, Skip, Widening
from .reading import files, toml
from .reading.document import Document
from .reading.problems import KeyPath, NotValid, dotted
from .reading.schema import Form
from .reading.validation import Fault

NAME = "verify.yaml"
PYPROJECT = "pyproject.toml"
TABLE = ("tool", "fsdp2")
FORM = Form(__name__, "verify.schema.json", "the configuration")
NOUN = "a configuration"
WORDS = ("args", "save_args", "resume_args", "single_args", "reshard_args", "reference", "prepare")
WHAT = ("script", "module", "folder")  # what names the code of a target
LONGEST = 366  # days of a skip
CheckName = Callable[
    [str], str
]  # what is wrong with the name of a rule or family; "" if nothing is


def any_name(name: str) -> str:
    """Accept any name: for callers that do not know the rules."""
    return ""


@dataclass(frozen=True)
class Entry:
    """One target of a configuration: its keys, ready for use, and the folder with a configuration
    of its own.
    """

    name: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """What the team has decided about it. Raises UserError where that contradicts itself."""
        keys = ("skip", "required", "require")
        skips, required, require = (tuple(self.values.get(key, ())) for key in keys)
        return Policy(skips, required, require, self.values.get("tolerances", {}))

    def over(self, other: Entry) -> Entry:
        """This entry, with the keys of the other where it has none."""
        return Entry(self.name, {**other.values, **self.values})


def config_in(folder: Path) -> Path | None:
    """The configuration of a folder. Raises UserError if it has two."""
    own, project = folder / NAME, folder / PYPROJECT
    table = project.is_file() and _pyproject(project) is not None
    if own.is_file() and table:
        raise UserError(
            f"{project}: [{'.'.join(TABLE)}] and {own} both configure the verification; keep one of"
            " them"
        )
    if own.exists() and not own.is_dir():
        return own  # what is no regular file is refused where it is read
    return project if table else None


def only_in(folder: Path, unknown_rule: CheckName) -> Entry:
    """What a folder of its own says; it has one target."""
    config = config_in(folder)
    entries = read(config, unknown_rule=unknown_rule) if config is not None else [Entry()]
    if len(entries) > 1 or "folder" in entries[0].values:
        raise UserError(
            f"{config}: it has targets of its own; name their scripts in the outer configuration"
        )
    return entries[0]


def read(
    path: Path, today: datetime.date | None = None, unknown_rule: CheckName = any_name
) -> list[Entry]:
    """The targets in this file, in order; one without a name if it has no `targets`.

    Raises NotValid with all that is wrong.
    """
    shared, targets = read_all(path, today, unknown_rule)
    return targets or [shared]


def read_all(
    path: Path, today: datetime.date | None = None, unknown_rule: CheckName = any_name
) -> tuple[Entry, list[Entry]]:
    """What holds for all targets of this file, and the targets."""
    toml_file = path.suffix == ".toml"
    found = (
        _pyproject(path) if toml_file else files.parsed(files.read_bytes(path, NOUN), path, NOUN)
    )
    if found is None:
        raise UserError(f"{path}: no table [{'.'.join(TABLE)}]")
    if () not in found.bad and found.data is not None:
        files.validate(found, FORM)
        files.note(found, list(_faults(found, today or datetime.date.today(), unknown_rule)))
    if found.problems:
        raise NotValid(found.problems)
    data = found.data or {}
    common = {key: value for key, value in data.items() if key != "targets"}
    shared = Entry("", _ready(found, common, (), today))
    return shared, [
        Entry(target.pop("name"), _ready(found, target, ("targets", number), today)).over(shared)
        for number, target in enumerate(data.get("targets", ()))
    ]


def _pyproject(path: Path) -> Document | None:
    data = files.read_bytes(path, NOUN, 2**20)
    if TABLE[1].encode() not in data:
        return None
    text, source = files.decoded(data, path, NOUN, 2**20)
    return toml.read(text, source, TABLE)


def _ready(
    found: Document, values: dict[str, Any], at: KeyPath, today: datetime.date | None
) -> dict[str, Any]:
    """The keys of one target, skips and tolerances as the policy has them."""
    values = dict(values)
    if "tolerances" in values:
        values["tolerances"] = {
            rule: Widening(**wider) for rule, wider in values["tolerances"].items()
        }
    if "skip" in values:
        day = today or datetime.date.today()
        skips = []
        for number, skip in enumerate(values["skip"]):
            place = found.place((*at, "skip", number))
            code = found.source.lines[place.line - 1].strip()
            file = str(Path(found.source.name).absolute())
            location = Place(file=file, line=place.line, function="skip", code=code)
            over = datetime.date.fromisoformat(skip["until"]) < day
            skips.append(Skip(**skip, over=over, location=location, column=place.column))
        values["skip"] = skips
    return values


def _faults(found: Document, today: datetime.date, unknown_rule: CheckName) -> Iterator[Fault]:
    """Faults that the schema cannot express, in the parts that it accepts."""
    data = found.data
    if not isinstance(data, dict):
        return
    yield from _of_keys(found, data, (), today, unknown_rule)
    targets = data.get("targets")
    if not isinstance(targets, list):
        return
    for key in (key for key in WHAT if key in data):
        yield Fault(
            (key,), f"{key} beside targets: write it in one of the targets", (key,), on_key=True
        )
    names: list[Any] = []
    for number, target in enumerate(targets):
        at: KeyPath = ("targets", number)
        if isinstance(target, dict):
            name = target.get("name")
            if name in names:
                yield Fault((*at, "name"), f"a second target with the name {name!r}", (*at, "name"))
            names.append(name)
            yield from _of_keys(found, target, at, today, unknown_rule)


def _of_keys(
    found: Document,
    keys: dict[str, Any],
    at: KeyPath,
    today: datetime.date,
    unknown_rule: CheckName,
) -> Iterator[Fault]:
    if "script" in keys and "module" in keys:
        yield Fault(
            (*at, "module"), "give `module` or `script`, not both", (*at, "module"), on_key=True
        )
    for key in WORDS:
        try:
            shlex.split(keys[key] if isinstance(keys.get(key), str) else "")
        except ValueError as error:
            yield Fault((*at, key), f"{key}: {str(error).lower()}", (*at, key))
    rules, skips = keys.get("required"), keys.get("skip")
    named = {
        (*at, "required", n): rule
        for n, rule in enumerate(rules if isinstance(rules, list) else ())
    }
    for number, skip in enumerate(skips if isinstance(skips, list) else ()):
        if isinstance(skip, dict):
            named[(*at, "skip", number, "rule")] = skip.get("rule")
            path: KeyPath = (*at, "skip", number, "until")
            if (
                found.trusted(path)
                and "until" in skip
                and (wrong := _no_day(skip["until"], today)) is not None
            ):
                yield Fault(path, f"{dotted(path)} {wrong}", path)
    for path, rule in named.items():
        if isinstance(rule, str) and found.trusted(path) and (wrong := unknown_rule(rule)):
            yield Fault(path, wrong, path)


def _no_day(text: str, today: datetime.date) -> str | None:
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        return f"is not a calendar date: {text}"
    if (day - today).days > LONGEST:
        return f"is more than a year away; at most {today + datetime.timedelta(LONGEST)}"
    return None
