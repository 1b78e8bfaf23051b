"""The training loop is a generator of events; everything else listens to it."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass
class Event:
    kind: str
    step: int
    data: dict = field(default_factory=dict)


def microbatch_losses(model, plan):
    """one backward pass per yield; only the last of the plan reduces the gradients"""
    for n, (x, y, weight) in enumerate(plan):
        model.set_requires_gradient_sync(n + 1 == len(plan))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") * weight
        loss.backward()
        yield loss.detach()


def training(model, optimizer, source, first, last):
    yield Event("start", first)
    for step in range(first, last):
        plan = source.plan(step)
        yield Event("before_step", step)
        loss = sum(microbatch_losses(model, plan))
        yield Event("gradients", step)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        yield Event("after_step", step + 1, {"loss": loss.item() / dist.get_world_size()})
    yield Event("end", last)


def drive(events, listeners):
    for event in events:
        for listener in listeners:
            handler = getattr(listener, f"on_{event.kind}", None)
            if handler is not None:
                handler(event)
