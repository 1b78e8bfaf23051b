"""Sharpness-aware minimisation around SGD, written as an optimizer that takes a closure."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class SAM(torch.optim.SGD):
    def __init__(self, params, rho=0.05, **kw):
        super().__init__(params, **kw)
        self.rho = rho

    def step(self, closure):
        params = [p for g in self.param_groups for p in g["params"]]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            grads = [p.grad for p in params]
            norm = torch.nn.utils.get_total_norm(grads).full_tensor()
            kept = [p.detach().clone() for p in params]
            for p, g in zip(params, grads):
                p.add_(g, alpha=self.rho / (norm.item() + 1e-12))
        self.zero_grad()
        with torch.enable_grad():
            perturbed = closure()
        with torch.no_grad():
            for p, k in zip(params, kept):
                p.copy_(k)
        super().step()
        self.zero_grad()
        return loss, perturbed


class PatchNet(nn.Module):
    def __init__(self, d=24, classes=7):
        super().__init__()
        self.patch = nn.Conv2d(1, d, 4, stride=4)
        self.token = nn.ModuleList(nn.Sequential(nn.Linear(9, 18), nn.GELU(), nn.Linear(18, 9)) for _ in range(2))
        self.channel = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(2)
        )
        self.fc = nn.Linear(d, classes)

    def forward(self, x):
        h = self.patch(x).flatten(2)
        for tok, chn in zip(self.token, self.channel):
            h = h + tok(h)
            h = h + chn(h.transpose(1, 2)).transpose(1, 2)
        return self.fc(h.mean(-1))


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(7, 1, 12, 12, generator=torch.Generator().manual_seed(31))
    y = torch.randint(0, 7, (n,), generator=g)
    return proto[y] + 1.0 * torch.randn(n, 1, 12, 12, generator=g), y


def cutmix(x, y, g):
    """One box and one partner per sample, drawn for the global batch."""
    other = torch.randperm(len(x), generator=g)
    r, c = torch.randint(0, 8, (2,), generator=g).tolist()
    mixed = x.clone()
    mixed[:, :, r : r + 4, c : c + 4] = x[other][:, :, r : r + 4, c : c + 4]
    lam = 1 - 16 / 144
    return mixed, lam * F.one_hot(y, 7) + (1 - lam) * F.one_hot(y[other], 7)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--rho", type=float, default=0.1)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = PatchNet()
    for m in [*model.token, *model.channel]:
        fully_shard(m)
    fully_shard(model)
    opt = SAM(model.parameters(), rho=args.rho, lr=0.08, momentum=0.9, weight_decay=5e-4)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, 5)
    x, y = dataset(1024, 1)
    vx, vy = dataset(256, 2)

    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(x), (args.batch,), generator=g)
        bx, by = (t[rank::world] for t in cutmix(x[idx], y[idx], g))

        def closure():
            loss = F.cross_entropy(model(bx), by)
            loss.backward()
            return loss.detach()

        pair = torch.stack(opt.step(closure))
        warm.step()
        dist.all_reduce(pair)
        if (step + 1) % 5 == 0:
            with torch.no_grad():
                hits = (model(vx[rank::world]).argmax(1) == vy[rank::world]).sum().float()
            dist.all_reduce(hits)
            if rank == 0:
                l, s = (pair / world).tolist()
                print(f"step {step + 1} loss {l:.4f} sharpness {s - l:.4f} acc {hits.item() / len(vx):.3f}", flush=True)
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
