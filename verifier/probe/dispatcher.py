"""Each function of torch is patched once, here; topics subscribe to its calls.

A subscriber's own error becomes a `ProbeError` event and never reaches the script; `StopRun` does.
What a subscriber computes does not follow the script's default device or its other modes; what it
replaces does. While torch.compile traces, a patched function only calls the real one; within a
transform of torch.func (grad, vmap) and under FakeTensorMode nothing is recorded. Subscribers are
called in the order of subscription; of two that replace a function, the first is the outer one.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch.compiler import is_compiling

from .compat.names import (
    CURRENT_MODE,
    FAKE_MODE,
    TRANSFORM,
    find,
    forget_builtins,
    keep_constructors,
)
from .compat.tensors import own_tensors

Report = Callable[[str, BaseException], None]
Leave = Callable[[], object]
Before = Callable[["Call"], Leave | None]
After = Callable[["Call"], None]
Replace = Callable[["Call", Callable[[], Any]], Any]


def _without_values() -> Callable[[], bool]:
    """Whether tensors have no values to record here: within a transform of torch.func, or under
    torch's FakeTensorMode, with which scripts count FLOPs (saforem2/ezpz).
    """
    transform, mode, fake = find(TRANSFORM), find(CURRENT_MODE), find(FAKE_MODE)

    def now() -> bool:
        if transform is not None and transform() is not None:
            return True
        return mode is not None and fake is not None and mode(fake) is not None

    return now


class Call:
    """One call of a patched function. Subscribers may change `args` and `kwargs` before it."""

    __slots__ = ("args", "failed", "kwargs", "result")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.result: Any = None
        self.failed: type[BaseException] | None = None

    def given(self, position: int, name: str, default: Any = None) -> Any:
        """An argument, by its position or its name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


class Point:
    """A function that is patched, with its subscribers."""

    def __init__(self, owner: Any, name: str, real: Callable[..., Any], report: Report) -> None:
        self.owner = owner
        self.name = name
        self.real = real
        self.befores: list[Before] = []
        self.afters: list[After] = []
        self.replacing: list[Replace] = []
        self._report = report

    def patched(self) -> Callable[..., Any]:
        """The replacement of the function.

        One frame for all subscribers, since modules are called often.
        """
        real, report, guarded = self.real, self._report, self._guarded
        befores, afters = tuple(self.befores), tuple(self.afters)
        run, valueless = self._run if self.replacing else None, _without_values()

        @functools.wraps(real)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return real(*args, **kwargs)
            call = Call(args, kwargs)
            if valueless():
                return real(*args, **kwargs) if run is None else run(call, 0)
            leaving: list[Leave] | None = None
            try:
                if befores:
                    with own_tensors():
                        for before in befores:
                            try:
                                leave = before(call)
                            except Exception as error:
                                report(name_of(before), error)
                            else:
                                if leave is not None:
                                    leaving = [leave] if leaving is None else [leave, *leaving]
                call.result = real(*call.args, **call.kwargs) if run is None else run(call, 0)
            except BaseException as error:
                # not the error: it would hold the frames, and they the call
                call.failed = type(error)
                raise
            finally:
                if leaving is not None:
                    with own_tensors():
                        for leave in leaving:
                            guarded(leave)
            if afters:
                with own_tensors():
                    for after in afters:
                        guarded(after, call)
            return call.result

        watched.__fsdp2_point__ = self  # type: ignore[attr-defined]
        return watched

    def _run(self, call: Call, depth: int) -> Any:
        if depth == len(self.replacing):
            return self.real(*call.args, **call.kwargs)
        return self.replacing[depth](call, lambda: self._run(call, depth + 1))

    def _guarded(self, subscriber: Callable[..., object], *arguments: Any) -> None:
        try:
            subscriber(*arguments)
        except Exception as error:
            self._report(name_of(subscriber), error)


class Dispatcher:
    """The points of one process. `report(symbol, error)` records an error of a subscriber."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._points: dict[tuple[int, str], Point] = {}

    def around(
        self,
        target: str,
        before: Before | None = None,
        after: After | None = None,
        replace: Replace | None = None,
        optional: bool = False,
    ) -> None:
        """Subscribe to the function `module:attributes` of torch or Python.

        `before` may return a function to call when the call ends, with an error or not; `after` is
        called only if it succeeded; `replace(call, proceed)` returns the result in place of the
        function, and its errors reach the script. A target that this torch lacks is reported,
        unless it is `optional`.
        """
        point = self._point(target)
        if point is None:
            if not optional:
                self._report(
                    target.replace(":", "."), AttributeError("this torch does not have it")
                )
            return
        lists: tuple[list[Any], ...] = (point.befores, point.afters, point.replacing)
        for subscriber, known in zip((before, after, replace), lists, strict=True):
            if subscriber is not None and subscriber not in known:
                known.append(subscriber)

    def outermost(self, targets: Iterable[str], after: After) -> None:
        """Subscribe to functions of which one may call another: `after` sees only the outermost
        call that succeeded.
        """
        running: list[Call] = []

        def before(call: Call) -> Leave:
            running.append(call)
            return running.pop

        def ended(call: Call) -> None:
            if not running:
                after(call)

        for target in targets:
            self.around(target, before=before, after=ended)

    def install(self) -> None:
        """Patch every function that has subscribers, in every module of torch that holds it."""
        keep_constructors()
        by_name: dict[str, list[tuple[Any, Any]]] = {}
        for point in self._points.values():
            patched = point.patched()
            raw = vars(point.owner).get(point.name)
            setattr(
                point.owner,
                point.name,
                staticmethod(patched) if isinstance(raw, staticmethod) else patched,
            )
            if not isinstance(point.owner, type):
                by_name.setdefault(point.name, []).append((point.real, patched))
        names = by_name.keys()
        for key, module in list(sys.modules.items()):
            if key.partition(".")[0] != "torch":
                continue
            held = getattr(module, "__dict__", {})
            for name in names & held.keys():
                for real, ours in by_name[name]:
                    if held[name] is real:
                        setattr(module, name, ours)
        forget_builtins()

    def _point(self, target: str) -> Point | None:
        module, _, path = target.partition(":")
        *outer, name = path.split(".")
        owner = find(f"{module}:{'.'.join(outer)}")
        real = None if owner is None else getattr(owner, name, None)
        if real is None:
            return None
        known = self._points.get((id(owner), name))
        if known is None and not isinstance(
            owner, type
        ):  # another module may hold the same function
            known = next((p for p in self._points.values() if p.real is real), None)
        if known is None:
            known = self._points[id(owner), name] = Point(owner, name, real, self._report)
        return known


def name_of(subscriber: Any) -> str:
    """`topic.function`, for reports."""
    subscriber = getattr(subscriber, "func", subscriber)  # of a partial
    module = getattr(subscriber, "__module__", "").rpartition(".")[2]
    return f"{module}.{getattr(subscriber, '__qualname__', subscriber)}"
