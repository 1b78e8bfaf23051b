"""Frozen parameters of one model, such as a target network, in the memory of parameters that an
optimizer of another model holds.
"""

from torch.optim import Optimizer

from ...trace.events import SharedMemory
from ..compat.groups import slots
from ..compat.tensors import in_memory
from ..session import Session

_NAMES = 32


def install(session: Session) -> None:
    """Look after each step, in the run that is judged, until some are found."""
    if session.request.mode != "fsdp":
        return

    def stepped(optimizer: Optimizer) -> None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        models = [[(name + s.name, s.param) for s in slots(root)] for name, root in session.roots]
        places = [
            {in_memory(p).data_ptr() for _, p in model if id(p) in held} - {0} for model in models
        ]
        names = [
            name
            for number, model in enumerate(models)
            for name, p in model
            if not p.requires_grad
            and id(p) not in held
            and any(
                in_memory(p).data_ptr() in own for own in places[:number] + places[number + 1 :]
            )
        ]
        if names and session.first("shared memory"):
            step = session.progress.optimizers.of(optimizer).begun
            session.write(SharedMemory(step=step, names=names[:_NAMES], at_line=session.here()))

    session.subscribe("stepped", stepped)
