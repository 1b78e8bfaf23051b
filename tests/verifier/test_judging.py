"""The tables of judging and the policies of rules: each entry says why it is there, and is used."""

from typing import Any

import pytest

from verified_fsdp2.verifier.judge import tables
from verified_fsdp2.verifier.judging.all_findings import OF_A_TEAM, OF_ALL
from verified_fsdp2.verifier.judging.one_finding import OF_ONE, QUESTIONS
from verified_fsdp2.verifier.judging.passes import Pass
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.policies import Policy, ShownBy, SkippedWith

PASSES: list[Pass[Any]] = [*QUESTIONS, *OF_ONE, *OF_ALL, *OF_A_TEAM]


@pytest.mark.parametrize("one", PASSES, ids=lambda one: one.name)
def test_every_pass_says_why_it_is_there_and_why_there(one: Pass[Any]) -> None:
    assert len(one.why.split()) > 3 and len(one.here.split()) > 3 and one.apply.__doc__
    assert f"{one.name}\n    why:  {one.why}\n    here: {one.here}" in tables()


def test_no_pass_is_there_twice() -> None:
    assert len({one.name for one in PASSES}) == len(PASSES)


@pytest.mark.parametrize("kind", Policy.__subclasses__())
def test_every_policy_is_documented_and_used(kind: type[Policy]) -> None:
    assert kind.__module__ == Policy.__module__
    documented = (kind.__doc__ or "").split()
    assert len(documented) > 5 and not documented[0].startswith(f"{kind.__name__}(")
    assert any(rule.policy(kind) for rule in RULES.values())


def test_policies_are_each_said_once_and_kept_from_the_base() -> None:
    for name, rule in RULES.items():
        kinds = [type(policy) for policy in rule.policies]
        assert len(set(kinds)) == len(kinds), name
        inherited = {one for base in type(rule).__mro__ for one in vars(base).get("policies", ())}
        assert inherited == {*rule.policies}, name


def test_policies_name_what_there_is() -> None:
    families = {rule.family for rule in RULES.values()}
    for name, rule in RULES.items():
        shown, beside = rule.policy(ShownBy), rule.policy(SkippedWith)
        assert shown is None or shown.rule in RULES, name
        assert beside is None or beside.family in families, name
