"""Evaluation harness: suites are registered by name and scored over all ranks."""
import torch
import torch.distributed as dist

SUITES = {}


def suite(name):
    def register(fn):
        SUITES[name] = fn
        return fn
    return register


class Harness:
    def __init__(self, model, rows_per_rank=8):
        self.model, self.rows = model, rows_per_rank
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def batches(self, n):
        """Equal number of batches on every rank; positions past the end wrap around to the first items."""
        span = self.rows * self.world
        total = -(-n // span) * span
        for at in range(0, total, span):
            positions = torch.arange(at + self.rank * self.rows, at + (self.rank + 1) * self.rows)
            counted = (positions < n).float()
            yield positions % n, counted

    @torch.no_grad()
    def score(self, name):
        inputs, labels = SUITES[name]()
        sums = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        for items, counted in self.batches(len(labels)):
            logits = self.model(inputs[items])
            nll = torch.nn.functional.cross_entropy(logits, labels[items], reduction="none")
            hit = (logits.argmax(-1) == labels[items]).float()
            sums += torch.stack([(nll * counted).sum(), (hit * counted).sum(), counted.sum()]).double()
        self.model.train()
        dist.all_reduce(sums)
        return {"nll": sums[0].item() / sums[2].item(), "acc": sums[1].item() / sums[2].item()}

    def report(self, step):
        rows = {name: self.score(name) for name in sorted(SUITES)}
        if self.rank == 0:
            print(f"eval@{step} " + " | ".join(f"{k} nll {v['nll']:.4f} acc {v['acc']:.4f}" for k, v in rows.items()), flush=True)
        return rows
