from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass
class Learner:
    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    history: list = field(default_factory=list)

    def apply(self, loss, clip=1.0):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        self.history.append(mean.item())


@dataclass
class Phase:
    name: str
    steps: int
    run: Callable


def kl(logits, log_target):
    return F.kl_div(F.log_softmax(logits, -1).flatten(0, 1), log_target.flatten(0, 1),
                    reduction="batchmean", log_target=True)


def ce(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mutual_step(a, b, ids, targets, step):
    """Deep mutual learning: one after the other, each with the newest peer; the order alternates."""
    for me, peer in ((a, b), (b, a)) if step % 2 == 0 else ((b, a), (a, b)):
        with torch.no_grad():
            opinion = F.log_softmax(peer.model(ids), -1)
        logits = me.model(ids)
        me.apply(ce(logits, targets) + kl(logits, opinion))


def ensemble_step(small, teachers, ids, targets, step):
    """The small model learns from the mean of the teachers' probabilities, weighted by how well they do
    on the global batch."""
    with torch.no_grad():
        outputs = [t.model(ids) for t in teachers]
        scores = torch.stack([-ce(o, targets) for o in outputs])
        dist.all_reduce(scores)
        weights = (scores / dist.get_world_size()).softmax(0)
        mixture = sum(w * o.softmax(-1) for w, o in zip(weights, outputs)).log()
    logits = small.model(ids)
    small.apply(0.3 * ce(logits, targets) + 0.7 * kl(logits, mixture))
