"""The training process as a coroutine: send() it what to do next, it yields what came of it."""
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lessons import lesson


def training(model, opt, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    order = yield
    while True:
        opt.param_groups[0]["lr"] = order["lr"]
        ids, target = (t.chunk(world)[rank] for t in lesson(order["level"], order["step"], size))
        logits = model(ids)
        picked = target != -100
        tokens = picked.sum().float()
        dist.all_reduce(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        opt.zero_grad()
        (loss * world / tokens).backward()
        opt.step()
        seen = torch.stack([loss.detach(), ((logits.argmax(-1) == target) & picked).sum().float()])
        dist.all_reduce(seen)
        order = yield (seen / tokens).tolist()


class Teacher:
    """Decides level and learning rate from the job-wide results, which are equal on all ranks."""

    def __init__(self, pass_mark=0.35, warmup=4, lr=1e-2):
        self.pass_mark, self.warmup, self.lr = pass_mark, warmup, lr
        self.level, self.step, self.since, self.score = 0, 0, 0, 0.0

    def order(self):
        return {"level": self.level, "step": self.step, "lr": self.lr * min(1.0, (self.since + 1) / self.warmup)}

    def hear(self, result):
        self.step += 1
        self.since += 1
        self.score = 0.5 * self.score + 0.5 * result[1]
        if self.score > self.pass_mark and self.since >= 5:
            self.level, self.since, self.score = self.level + 1, 0, 0.0
