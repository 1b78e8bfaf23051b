"""Evaluation over documents dealt out by length, so that ranks make different numbers of forward passes.

All weights are gathered once and held; no rank needs another one until the counts are added.
"""
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from corpus import suites, tags_of


@contextmanager
def gathered(model):
    parts = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for m in parts:
        m.set_reshard_after_forward(False, recurse=False)
        m.unshard()
    try:
        yield
    finally:
        for m in parts:
            m.reshard()
            m.set_reshard_after_forward(True, recurse=False)


def deal(docs, world):
    """Longest document first, each to the rank with the fewest tokens so far."""
    loads, hands = [0] * world, [[] for _ in range(world)]
    for doc in sorted(docs, key=len, reverse=True):
        r = loads.index(min(loads))
        hands[r].append(doc)
        loads[r] += len(doc)
    return hands


class Harness:
    def __init__(self, tags=5):
        self.tags, self.suites = tags, suites()

    @torch.no_grad()
    def __call__(self, model):
        rank, world = dist.get_rank(), dist.get_world_size()
        names = list(self.suites)
        confusion = torch.zeros(len(names), self.tags, self.tags, dtype=torch.int64)
        nll = torch.zeros(len(names), dtype=torch.float64)
        model.eval()
        with gathered(model):
            for i, name in enumerate(names):
                for doc in deal(self.suites[name], world)[rank]:
                    logits, target = model(doc[None])[0], tags_of(doc)
                    nll[i] += F.cross_entropy(logits, target, reduction="sum").double()
                    pairs = target * self.tags + logits.argmax(-1)
                    confusion[i] += torch.bincount(pairs, minlength=self.tags**2).view(self.tags, self.tags)
        model.train()
        dist.all_reduce(confusion)
        dist.all_reduce(nll)
        return {name: self._scores(confusion[i], nll[i]) for i, name in enumerate(names)}

    def _scores(self, table, nll):
        hit = table.diagonal().double()
        f1 = 2 * hit / (table.sum(0) + table.sum(1)).clamp(min=1)
        return {"nll": (nll / table.sum()).item(), "macro_f1": f1.mean().item()}
