"""First-order MAML on system identification tasks.

For every task the shared weights are moved in place by a few plain gradient steps on the support set, the gradient of
the query loss is taken there, and the weights go back. The meta optimizer steps with the sum over the tasks.
"""
import contextlib
import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Identifier(nn.Module):
    def __init__(self, dim=6, hidden=32):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(dim, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 4)

    def forward(self, x):
        return self.c(F.silu(self.b(F.silu(self.a(x)))))


def system(task, n=32, dim=6):
    g = torch.Generator().manual_seed(11)
    base = torch.randn(dim, 4, generator=g) / dim ** 0.5
    g = torch.Generator().manual_seed(5000 + task)
    gain = base + 0.4 * torch.randn(dim, 4, generator=g) / dim ** 0.5
    x = torch.randn(2 * n, dim, generator=g)
    y = torch.tanh(x @ gain) * 1.5
    return (x[:n], y[:n]), (x[n:], y[n:])


class Meta:
    def __init__(self, model, inner_lr, inner_steps):
        self.model, self.lr, self.steps = model, inner_lr, inner_steps
        self.params = list(model.parameters())

    @contextlib.contextmanager
    def excursion(self):
        with torch.no_grad():
            home = [p.to_local().clone() for p in self.params]
        try:
            yield
        finally:
            with torch.no_grad():
                for p, h in zip(self.params, home):
                    p.to_local().copy_(h)

    def gradient(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        grads = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        return grads, loss.detach()

    def task(self, support, query):
        with self.excursion():
            for _ in range(self.steps):
                grads, _ = self.gradient(*support)
                with torch.no_grad():
                    torch._foreach_add_(self.params, grads, alpha=-self.lr)
            return self.gradient(*query)


def gathered(x):
    return x.full_tensor().detach().clone()


def main(a):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    def mine(pair):
        return tuple(t[rank::world] for t in pair)

    torch.manual_seed(12)
    model = Identifier()
    fully_shard(model)
    meta = Meta(model, inner_lr=0.1, inner_steps=2)
    opt = torch.optim.SGD(meta.params, lr=0.25, momentum=0.7)
    it = 0
    if a.resume:
        blob = torch.load(os.path.join(a.resume, "meta.pt"))
        it = blob["it"]
        for p, w, m in zip(meta.params, blob["weights"], blob["momentum"]):
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
            with torch.no_grad():
                for dst, src in ((p, w), (opt.state[p]["momentum_buffer"], m)):
                    local = dst.to_local()
                    local.copy_(src.chunk(world)[rank] if local.shape != src.shape else src)
    while it < a.meta_steps:
        total, loss = None, 0.0
        for k in range(a.tasks):
            support, query = system(it * a.tasks + k)
            grads, query_loss = meta.task(mine(support), mine(query))
            total = grads if total is None else [t + g for t, g in zip(total, grads)]
            loss = loss + query_loss / a.tasks
        for p, t in zip(meta.params, total):
            p.grad = t / a.tasks
        opt.step()
        opt.zero_grad()
        it += 1
        dist.all_reduce(loss)
        if rank == 0:
            print(f"meta step {it} query loss {loss.item() / world:.5f}", flush=True)
        if a.out and it == a.save_at:
            blob = {"it": it, "weights": [gathered(p) for p in meta.params],
                    "momentum": [gathered(opt.state[p]["momentum_buffer"]) for p in meta.params]}
            if rank == 0:
                os.makedirs(a.out, exist_ok=True)
                torch.save(blob, os.path.join(a.out, "meta.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = ArgumentParser()
    ap.add_argument("--meta-steps", type=int, default=10)
    ap.add_argument("--tasks", type=int, default=2)
    ap.add_argument("--save-at", type=int, default=6)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    main(ap.parse_args())
