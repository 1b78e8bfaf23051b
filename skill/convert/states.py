"""State dicts: whole ones, gathered on all ranks, in the place of those of DDP and FSDP1."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

import libcst as cst

MODULE = "torch.distributed.checkpoint.state_dict"
WHOLE_ON_ONE = "StateDictOptions(full_state_dict=True, cpu_offload=True)"
WHOLE = "StateDictOptions(full_state_dict=True)"
SHARDS = ""


@dataclass(frozen=True)
class Kind:
    """What `state_dict_type` asks for: the options of a new save, None where there are none that
    are the same.
    """

    save: str | None
    load: str


DDP = Kind(WHOLE_ON_ONE, WHOLE)


def kind_of(call: ast.AST, configs: Mapping[str, ast.Call]) -> Kind | None:
    """The kind of state dict that a call of `state_dict_type` asks for; None if it cannot be
    known.
    """
    if not isinstance(call, ast.Call) or len(call.args) < 2 or call.keywords:
        return None
    kind = ast.unparse(call.args[1]).rpartition(".")[2]
    if kind == "SHARDED_STATE_DICT":
        return Kind(SHARDS, SHARDS)
    if kind != "FULL_STATE_DICT":
        return None
    asked = [_options(config, configs) for config in call.args[2:]] or [{}]
    if any(one is None or one != asked[0] for one in asked):
        return None
    wanted = asked[0] or {}
    whole = {("False", "False"): WHOLE, ("True", "True"): WHOLE_ON_ONE}
    return Kind(
        whole.get((wanted.get("offload_to_cpu", "False"), wanted.get("rank0_only", "False"))), WHOLE
    )


def _options(config: ast.expr, configs: Mapping[str, ast.Call]) -> dict[str, str] | None:
    made = configs.get(config.id) if isinstance(config, ast.Name) else config
    if not isinstance(made, ast.Call) or made.args:
        return None
    return {keyword.arg or "": ast.unparse(keyword.value) for keyword in made.keywords}


def configs_in(tree: ast.Module) -> dict[str, ast.Call]:
    """{name: call} of the configurations that are assigned once."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {
        name: made[0]
        for name, made in found.items()
        if len(made) == 1 and isinstance(made[0], ast.Call)
    }


def call(function: str, given: list[cst.BaseExpression], options: str) -> cst.BaseExpression:
    """A call of a function of torch.distributed.checkpoint.state_dict."""
    names = [f"a{number}" for number in range(len(given))]
    text = f"{function}({', '.join(names)}{f', options={options}' if options else ''})"
    made = cst.ensure_type(cst.parse_expression(text), cst.Call)
    args = [arg.with_changes(value=value) for arg, value in zip(made.args, given, strict=False)]
    return made.with_changes(args=[*args, *made.args[len(given) :]])
