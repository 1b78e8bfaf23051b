"""Rules and plans that a test makes up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import written
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.pipeline import planned
from verified_fsdp2.verifier.rules.base import Rule
from verified_fsdp2.verifier.stages.settings import Settings


def made_up_rule(
    name: str, judge: Callable[[Evidence], Finding] | None = None, page: str = ""
) -> Rule:
    """A rule as if a module of `verifier/rules/laws/` had it, which passes without `judge`.

    `page`: its docstring. `Rule` takes name and family from the name of a rule's module, which must
    end in `rules.FAMILY.NAME`.
    """
    fields = {
        "__module__": f"verified_fsdp2.verifier.rules.laws.{name.replace('-', '_')}",
        "__doc__": page,
        "judge": staticmethod(judge or (lambda evidence: Finding(name, "pass", "it holds"))),
    }
    made: Rule = type("MadeUp", (Rule,), fields)()
    return made


def made_up_plan(folder: Path, *rules: str, script: str = "", **flags: Any) -> Settings:
    """What the runs for these rules are planned from; `script` is the text of train.py."""
    return planned(resolve(written(folder, script), flags), rules)
