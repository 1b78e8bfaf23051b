"""Every code block of every document is run: Python in one process with a small setting, `fsdp2` lines through the command line."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from verified_fsdp2.skill import cli, reference
from verified_fsdp2.verifier import comparison
from verified_fsdp2.verifier.rules import RULES, parity

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "SKILL.md", *sorted((ROOT / "references").glob("*.md"))]
SETTING = Path(__file__).parent / "docs_setting.py"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, text) of every block in a language."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[1] == language:
                found.append((f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}", match[2]))
    return found


def test_every_block_names_a_language_that_is_tested() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        opened = re.findall(r"^```(\w*)$", text, re.M)[::2]
        assert set(opened) <= {"python", "sh", "yaml", "json", "text"}, document.name


@pytest.mark.launch
def test_python_blocks_run(tmp_path: Path) -> None:
    found = blocks("python")
    assert len(found) > 30
    for number, (_, text) in enumerate(found):
        (tmp_path / f"block{number:03}.py").write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, SETTING, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    failed = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"setting": done.stderr[-2000:]}
    assert {found[int(k)][0] if k.isdigit() else k: v for k, v in failed.items()} == {}


def test_the_contract_is_what_the_rules_say() -> None:
    text = (ROOT / "references" / "contract.md").read_text(encoding="utf-8")
    assert text.rstrip("\n") == reference.contract().rstrip("\n"), "run `make references`"


def test_the_tolerance_is_what_the_code_allows() -> None:
    text = (ROOT / "references" / "verify.md").read_text(encoding="utf-8")
    assert f"{comparison.MULTIPLE:.0f} times what one unit in the last place" in text
    assert f"plus 2^{math.log2(comparison.FLOOR):.0f}" in text
    assert f"exceeds {parity.UNREPRODUCIBLE:.0%}".replace("%", " %") in text


def test_the_skill_and_the_options_name_every_rule_and_role() -> None:
    skill = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    named = re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", " ".join(re.findall(r"\(([a-z0-9,\s-]+)\)", skill)))
    assert len(set(named) & set(RULES)) > 20
    assert {word for word in named if word.count("-") > 1} <= set(RULES)
    roles = json.loads((ROOT / "verifier" / "report" / "report.schema.json").read_text())
    text = (ROOT / "references" / "verify.md").read_text(encoding="utf-8")
    for role in roles["properties"]["runs"]["items"]["properties"]["role"]["enum"]:
        assert f"| {role} |" in text


@pytest.mark.parametrize(("where", "text"), blocks("sh"))
def test_fsdp2_lines_are_valid(where: str, text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["fsdp2"]:
            cli.parse(words[1:])


@pytest.mark.parametrize(("where", "text"), blocks("json"))
def test_json_blocks_are_json(where: str, text: str) -> None:
    json.loads(text)
