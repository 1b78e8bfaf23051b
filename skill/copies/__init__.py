"""An installed copy: its files, where the modules of a package are sections of one source file, as
they stand in the repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .joined import HEADING, SOURCES, cache

__all__ = ["SOURCES", "cache", "join"]

FINDER = "skill/copies/joined.py"  # in a copy, with the version: __init__.py
FILES = (
    "skill/__main__.py",
    "verifier/__main__.py",
    "skill/recipe_base.yaml",
)  # what is started or read by its path
# Which source file holds what; the first that fits. Scanners and people stop at files that are too
# long: no code file has more than 200 kB.
_PARTS = {
    "rules_of_checkpoints.py": ("verifier/rules/checkpoint/",),
    "rules_of_state.py": ("verifier/rules/laws/",),
    "rules_of_the_model.py": tuple(
        f"verifier/rules/{name}/" for name in ("wrapping", "init", "mesh", "precision")
    ),
    "rules.py": ("verifier/rules/",),
    "probe_events_of_the_model.py": tuple(
        f"verifier/probe/events/{name}.py"
        for name in (
            "capacity",
            "groups",
            "layers",
            "lora_merges",
            "memory",
            "models",
            "precision",
            "recompute",
            "replaced",
            "restored_weights",
            "sharding",
            "ties",
            "uninitialised_memory",
            "wrapping",
        )
    ),
    "probe_events.py": ("verifier/probe/events/",),
    "probe_substitutes.py": ("verifier/probe/substitutes/", "verifier/probe/capacity/"),
    "probe.py": ("verifier/probe/",),
    "analysis_of_capacity.py": tuple(
        f"verifier/analysis/{name}.py" for name in ("capacity", "roofline", "settings_search")
    ),
    "analysis.py": ("verifier/analysis/",),
    "source_migration.py": ("verifier/source/migration",),
    "source.py": ("verifier/source/",),
    "report.py": ("verifier/report/", "verifier/integrations/"),
    "launch.py": ("verifier/launch/", "verifier/config/"),
    "isolation.py": ("verifier/isolation/",),
    "verifier.py": ("verifier/",),
    "spec.py": ("skill/spec/",),
    "commands.py": ("skill/cli/", "skill/convert/"),
    "skill.py": ("skill/",),
}
_DATA = "data.j2"  # templates, and the schemas beside the code
_ABOUT = (
    "# verified-fsdp2: files of {what} as they stand in its repository, one below the other;"
    " __init__.py reads them.\n"
)


def join(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a copy, from those of the pack: code, templates and schemas as sections of a few
    files in sources/.
    """
    parts: dict[str, list[bytes]] = {}
    found = {}
    for path, data in files.items():
        part = _part(path)
        if part is None:
            found[path] = data
            continue
        if not data.endswith(b"\n") or HEADING.search(data.decode()):
            raise ValueError(
                f"{path} cannot be a section: it must end with a newline, and hold no heading"
                " of one"
            )
        if path.endswith(".json"):
            data = re.sub(rb"\n +", b"\n", data)  # a fifth of these files is indentation
        parts.setdefault(part, []).append(f"# ==== {path}\n".encode() + data)
    version = next(
        line for line in found["__init__.py"].splitlines() if line.startswith(b"__version__ = ")
    )
    found["__init__.py"] = files[FINDER] + b"\n" + version + b"\n"
    for name, sections in parts.items():
        what = ", ".join(_PARTS.get(name, ("templates/", "schemas")))
        found[f"{SOURCES}/{name}"] = _ABOUT.format(what=what).encode() + b"".join(sections)
    return found


def _part(path: str) -> str | None:
    """The source file that a file of the pack goes to; None if it stays a file."""
    if path.startswith("templates/"):
        return _DATA
    if path in FILES or not path.startswith(("skill/", "verifier/")):
        return None
    if not path.endswith(".py"):
        return _DATA
    return next(name for name, start in _PARTS.items() if path.startswith(start))
