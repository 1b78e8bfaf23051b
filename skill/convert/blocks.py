"""Statements in the place of others: bodies of `with`, and conditions."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from .nodes import text_of

Statement = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel
_JUMP = m.Return() | m.Break() | m.Continue() | m.Yield()
_INVERTED: dict[type[cst.BaseCompOp], type[cst.BaseCompOp]] = {
    cst.Equal: cst.NotEqual,
    cst.NotEqual: cst.Equal,
    cst.LessThan: cst.GreaterThanEqual,
    cst.GreaterThanEqual: cst.LessThan,
    cst.GreaterThan: cst.LessThanEqual,
    cst.LessThanEqual: cst.GreaterThan,
}


def joined(
    before: Sequence[cst.BaseStatement], block: cst.With, after: Sequence[cst.BaseStatement] = ()
) -> Statement:
    """The body of a `with` in its place, its comments kept."""
    body = block.body
    if not isinstance(body, cst.IndentedBlock):
        inner: list[cst.BaseStatement] = [
            cst.SimpleStatementLine(cst.ensure_type(body, cst.SimpleStatementSuite).body)
        ]
        comments: list[cst.EmptyLine] = []
    else:
        inner = list(body.body)
        comments = [cst.EmptyLine(comment=body.header.comment)] if body.header.comment else []
        kept = [line for line in body.footer if line.comment]
        after = [*after]
        if kept:
            inner[-1] = inner[-1].with_changes(
                leading_lines=[*getattr(inner[-1], "leading_lines", ()), *kept]
            )
    statements = [*before, *inner, *after]
    leading = [*block.leading_lines, *comments, *getattr(statements[0], "leading_lines", ())]
    statements[0] = statements[0].with_changes(leading_lines=leading)
    return cst.FlattenSentinel(statements)


def plain_body(body: cst.BaseSuite) -> bool:
    """Whether a block runs to its end: nothing in it jumps out."""
    return not m.findall(body, _JUMP)


def negated(test: cst.BaseExpression) -> cst.BaseExpression:
    """`not test`, without a `not` where that is easy."""
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        target = test.comparisons[0]
        other = _INVERTED.get(type(target.operator))
        if other is not None:
            return test.with_changes(comparisons=[target.with_changes(operator=other())])
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    wrapped = (
        test
        if isinstance(test, cst.Name | cst.Attribute | cst.Call)
        else test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    )
    return cst.UnaryOperation(cst.Not(), wrapped)


def split_test(
    test: cst.BaseExpression,
) -> tuple[cst.BaseExpression | None, cst.BaseExpression] | None:
    """(what all ranks agree on, the condition on the rank) of a test; None if the two cannot be
    separated.

    A condition on the rank alone has nothing before it.
    """
    parts = _conjuncts(test)
    of_rank = [part for part in parts if _asks_rank(part)]
    others = [part for part in parts if not _asks_rank(part)]
    if not of_rank or any(m.findall(part, m.Call() | m.NamedExpr()) for part in others):
        return None
    if not others:
        return None, test
    return _all(others), _all(of_rank)


def _asks_rank(part: cst.BaseExpression) -> bool:
    words = text_of(part).lower()
    return any(
        word in words for word in ("rank", "is_main", "is_master", "main_process", "master_process")
    )


def _conjuncts(test: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return [*_conjuncts(test.left), *_conjuncts(test.right)]
    return [test]


def _all(parts: list[cst.BaseExpression]) -> cst.BaseExpression:
    made = parts[0]
    for part in parts[1:]:
        made = cst.BooleanOperation(made, cst.And(), part)
    return made
