"""Following calls: into the project's functions and classes; for torch's, the properties of the
results that detectors need.
"""

from __future__ import annotations

import ast

from .coverage import LIMIT
from .events import CALL, NEW, SHARD, STORE, Event
from .expressions import mesh_rank
from .names import Frame
from .project import ClassInfo
from .torch_names import (
    ASKS_NAMES,
    COLLECTIONS,
    COMPUTES,
    GROWS,
    LAUNCHERS,
    PLAIN,
    SAME_MODULE,
    STARTERS,
    SYNCS,
)
from .unresolved_calls import Noting
from .values import GLOBAL, RANK_NAMES, SUB, Value, choices, const, either, spread

INLINED = 14  # calls of project functions within one another
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Calls(Noting):
    """The part of the follower that evaluates calls."""

    def _call(self, node: ast.Call) -> Value:
        callee = self.evaluate(node.func)
        args: list[Value] = []
        kwargs: dict[str, Value] = {}
        is_open = False
        for arg in node.args:
            value = self.evaluate(arg)
            if not isinstance(arg, ast.Starred):
                args.append(value)
            elif value.kind in ("list", "tuple") and value.name != "many":
                args += value.parts
            else:
                is_open = True
        for keyword in node.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif value.kind == "dict" and value.name != "open":
                kwargs |= {key[1:-1]: item for key, item in value.attrs.items()}
            else:
                is_open = True
        return self.apply(callee, args, kwargs, node, is_open)

    def apply(
        self,
        callee: Value,
        args: list[Value],
        kwargs: dict[str, Value],
        node: ast.AST,
        is_open: bool = False,
    ) -> Value:
        """Call a value."""
        self.note(callee, node)
        if callee.kind == "either":
            saved, self.forked = self.forked, True
            value = either(
                [self.apply(part, args, kwargs, node, is_open) for part in callee.parts[:3]]
            )
            self.forked = saved
            return value
        if callee.kind == "def":
            if callee.name.endswith(".forward") and isinstance(callee.const, Value):
                self.emit("", node, "forward", callee.const, args)
            return self.call_function(callee, args, kwargs, node)
        if callee.kind == "class":
            return self._instantiate(callee, args, kwargs, node)
        if callee.kind == "made" and callee.event is not None:
            inner = callee.event.args[0] if callee.event.args else None
            if callee.name == "functools.partial" and inner is not None:
                more = callee.event
                return self.apply(
                    inner,
                    [*more.args[1:], *args],
                    {**more.kwargs, **kwargs},
                    node,
                    is_open or more.open,
                )
            if inner is not None and inner.kind == "def" and callee.name not in LAUNCHERS:
                return self.call_function(inner, args, kwargs, node)
        if callee.kind == "name":
            if callee.name in ("dcp.save", "dcp.load", "dcp.async_save"):
                self._ask_stateful(args[0] if args else kwargs.get("state_dict"), node)
            return self._external(self._event(callee.name, node, args, kwargs, is_open))
        if callee.kind == "attr" and callee.owner is not None:
            event = self._event("", node, args, kwargs, is_open)
            event.method, event.on = callee.name, callee.owner
            self.flow.by_method.setdefault(event.method, []).append(event)
            return self._method(event)
        if callee.kind == "object" and not self.is_module(callee):
            method = self.class_attribute(callee, "__call__", node)
            if method is not None:
                return self.call_function(method, args, kwargs, node)
        event = self._event(CALL, node, args, kwargs, is_open)
        event.on = callee
        event.result = Value("derived", "forward", args, node=node, local=True, event=event)
        return event.result

    def _ask_stateful(self, state: Value | None, node: ast.AST) -> None:
        """Call `state_dict` of the stateful objects in a state dict, as a checkpoint does."""
        for one in (
            c for part in (state.parts if state is not None else []) for c in choices(part)
        ):
            if one.kind == "object" and not self.is_module(one):
                method = self.class_attribute(one, "state_dict", node)
                if method is not None and method.kind == "def":
                    one.parts.append(self.call_function(method, [], {}, node))

    def _event(
        self, op: str, node: ast.AST, args: list[Value], kwargs: dict[str, Value], is_open: bool
    ) -> Event:
        event = self.emit(op, node, args=args)
        event.kwargs, event.open, event.forked = kwargs, is_open, self.forked
        return event

    def _made(self, event: Event, name: str) -> Value:
        event.result = made = Value(
            "made", name, [*event.args, *event.kwargs.values()], node=event.node, event=event
        )
        if event.op.startswith(COMPUTES) or not event.op:
            made.rank, made.local = spread(made.parts)
        return made

    def _external(self, event: Event) -> Value:
        """The result of an external function."""
        op, args = event.op, event.args
        first = args[0] if args else None
        if op == SHARD:
            event.result = event.arg(0, "module") or Value("unknown")
            return event.result
        if op in SYNCS:
            self._sync(event.arg(0, "tensor") or event.arg(0, "object_list"))
        if op in ("dist.get_rank", "dist.get_node_local_rank"):
            self._made(event, op).rank = SUB if event.arg(0, "group") is not None else GLOBAL
            return event.result
        if op in ("os.environ.get", "os.getenv", "os.environ.pop") and first is not None:
            return self.variable(first)
        if op == "builtins.getattr" and len(args) > 1 and isinstance(args[1].const, str):
            return self.attribute(args[0], args[1].const, event.node)
        if op == "builtins.setattr" and len(args) > 2 and isinstance(args[1].const, str):
            self.store(args[0], args[1].const, args[2], event.node)
        if op in COLLECTIONS and first is not None:
            if first.kind in ("list", "tuple", "dict") and op != "builtins.dict":
                return Value("list", first.name, first.parts, rank=first.rank, local=first.local)
            inside = self.element(first) if first.kind != "dict" else None
            return first if inside is None else Value("list", "many", [inside])
        if op == "builtins.dict":
            value = Value("dict", "open" if event.open else "")
            for key, item in event.kwargs.items():
                self.put(value, const(key), item)
            return value
        if op == "builtins.super":
            owner = self.frame.names.get("self")
            return Value("super", home=owner) if owner is not None else Value("unknown")
        if op == "importlib.import_module" and first is not None and isinstance(first.const, str):
            module = self.project.find(first.const, event.module.path)
            if module is not None:
                self.load(module)
                return Value("file", first.const, home=module)
        if op in LAUNCHERS and first is not None and first.kind == "def":
            given = event.arg(1, "args")
            self.call_function(
                first, [free("rank"), *(given.parts if given is not None else [])], {}, event.node
            )
            return self._made(event, op)
        if op in STARTERS and first is not None:
            return self.call_function(first, [], {}, event.node) if first.kind == "def" else first
        if event.given_rank and op not in PLAIN and not op.startswith(("logging.", "builtins.")):
            self.flow.rank_uses.append(event.node)
        value = self._made(event, op)
        if op in ("torch.nn.ModuleList", "torch.nn.Sequential", "torch.nn.ModuleDict"):
            for part in (
                p
                for given in args
                for p in (given.parts if given.kind in ("list", "dict") else [given])
            ):
                for one in choices(part):
                    one.owner = one.owner or value
        if op == "torch.nn.utils.clip_grad_norm_":
            value.local = False
        return value

    def _method(self, event: Event) -> Value:
        """The result of a method of a value that is not a project's object."""
        on, name, args = event.on, event.method, event.args
        assert on is not None
        if on.kind == "super":
            return self._super_method(event)
        if name in SAME_MODULE and (
            on.kind != "derived" and on.name not in ("parameter", "buffer")
        ):
            if name == "apply" and args and args[0].kind == "def":
                one = Value("item", "module", owner=on)
                self.call_function(args[0], [one], {}, event.node)
            event.result = on
            if self.is_module(on) or not args or on.kind in ("attr", "free", "item"):
                return on
        if name in GROWS and on.kind in ("list", "dict", "made", "attr"):
            self._grow(event)
        known = f"[{args[0].const}]" if args and args[0].kind == "const" else ""
        if name == "get" and on.kind == "dict" and known in on.attrs:
            return on.attrs[known]
        value = self._made(event, name)
        value.parts = [on, *value.parts]
        if name in ("get_local_rank", "get_rank", "get_coordinate"):
            value.rank = (
                GLOBAL if name == "get_rank" or (not args and mesh_rank(on) == GLOBAL) else SUB
            )
            return value
        value.rank = value.rank or on.rank
        value.local = value.local or on.local
        if name in ASKS_NAMES and args and args[0].name == "text":
            value.rank, value.local = on.rank, value.local or bool(args[0].rank)
        if name in ("full_tensor", "wait") or (name == "load_state_dict"):
            value.local = False
        if event.given_rank and name not in ("info", "debug", "warning", "print", "format"):
            self.flow.rank_uses.append(event.node)
        return value

    def _grow(self, event: Event) -> None:
        on, args = event.on, event.args
        assert on is not None
        if event.method in ("extend", "update") and args:
            on.parts += args[0].parts if args[0].kind in ("list", "tuple", "dict") else args[:1]
            on.attrs.update(args[0].attrs if args[0].kind == "dict" else {})
        elif (
            event.method in ("add_module", "register_module")
            and len(args) > 1
            and isinstance(args[0].const, str)
        ):
            self.store(on, args[0].const, args[1], event.node)
        else:
            on.parts += args[-1:]
            if on.kind == "made" and args:
                for one in choices(args[-1]):
                    one.owner = one.owner or (on if one is not on else None)
                on.attrs["*"] = either([on.attrs["*"], args[-1]]) if "*" in on.attrs else args[-1]

    def _super_method(self, event: Event) -> Value:
        owner: Value = event.on.home if event.on is not None else Value("unknown")
        if owner.cls is None:
            return Value("unknown")
        current = event.function.partition(".")[0]
        line = self.ancestry(owner.cls)
        names = [info.name for info in line]
        after = line[names.index(current) + 1 :] if current in names else line[1:]
        for info in after:
            if event.method in info.methods:
                return self.call_function(
                    info.method(event.method, owner), event.args, event.kwargs, event.node
                )
        return self._made(event, event.method)

    def _sync(self, value: Value | None) -> None:
        """After a collective in place."""
        for one in choices(value) if value is not None else ():
            one.local, one.rank, one.synced = False, 0, True
            if one.kind in ("list", "tuple"):
                one.parts, one.attrs = (
                    [Value("unknown", "synced", synced=True) for _ in one.parts],
                    {},
                )

    def store(self, base: Value, attr: str, value: Value, node: ast.AST) -> None:
        """`base.attr = value`."""
        event = self.emit(STORE, node, attr, base, [value])
        for one in choices(base):
            old = one.attrs.get(attr)
            keep = old is not None and old.kind != "const" and bool(event.guards)
            one.attrs[attr] = either([old, value]) if keep and old is not None else value
            if one.kind != "object" or self.is_module(one):
                for part in choices(value):
                    if (
                        part.owner is None
                        and part is not one
                        and (part.kind in ("made", "object", "list"))
                    ):
                        part.owner = one

    def _instantiate(
        self, callee: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        event = self._event(NEW, node, args, kwargs, False)
        event.result = value = Value(
            "object", callee.cls.name, node=node, cls=callee.cls, event=event
        )
        for info in reversed(self.ancestry(callee.cls)):
            for position, (key, default) in enumerate(info.fields.items()):
                given = kwargs.get(key, args[position] if position < len(args) else None)
                if given is None and default is not None:
                    given = self._default(info, default)
                if given is not None:
                    value.attrs[key] = given
        method = self.class_attribute(value, "__init__", node)
        if method is not None:
            self.call_function(method, args, kwargs, node)
        elif not callee.cls.fields:
            value.parts = list(event.given())
        return value

    def _default(self, info: ClassInfo, node: ast.expr) -> Value:
        saved, self.frame = self.frame, Frame(info.home, info.name)
        value = self.evaluate(node)
        self.frame = saved
        return value

    def call_function(
        self, value: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        """Follow a call into a function of the project."""
        function = value.node
        if (
            not isinstance(function, Function)
            or function in self.stack
            or len(self.stack) >= INLINED
        ):
            if function not in self.stack:
                self.flow.partial = True
                self.missed(node, LIMIT, f"limit of {INLINED} nested calls")
            return Value("unknown", value.name)
        module, closure = value.home
        self.note_decorators(function, module, value.name)
        saved = (self.frame, self.guards, self.loops, self.depth, self.caught)
        frame = Frame(module, value.name.rpartition(".")[2] if closure else value.name, closure)
        bound = [value.const] if isinstance(value.const, Value) else []
        self._bind_parameters(frame, function.args, [*bound, *args], kwargs)
        self.frame, self.depth = frame, 0
        self.stack.append(function)
        try:
            if isinstance(function, ast.Lambda):
                return self.evaluate(function.body)
            self.run_body(function.body)
            if frame.yields:
                return Value("list", "many", [either(frame.yields)])
            return either(frame.returns) if frame.returns else const(None)
        finally:
            self.stack.pop()
            self.frame, self.guards, self.loops, self.depth, self.caught = saved

    def _bind_parameters(
        self, frame: Frame, spec: ast.arguments, args: list[Value], kwargs: dict[str, Value]
    ) -> None:
        names, outer = [*spec.posonlyargs, *spec.args], self.frame
        defaults = [*[None] * (len(names) - len(spec.defaults)), *spec.defaults, *spec.kw_defaults]
        passed = args[: len(names)]
        for position, one in enumerate([*names, *spec.kwonlyargs]):
            if one.arg in kwargs:
                value = kwargs[one.arg]
            elif position < len(passed):
                value = passed[position]
            elif (default := defaults[position]) is not None:
                self.frame = Frame(frame.module, frame.function, frame.parent)
                value = self.evaluate(default)
                self.frame = outer
            else:
                value = free(one.arg)
            frame.names[one.arg] = value
        if spec.vararg is not None:
            frame.names[spec.vararg.arg] = Value("tuple", parts=args[len(names) :])
        if spec.kwarg is not None:
            known = {a.arg for a in (*names, *spec.kwonlyargs)}
            rest = Value("dict")
            for key, item in kwargs.items():
                if key not in known:
                    self.put(rest, const(key), item)
            frame.names[spec.kwarg.arg] = rest


def free(name: str) -> Value:
    """A parameter that no visible call passes."""
    return Value("free", name, rank=GLOBAL if name in RANK_NAMES else 0)
