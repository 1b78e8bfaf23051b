"""`migrate`: what a script that is not FSDP2 yet must change, in the order of work.

Reads sources; edits and runs nothing.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from .entry_points import follow
from .events import SHARD, Event, Flow
from .files import files_of
from .flow_queries import trains
from .follow import Follower
from .migration_loop import FINDERS as LOOP
from .migration_model import FINDERS as MODEL
from .migration_scene import DATA_PARALLEL, DDP, FSDP1, MODULE, WRAPPERS, Scene
from .project import Files, Project
from .values import Value

STEPS = ("device", "model", "optimizer", "training step", "data", "checkpoint")
# What a library's loop is made of.
_LIBRARIES = {
    "accelerate": ("accelerate", ("Accelerator",)),
    "transformers": ("transformers", ("Trainer", "Seq2SeqTrainer")),
    "lightning": ("lightning", ("Trainer", "Fabric")),
    "deepspeed": ("deepspeed", ("initialize",)),
}


@dataclass
class Item:
    """One construct that a migration changes, and where it stands.

    `action`: replace, drop, move, add, or check.
    """

    construct: str
    step: str
    action: str
    fsdp2: str
    mind: str
    rules: tuple[str, ...]
    reference: str
    places: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Migration:
    """The answer: what kinds of script were seen, and the changes in the order of work."""

    paths: tuple[str, ...]
    files: int
    kinds: tuple[str, ...]
    items: tuple[Item, ...]


class _Follower(Follower):
    """Follows both branches of every condition, since dead code changes too, and reports every
    `.module` of a wrapper.
    """

    def decided(self, node: ast.If, test: Value) -> bool:
        return test.kind == "const" and any(
            getattr(part, "id", "") == "__name__" for part in ast.walk(node.test)
        )

    def attribute(self, base: Value, attr: str, node: Any) -> Value:
        if attr == "module" and base.kind == "made" and base.name in WRAPPERS:
            self.emit(MODULE, node, on=base)
            base.attrs.setdefault(attr, Value("item", MODULE, owner=base, node=node))
        return super().attribute(base, attr, node)


def migrate(paths: Sequence[Path]) -> Migration:
    """What the scripts at these paths must change. Raises UserError."""
    scripts = files_of(paths)
    rows = table()
    kinds: dict[str, None] = {}
    items: dict[tuple[str, ...], Item] = {}
    for kind, name, event, values in constructs(scripts):
        kinds |= {kind: None}
        if event is not None:
            place = _place(event, int(values.pop("line", event.line)))
            item = items.setdefault(
                (name, kind, *values.values()), _item(rows[name], name, kind, values)
            )
            if place not in item.places:
                item.places.append(place)
    for item in items.values():
        item.places.sort(key=lambda place: (place["file"], place["line"]))
    order = list(rows)
    done = sorted(
        items.items(), key=lambda pair: (STEPS.index(pair[1].step), order.index(pair[0][0]))
    )
    return Migration(
        tuple(map(str, paths)), len(scripts), tuple(kinds), tuple(item for _, item in done)
    )


def table() -> dict[str, dict[str, Any]]:
    """The rows of migration.json: a construct, and what takes its place."""
    import json

    found: dict[str, dict[str, Any]] = json.loads(
        pkgutil.get_data(__name__, "migration.json") or ""
    )
    return found


def constructs(scripts: Sequence[Path]) -> Iterator[tuple[str, str, Event | None, dict[str, str]]]:
    """(kind of script, row of the table, event, values of its $names) of each construct; first of
    each kind one without an event.
    """
    for traces in _entries(scripts, Files(scripts)):
        kind, partly = kind_of(traces)
        if kind:
            yield kind, "", None, {}
        for scene in (Scene(flow, kind) for flow in traces if kind and kind != "fsdp2"):
            for finder in MODEL if partly else (*MODEL, *LOOP):
                for name, event, values in finder(scene):
                    yield kind, name, event, values


def _entries(scripts: Sequence[Path], files: Files) -> list[list[Flow]]:
    """The traces of each script; a file that another one imports is followed from there."""
    found: dict[Path, list[Flow]] = {}
    imported: set[Path] = set()
    for script in scripts:
        project = Project(script, files)
        found[script] = follow(project, _Follower)
        imported |= {module.path for module in project.modules if module is not project.script}
    return [found[script] for script in scripts if script not in imported] or list(found.values())


def kind_of(traces: Sequence[Flow]) -> tuple[str, bool]:
    """(what a script is, by what it calls; empty if it trains nothing, whether it is FSDP2 in
    part).
    """
    names = {name for flow in traces for name in flow.by_op}
    partly = SHARD in names
    if FSDP1 in names or {"fsdp.state_dict_type", "fsdp.optim_state_dict"} & names:
        return "fsdp1", partly
    if names & set(DDP):
        return "ddp", partly
    if partly:
        return "fsdp2", True
    for kind, (package, made) in _LIBRARIES.items():
        if any(
            package in name.partition(".")[0] and name.rpartition(".")[2] in made for name in names
        ):
            return kind, False
    if names & set(DATA_PARALLEL):
        return "dataparallel", False
    return ("single" if any(trains(flow) for flow in traces) else ""), False


def _item(row: dict[str, Any], name: str, kind: str, values: dict[str, str]) -> Item:
    section = row.get("section") or (
        "single" if kind == "dataparallel" else kind
    )  # the kinds are headings there
    fsdp2, mind = (Template(row.get(key, "")).substitute(values) for key in ("fsdp2", "mind"))
    reference = f"references/converting.md#{section}"
    return Item(
        name, row["step"], row["action"], fsdp2, mind, tuple(row.get("rules", ())), reference
    )


def _place(event: Event, line: int) -> dict[str, Any]:
    module = event.module
    return {
        "file": str(module.path),
        "line": line,
        "function": event.function,
        "code": module.code(line),
    }
