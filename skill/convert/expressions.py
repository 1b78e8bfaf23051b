"""The edits of expressions: attributes, calls, wrappers and state dicts."""

from __future__ import annotations

import ast
from functools import cached_property

import libcst as cst
from libcst.metadata import CodeRange, PositionProvider

from . import states, wrapper
from .blocks import split_test
from .found import Construct, Found, Range, Todo, todo
from .nodes import attribute_call, is_scalar_parameter, plain_optimizer, text_of

SCALAR = (
    "a scalar parameter",
    "unsupported-module-or-param",
    "a tensor of one element, torch.tensor([...]); checkpoints then hold it so",
)
DEVICE = ("no torch.cuda.set_device", "FSDP device_id")
GATHERED = {"model": "model_state", "optimizer": "optimizer_state"}
_LOADED = {
    "model.load_state_dict(...)": "set_model_state_dict",
    "optimizer.load_state_dict(...)": "set_optimizer_state_dict",
}
_SAVED = {
    "model.state_dict()": "get_model_state_dict",
    "optimizer.state_dict()": "get_optimizer_state_dict",
}
_SAVED |= {"optim_state_dict": "get_optimizer_state_dict"}
# What holds of a file as soon as the state dicts in it are converted.
FILES = ("torch.save", "torch.save of the model alone", "torch.load")
# by the broadcast of the function that shards
SETTLED = ("no seed before the model", "a seed by rank before the model")


