"""What a rule needs beside its module; what is missing is named, with the file in which to write
it.

CONTRIBUTING.md, "Add a rule", promises three files: whoever adds a check that a new rule must meet
adds it here, so that one test says it, or makes it follow from the rule's docstring.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up import made_up_rule

from corpus import faults
from documents import diagnosis
from verified_fsdp2.skill import reference
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SECTIONS, RaisedRule, Rule

ROOT = Path(__file__).parents[2]
CONTRACT = (ROOT / "references" / "contract.md").read_text(encoding="utf-8")
SEEDED = {case.rule for case in faults()}
ROWS = diagnosis()
NO_SCRIPT_HAS_IT = {"gloo-avg-is-sum"}  # a torch has it: test_average.py
NOT_SEEN_IN_TRAINING = {"unused-suppression"}  # it compares sources with their comments


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_all_that_it_needs(name: str) -> None:
    missing = list(lacks(RULES[name]))
    assert not missing, f"{name} needs:\n" + "\n".join(f"  - {what}" for what in missing)


def lacks(rule: Rule) -> Iterator[str]:
    """What is to be written for a rule, and where."""
    module, page = type(rule).__module__.partition(".")[2].replace(".", "/"), rule.page()
    for section in ("Statement", *SECTIONS):
        if section != "Seen" and not page.get(section):
            what = "a first line" if section == "Statement" else f"a section `{section}:`"
            yield f"in the docstring of {module}.py {what}"
    texts = [text for row in ROWS if rule.name in row.rules for text in row.texts]
    if not any(rule.name in row.rules for row in ROWS) and rule.name not in NOT_SEEN_IN_TRAINING:
        yield (
            f"in the docstring of {module}.py a section `Seen:` (the text of the error in"
            " backquotes, or the symptom), or a row in references/diagnosis.md"
        )
    elif isinstance(rule, RaisedRule) and not any(_matches(rule, text) for text in texts):
        yield f"in the section `Seen:` of {module}.py a text in backquotes that its `pattern` finds"
    if rule.name not in SEEDED | NO_SCRIPT_HAS_IT:
        file = f"tests/faults/{rule.name.replace('-', '_')}.yaml"
        yield f"a fault: {file} (keys: benchmarks/corpus.py)"
    if (
        all(page.get(section) for section in ("Statement", "Fix"))
        and reference.line(rule) not in CONTRACT.splitlines()
    ):
        yield "its line in references/contract.md: run `make references`"


def _matches(rule: RaisedRule, text: str) -> bool:
    return re.search(rule.pattern, f"SomeError: {text.replace('...', 'x')}") is not None


def test_what_is_missing_is_named() -> None:
    page = "What holds.\n\nWhy: a reason.\nFix: Do it.\n"
    said = "\n".join(lacks(made_up_rule("new-rule", page=page)))
    for words in (
        "section `Wrong:`",
        "section `Seen:`",
        "tests/faults/new_rule.yaml",
        "run `make references`",
    ):
        assert words in said
    assert "verifier/rules/laws/new_rule.py" in said


def test_every_fault_names_a_rule() -> None:
    assert sorted({str(rule) for rule in SEEDED} - set(RULES)) == []
