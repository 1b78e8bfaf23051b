"""Generators that are gone through twice, in sources: which, and where they are made."""

import ast

import pytest

from verified_fsdp2.verifier.source.used_up import used_up

CLIP = """
def clip(parameters, limit):
    {first}
    norm = total([p.grad for p in parameters])
    {between}
    for p in parameters:
        p.grad.mul_(limit / norm)
"""


def lines(source: str) -> list[int]:
    return [found.made.lineno for found in used_up({"train.py": ast.parse(source)})]


@pytest.mark.parametrize(
    ("first", "between", "given", "found"),
    [
        ("pass", "pass", "model.parameters()", True),
        ("pass", "pass", "(p for p in model.parameters() if p.requires_grad)", True),
        ("pass", "pass", "filter(trains, model.parameters())", True),
        ("pass", "pass", "list(model.parameters())", False),
        ("pass", "pass", "params", False),  # unknown
        ("parameters = list(parameters)", "pass", "model.parameters()", False),
        ("pass", "parameters = model.parameters()", "model.parameters()", False),
    ],
)
def test_a_parameter(first: str, between: str, given: str, found: bool) -> None:
    source = f"{CLIP.format(first=first, between=between)}\nclip({given}, 1.0)\n"
    assert lines(source) == ([source.count("\n")] if found else [])


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("optimizer = AdamW(params)\nclip_grad_norm_(params, 1.0)", True),
        ("optimizer = AdamW(params)\nfor p in params:\n    count(p)", True),
        ("while True:\n    clip_grad_norm_(params, 1.0)", True),
        ("for step in steps:\n    clip_grad_norm_(model.parameters(), 1.0)", False),
        ("while True:\n    params = model.parameters()\n    clip_grad_norm_(params, 1.0)", False),
        ("optimizer = AdamW(params)", False),
        ("if small:\n    a = SGD(params)\nelse:\n    a = AdamW(params)", False),
        ("if small:\n    a = SGD(params)\n    print(a)\nb = AdamW(params)", True),
        ("for p in params:\n    break\nfor p in params:\n    count(p)", False),  # rest is left
        ("first = next(params)\nfor p in params:\n    count(p)", False),
    ],
)
def test_a_variable(body: str, found: bool) -> None:
    source = f"params = model.parameters()\n{body}\n"
    assert lines(source) == ([1] if found else [])


def test_two_arms_of_which_one_leaves() -> None:
    """The plain branch of a clip returns before the sharded one begins."""
    source = """
def clip(parameters):
    if plain:
        return norm([p.grad for p in parameters])
    return sharded_norm([p.grad for p in parameters])

clip(model.parameters())
"""
    assert lines(source) == []