class ExpressionEdits(cst.CSTTransformer):
    """Applies what has one right answer, but to expressions only.

    `done` and `todos` say what became of each construct.
    """

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found
        self.tree = ast.parse(found.source)
        self.names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.configs = states.configs_in(self.tree)
        self.models = _models(found)
        self.imports: set[tuple[str, str]] = set()
        self.done: list[tuple[int, str]] = []
        self.todos: list[Todo] = []
        self._unplaced: list[Todo] = []  # marks that no statement has yet
        self.by_class = self.by_block = False
        # around the current node, with what is gathered before each
        self._ifs: list[tuple[cst.If, dict[str, str]]] = []
        # of the `state_dict_type` around the current node
        self._kinds: list[states.Kind | None] = []
        self._functions: list[int] = [0]

    # What is known of a node

    def at(self, node: cst.CSTNode) -> list[Construct]:
        """The constructs that are exactly this node."""
        place = self.place(node)
        found: Range = (place.start.line, place.start.column, place.end.line, place.end.column)
        return self.found.places.get(found, [])

    def place(self, node: cst.CSTNode) -> CodeRange:
        """Where a node of the original stands."""
        place = self.get_metadata(PositionProvider, node)
        assert isinstance(place, CodeRange)
        return place

    def mark(self, construct: Construct) -> None:
        """Leave a construct to a person."""
        self.add(todo(construct))

    def add(self, one: Todo) -> None:
        """Add a mark."""
        if one not in self.todos:
            self.todos.append(one)
            self._unplaced.append(one)

    def settle(self, construct: Construct) -> None:
        """Note that a construct is replaced."""
        self.done.append((construct.line, construct.row))

    # Expressions

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        for one in self.at(original_node):
            if one.row == ".module":
                self.settle(one)
                return updated_node.value
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        rows = self.at(original_node)
        if any(
            row.row.startswith(("DistributedDataParallel", "FullyShardedDataParallel"))
            for row in rows
        ):
            return self._wrapper(updated_node, rows)
        made: cst.BaseExpression = updated_node
        if is_scalar_parameter(updated_node):
            self.add(Todo(self.place(original_node).start.line, *SCALAR, str(self.found.path)))
        for one in rows:
            new = self._replaced(one, original_node, updated_node)
            if new is not None:
                made = new
                self.settle(one)
            elif one.row in SETTLED and self.found.kind == "ddp":
                self.settle(one)
            elif one.row not in (
                *FILES,
                ".module",
                "with no_sync()",
                "state_dict_type",
                "optimizer before the wrapper",
            ):
                self.mark(one)
        return made

    def _replaced(
        self, one: Construct, original: cst.Call, call: cst.Call
    ) -> cst.BaseExpression | None:
        """What takes the place of a call; None if that is not certain."""
        if one.row in _SAVED or one.row in _LOADED:
            return self._state(one, call)
        if one.row == "the norm that clip_grad_norm_ returns":
            return attribute_call(call, "full_tensor")
        if one.row == "clip_grad_norm_ of the wrapper" and isinstance(call.func, cst.Attribute):
            first = cst.Arg(
                attribute_call(call.func.value, "parameters"),
                comma=cst.Comma(cst.SimpleWhitespace(""), cst.SimpleWhitespace(" ")),
            )
            made = call.with_changes(
                func=cst.parse_expression("torch.nn.utils.clip_grad_norm_"),
                args=[first, *call.args],
            )
            return made if one.event.discarded else attribute_call(made, "full_tensor")
        if one.row == "inference_mode" and not call.args:
            return cst.parse_expression("torch.no_grad()")
        if (
            one.row == "isinstance of the wrapper"
            and len(call.args) == 2
            and isinstance(call.args[1].value, cst.Name | cst.Attribute)
        ):
            self.imports.add((wrapper.POLICY, "FSDPModule"))
            return call.with_changes(
                args=[call.args[0], call.args[1].with_changes(value=cst.Name("FSDPModule"))]
            )
        if one.row == "ZeroRedundancyOptimizer":
            return plain_optimizer(call)
        if one.row == "FullStateDictConfig":
            return call if self._kinds or self._assigned(original) else None
        return None

    def _assigned(self, call: cst.Call) -> bool:
        """Whether a configuration is only assigned to a name, which `state_dict_type` reads."""
        line = self.place(call).start.line
        return any(made.lineno == line for made in self.configs.values())

    def _wrapper(self, call: cst.Call, rows: list[Construct]) -> cst.BaseExpression:
        given, model = wrapper.arguments(call, self.found.kind, rows)
        if model is None:
            for row in rows:
                self.mark(row)
            return call
        options = wrapper.Options(given, rows, self.configs)
        self.imports |= options.imports
        by_class = bool(options.classes)
        self.by_class, self.by_block = self.by_class or by_class, self.by_block or not by_class
        for row in rows:
            if row in options.left or (
                row.row in DEVICE and not self.device_line and "set_device" not in self.found.source
            ):
                self.mark(row)
            else:
                self.settle(row)
        return options.call(model)

    @cached_property
    def device_line(self) -> int:
        """The statement below which a device is chosen, the one that makes the process group; 0 if
        there is none, or no need.
        """
        if (
            not any(one.row in DEVICE for one in self.found.all())
            or "set_device" in self.found.source
        ):
            return 0
        calls = [
            (node.lineno, ast.unparse(node.value.func))
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ]
        return next((line for line, name in calls if name.endswith("init_process_group")), 0)

    # State dicts

    def _state(self, one: Construct, call: cst.Call) -> cst.BaseExpression | None:
        kind = self._kinds[-1] if self._kinds else None
        if not self._kinds and self.found.kind == "ddp":
            kind = states.DDP
        of_model = one.row.startswith("model.")
        model = self._model(call) if of_model else self.models.get(self._functions[-1])
        if kind is None or not model or not isinstance(call.func, cst.Attribute):
            return None
        if any(arg.keyword or arg.star for arg in call.args):
            return None
        given = [arg.value for arg in call.args]
        own = [cst.parse_expression(model)]
        if one.row.startswith("optimizer."):
            own.append(call.func.value)
        if one.row in _LOADED:
            self.imports |= _imports(_LOADED[one.row], kind.load)
            return states.call(_LOADED[one.row], own + given, kind.load)
        if one.row == "optim_state_dict":
            own = given
        if kind.save is None or len(given) != (2 if one.row == "optim_state_dict" else 0):
            return None
        return self._saved(one, own, kind.save)

    def _saved(
        self, one: Construct, own: list[cst.BaseExpression], options: str
    ) -> cst.BaseExpression | None:
        """The call that gathers on all ranks; its name where only some of them come here."""
        made = states.call(_SAVED[one.row], own, options)
        guard = one.event.on_some_ranks
        if guard is not None:
            part = "model" if one.row.startswith("model.") else "optimizer"
            name = self._before(guard.node, made, GATHERED[part])
            if name is None:
                return None
            made = cst.Name(name)
        self.imports |= _imports(_SAVED[one.row], options)
        return made

    def _model(self, call: cst.Call) -> str:
        return text_of(call.func.value) if isinstance(call.func, cst.Attribute) else ""

    def _before(self, guard: ast.AST, made: cst.BaseExpression, name: str) -> str | None:
        """The name of what all ranks gather before the `if` that only some of them enter; None if
        there is no such place.
        """
        at = (getattr(guard, "lineno", 0), getattr(guard, "col_offset", 0))
        for node, gathered in self._ifs:
            place = self.place(node).start
            if (place.line, place.column) != at:
                continue
            if split_test(node.test) is None or isinstance(node.orelse, cst.If):
                return None
            code = text_of(made)
            known = next((old for old, text in gathered.items() if text == code), None)
            names = (name, f"whole_{name}", f"{name}_of_all")
            free = next(n for n in names if n not in self.names and n not in gathered)
            gathered[known or free] = code
            return known or free
        return None


def _imports(function: str, options: str) -> set[tuple[str, str]]:
    names = [function, *["StateDictOptions"] * bool(options)]
    return {(states.MODULE, name) for name in names}


def _models(found: Found) -> dict[int, str]:
    """{line of a function: the model in it}, by its state dicts, for the optimizers beside them."""
    functions = [
        node
        for node in ast.walk(ast.parse(found.source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    models: dict[int, set[str]] = {}
    for one in found.all():
        node = one.event.node
        if (
            one.row in ("model.state_dict()", "model.load_state_dict(...)")
            and isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
        ):
            around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            line = max((f.lineno for f in around), default=0)
            models.setdefault(line, set()).add(ast.unparse(node.func.value).removesuffix(".module"))
    return {line: next(iter(names)) for line, names in models.items() if len(names) == 1}
