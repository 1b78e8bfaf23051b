"""What each module of the models makes in its first call of step 1, in the order in which these
calls end.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ...trace.events import Layer
from ..measures import first_sketch
from ..session import Session

MOST = 2_000


def install(session: Session) -> None:
    if not session.request.layers:
        return
    names: dict[int, str] = {}

    def adopted(root: nn.Module, name: str) -> None:
        names.update({id(part): f"{name}{inner}" for inner, part in root.named_modules()})

    def called(module: nn.Module, args: Any, output: Any) -> None:
        if session.progress.step_number() > 1 or len(names) > MOST or not torch.is_grad_enabled():
            return
        if (name := names.pop(id(module), None)) is None:
            return
        try:
            line, cls = (
                session.frames.defined(type(module).forward),
                type(module).__name__.removeprefix("FSDP"),
            )
            given, made = first_sketch(args), first_sketch(output)
            session.write(Layer(name=name, cls=cls, given=given, made=made, forward=line))
        except Exception as error:  # raised in here it would be raised in the script
            session.report("layers", error)

    session.subscribe("adopt", adopted)
    register_module_forward_hook(called)
