"""`look`: all hits of the detectors in one script and what it imports from its own folder, less what is suppressed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from ..finding import Hit
from .detectors import DETECTORS
from .follow import follow
from .project import Module, Project
from .suppress import Suppression, read


class Seen:
    """`hits` in the order of their lines; `hidden` are those that a suppression with a reason covers."""

    def __init__(self, hits: list[Hit], hidden: list[tuple[Hit, Suppression]], suppressions: list[Suppression]) -> None:
        self.hits, self.hidden, self.suppressions = hits, hidden, suppressions

    def by_rule(self) -> dict[str, tuple[Hit, ...]]:
        """The hits of each rule; those that are suppressed come last."""
        found: dict[str, tuple[Hit, ...]] = {}
        for hit in [*self.hits, *(hit for hit, _ in self.hidden)]:
            found[hit.rule] = (*found.get(hit.rule, ()), hit)
        return found


def look(
    scripts: Iterable[Path], only: Collection[str] | None = None, parsed: dict[Path, Module | None] | None = None
) -> Seen:
    """What the detectors see, each fault once. `only`: the rules that are looked for; `parsed`: files that are read already."""
    parsed = {} if parsed is None else parsed
    found: dict[tuple[str, str, int], Hit] = {}
    modules: dict[Path, Module] = {}
    for script in scripts:
        project = Project(script, parsed)
        for trace in follow(project):
            if not trace.distributed:
                continue
            for rule, detectors in DETECTORS.items():
                if only is None or rule in only:
                    for hit in (hit for detector in detectors for hit in detector(trace)):
                        found.setdefault((rule, hit.location["file"], hit.location["line"]), hit)
        modules |= {module.path: module for module in project.modules}
    suppressions = [s for module in modules.values() for s in read(module)]
    hits: list[Hit] = []
    hidden: list[tuple[Hit, Suppression]] = []
    for hit in sorted(found.values(), key=lambda h: (h.location["file"], h.location["line"], h.rule)):
        cover = next((s for s in suppressions if s.covers(hit.rule, hit.location)), None)
        if cover is None:
            hits.append(hit)
        else:
            cover.used.add(hit.rule)
            hidden.append((hit, cover))
    return Seen(hits, hidden, suppressions)
