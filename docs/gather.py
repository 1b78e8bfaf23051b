"""A hook of mkdocs: the pages are the texts of the repository, at their own paths, so that links
between them stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
TEXTS = (
    "README.md",
    "SKILL.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "references/*.md",
    "examples/*.yaml",
)


def on_files(files: Files, config: Any) -> Files:
    """Add the texts, and the examples that they link to."""
    for pattern in TEXTS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(
                File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
            )
    return files
