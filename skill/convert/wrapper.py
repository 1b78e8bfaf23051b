"""The call that takes the place of a wrapper: its arguments, and the function that shards a
model.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import libcst as cst

from ...verifier.source.migration_model import DDP_PARAMETERS, FSDP1_PARAMETERS
from .found import Construct
from .nodes import text_of

NAME, BY_CLASS = "shard_model", "shard_model_by_class"
POLICY = "torch.distributed.fsdp"
# Arguments without a counterpart, or whose counterpart is what FSDP2 always does.
_DROPPED = {
    "module",
    "device_ids",
    "output_device",
    "dim",
    "check_reduction",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "broadcast_buffers",
    "init_sync",
    "gradient_as_bucket_view",
    "static_graph",
    "bucket_cap_mb",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "device_id",
}
_BLOCKS = '''
def blocks(module):
    """The blocks in the lists of layers of a module, not what is in them."""
    for child in module.children():
        in_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        has_layers = next(child.children(), None) is not None
        if in_list and has_layers and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from blocks(child)
'''
_BROADCAST = """\
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            # as DistributedDataParallel does: all ranks start from the same weights
            dist.broadcast(tensor, src=0)
"""
_SHARD = '''
def {name}(model{classes}, **options):
    """Shard `model` in place: {groups} is one group of parameters, the rest of the model
    another.
    """
{start}    for module in {modules}:
        fully_shard(module, **options)
    fully_shard(model, **options)
    return model
'''
_MESH = """\
    device = next(model.parameters()).device.type
    options.setdefault("mesh", init_device_mesh(device, (dist.get_world_size(),)))
"""


def helper(kind: str, by_class: bool, by_block: bool, equal: bool, source: str) -> str:
    """The functions that the new calls use. `equal`: the ranks may have built unequal weights."""
    start = _MESH * (kind == "ddp") + _BROADCAST * equal
    text = _BLOCKS + "\n" if by_block else ""
    if by_block:
        text += _SHARD.format(
            name=NAME, classes="", groups="each block", start=start, modules="list(blocks(model))"
        )
    if by_class:
        chosen = (
            "reversed([m for m in model.modules() if isinstance(m, classes) and m is not model])"
        )
        text += "\n" * by_block + _SHARD.format(
            name=BY_CLASS,
            classes=", classes",
            groups="each module of these classes",
            start=start,
            modules=chosen,
        )
    for full, short in (("torch.nn", "nn"), ("torch.distributed", "dist")):
        names = (
            rf"^\s*(?:import {re.escape(full)} as {short}|from torch import (?:[\w, ]*,"
            rf" )?{full.partition('.')[2]}( as {short})?)\b"
        )
        if not re.search(names, source, re.MULTILINE):
            text = re.sub(rf"(?<![\w.]){short}\.", f"{full}.", text)
    return text.lstrip("\n")


def arguments(
    call: cst.Call, kind: str, rows: list[Construct]
) -> tuple[dict[str, cst.Arg], cst.BaseExpression | None]:
    """({name: argument}, the model) of a call of a wrapper; no model where arguments are
    unpacked.
    """
    names = DDP_PARAMETERS if kind == "ddp" else FSDP1_PARAMETERS
    given: dict[str, cst.Arg] = {}
    for position, arg in enumerate(call.args):
        if arg.star:
            return {}, None
        given[arg.keyword.value if arg.keyword else names[position]] = arg
    model = given.pop("module", None)
    return given, model.value if model is not None else None


class Options:
    """The options of the new call, from the arguments of the old one; `left` are the rows that they
    do not settle.
    """

    def __init__(
        self, given: dict[str, cst.Arg], rows: list[Construct], configs: Mapping[str, ast.Call]
    ) -> None:
        self.given, self.rows, self._configs = given, rows, configs
        self.classes = ""
        self.options: dict[str, str] = {}
        self.imports: set[tuple[str, str]] = set()
        self.left: list[Construct] = []
        for name, arg in given.items():
            self._argument(name, arg)

    def _argument(self, name: str, arg: cst.Arg) -> None:
        code = text_of(arg.value)
        rows = [row for row in self.rows if re.match(rf"(?:FSDP|DDP) {name}\b", row.row)]
        row = rows[0].row if len(rows) == 1 else ""
        if _is_default(name, code, row):
            return
        if name == "device_mesh":
            self.options["mesh"] = code
        elif name == "sharding_strategy":
            self._strategy(row, rows)
        elif name == "cpu_offload" and row:
            self._made("offload_policy", "CPUOffloadPolicy", "")
        elif name == "auto_wrap_policy" and row.endswith("by class"):
            self.classes = self._classes(code)
            self.left += [] if self.classes else rows
        elif name == "mixed_precision" and row and "..." not in rows[0].values.values():
            values = rows[0].values
            types = f"param_dtype={values['param']}, reduce_dtype={values['reduce']}"
            self._made("mp_policy", "MixedPrecisionPolicy", types)
        else:
            self.left += rows

    def _strategy(self, row: str, rows: list[Construct]) -> None:
        """What a strategy other than FULL_SHARD is: whether to reshard; a mesh says the rest."""
        meshed = "device_mesh" in self.given
        if row.endswith("=SHARD_GRAD_OP") or (row.endswith("_ZERO2") and meshed):
            self.options["reshard_after_forward"] = "False"
        elif not (row.endswith("HYBRID_SHARD") and meshed):
            self.left += rows

    def _classes(self, policy: str) -> str:
        """The classes that a policy lists, as they are written; empty if it does not list them
        itself.
        """
        made: ast.AST | None = (
            self._configs.get(policy) if policy.isidentifier() else ast.parse(policy, mode="eval")
        )
        nodes = ast.walk(made) if made else ()
        listed = [node.elts for node in nodes if isinstance(node, ast.Set | ast.List | ast.Tuple)]
        names = [ast.unparse(one) for one in listed[0]] if len(listed) == 1 else []
        if len(names) == 1:
            return names[0]
        return f"({', '.join(names)})" if names else ""

    def _made(self, option: str, policy: str, given: str) -> None:
        self.options[option] = f"{policy}({given})"
        self.imports.add((POLICY, policy))

    def call(self, model: cst.BaseExpression) -> cst.BaseExpression:
        """The new call."""
        name = BY_CLASS if self.classes else NAME
        given = [self.classes] if self.classes else []
        given += [f"{option}={value}" for option, value in self.options.items()]
        made = cst.ensure_type(
            cst.parse_expression(f"{name}(model{''.join(f', {one}' for one in given)})"), cst.Call
        )
        return made.with_changes(args=[made.args[0].with_changes(value=model), *made.args[1:]])


def _is_default(name: str, code: str, row: str) -> bool:
    """Whether FSDP2 does by itself what this argument asks for, or has no part of it."""
    return (
        name in _DROPPED
        or code == "None"
        or (name == "find_unused_parameters" and code == "False")
        or (name == "process_group" and code.endswith("group.WORLD"))
        or row.endswith(("=FULL_SHARD", "(False)", "by size"))
    )
