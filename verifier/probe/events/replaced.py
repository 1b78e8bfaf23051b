"""Parameters that `fully_shard` or `to_empty` has replaced: the old object is in no model any more,
and who reads it reads old values.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ...trace.events import ReplacedRead
from ..compat.names import AS_PLAIN, need
from ..compat.tensors import own_parameters
from ..dispatcher import Call, Leave
from ..session import Session

Named = dict[int, tuple[str, nn.Parameter]]  # {id: (full name, parameter)}
Given = Callable[[Iterable[Any], Callable[..., Any]], None]
_READS = 8  # lines that are recorded
_ABOUT = (  # what says nothing of the values
    "__get__",
    "__hash__",
    "__len__",
    "__set__",
    "data_ptr",
    "dim",
    "element_size",
    "is_complex",
    "is_contiguous",
    "is_floating_point",
    "numel",
    "ndimension",
    "register_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
    "type",
    "untyped_storage",
)


class Replacements:
    """The parameters that were replaced on one rank, and the lines that read them since."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.names: dict[int, str] = {}
        self.lines: set[object] = set()
        self.type = _replaced_type(self.given)

    def before(self, call: Call) -> Leave:
        """Parameters are about to be replaced."""
        given = call.given(0, "module")
        several = list(given) if isinstance(given, list | tuple) else []
        modules = [given] if isinstance(given, nn.Module) else several
        old = _parameters(modules)
        return lambda: self._leave(modules, old)

    def _leave(self, modules: list[nn.Module], old: Named) -> None:
        now = _parameters(modules)
        for key, (name, param) in old.items():
            if key not in now and type(param) is nn.Parameter:
                self.names[key] = name
                param.__class__ = self.type

    def given(self, args: Iterable[Any], function: Callable[..., Any]) -> None:
        """A function of torch is given arguments, of which some were replaced."""
        try:
            for value in args:
                for one in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(one, self.type):
                        self._read(one, function)
        except Exception as error:
            self.session.report("replaced.read", error)

    def _read(self, param: nn.Parameter, function: Callable[..., Any]) -> None:
        session, by = self.session, getattr(function, "__name__", "")
        if by in _ABOUT or by.startswith("is_"):
            return
        if not session.roots or session.progress.in_step or len(self.lines) >= _READS:
            return
        place = session.here()
        if place is not None and (place.file, place.line) not in self.lines:
            self.lines.add((place.file, place.line))
            name, step = self.names.get(id(param), "a parameter"), session.progress.step_number()
            session.write(ReplacedRead(name=name, by=by, step=step, at_line=place))


def _replaced_type(
    given: Callable[[Iterable[Any], Callable[..., Any]], None],
) -> type[nn.Parameter]:
    as_plain = need(AS_PLAIN)

    class Replaced(nn.Parameter):
        """What a replaced parameter becomes: it computes as before, and says that it was read."""

        replaced = True

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with as_plain():
                given(args, function)
                return function(*args, **(kwargs or {}))

    return Replaced


def _parameters(modules: Iterable[nn.Module]) -> Named:
    return {
        id(param): (f"{prefix}.{name}".lstrip("."), param)
        for module in modules
        for prefix, part in module.named_modules()
        for name, param in own_parameters(part).items()
        if param is not None
    }


def install(session: Session) -> None:
    """Subscribe to what replaces parameters, except where DDP stands in, which replaces none."""
    if session.request.mode != "fsdp":
        return
    replacements = Replacements(session)
    session.around("torch.distributed.fsdp:fully_shard", before=replacements.before)
    session.around("torch.nn:Module.to_empty", before=replacements.before)
