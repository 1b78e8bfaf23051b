"""`look`: all hits of the detectors in scripts and in what they import, less what is suppressed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..finding import Hit
from .detectors import DETECTORS
from .follow import follow
from .project import Module, Project
from .suppress import Suppression, covering, read


@dataclass(frozen=True)
class Seen:
    """`hits` in the order of their lines; `hidden` are those that a suppression with a reason covers."""

    hits: tuple[Hit, ...]
    hidden: tuple[tuple[Hit, Suppression], ...]
    suppressions: tuple[Suppression, ...]

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
    suppressions = tuple(s for module in modules.values() for s in read(module))
    hits = sorted(found.values(), key=lambda h: (h.location["file"], h.location["line"], h.rule))
    covers = [(hit, covering(suppressions, hit.rule, hit.location)) for hit in hits]
    return Seen(
        tuple(hit for hit, cover in covers if cover is None),
        tuple((hit, cover) for hit, cover in covers if cover is not None),
        suppressions,
    )
