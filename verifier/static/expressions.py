"""Following expressions: where each value comes from."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from .events import ITERATE, Event, Guard, Trace
from .project import ClassInfo, Module, Project, canonical
from .values import GLOBAL, RANK_NAMES, RANK_VARIABLES, SUB, Value, choices, const, derived, either

DEPTH = 60  # of nested expressions
_FOLDED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_PASS_ON = ("builtins.reversed", "builtins.iter", "tqdm", "tqdm.tqdm", "tqdm.auto.tqdm", "copy.copy")
_LISTS = ("torch.nn.ModuleList", "torch.nn.Sequential")


class Frame:
    """The names of one function call, of a module, or of a comprehension."""

    __slots__ = ("function", "globals", "module", "names", "parent", "returns", "yields")

    def __init__(self, module: Module, function: str, parent: Frame | None = None) -> None:
        self.module, self.function, self.parent = module, function, parent
        self.names: dict[str, Value] = {}
        self.globals: set[str] = set()
        self.returns: list[Value] = []
        self.yields: list[Value] = []


class Expressions:
    """The part of the follower that evaluates expressions."""

    def __init__(self, project: Project, whole: bool, budget: int) -> None:
        self.project = project
        self.trace = Trace(project, whole)
        self.trace.is_module, self.trace.external_bases = self.is_module, self.external_bases
        self.budget = budget
        self.guards: tuple[Guard, ...] = ()
        self.loops: tuple[ast.AST, ...] = ()
        self.withs: tuple[Value, ...] = ()
        self.caught = 0
        self.forked = False
        self.depth = 0
        self.stack: list[ast.AST] = []
        self.external: dict[str, Value] = {}
        self.frame: Frame

    def call(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def call_function(self, value: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        raise NotImplementedError

    def load(self, module: Module) -> None:
        raise NotImplementedError

    def emit(self, op: str, node: ast.AST, method: str = "", on: Value | None = None, args: list[Value] | None = None) -> Event:
        """Record an event under the conditions that hold now."""
        event = Event(len(self.trace.events), op, node, self.frame.module, self.frame.function)
        event.method, event.on, event.args = method, on, args or []
        event.guards, event.loops, event.withs, event.caught = self.guards, self.loops, self.withs, self.caught > 0
        self.trace.add(event)
        return event

    def name(self, dotted: str) -> Value:
        """An external name; the same value each time."""
        dotted = canonical(dotted)
        if dotted not in self.external:
            self.external[dotted] = Value("name", dotted)
        return self.external[dotted]

    def eval(self, node: ast.expr | None) -> Value:
        """The value of an expression."""
        if node is None:
            return const(None)
        self.budget -= 1
        if self.budget < 0 or self.depth > DEPTH:
            self.trace.partial = True
            return Value("unknown")
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        self.depth += 1
        try:
            return method(node) if method is not None else self._parts(node)
        finally:
            self.depth -= 1

    def _parts(self, node: ast.expr) -> Value:
        found = [self.eval(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return derived(type(node).__name__, found, node)

    def _constant(self, node: ast.Constant) -> Value:
        return const(node.value)

    def _name(self, node: ast.Name) -> Value:
        return self.lookup(node.id)

    def lookup(self, name: str) -> Value:
        """What a name stands for here."""
        frame: Frame | None = self.frame
        while frame is not None:
            if name in frame.names and name not in frame.globals:
                return frame.names[name]
            frame = frame.parent
        found = self.frame.module.names.get(name)
        if isinstance(found, Value):
            return found
        return self.name(f"builtins.{name}")

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.eval(node.value), node.attr, node)

    def attribute(self, base: Value, attr: str, node: ast.AST) -> Value:
        """`base.attr`."""
        if base.kind == "name":
            found = self.name(f"{base.name}.{attr}")
            found.owner = None
            return found
        if base.kind == "file":
            self.load(base.home)
            inner = base.home.names.get(attr)
            if isinstance(inner, Value):
                return inner
            below = self.project.find(attr, base.home.path, 1) if base.home.path.name == "__init__.py" else None
            return Value("file", attr, home=below) if below is not None else Value("unknown", attr)
        if base.kind == "either":
            return either([self.attribute(part, attr, node) for part in base.parts[:4]])
        if attr in base.attrs:
            return base.attrs[attr]
        if base.cls is not None and (found_in := self.class_attribute(base, attr, node)) is not None:
            return found_in
        value = Value("attr", attr, owner=base, node=node)
        value.rank = GLOBAL if attr in RANK_NAMES and base.kind != "object" else 0
        value.local = base.local
        base.attrs[attr] = value
        return value

    def class_attribute(self, base: Value, attr: str, node: ast.AST) -> Value | None:
        """A method, property or class variable of a project class."""
        for info in self.ancestry(base.cls):
            method = info.methods.get(attr)
            if method is not None:
                marks = {ast.unparse(d).rpartition(".")[2] for d in method.decorator_list}
                bound = None if base.kind == "class" or "staticmethod" in marks else base
                if base.kind == "class" and "classmethod" in marks:
                    bound = base
                value = Value("def", f"{info.name}.{attr}", const=bound, node=method, home=(info.home, None))
                if marks & {"property", "cached_property"} and base.kind == "object":
                    return self.call_function(value, [], {}, node)
                return value
            for item in info.node.body:
                if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == attr for t in item.targets):
                    return self.eval(item.value)
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == attr:
                    return self.eval(item.value) if item.value is not None else None
        return None

    def ancestry(self, info: ClassInfo) -> list[ClassInfo]:
        """A project class and its project bases."""
        found, queue = [], [info]
        while queue and len(found) < 20:
            current = queue.pop(0)
            found.append(current)
            for base in current.bases:
                value = self._in_module(current.home, base)
                if value.kind == "class" and value.cls not in found:
                    queue.append(value.cls)
        return found

    def external_bases(self, info: ClassInfo) -> list[str]:
        """The canonical names of the bases that are not of the project."""
        values = [self._in_module(one.home, base) for one in self.ancestry(info) for base in one.bases]
        return [value.name for value in values if value.kind == "name"]

    def _in_module(self, module: Module, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            found = module.names.get(node.id)
            return found if isinstance(found, Value) else self.name(f"builtins.{node.id}")
        if isinstance(node, ast.Attribute):
            return self.attribute(self._in_module(module, node.value), node.attr, node)
        return Value("unknown")

    def is_module(self, value: Value) -> bool:
        """Whether a value is known to be an nn.Module."""
        if value.kind == "object":
            names = self.external_bases(value.cls)
            return any(n.startswith("torch.nn.") or n.endswith(("Module", "PreTrainedModel")) for n in names)
        if value.kind == "made":
            last = value.name.rpartition(".")[2]
            return (value.name.startswith("torch.nn.") and last[:1].isupper() and last != "Parameter") or last in (
                "from_pretrained",
                "from_config",
            )
        return False

    def _subscript(self, node: ast.Subscript) -> Value:
        base, key = self.eval(node.value), self.eval(node.slice)
        return self.item(base, key, node)

    def item(self, base: Value, key: Value, node: ast.AST) -> Value:
        """`base[key]`."""
        if base.kind == "name" and base.name == "os.environ":
            return self.variable(key)
        known = key.const if key.kind == "const" and isinstance(key.const, int | str) else None
        if known is not None and f"[{known}]" in base.attrs:
            return base.attrs[f"[{known}]"]
        if base.kind in ("list", "tuple") and isinstance(known, int) and -len(base.parts) <= known < len(base.parts):
            return base.parts[known]
        if base.kind == "either":
            return either([self.item(part, key, node) for part in base.parts[:4]])
        if base.kind == "made" and base.name in _LISTS:
            return self.element(base)
        if key.rank:
            self.trace.rank_uses.append(node)
        value = Value("item", "item", [key], owner=base, node=node)
        value.key, value.local = key, base.local or bool(key.rank) or key.local
        if known is not None:
            base.attrs[f"[{known}]"] = value
        return value

    def variable(self, key: Value) -> Value:
        """An environment variable."""
        value = Value("made", "os.environ", [key])
        if key.const in RANK_VARIABLES:
            value.rank = GLOBAL
        return value

    def element(self, value: Value) -> Value:
        """One element of what is iterated over."""
        if value.kind in ("list", "tuple"):
            return either(value.parts) if value.parts else Value("unknown")
        if value.kind == "either":
            return either([self.element(part) for part in value.parts[:4]])
        if "*" in value.attrs:
            return value.attrs["*"]
        found = self._element_of_made(value) if value.kind == "made" and value.event is not None else None
        if found is None:
            found = Value("item", "item", owner=value)
            found.local = value.local or (value.kind == "made" and value.name == "data.DataLoader")
            found.rank = value.rank
        value.attrs["*"] = found
        return found

    def _element_of_made(self, value: Value) -> Value | None:
        event: Event = value.event
        first = event.args[0] if event.args else None
        if value.name in _LISTS:
            inside = self.element(first) if len(event.args) == 1 and first is not None else either(event.args)
            return inside if event.args else None
        if value.name == "builtins.enumerate" and first is not None:
            return Value("tuple", parts=[Value("unknown"), self.element(first)])
        if value.name == "builtins.zip":
            return Value("tuple", parts=[self.element(arg) for arg in event.args])
        if value.name in _PASS_ON and first is not None:
            return self.element(first)
        if value.name == "builtins.range":
            return derived("index", event.args)
        if event.on is None:
            return None
        if value.name == "values" and event.on.kind != "dict":
            return self.element(event.on)
        if value.name == "items":
            inside = either(event.on.parts) if event.on.kind == "dict" and event.on.parts else self.element(event.on)
            return Value("tuple", parts=[Value("unknown"), inside])
        return self._element_of_module(value.name, event.on)

    def _element_of_module(self, method: str, module: Value) -> Value | None:
        """One of `parameters()`, `modules()`, ... of a module."""
        kinds = {"parameters": "parameter", "buffers": "buffer", "modules": "module", "children": "child"}
        plain = method.removeprefix("named_")
        if plain not in kinds:
            return None
        one = Value("item", kinds[plain], owner=module)
        return Value("tuple", parts=[Value("unknown"), one]) if plain != method else one

    def _binop(self, node: ast.BinOp) -> Value:
        left, right = self.eval(node.left), self.eval(node.right)
        return self._fold(type(node.op), left, right, node)

    def _fold(self, kind: type, left: Value, right: Value, node: ast.AST) -> Value:
        if left.kind == right.kind == "const" and kind in _FOLDED:
            simple = isinstance(left.const, int | float | str) and isinstance(right.const, int | float | str)
            large = any(isinstance(x, str) and len(x) > 1000 or isinstance(x, int) and abs(x) > 1e18 for x in (left.const, right.const))
            text = kind in (ast.Mult, ast.Mod) and isinstance(left.const, str) | isinstance(right.const, str)
            if simple and not large and not text:
                try:
                    return const(_FOLDED[kind](left.const, right.const))
                except (TypeError, ZeroDivisionError, OverflowError):
                    return Value("unknown")
        value = derived(kind.__name__, [left, right], node)
        if value.rank and kind in _FOLDED and isinstance(node, ast.BinOp):
            self.trace.rank_uses.append(node)
        return value

    def _compare(self, node: ast.Compare) -> Value:
        left, rights = self.eval(node.left), [self.eval(c) for c in node.comparators]
        if len(rights) == 1:
            kind = type(node.ops[0])
            if kind in (ast.Is, ast.IsNot) and rights[0].kind == "const" and rights[0].const is None:
                if left.kind in ("const", "object", "def", "class", "list", "dict", "tuple"):
                    return const((left.const is None and left.kind == "const") == (kind is ast.Is))
                return derived("is none", [left], node)
            return self._fold(kind, left, rights[0], node)
        return derived("compare", [left, *rights], node)

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        value = self.eval(node.operand)
        if value.kind == "const" and isinstance(node.op, ast.Not):
            return const(not value.const)
        if value.kind == "const" and isinstance(node.op, ast.USub) and isinstance(value.const, int | float):
            return const(-value.const)
        return derived(type(node.op).__name__, [value], node)

    def _boolop(self, node: ast.BoolOp) -> Value:
        values = [self.eval(v) for v in node.values]
        decides = isinstance(node.op, ast.Or)
        for value in values:
            if value.kind == "const" and bool(value.const) == decides:
                return value if value is values[0] else derived("bool", values[: values.index(value)], node)
            if value.kind != "const":
                break
        else:
            return values[-1]
        return derived("bool", values, node)

    def _ifexp(self, node: ast.IfExp) -> Value:
        test = self.eval(node.test)
        if test.kind == "const":
            return self.eval(node.body if test.const else node.orelse)
        saved = self.guards
        self.guards = (*saved, Guard(node, test, True))
        body = self.eval(node.body)
        self.guards = (*saved, Guard(node, test, False))
        other = self.eval(node.orelse)
        self.guards = saved
        value = either([body, other])
        if test.rank and value.kind == "either":
            value.rank = test.rank
        return value

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        parts: list[Value] = []
        for item in node.elts:
            value = self.eval(item.value if isinstance(item, ast.Starred) else item)
            if isinstance(item, ast.Starred):
                parts += value.parts if value.kind in ("list", "tuple") else [self.element(value)]
            else:
                parts.append(value)
        value = Value("tuple" if isinstance(node, ast.Tuple) else "list", parts=parts, node=node)
        value.rank, value.local = max((p.rank for p in parts), default=0), any(p.local for p in parts)
        return value

    _tuple = _set = _list

    def _dict(self, node: ast.Dict) -> Value:
        value = Value("dict", node=node)
        for key_node, item_node in zip(node.keys, node.values, strict=True):
            item = self.eval(item_node)
            if key_node is None:
                value.parts += item.parts if item.kind == "dict" else [item]
                value.attrs.update(item.attrs if item.kind == "dict" else {})
                value.name = value.name if item.kind == "dict" else "open"
                continue
            self.put(value, self.eval(key_node), item)
        return value

    def put(self, base: Value, key: Value, item: Value) -> None:
        """`base[key] = item` in a dict."""
        if key.kind == "const":
            base.attrs[f"[{key.const}]"] = item
            base.parts.append(item)
        else:
            base.parts.append(derived("entry", [key, item]))
            base.name = "open"

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        parts = [self.eval(v.value) for v in node.values if isinstance(v, ast.FormattedValue)]
        return derived("text", parts, node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        outer = self.frame
        self.frame = Frame(outer.module, outer.function, outer)
        saved, loops = self.guards, self.loops
        self.loops = (*loops, node)
        for clause in node.generators:
            source = self.eval(clause.iter)
            self.emit(ITERATE, node, args=[source])
            self.bind(clause.target, self.element(source))
            for test in clause.ifs:
                self.guards = (*self.guards, Guard(test, self.eval(test), True))
        if isinstance(node, ast.DictComp):
            value = Value("dict", "open", [derived("entry", [self.eval(node.key), self.eval(node.value)])], node=node)
        else:
            value = Value("list", "many", [self.eval(node.elt)], node=node)
        self.frame, self.guards, self.loops = outer, saved, loops
        value.local = value.parts[0].local
        return value

    _listcomp = _setcomp = _generatorexp = _dictcomp = _comprehension

    def bind(self, target: ast.expr, value: Value) -> None:
        raise NotImplementedError

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("def", "<lambda>", node=node, home=(self.frame.module, self.frame))

    def _await(self, node: ast.Await) -> Value:
        return self.eval(node.value)

    def _starred(self, node: ast.Starred) -> Value:
        return self.eval(node.value)

    def _yield(self, node: ast.Yield) -> Value:
        self.frame.yields.append(self.eval(node.value))
        return Value("unknown")

    def _yieldfrom(self, node: ast.YieldFrom) -> Value:
        self.frame.yields.append(self.element(self.eval(node.value)))
        return Value("unknown")

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.eval(node.value)
        self.bind(node.target, value)
        return value

    def _call(self, node: ast.Call) -> Value:
        return self.call(node)


def mesh_rank(mesh: Value) -> int:
    """What a rank in a mesh says: a number in the world if the mesh is known to have one dimension, else in a part of it."""
    for one in choices(mesh):
        shape = one.event.arg(1, "mesh_shape") if one.kind == "made" and one.event is not None else None
        if one.name != "dist.init_device_mesh" or shape is None or shape.kind != "tuple" or len(shape.parts) != 1:
            return SUB
    return GLOBAL
