import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


class Trainer:
    """Losses are sums over tokens and gradients are sums over ranks and micro-batches; the number of tokens divides them
    once, before the step. A step whose gradient norm is far above the usual is left out."""

    def __init__(self, model, optimizer, source, micro, spike=1.6, history=8):
        self.model, self.optimizer, self.source = model, optimizer, source
        self.micro, self.spike, self.history = micro, spike, history
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.norms, self.step, self.skipped = [], 0, 0

    def accumulate(self):
        mine = self.source(self.step).chunk(self.world)[self.rank]
        parts = mine.split(self.micro)
        sums = torch.zeros(2, dtype=torch.float64)
        for i, ids in enumerate(parts):
            self.model.set_requires_gradient_sync(i == len(parts) - 1)
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten(), ignore_index=0, reduction="sum")
            loss.backward()
            sums += torch.tensor([loss.item(), (ids[:, 2:] != 0).sum().item()], dtype=torch.float64)
        dist.all_reduce(sums)
        for p in self.model.parameters():
            p.grad.div_(sums[1].item())
        return (sums[0] / sums[1]).item()

    def usual(self, norm):
        if len(self.norms) < 4:
            return True
        return norm < self.spike * statistics.median(self.norms)

    def run_step(self):
        loss = self.accumulate()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        applied = self.usual(norm)
        if applied:
            self.optimizer.step()
            self.norms = (self.norms + [norm])[-self.history :]
        else:
            self.skipped += 1
        self.optimizer.zero_grad()
        self.step += 1
        return loss, norm, applied

    def state_dict(self):
        return {"step": self.step, "skipped": self.skipped, "norms": list(self.norms)}

    def load_state_dict(self, state):
        self.step, self.skipped, self.norms = state["step"], state["skipped"], list(state["norms"])
