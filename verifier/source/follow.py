"""Following statements: a script from its first line into the functions that it calls, both
branches of every condition.
"""

from __future__ import annotations

import ast
from functools import lru_cache

from .coverage import LIMIT
from .events import ITERATE, Guard
from .imports import Imports
from .names import Frame
from .project import ClassInfo, Module, Project
from .values import Value, choices, const, either

# Expressions that are followed from one entry; beyond it `limit` is among the reasons of what was
# missed.
BUDGET = 150_000  # expressions followed from one entry
EXITS = ("sys.exit", "builtins.exit", "builtins.quit", "os._exit", "os.abort")
Block = list[ast.stmt]


class Follower(Imports):
    """One walk through a project."""

    def __init__(self, project: Project, whole: bool, budget: int) -> None:
        super().__init__(project, whole, budget)
        self.met: set[ast.AST] = set()
        self.frame = Frame(project.script, "<module>") if project.script is not None else self.frame

    def start(self, module: Module) -> None:
        """Follow the script itself."""
        module.names["__name__"] = const("__main__")
        module.names["__file__"] = Value("unknown", "__file__")
        try:
            self.load(module)
        except RecursionError:
            self._stopped(module.tree, "nested too deeply")

    def entry(self, module: Module, function: Value) -> None:
        """Follow one function with parameters that are not known."""
        self.frame = Frame(module, "<module>")
        if isinstance(info := function.const, ClassInfo):
            function = info.method(
                function.name.rpartition(".")[2], Value("object", info.name, cls=info)
            )
        try:
            self.call_function(function, [], {}, function.node or ast.Pass())
        except RecursionError:
            self._stopped(function.node or module.tree, "nested too deeply")

    def _stopped(self, node: ast.AST, reason: str) -> None:
        """From here on nothing is followed."""
        if not self.flow.partial or not any(
            one.reason == reason for one in self.flow.missed.values()
        ):
            self.missed(node, LIMIT, reason, self.frame.function)
        self.flow.partial = True

    def load(self, module: Module) -> None:
        """Follow a module's own lines, once."""
        if module.state:
            return
        module.state = "running"
        module.names.setdefault("__name__", const(module.path.stem))
        saved = (self.frame, self.guards, self.loops, self.withs, self.depth)
        self.frame, self.guards, self.loops, self.depth = Frame(module, "<module>"), (), (), 0
        self.frame.names = module.names
        self.run_body(module.tree.body)
        self.frame, self.guards, self.loops, self.withs, self.depth = saved
        module.state = "done"

    def call_function(
        self, value: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        if value.node is not None:
            self.met.add(value.node)
            self.flow.followed.add(value.node)
        return super().call_function(value, args, kwargs, node)

    def run_body(self, body: Block) -> bool:
        """Follow statements; whether they always leave their block.

        The methods for statements return that, or None.
        """
        for statement in body:
            if self.budget < 0:
                self._stopped(statement, "too long to be followed completely")
                return False
            if self.ways[type(statement)](self, statement):
                return True
        return False

    def _do_expr(self, node: ast.Expr) -> bool:
        before = len(self.flow.events)
        value = self.evaluate(node.value)
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        for event in self.flow.events[before:]:
            if event.node is call:
                event.discarded = True
        return value.kind == "made" and value.name in EXITS

    def _do_assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.bind(target, value)

    def _do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.evaluate(node.value))

    def _do_augassign(self, node: ast.AugAssign) -> None:
        old, new = self.evaluate(node.target), self.evaluate(node.value)
        value = self._fold(type(node.op), old, new, ast.BinOp(node.target, node.op, node.value))
        if self.loops and value.kind == "const":
            value = Value("derived", "count", [old, new])  # it changes in each iteration
        self.emit("(augmented)", node, type(node.op).__name__, old, [new]).result = value
        if isinstance(node.target, ast.Name | ast.Attribute):
            self.bind(node.target, value)

    def bind(self, target: ast.expr, value: Value) -> None:
        """Give a target its value."""
        if isinstance(target, ast.Name):
            names = self.frame.module.names if target.id in self.frame.globals else self.frame.names
            names[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.store(self.evaluate(target.value), target.attr, value, target)
        elif isinstance(target, ast.Subscript):
            self._store_item(target, value)
        elif isinstance(target, ast.Tuple | ast.List):
            known = value.kind in ("tuple", "list") and value.name != "many"
            starred = any(isinstance(t, ast.Starred) for t in target.elts)
            for position, one in enumerate(target.elts):
                if starred:
                    self.bind(one, self.element(value))
                elif known and position < len(value.parts):
                    self.bind(one, value.parts[position])
                else:
                    self.bind(one, self.item(value, const(position), one))
        elif isinstance(target, ast.Starred):
            self.bind(target.value, value)

    def _store_item(self, target: ast.Subscript, value: Value) -> None:
        base, key = self.evaluate(target.value), self.evaluate(target.slice)
        self.emit("(store item)", target, on=base, args=[key, value])
        for one in choices(base):
            if one.kind == "dict":
                self.put(one, key, value)
            elif one.kind in ("list", "tuple"):
                one.parts.append(value)
            elif one.kind in ("made", "attr"):
                one.attrs["*"] = either([one.attrs["*"], value]) if "*" in one.attrs else value
                for part in choices(value):
                    if part.owner is None and part.kind in ("made", "object"):
                        part.owner = one

    def _do_return(self, node: ast.Return) -> bool:
        if node.value is not None:
            self.frame.returns.append(self.evaluate(node.value))
        return True

    def _do_raise(self, node: ast.Raise) -> bool:
        self.evaluate(node.exc)
        return True

    def _do_continue(self, node: ast.Continue | ast.Break) -> bool:
        self.emit(f"({type(node).__name__.lower()})", node)
        return True

    _do_break = _do_continue

    def _do_assert(self, node: ast.Assert) -> None:
        self.evaluate(node.test)

    def _do_global(self, node: ast.Global) -> None:
        self.frame.globals.update(node.names)

    def _do_if(self, node: ast.If) -> bool:
        test = self.evaluate(node.test)
        if self.decided(node, test):
            return self.run_body(node.body if test.const else node.orelse)
        saved, names = self.guards, dict(self.frame.names)
        held, not_held = (*saved, Guard(node, test, True)), (*saved, Guard(node, test, False))
        self.guards = held
        body_leaves = self.run_body(node.body)
        after_body = self.frame.names
        self._put_names(dict(names))
        self.guards = not_held
        other_leaves = self.run_body(node.orelse)
        after_other = self.frame.names
        self.guards = saved
        if body_leaves and other_leaves:
            return True
        if body_leaves:
            self.guards = saved if _raises(node.body[-1]) else not_held
        elif other_leaves:
            self._put_names(after_body)
            self.guards = held
        else:
            self._put_names(self._joined(after_body, after_other, test))
        return False

    def decided(self, node: ast.If, test: Value) -> bool:
        """Whether only one branch is followed."""
        return test.kind == "const"

    def _put_names(self, names: dict[str, Value]) -> None:
        if self.frame.names is self.frame.module.names:
            self.frame.module.names = names
        self.frame.names = names

    @staticmethod
    def _joined(one: dict[str, Value], other: dict[str, Value], test: Value) -> dict[str, Value]:
        joined = {**one, **other}
        for name, value in one.items():
            if joined[name] is not value:
                joined[name] = either([value, other[name]])
                if test.rank and joined[name].kind == "either" and not joined[name].rank:
                    joined[name].rank = (
                        test.rank if all(p.kind == "const" for p in joined[name].parts) else 0
                    )
        return joined

    def _do_for(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        source = self.evaluate(node.test if isinstance(node, ast.While) else node.iter)
        saved, guards = self.loops, self.guards
        if not isinstance(node, ast.While):
            self.emit(ITERATE, node, args=[source])
        self.loops = (*saved, node)
        if not isinstance(node, ast.While):
            self.bind(node.target, self.element(source))
        self.run_body(node.body)
        self.loops, self.guards = saved, guards
        self.run_body(node.orelse)

    _do_asyncfor = _do_while = _do_for

    def _do_with(self, node: ast.With | ast.AsyncWith) -> bool:
        saved = self.withs
        for item in node.items:
            value = self.evaluate(item.context_expr)
            self.withs = (*self.withs, value)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, value)
        leaves = self.run_body(node.body)
        self.withs = saved
        return leaves

    _do_asyncwith = _do_with

    def _do_try(self, node: ast.Try) -> bool:
        guards = self.guards
        self.caught += bool(node.handlers)
        leaves = self.run_body(node.body)
        self.caught -= bool(node.handlers)
        kept = self.guards
        for handler in node.handlers:
            self.guards = (*guards, Guard(handler, Value("unknown", "except"), True))
            self.evaluate(handler.type)
            if handler.name:
                self.frame.names[handler.name] = Value("unknown", "error")
            self.run_body(handler.body)
        self.guards = kept
        leaves = leaves or self.run_body(node.orelse)
        return self.run_body(node.finalbody) or (leaves and not node.handlers)

    _do_trystar = _do_try

    def _do_match(self, node: ast.Match) -> None:
        test, saved = self.evaluate(node.subject), self.guards
        names = joined = dict(self.frame.names)
        for case in node.cases:
            self._put_names(dict(names))
            self.guards = (*saved, Guard(case, test, True))
            if not self.run_body(case.body):
                joined = self._joined(joined, self.frame.names, test)
        self.guards = saved
        self._put_names(joined)

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.frame if self.frame.names is not self.frame.module.names else None
        self.frame.names[node.name] = Value(
            "def", node.name, node=node, home=(self.frame.module, outer)
        )

    _do_asyncfunctiondef = _do_functiondef

    def _do_classdef(self, node: ast.ClassDef) -> None:
        info = ClassInfo(node, self.frame.module)
        self.frame.names[node.name] = Value("class", node.name, node=node, cls=info)


@lru_cache(maxsize=4096)
def _raises(last: ast.stmt) -> bool:
    """Whether a branch ends in an error, which ends the run: what follows is not conditional on
    it.
    """
    return isinstance(last, ast.Raise) and not any(
        getattr(n, "id", "") == "SystemExit" for n in ast.walk(last)
    )
