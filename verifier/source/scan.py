"""Scans the sources before anything runs: what they can do that a run may not show, such as saving
a checkpoint.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config.policy import Checkouts
from ..evidence import LOADS, Evidence, Sources
from ..finding import Hit, Suppression
from ..trace.events import Checkpoint, Micro, Place, Step
from ..trace.origin import is_user
from .events import hit_at
from .lint import look
from .project import Files, Module, canonical
from .sources import project_files, with_named_files

_SAVES = (
    "torch.save",
    "dcp.save",
    "dcp.async_save",
    "dcp.save_state_dict",
    "dcp.async_save_state_dict",
)
# Methods of managers and trainers that save; a bare `save` counts only with a state dict
# (`image.save` does not) (test_what_counts_as_saving).
_SAVING_METHODS = (
    "async_save",
    "save_checkpoint",
    "save_model",
    "save_pretrained",
    "save_state",
    "save_state_dict",
)
_LOADS = (
    "load",
    "load_file",
    "safe_open",
    "from_pretrained",
    "load_checkpoint",
    "load_sharded_checkpoint",
    "resume",
)
# A script without these words clips nothing: no run with huge gradients is made
# (test_what_touches_no_gradient_is_not_provoked).
_GRADIENT_WORDS = ("clip", "grad_norm", "total_norm")


@dataclass(frozen=True)
class Scan:
    """The files of the target's own code, what the detectors find in them, and what they can do."""

    sources: Sources = field(default_factory=Sources)
    hits: Mapping[str, tuple[Hit, ...]] = field(default_factory=dict)
    suppressions: tuple[Suppression, ...] = ()
    followed: str = ""  # from where the detectors have come to its training; "" if they have not
    saving: Place | None = None  # the first line that saves model or optimizer state
    exporting: Place | None = None  # the same, if what `torch.save` writes is an export
    loading: tuple[Place, ...] = ()  # the lines that load
    gradients: bool = False  # whether they touch gradients beside `backward` and `zero_grad`


def scan(script: Path, root: Path | None = None, checkouts: Checkouts | None = None) -> Scan:
    """Read the sources of a script; absolute imports are looked up below `root` first, where there
    is one. `checkouts`: see `look`.
    """
    files = Files()
    seen = look([script], files=files, checkouts=checkouts)
    project = project_files(script, root, files)
    parsed = [module for path in project if (module := files.module(path)) is not None]
    loading = tuple(place for module_ in parsed for place in _loading(module_))
    saving, exporting = (
        next((p for m in parsed for p in _saving(m, exports)), None) for exports in (False, True)
    )
    return Scan(
        files.sources(project),
        seen.by_rule(),
        seen.suppressions,
        followed="" if seen.coverage.without_training else "from the script on",
        saving=saving if loading else exporting,
        exporting=exporting,
        loading=loading,
        gradients=any(_touches_gradients(module_) for module_ in parsed),
    )


def with_sources(
    evidence: Evidence,
    script: Path,
    root: Path | None = None,
    checkouts: Checkouts | None = None,
) -> Evidence:
    """The evidence with what the sources show."""
    return replace(evidence, **vars(scan(script, root, checkouts)))


def with_training(evidence: Evidence, script: Path, checkouts: Checkouts | None = None) -> Evidence:
    """The evidence with what the train run shows of the sources: whether they can resume, and,
    where no call could be followed into them, what the files in which it trained hold.
    """
    train = evidence.train
    if train is None:
        return evidence
    loaded = {
        (r.at_line.file, r.at_line.line)
        for r in train.places(Checkpoint)
        if r.op in LOADS and r.at_line
    }
    others = {(line.file, line.line) for line in evidence.loading} - loaded
    # Every load of the sources was made in a run from scratch (pretrained weights): none is left
    # that could resume.
    if evidence.loading and not others:  # no other load could resume
        evidence = replace(evidence, saving=evidence.exporting)
    if evidence.followed:
        return evidence
    places = [
        r.at_line for r in (*train.places(Step), *train.places(Micro)) if r.at_line is not None
    ]
    lines = (line for place in places for line in (place, *place.through, *place.callers))
    trained = {Path(line.file) for line in lines if is_user(line.file)} - {script}
    scripts = [script, *sorted(file for file in trained if file.is_file())]
    files = Files.of(evidence.sources)
    seen = look(scripts, files=files, shown=True, checkouts=checkouts)
    loops = ", ".join(sorted({Path(place.file).name for place in places if place.library is None}))
    followed = (
        f"from where the run trained ({loops})"
        if loops
        else "where they lead to a library that trains"
    )
    return replace(
        evidence,
        hits=seen.by_rule(),
        suppressions=seen.suppressions,
        followed=followed if places else "",
    )


def with_texts(evidence: Evidence) -> Evidence:
    """The evidence with the source files that its runs name."""
    return replace(evidence, sources=with_named_files(evidence.sources, evidence.runs))


def is_distributed(script: Path) -> bool:
    """Whether a script, or what it imports from its own folder, uses torch.distributed."""
    files = Files()  # it is a reference: its files are not those of the script that is verified
    return any("distributed" in files.text(path) for path in project_files(script, files=files))


def _loading(module: Module) -> Iterator[Place]:
    """The lines of a file that load state: without any in any file, what `torch.save` writes is an
    export and no checkpoint.
    """
    for node in ast.walk(module.tree):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in _LOADS
        ):
            yield hit_at("", "", module, node.lineno, "").location


def _saving(module: Module, exports: bool) -> Iterator[Place]:
    """The lines of a file that save state; without those of `torch.save` where that `exports`."""
    names = _imported(module.tree)
    functions = [
        n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _saves(node, names):
            if exports and canonical(_dotted(node.func, names)) == "torch.save":
                continue
            inside = [
                f.name for f in functions if f.lineno <= node.lineno <= (f.end_lineno or f.lineno)
            ]
            yield hit_at("", "", module, node.lineno, inside[-1] if inside else "<module>").location


def _saves(call: ast.Call, names: dict[str, str]) -> bool:
    if canonical(_dotted(call.func, names)) in _SAVES:
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    given = [ast.unparse(value) for value in (*call.args, *(word.value for word in call.keywords))]
    saving = call.func.attr in _SAVING_METHODS
    return saving or (call.func.attr == "save" and any("state_dict" in text for text in given))


def _imported(tree: ast.Module) -> dict[str, str]:
    """{name in this file: the dotted name that it stands for}."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname: a.name for a in node.names if a.asname
            }  # without a new name, `import a.b` binds `a` itself
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """`dcp.save` as `torch.distributed.checkpoint.save`; "" for what is no chain of names."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value, names)):
        return f"{base}.{node.attr}"
    return ""


def _touches_gradients(module: Module) -> bool:
    for node in ast.walk(module.tree):
        name = (
            node.attr
            if isinstance(node, ast.Attribute)
            else node.arg
            if isinstance(node, ast.keyword)
            else ""
        )
        name = node.id if isinstance(node, ast.Name) else name or ""
        if (isinstance(node, ast.Attribute) and name == "grad") or any(
            word in name for word in _GRADIENT_WORDS
        ):
            return True
    return False
