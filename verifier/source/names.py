"""Following names: attributes, items, elements and class members of values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .coverage import Missed, callee_of
from .events import Event, Flow, Guard
from .project import ClassInfo, Module, Project, canonical
from .values import GLOBAL, RANK_NAMES, RANK_VARIABLES, Value, derived, either

_PASS_ON = (
    "builtins.reversed",
    "builtins.iter",
    "tqdm",
    "tqdm.tqdm",
    "tqdm.auto.tqdm",
    "copy.copy",
)
_LISTS = ("torch.nn.ModuleList", "torch.nn.Sequential")


@dataclass(eq=False, repr=False, slots=True)
class Frame:
    """The names in a function call, a module or a comprehension."""

    module: Module
    function: str
    parent: Frame | None = None
    names: dict[str, Value] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)


class Names:
    """The part of the follower that looks up names.

    The attributes without a value are methods of its subclasses.
    """

    call_function: Callable[[Value, list[Value], dict[str, Value], ast.AST], Value]
    evaluate: Callable[[ast.expr | None], Value]
    load: Callable[[Module], None]
    member: Callable[[str, Module | None, str, Path, int], Value]
    run_body: Callable[[list[ast.stmt]], bool]
    bind: Callable[[ast.expr, Value], None]

    def __init__(self, project: Project, whole: bool, budget: int) -> None:
        self.project = project
        self.flow = Flow(project, whole)
        self.flow.is_module, self.flow.external_bases = self.is_module, self.external_bases
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

    def emit(
        self,
        op: str,
        node: ast.AST,
        method: str = "",
        on: Value | None = None,
        args: list[Value] | None = None,
    ) -> Event:
        """Record an event under the conditions that hold now."""
        flow, frame, held = (
            self.flow,
            self.frame,
            (self.guards, self.loops, self.withs, self.caught > 0),
        )
        event = Event(
            len(flow.events), op, node, frame.module, frame.function, method, on, args, *held
        )
        flow.add(event)
        return event

    def missed(self, node: ast.AST, kind: str, reason: str, callee: str = "") -> None:
        """Record a call that cannot be followed."""
        if node not in self.flow.missed:
            place = (str(self.frame.module.path), getattr(node, "lineno", 1))
            self.flow.missed[node] = Missed(callee or callee_of(node), *place, kind, reason)

    def name(self, dotted: str) -> Value:
        """An external name; the same value each time."""
        short = canonical(dotted)
        found = self.external.get(short)
        if found is None:
            found = self.external[short] = Value("name", short, home=dotted)
        return found

    def lookup(self, name: str) -> Value:
        """What a name stands for here."""
        frame: Frame | None = self.frame
        while frame is not None:
            found = frame.names.get(name)
            if found is not None and name not in frame.globals:
                if found.kind == "pending":
                    found = frame.names[name] = self.imported(found)
                return found
            frame = frame.parent
        return self._global(self.frame.module, name)

    def _global(self, module: Module, name: str) -> Value:
        """What a name stands for in a module's own code."""
        found = module.names.get(name)
        return self.imported(found) if isinstance(found, Value) else self.name(f"builtins.{name}")

    def imported(self, value: Value) -> Value:
        """The value, or the result of its deferred import."""
        return self.member(value.name, *value.home) if value.kind == "pending" else value

    def attribute(self, base: Value, attr: str, node: ast.AST) -> Value:
        """`base.attr`."""
        if base.kind == "name":
            found = self.name(f"{base.home}.{attr}")
            found.owner = None
            return found
        if base.kind == "file":
            self.load(base.home)
            inner = base.home.names.get(attr)
            if isinstance(inner, Value):
                return self.imported(inner)
            below = (
                self.project.find(attr, base.home.path, 1)
                if base.home.path.name == "__init__.py"
                else None
            )
            return Value("file", attr, home=below) if below is not None else Value("unknown", attr)
        if base.kind == "either":
            return either([self.attribute(part, attr, node) for part in base.parts[:4]])
        if attr in base.attrs:
            return base.attrs[attr]
        if (
            base.cls is not None
            and (found_in := self.class_attribute(base, attr, node)) is not None
        ):
            return found_in
        rank = GLOBAL if attr in RANK_NAMES and base.kind != "object" else 0
        base.attrs[attr] = Value("attr", attr, owner=base, node=node, rank=rank, local=base.local)
        return base.attrs[attr]

    def class_attribute(self, base: Value, attr: str, node: ast.AST) -> Value | None:
        """A method, property or class variable of a project class."""
        for info in self.ancestry(base.cls):
            method = info.methods.get(attr)
            if method is not None:
                marks = info.marks(attr)
                bound = (
                    "classmethod" in marks if base.kind == "class" else "staticmethod" not in marks
                )
                value = info.method(attr, base if bound else None)
                if marks & {"property", "cached_property"} and base.kind == "object":
                    return self.call_function(value, [], {}, node)
                return value
            if attr in info.variables:
                value_of = info.variables[attr]
                return self.evaluate(value_of) if value_of is not None else None
        return None

    def ancestry(self, info: ClassInfo) -> list[ClassInfo]:
        """A project class and its project bases."""
        if info.line:
            return info.line
        found: list[ClassInfo] = []
        queue = [info]
        while queue and len(found) < 20:
            found.append(queue.pop(0))
            bases = (self._in_module(found[-1].home, base) for base in found[-1].bases)
            queue += [
                value.cls for value in bases if value.kind == "class" and value.cls not in found
            ]
        if all(one.home.state == "done" for one in found):  # else a base may still get its name
            info.line = found
        return found

    def external_bases(self, info: ClassInfo) -> list[str]:
        """The canonical names of the bases that are not of the project."""
        return [value.name for value in self.strange_bases(info)]

    def strange_bases(self, info: ClassInfo) -> list[Value]:
        """The bases that are not of the project."""
        if info.strange is None:
            values = [
                self._in_module(one.home, base) for one in self.ancestry(info) for base in one.bases
            ]
            found = [value for value in values if value.kind == "name"]
            if not info.line:
                return found
            info.strange = found
        return info.strange

    def _in_module(self, module: Module, node: ast.expr) -> Value:
        if isinstance(node, ast.Name):
            return self._global(module, node.id)
        if isinstance(node, ast.Attribute):
            return self.attribute(self._in_module(module, node.value), node.attr, node)
        return Value("unknown")

    def is_module(self, value: Value) -> bool:
        """Whether a value is known to be an nn.Module."""
        if value.kind == "object":
            names = self.external_bases(value.cls)
            return any(
                n.startswith("torch.nn.") or n.endswith(("Module", "PreTrainedModel"))
                for n in names
            )
        if value.kind == "made":
            last = value.name.rpartition(".")[2]
            of_torch = (
                value.name.startswith("torch.nn.") and last[:1].isupper() and last != "Parameter"
            )
            return of_torch or last in ("from_pretrained", "from_config")
        return False

    def item(self, base: Value, key: Value, node: ast.AST) -> Value:
        """`base[key]`."""
        if base.kind == "name" and base.name == "os.environ":
            return self.variable(key)
        known = key.const if key.kind == "const" and isinstance(key.const, int | str) else None
        if known is not None and f"[{known}]" in base.attrs:
            return base.attrs[f"[{known}]"]
        if (
            base.kind in ("list", "tuple")
            and isinstance(known, int)
            and -len(base.parts) <= known < len(base.parts)
        ):
            return base.parts[known]
        if base.kind == "either":
            return either([self.item(part, key, node) for part in base.parts[:4]])
        if base.kind == "made" and base.name in _LISTS:
            return self.element(base)
        if key.rank:
            self.flow.rank_uses.append(node)
        local = base.local or bool(key.rank) or key.local
        value = Value("item", "item", [key], owner=base, node=node, local=local)
        if known is not None:
            base.attrs[f"[{known}]"] = value
        return value

    def variable(self, key: Value) -> Value:
        """An environment variable."""
        return Value("made", "os.environ", [key], rank=GLOBAL if key.const in RANK_VARIABLES else 0)

    def element(self, value: Value) -> Value:
        """One element of what is iterated over."""
        if value.kind in ("list", "tuple"):
            return either(value.parts) if value.parts else Value("unknown")
        if value.kind == "either":
            return either([self.element(part) for part in value.parts[:4]])
        if "*" in value.attrs:
            return value.attrs["*"]
        found = (
            self._element_of_made(value)
            if value.kind == "made" and value.event is not None
            else None
        )
        if found is None:
            local = value.local or (value.kind == "made" and value.name == "data.DataLoader")
            found = Value("item", "item", owner=value, rank=value.rank, local=local)
        value.attrs["*"] = found
        return found

    def _element_of_made(self, value: Value) -> Value | None:
        event: Event = value.event
        first = event.args[0] if event.args else None
        if value.name in _LISTS:
            inside = (
                self.element(first)
                if len(event.args) == 1 and first is not None
                else either(event.args)
            )
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
            inside = (
                either(event.on.parts)
                if event.on.kind == "dict" and event.on.parts
                else self.element(event.on)
            )
            return Value("tuple", parts=[Value("unknown"), inside])
        return self._element_of_module(value.name, event.on)

    def _element_of_module(self, method: str, module: Value) -> Value | None:
        """One of `parameters()`, `modules()`, ... of a module."""
        kinds = {
            "parameters": "parameter",
            "buffers": "buffer",
            "modules": "module",
            "children": "child",
        }
        plain = method.removeprefix("named_")
        if plain not in kinds:
            return None
        one = Value("item", kinds[plain], owner=module)
        return Value("tuple", parts=[Value("unknown"), one]) if plain != method else one
