"""Forecasts time series with schedule-free AdamW. The weights in the model are y while training and x while evaluating;
only z is kept beside them, x is computed from both."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class ScheduleFreeAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, warmup=4):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, warmup=warmup, k=0, weight_sum=0.0, train_mode=True))

    def _switch(self, to_train):
        for group in self.param_groups:
            if group["train_mode"] == to_train:
                continue
            beta = group["betas"][0]
            for p in group["params"]:
                if "z" in self.state[p]:
                    # y = (1 - beta) z + beta x
                    weight = 1 - beta if to_train else 1 - 1 / beta
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = to_train

    @torch.no_grad()
    def eval(self):
        self._switch(False)

    @torch.no_grad()
    def train(self):
        self._switch(True)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            beta1, beta2 = group["betas"]
            k = group["k"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup"]) * math.sqrt(1 - beta2 ** (k + 1))
            group["weight_sum"] += lr**2
            share = lr**2 / group["weight_sum"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"] = p.detach().clone()
                    state["v"] = torch.zeros_like(p)
                z, v = state["z"], state["v"]
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = p.grad / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                p.lerp_(z, share)
                p.add_(update, alpha=lr * (beta1 * (1 - share) - 1))
                z.add_(update, alpha=-lr)
            group["k"] = k + 1


class Forecaster(nn.Module):
    def __init__(self, past, future, hidden=48):
        super().__init__()
        self.trend = nn.Linear(past, future)
        self.body = nn.Sequential(nn.Linear(past, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.quantiles = nn.Linear(hidden, future * 3)
        self.future = future

    def forward(self, x):
        level = x.mean(1, keepdim=True)
        x = x - level
        out = self.quantiles(self.body(x)).view(-1, self.future, 3)
        return out + (self.trend(x) + level)[..., None]


def pinball(pred, target, levels=(0.1, 0.5, 0.9)):
    q = torch.tensor(levels)
    err = target[..., None] - pred
    return torch.maximum(q * err, (q - 1) * err)


def series(n, seed, length=36):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length)
    period = torch.randint(5, 12, (n, 1), generator=g)
    phase, slope, level = (torch.randn(n, 1, generator=g) for _ in range(3))
    y = torch.sin(2 * math.pi * t / period + phase) + 0.05 * slope * t + level
    return y + 0.1 * torch.randn(n, length, generator=g)


@torch.no_grad()
def validate(model, opt, data, past, rank, world):
    """Evaluates x. The model goes back to y afterwards."""
    opt.eval()
    mine = data[rank::world]
    loss = pinball(model(mine[:, :past]), mine[:, past:]).sum()
    dist.all_reduce(loss)
    model.reshard()
    opt.train()
    return loss.item() / (data.shape[0] * (data.shape[1] - past) * 3)


def rank_path(folder, step, rank):
    return os.path.join(folder, f"step{step}", f"rank{rank}.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--store", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    past = 24
    train, valid = series(512, 1), series(101, 2)

    torch.manual_seed(0)
    model = Forecaster(past, 12)
    fully_shard(model.body)
    fully_shard(model)
    opt = ScheduleFreeAdamW(model.parameters(), lr=2e-2)

    start = 0
    if args.resume:
        start = max(int(d[4:]) for d in os.listdir(args.resume) if d.startswith("step"))
        saved = torch.load(rank_path(args.resume, start, rank), weights_only=False)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])

    for step in range(start + 1, args.steps + 1):
        pick = torch.randint(0, len(train), (64,), generator=torch.Generator().manual_seed(step))[rank::world]
        batch = train[pick]
        loss = pinball(model(batch[:, :past]), batch[:, past:]).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 4 == 0:
            score = validate(model, opt, valid, past, rank, world)
            mean = loss.detach()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} train {mean.item() / world:.5f} valid(x) {score:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            path = rank_path(args.store, step, rank)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)
            dist.barrier()

    # the result of the training is x
    opt.eval()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
