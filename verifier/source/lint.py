"""`look`: all hits of the detectors in scripts and in what they import, without those that are
suppressed, and the coverage.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config.policy import Checkouts
from ..finding import Hit, Suppression
from .coverage import Coverage, Missed, merged
from .entry_points import follow
from .follow import Follower
from .project import Files, Module, Project
from .registry import DETECTORS
from .suppress import covering, held_against, read

_BODIES = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Seen:
    """`hits` in the order of their lines; `hidden` are those that a suppression with a reason
    covers.
    """

    hits: tuple[Hit, ...]
    hidden: tuple[tuple[Hit, Suppression], ...]
    suppressions: tuple[Suppression, ...]
    coverage: Coverage

    def by_rule(self) -> dict[str, tuple[Hit, ...]]:
        """The hits of each rule; those that are suppressed come last."""
        found: dict[str, tuple[Hit, ...]] = {}
        for hit in [*self.hits, *(hit for hit, _ in self.hidden)]:
            found[hit.rule] = (*found.get(hit.rule, ()), hit)
        return found


def look(
    scripts: Iterable[Path],
    only: Collection[str] | None = None,
    files: Files | None = None,
    shown: bool = False,
    checkouts: Checkouts | None = None,
) -> Seen:
    """What the detectors see, each fault once.

    `only`: the rules that are looked for; `files`: those that were already read; `shown`: a
    run has shown that their training is distributed, so that every function is followed to its
    end; `checkouts`: where the base branch lies, whose suppressions alone count.
    """
    files = Files() if files is None else files
    wanted = {rule: found for rule, found in DETECTORS.items() if only is None or rule in only}
    found: dict[tuple[str, str, int], Hit] = {}
    modules: dict[Path, Module] = {}
    missed: list[tuple[ast.AST, Missed]] = []
    followed: set[ast.AST] = set()
    trained: dict[Path, bool] = {}
    for script in scripts:
        project = Project(script, files, lazy=script in modules)
        traces = follow(project, Follower if shown else None, followed if project.lazy else ())
        trained[script] = any(flow.distributed for flow in traces) and any(
            flow.training for flow in traces
        )
        for flow in traces:
            missed += flow.missed.items()
            followed |= flow.followed
            for rule, detector in wanted.items() if shown or flow.distributed else ():
                for hit in detector(flow):
                    found.setdefault((rule, hit.location.file, hit.location.line), hit)
        modules |= {module.path: module for module in project.modules}
        followed |= {module.tree for module in project.modules if module.state}
    suppressions = tuple(s for module in modules.values() for s in read(module))
    if checkouts is not None:
        by_file = {str(path): module for path, module in modules.items()}
        suppressions = tuple(held_against(suppressions, by_file, checkouts))
    hits = sorted(found.values(), key=lambda h: (h.location.file, h.location.line, h.rule))
    covers = [(hit, covering(suppressions, hit.rule, hit.location)) for hit in hits]
    visible = tuple(hit for hit, cover in covers if cover is None)
    hidden = tuple((hit, cover) for hit, cover in covers if cover is not None)
    functions = sum(isinstance(node, _BODIES) for node in followed)
    untrained = tuple(path for path, trains in trained.items() if not trains)
    coverage = Coverage(tuple(trained), functions, merged(missed, followed), untrained)
    return Seen(visible, hidden, suppressions, coverage)
