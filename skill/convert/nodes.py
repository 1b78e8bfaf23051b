"""Expressions that are made from others."""

from __future__ import annotations

import libcst as cst


def text_of(node: cst.CSTNode) -> str:
    """The source of a node."""
    return cst.Module([]).code_for_node(node)


def attribute_call(value: cst.BaseExpression, name: str) -> cst.Call:
    """`value.name()`."""
    return cst.Call(cst.Attribute(value, cst.Name(name)))


def switch(no_sync: cst.BaseExpression, value: str) -> cst.BaseStatement:
    """`model.set_requires_gradient_sync(value)`, of the model whose `no_sync()` this is."""
    call = cst.ensure_type(no_sync, cst.Call)
    owner = text_of(cst.ensure_type(call.func, cst.Attribute).value)
    return cst.parse_statement(f"{owner}.set_requires_gradient_sync({value})")


def is_scalar_parameter(call: cst.Call) -> bool:
    """`nn.Parameter(torch.tensor(1.0))`, or of zeros, ones, ... of no dimension: fully_shard takes
    no such parameter.
    """
    if not text_of(call.func).endswith("Parameter") or not call.args:
        return False
    held = call.args[0].value
    if not isinstance(held, cst.Call) or not held.args:
        return False
    name, first = text_of(held.func), held.args[0].value
    number = isinstance(first, cst.Integer | cst.Float | cst.UnaryOperation)
    empty = isinstance(first, cst.Tuple | cst.List) and not first.elements
    return (name == "torch.tensor" and number) or (
        name in ("torch.zeros", "torch.ones", "torch.empty", "torch.randn", "torch.rand") and empty
    )


def plain_optimizer(call: cst.Call) -> cst.BaseExpression | None:
    """The optimizer class itself, with the arguments that are its own."""
    ours = ("optimizer_class", "process_group", "parameters_as_bucket_view", "overlap_with_ddp")
    named = {arg.keyword.value: arg.value for arg in call.args if arg.keyword}
    plain = named.get("optimizer_class")
    if not isinstance(plain, cst.Name | cst.Attribute) or any(arg.star for arg in call.args):
        return None
    kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value not in ours]
    return call.with_changes(func=plain, args=kept)
