"""Tasks: one folder each with task.yaml (the request, the runs, the checks, the edits) and start/
(what the agent is given).

    edits:                      `old` stands exactly once in `file` (without one: in the script)
      - file: model.py
        old: |
          ...
        new: |
          ...

An edit without `old` makes a new file. `share` names files of evals/shared that are given besides:
FILE, or {FILE: where it lies in the repository}.

The reference solution is edits of the start. Wrong solutions, and other right ones, are edits of
the solution, or of the start with `base: start`; each says `why`, and a wrong one which checks it
`fails`.
"""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

EVALS = Path(__file__).resolve().parents[1]
NEEDED = {"prompt", "expected", "runs", "oracle", "checks", "start", "solution", "wrong"}
KEYS = NEEDED | {"share", "script", "prepare", "start_says", "right"}
Edits = list[dict[str, str]]


@dataclass(frozen=True)
class Task:
    """One task that is graded."""

    name: str
    values: dict[str, Any]

    @property
    def folder(self) -> Path:
        return EVALS / "tasks" / self.name

    @property
    def script(self) -> str:
        return str(self.values.get("script", "train.py"))

    @property
    def wrong(self) -> dict[str, dict[str, Any]]:
        """Seeded wrong solutions."""
        return dict(self.values["wrong"])

    @property
    def right(self) -> dict[str, dict[str, Any]]:
        """Right solutions that go another way than the reference solution."""
        return dict(self.values.get("right", {}))

    @property
    def variants(self) -> list[str]:
        """All that `write` takes, the start first."""
        return [
            "start",
            "solution",
            *(f"right/{key}" for key in self.right),
            *(f"wrong/{key}" for key in self.wrong),
        ]

    @functools.cached_property
    def checks(self) -> list[tuple[str, dict[str, Any]]]:
        """(kind, parameters) of each check; `run` is always among the parameters."""
        result = []
        for entry in self.values["checks"]:
            ((kind, reported),) = entry.items()
            result.append(
                (kind, dict(reported) if isinstance(reported, dict) else {"run": reported})
            )
        return result

    @functools.cached_property
    def share(self) -> dict[str, Path]:
        """Files of evals/shared by their places in the repository."""
        result = {}
        for entry in self.values.get("share", []):
            for name, place in (entry if isinstance(entry, dict) else {entry: entry}).items():
                result[place] = EVALS / "shared" / name
        return result

    def files(self) -> list[Path]:
        """What the agent is given."""
        shared = list(self.share.values())
        own = [
            p
            for p in sorted((self.folder / "start").rglob("*"))
            if p.is_file() and "__pycache__" not in p.parts
        ]
        return [*own, *shared]

    def write(self, variant: str, into: Path) -> Path:
        """The start, the solution, or right/NAME or wrong/NAME, in the new folder `into`."""
        shutil.copytree(self.folder / "start", into, ignore=shutil.ignore_patterns("__pycache__"))
        for place, source in self.share.items():
            shutil.copy(source, into / place)
        kind, _, name = variant.partition("/")
        reported = {"right": self.right, "wrong": self.wrong}[kind][name] if name else {}
        if kind != "start" and reported.get("base") != "start":
            self.edit(into, self.values["solution"])
        self.edit(into, reported.get("edits", []))
        return into

    def write_oracle(self, into: Path) -> Path:
        """The script that gives the right answer in one process without FSDP, in the new folder
        `into`.
        """
        self.write("start", into)
        oracle = self.values["oracle"]
        self.edit(into, oracle.get("edits", []))
        if "file" in oracle:
            shutil.copy(self.folder / oracle["file"], into / self.script)
        return into

    def edit(self, folder: Path, edits: Edits) -> None:
        for edit in edits:
            file = folder / edit.get("file", self.script)
            if "old" not in edit:
                file.write_text(edit["new"], encoding="utf-8")
                continue
            text = file.read_text(encoding="utf-8")
            if text.count(edit["old"]) != 1:
                raise ValueError(
                    f"{self.name}: stands {text.count(edit['old'])} times in {file.name}:"
                    f" {edit['old']!r}"
                )
            file.write_text(text.replace(edit["old"], edit["new"]), encoding="utf-8")


def load(name: str) -> Task:
    """The task of that name."""
    path = EVALS / "tasks" / name / "task.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if odd := (set(values) - KEYS) | (NEEDED - set(values)):
        raise ValueError(f"{path}: keys that are unknown or missing: {sorted(odd)}")
    return Task(name, values)


def names() -> list[str]:
    """Every graded task."""
    return sorted(path.parent.name for path in (EVALS / "tasks").glob("*/task.yaml"))


def negatives() -> list[dict[str, str]]:
    """Requests on which the skill is not to trigger."""
    found: list[dict[str, str]] = yaml.safe_load(
        (EVALS / "negatives.yaml").read_text(encoding="utf-8")
    )
    return found
