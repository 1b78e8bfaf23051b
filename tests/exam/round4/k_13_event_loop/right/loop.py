"""The training loop is a generator that yields events; who listens decides what happens at each of them."""
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F


@dataclass
class Progress:
    step: int = 0
    tokens: int = 0
    history: list = field(default_factory=list)


def training(model, opt, batches, progress, steps):
    for x, y in batches:
        if progress.step >= steps:
            return
        yield "begin", None
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        yield "gradients", loss.detach()
        opt.step()
        opt.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += y.numel()
        yield "end", loss.detach()


def drive(events, listeners):
    for name, value in events:
        for who in listeners:
            handler = getattr(who, "on_" + name, None)
            if handler is not None:
                handler(value)
