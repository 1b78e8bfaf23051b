"""Reptile for cold-start ratings. Inside a task plain SGD moves the sharded weights, after it the
slow weights take a step (with momentum) towards where the task ended."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from tasks import ITEMS, ColdUsers


class Scorer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.item = nn.Embedding(ITEMS, dim)
        self.hidden = nn.Linear(dim, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.item(ids)))).squeeze(-1)


class Reptile:
    def __init__(self, inner_lr=0.3, inner_steps=4, outer_lr=0.5, momentum=0.5):
        torch.manual_seed(14)
        self.model = Scorer()
        fully_shard(self.model.hidden)
        fully_shard(self.model, reshard_after_forward=True)
        self.params = dict(self.model.named_parameters())
        self.inner_lr, self.inner_steps = inner_lr, inner_steps
        self.outer_lr, self.momentum = outer_lr, momentum
        self.velocity = {n: torch.zeros_like(p.detach()) for n, p in self.params.items()}
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.users = ColdUsers()
        self.tasks_done = 0

    def loss(self, part):
        ids, y = (t.chunk(self.world)[self.rank] for t in part)
        return (self.model(ids) - y).square().mean()

    def adapt(self, support):
        """A few SGD steps on one user, returns the first loss."""
        first = None
        for _ in range(self.inner_steps):
            loss = self.loss(support)
            first = loss.detach() if first is None else first
            loss.backward()
            with torch.no_grad():
                for p in self.params.values():
                    p.sub_(p.grad, alpha=self.inner_lr)
                    p.grad = None
        return first

    def copy_of_weights(self):
        return {n: p.detach().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def put(self, weights):
        for n, p in self.params.items():
            p.copy_(weights[n])

    def outer_step(self, total):
        slow = self.copy_of_weights()
        support, query = self.users.task(self.tasks_done)
        before = self.adapt(support)
        with torch.no_grad():
            after = self.loss(query)
            for n, p in self.params.items():
                self.velocity[n].mul_(self.momentum).add_(p.detach() - slow[n])
                slow[n].add_(self.velocity[n], alpha=self.outer_lr * (1 - self.tasks_done / total))
        self.put(slow)
        self.tasks_done += 1
        return self.average(before, after)

    def average(self, *values):
        t = torch.stack(values) / self.world
        dist.all_reduce(t)
        return t.tolist()

    def evaluate(self, users=4):
        """Adapts to users never trained on; the slow weights are put back after each."""
        slow, losses = self.copy_of_weights(), []
        for k in range(users):
            support, query = self.users.task(90000 + k)
            self.adapt(support)
            with torch.no_grad():
                losses.append(self.loss(query))
            self.put(slow)
        return sum(self.average(*losses)) / users

    def state(self):
        return {"weights": self.copy_of_weights(), "velocity": self.velocity, "tasks": self.tasks_done}

    def load(self, path):
        s = self.state()
        dcp.load(s, checkpoint_id=path)
        self.put(s["weights"])
        self.velocity, self.tasks_done = s["velocity"], s["tasks"]


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--tasks", type=int, default=30)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=12)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    meta = Reptile()
    if args.resume:
        meta.load(os.path.join(args.resume, max(os.listdir(args.resume))))
    while meta.tasks_done < args.tasks:
        before, after = meta.outer_step(args.tasks)
        line = f"task {meta.tasks_done} loss before adapting {before:.5f} after {after:.5f}"
        if meta.tasks_done % 10 == 0:
            line += f" new users {meta.evaluate():.5f}"
        if meta.rank == 0:
            print(line, flush=True)
        if args.out and meta.tasks_done % args.save_every == 0:
            dcp.save(meta.state(), checkpoint_id=f"{args.out}/tasks{meta.tasks_done:05d}")
    dist.destroy_process_group()
