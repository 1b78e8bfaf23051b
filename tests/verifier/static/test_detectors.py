"""Each detector sees its fault and nothing else, and is quiet on the nearest right script."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from pairs import PAIRS, PRELUDE
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SourceRule
from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.registry import DETECTORS


def hits(tmp_path: Path, source: str) -> list[str]:
    """The rules hit in a script."""
    script = tmp_path / "train.py"
    script.write_text(PRELUDE + source + "\n", encoding="utf-8")
    ast.parse(script.read_text(encoding="utf-8"))
    return sorted({hit.rule for hit in look([script]).hits})


def numbered() -> list[str]:
    return [f"{rule}-{number}" for number, (rule, _, _) in enumerate(PAIRS)]


@pytest.mark.parametrize(("rule", "wrong", "right"), PAIRS, ids=numbered())
def test_pair(tmp_path: Path, rule: str, wrong: str, right: str) -> None:
    assert hits(tmp_path, wrong) == [rule]
    assert hits(tmp_path, right) == []


def test_every_detector_has_a_pair() -> None:
    assert {rule for rule, _, _ in PAIRS} == set(DETECTORS)


def test_every_detector_is_named_as_a_rule() -> None:
    assert set(DETECTORS) <= set(RULES)


def test_every_rule_of_the_sources_has_a_detector() -> None:
    decided = {name for name, rule in RULES.items() if isinstance(rule, SourceRule)}
    assert decided - {"unused-suppression"} <= set(DETECTORS)
