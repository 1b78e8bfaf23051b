"""Parameters that `fully_shard` or `to_empty` has replaced: the old object is in no model any more,
and who reads it reads old values.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from ...trace.events import ReplacedRead
from ..compat.names import AS_PLAIN, need
from ..compat.tensors import own_parameters
from ..dispatcher import Call, Leave
from ..session import Session

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


def install(session: Session) -> None:
    """Subscribe to what replaces parameters, except where DDP stands in, which replaces none."""
    if session.request.mode != "fsdp":
        return
    lines: set[object] = set()
    as_plain = need(AS_PLAIN)

    def read(name: str, function: Callable[..., Any]) -> None:
        by = getattr(function, "__name__", "")
        if (
            by in _ABOUT
            or by.startswith("is_")
            or not session.roots
            or session.progress.in_step
            or len(lines) >= _READS
        ):
            return
        place = session.here()
        if place is not None and (place.file, place.line) not in lines:
            lines.add((place.file, place.line))
            session.write(
                ReplacedRead(name=name, by=by, step=session.progress.step_number(), at_line=place)
            )

    class Replaced(nn.Parameter):
        """What a replaced parameter becomes: it computes as before, and says that it was read."""

        replaced = True

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with as_plain():
                try:
                    for value in args:
                        for one in value if isinstance(value, list | tuple) else [value]:
                            if isinstance(one, Replaced):
                                read(names.get(id(one), "a parameter"), function)
                except Exception as error:
                    session.report("replaced.read", error)
                return function(*args, **(kwargs or {}))

    names: dict[int, str] = {}

    def before(call: Call) -> Leave | None:
        given = call.given(0, "module")
        modules = (
            [given]
            if isinstance(given, nn.Module)
            else list(given)
            if isinstance(given, list | tuple)
            else []
        )
        old = {
            id(p): (f"{prefix}.{n}".lstrip("."), p)
            for m in modules
            for prefix, n, p in _parameters(m)
        }

        def leave() -> None:
            now = {id(p) for m in modules for _, _, p in _parameters(m)}
            for key, (name, param) in old.items():
                if key not in now and type(param) is nn.Parameter:
                    names[key] = name
                    param.__class__ = Replaced

        return leave

    session.around("torch.distributed.fsdp:fully_shard", before=before)
    session.around("torch.nn:Module.to_empty", before=before)


def _parameters(module: nn.Module) -> list[tuple[str, str, nn.Parameter]]:
    return [
        (prefix, name, param)
        for prefix, part in module.named_modules()
        for name, param in own_parameters(part).items()
        if param is not None
    ]
