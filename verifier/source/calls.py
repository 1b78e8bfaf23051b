"""Following calls: into the project's functions and classes; for methods of torch's objects, the
properties of the results that detectors need.
"""

from __future__ import annotations

import ast

from .coverage import LIMIT
from .events import CALL, NEW, Event
from .expressions import mesh_rank
from .external_calls import Call, ExternalCalls, free
from .names import Frame
from .project import ClassInfo
from .torch_names import ASKS_NAMES, GROWS, LAUNCHERS, SAME_MODULE
from .values import GLOBAL, SUB, Value, choices, const, either

INLINED = 14  # calls of project functions within one another
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Calls(ExternalCalls):
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
        return self._apply(callee, Call(node, args, kwargs, is_open))

    def _apply(self, callee: Value, call: Call) -> Value:
        """Call a value."""
        self.note(callee, call.node)
        function: Value | None = None
        match callee.kind:
            case "either":
                return self._apply_each(callee.parts[:3], call)
            case "class":
                return self._instantiate(callee, call)
            case "name":
                if callee.name in ("dcp.save", "dcp.load", "dcp.async_save"):
                    state = call.args[0] if call.args else call.kwargs.get("state_dict")
                    self._ask_stateful(state, call.node)
                return self._external(self._event(callee.name, call))
            case "attr" if callee.owner is not None:
                event = self._event("", call)
                event.method, event.on = callee.name, callee.owner
                self.flow.by_method.setdefault(event.method, []).append(event)
                return self._method(event)
            case "def":
                if callee.name.endswith(".forward") and isinstance(callee.const, Value):
                    self.emit("", call.node, "forward", callee.const, call.args)
                function = callee
            case "made" if callee.event is not None and callee.event.args:
                inner, *bound = callee.event.args
                if callee.name == "functools.partial":
                    return self._apply(inner, call.after(bound, callee.event))
                if inner.kind == "def" and callee.name not in LAUNCHERS:
                    function = inner
            case "object" if not self.is_module(callee):
                function = self.class_attribute(callee, "__call__", call.node)
        if function is not None:
            return self.call_function(function, call.args, call.kwargs, call.node)
        event = self._event(CALL, call)
        event.on = callee
        event.result = Value(
            "derived", "forward", call.args, node=call.node, local=True, event=event
        )
        return event.result

    def _apply_each(self, callees: list[Value], call: Call) -> Value:
        saved, self.forked = self.forked, True
        value = either([self._apply(one, call) for one in callees])
        self.forked = saved
        return value

    def _ask_stateful(self, state: Value | None, node: ast.AST) -> None:
        """Call `state_dict` of the stateful objects in a state dict, as a checkpoint does."""
        for one in (
            c for part in (state.parts if state is not None else []) for c in choices(part)
        ):
            if one.kind == "object" and not self.is_module(one):
                method = self.class_attribute(one, "state_dict", node)
                if method is not None and method.kind == "def":
                    one.parts.append(self.call_function(method, [], {}, node))

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

    def _instantiate(self, callee: Value, call: Call) -> Value:
        node, args, kwargs, _ = call
        event = self._event(NEW, call._replace(is_open=False))
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
