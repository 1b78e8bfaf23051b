"""SKILL.md is valid by the reference validator, within its size, and the shipped code is free of what scanners refuse."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = [p for folder in ("skill", "verifier") for p in sorted((ROOT / folder).rglob("*.py"))]


def test_the_reference_validator_accepts_it(tmp_path: Path) -> None:
    folder = tmp_path / "verified-fsdp2"
    folder.mkdir()
    shutil.copy(ROOT / "SKILL.md", folder)
    validator = Path(sys.executable).parent / "agentskills"  # the command of the distribution skills-ref
    done = subprocess.run([validator, "validate", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_size() -> None:
    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(re.findall(r"\w+|[^\w\s]", text)) <= 3000  # an upper estimate of tokens for English and code


def test_every_link_of_the_skill_leads_to_a_file() -> None:
    for document in [ROOT / "SKILL.md", ROOT / "README.md", *(ROOT / "references").glob("*.md")]:
        text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (document.parent / link).is_file(), f"{document.name}: {link}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_scanner_clean(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= 400
    for pattern in (
        r"\beval\s*\(",
        r"\bexec\s*\(",
        r"(?<![.\w])compile\(",
        r"shell=True",
        r"environ\.copy\(",
        r"\bpickle\b",
        r"https?://",
    ):
        assert not re.search(pattern, text), pattern
    for call in re.findall(r"subprocess\.\w+\([^)]*\)", text, re.S):
        assert 'f"' not in call


@pytest.mark.parametrize(
    "path", sorted((ROOT / "skill").rglob("*.py")) + sorted((ROOT / "verifier").rglob("*.py")), ids=str
)
def test_dependency_direction(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) verified_fsdp2", text, re.M), "inside the package imports are relative"
    if path.is_relative_to(ROOT / "verifier"):
        assert not re.search(r"from \.+skill", text), "verifier/ never imports skill/"
