"""What the configuration of a base branch leaves of a pull request's.

A pull request can tighten, not loosen. TIGHTER is the one table of what that means, key by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..finding import Remark
from ..tolerances import LEAST
from ..trace.events import Place
from .policy import Checkouts, Skip, Widening
from .verify_file import NAME, WHAT, CheckName, Entry, config_in, only_in, read_all

# (the pull request's value, the base branch's) to the one that holds; None: the key is not written
Tighter = Callable[[Any, Any], Any]


def _own(own: Any, base: Any) -> Any:
    return own


def _base(own: Any, base: Any) -> Any:
    return base


def _not_left_out(own: Any, base: Any) -> Any:
    return own or base


def _most(default: float) -> Tighter:
    def most(own: float | None, base: float | None) -> float:
        return max(own or default, base or default)

    return most


def _longest(own: float | None, base: float | None) -> float | None:
    return None if own is None or base is None else max(own, base)


def _steps(own: int | str | None, base: int | str | None) -> int | str:
    """`auto` compares five steps at least, and more where the script suggests it."""
    found = [value for value in (own, base) if isinstance(value, int)]
    most = max(found, default=0)
    return most if len(found) == 2 or (most > LEAST and base == most) else "auto"


def _all_of(own: Any, base: Any) -> list[Any]:
    return list(dict.fromkeys((*_listed(own), *_listed(base))))


def _all_of_both(own: Any, base: Any) -> list[Any] | None:
    """Of keys without which everything is meant."""
    return None if own is None or base is None else _all_of(own, base)


def _common(own: Any, base: Any) -> list[Any]:
    return [one for one in _listed(own) if one in _listed(base)]


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, str) else value or ()


def _skips(own: Sequence[Skip] | None, base: Sequence[Skip] | None) -> list[Skip]:
    """Those of both, to the earlier day."""
    allowed = {skip.rule: skip for skip in base or ()}
    both = [(skip, allowed[skip.rule]) for skip in own or () if skip.rule in allowed]
    return [
        skip if skip.until <= other.until else replace(skip, until=other.until, over=other.over)
        for skip, other in both
    ]


def _widenings(
    own: dict[str, Widening] | None, base: dict[str, Widening] | None
) -> dict[str, Widening]:
    """Those of both, by the smaller factor."""
    own, base = own or {}, base or {}
    return {
        rule: min(own[rule], base[rule], key=lambda one: one.times) for rule in own if rule in base
    }


TIGHTER: dict[str, Tighter] = {
    "skip": _skips,
    "tolerances": _widenings,
    "required": _all_of_both,
    "reshard_to": _all_of_both,
    **dict.fromkeys(("require", "watch"), _all_of),
    "steps": _steps,
    # other windows are neither more nor fewer; `none` is the least
    "windows": lambda own, base: own if base == "none" else base,
    "nproc": _most(2),
    "timeout": _most(300.0),
    "budget": _longest,
    "thorough": lambda own, base: own or base,
    "quick": lambda own, base: own and base,
    # What runs has no order: it may change, and the change is said.
    **dict.fromkeys(("args", *WHAT, "root"), _own),
    **dict.fromkeys(
        ("save_args", "resume_args", "single_args", "reshard_args", "reference", "prepare"),
        _not_left_out,
    ),
    # Where it runs, and what it may change there: the base branch decides.
    **dict.fromkeys(("device", "launcher", "isolation", "oversubscribe"), _base),
    "allow_writes": _common,
}


@dataclass(frozen=True)
class BasePolicy:
    """The configuration of the base branch: `shared` holds for targets that it does not name."""

    checkouts: Checkouts
    file: Path | None  # None: it has none
    shared: Entry
    targets: tuple[Entry, ...]
    unknown_rule: CheckName

    def missing(self, own: Sequence[Entry], folder: Path) -> tuple[list[Entry], list[Remark]]:
        """The targets that a pull request leaves out and whose code is still there, and what to
        say of all that it leaves out.
        """
        met = [self._same(one) for one in own]
        left = [base for base in self._known if not any(base is one for one in met)]
        there = [base for base in left if _is_there(base, folder)]
        said = [
            Remark(
                f"target {_title(base)} is left out here; "
                + ("it is verified as on the base branch" if base in there else "its code is gone")
            )
            for base in left
        ]
        return there, said

    def bounded(self, own: Entry, config: Path | None) -> tuple[Entry, tuple[Remark, ...]]:
        """What holds of a target of the pull request, and each difference."""
        found = self._same(own)
        base = self._whole(found) if found is not None else self._of_all()
        values: dict[str, Any] = {}
        texts: list[str] = []
        if found is None:
            what = f"target {_title(own)} is" if self.file is not None else "a configuration is"
            texts.append(f"{what} not on the base branch")
        for key in dict.fromkeys((*own.values, *base.values)):
            mine, theirs = own.values.get(key), base.values.get(key)
            held = mine if mine == theirs else TIGHTER[key](mine, theirs)
            if held is not None:
                values[key] = held
            # a new target has keys of its own: only what is refused is worth a line
            if found is not None or _shown(held) != _shown(mine):
                texts += _difference(key, mine, theirs, held)
        place = _top(config) if config is not None else None
        return Entry(own.name, values), tuple(Remark(text, place) for text in texts)

    @property
    def _known(self) -> tuple[Entry, ...]:
        return self.targets or ((self.shared,) if self.file is not None else ())

    def _same(self, own: Entry) -> Entry | None:
        """Its target of the same name, else of the same script."""
        named = (base for base in self._known if base.name and base.name == own.name)
        return next(named, None) or next(
            (base for base in self._known if _code(base) == _code(own)), None
        )

    def _of_all(self) -> Entry:
        return Entry("", {k: v for k, v in self.shared.values.items() if k not in WHAT})

    def _whole(self, found: Entry) -> Entry:
        """A target with what the configuration in its own folder says."""
        if self.file is None or "folder" not in found.values:
            return found
        folder = self.file.parent / found.values["folder"]
        return found.over(only_in(folder, self.unknown_rule)) if folder.is_dir() else found


def base_policy(
    checkouts: Checkouts, target: Path, config: Path | None, unknown_rule: CheckName
) -> BasePolicy:
    """The policy of a base branch for the pull request's `target` and `config`. Raises UserError
    if its configuration cannot be read.
    """
    file = None
    # a script that is named is verified without any configuration: there is nothing to hold
    if config is not None or target.is_dir():
        file = checkouts.config or checkouts.before(config or target / NAME)
    if file is not None and not file.is_file():
        file = config_in(file.parent) if file.parent.is_dir() else None
    shared, targets = read_all(file, unknown_rule=unknown_rule) if file else (Entry(), [])
    return BasePolicy(checkouts, file, shared, tuple(targets), unknown_rule)


def _code(entry: Entry) -> tuple[Any, ...]:
    found = tuple(entry.values.get(key) for key in WHAT)
    return found if any(found) else ("train.py", None, None)


def _title(entry: Entry) -> str:
    return entry.name or str(next(filter(None, _code(entry))))


def _is_there(entry: Entry, folder: Path) -> bool:
    script, module, inner = _code(entry)
    return bool(module) or (folder / (inner or "") / (script or "")).exists()


def _top(config: Path) -> Place:
    return Place(file=str(config.absolute()), line=1, function="", code="")


def _difference(key: str, own: Any, base: Any, held: Any) -> list[str]:
    """What to say where a pull request has another value."""
    here, before, used = map(_shown, (own, base, held))
    if here == before:
        return []
    which = {here: "as here", before: "as on the base branch"}.get(used, used)
    return [f"{key}: {before} on the base branch, {here} here; used: {which}"]


def _shown(value: Any) -> str:
    if isinstance(value, Skip):
        return f"{value.rule} until {value.until}"
    if isinstance(value, dict):
        value = [f"{rule} {wider.times:g} times" for rule, wider in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(_shown, value))
    return "not set" if value in (None, "") else str(value)
