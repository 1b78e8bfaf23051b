"""What each module of the models makes in its first call of step 1, in the order in which these calls end."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ...trace.events import Layer
from ..frames import line_at
from ..session import Session
from ..sketch import sketch

MOST = 2_000


def install(session: Session) -> None:
    if not session.request["layers"]:
        return
    names: dict[int, str] = {}

    def adopted(root: nn.Module, name: str) -> None:
        names.update({id(part): f"{name}{inner}" for inner, part in root.named_modules()})

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if session.step_number() > 1 or len(names) > MOST or not torch.is_grad_enabled():
            return
        if (name := names.pop(id(module), None)) is None:
            return
        try:
            code = getattr(type(module).forward, "__code__", None)
            own = code is not None and session.frames.owns(code.co_filename)
            line = line_at(code.co_filename, code.co_firstlineno, code.co_name) if code is not None and own else None
            cls = type(module).__name__.removeprefix("FSDP")
            session.write(Layer(name=name, cls=cls, given=_first(args), made=_first(output), forward=line))
        except Exception as error:  # raised in here it would be raised in the script
            session.report("layers", error)

    session.subscribe("adopt", adopted)
    register_module_forward_hook(called)


def _first(values: Any) -> list[float] | None:
    """The sketch of the first tensor; None without one."""
    if isinstance(values, torch.Tensor):
        return sketch(values.detach())
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return next((found for value in inside if (found := _first(value)) is not None), None)
