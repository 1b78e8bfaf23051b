"""Each detector sees its fault and nothing else, and is quiet on the nearest right script."""

import ast
from pathlib import Path

import pytest
import yaml

from corpus import faults
from pairs import HEAD, MODEL, PRELUDE
from records import brief
from scripts import written
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SourceRule
from verified_fsdp2.verifier.source.lint import look
from verified_fsdp2.verifier.source.registry import DETECTORS

PAIRS_FILE = Path(__file__).with_name("pairs.yaml")
PAIRS = yaml.safe_load(PAIRS_FILE.read_text(encoding="utf-8"))
SHARED = {"HEAD": HEAD, "MODEL": MODEL}


def hits(tmp_path: Path, source: str) -> list[str]:
    first, _, rest = source.partition("\n")
    script = written(tmp_path, PRELUDE + SHARED.get(first, first + "\n") + rest)
    ast.parse(script.read_text(encoding="utf-8"))
    found = look([script]).hits
    assert all(map(brief, found))
    return sorted({hit.rule for hit in found})


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["rule"])
def test_pair(tmp_path: Path, pair: dict[str, str]) -> None:
    assert hits(tmp_path, pair["wrong"]) == [pair["rule"]]
    assert hits(tmp_path, pair["right"]) == []


def test_every_detector_has_a_pair_or_finds_its_fault(tmp_path: Path) -> None:
    paired = {pair["rule"] for pair in PAIRS}
    assert paired <= set(DETECTORS) <= set(RULES)
    own = [
        case.target(tmp_path / case.name)
        for case in faults()
        if case.rule in set(DETECTORS) - paired
    ]
    blind = set(DETECTORS) - paired - {hit.rule for hit in look(own).hits}
    assert not blind, (
        f"{sorted(blind)}: `detect` does not see the rule's own fault; write a pair in"
        f" {PAIRS_FILE.name}"
    )


def test_every_rule_of_the_sources_has_a_detector() -> None:
    decided = {name for name, rule in RULES.items() if isinstance(rule, SourceRule)}
    assert decided - {"unused-suppression"} <= set(DETECTORS)
