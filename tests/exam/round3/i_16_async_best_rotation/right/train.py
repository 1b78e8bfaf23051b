import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from saver import BackgroundSaver, restore


class Reservoir:
    """Contexts for a bandit-like ranking task; position = number of draws, so that it can be skipped to."""

    def __init__(self, dim=12, items=6):
        g = torch.Generator().manual_seed(61)
        self.items = torch.randn(items, dim, generator=g)
        self.dim, self.draws = dim, 0

    def draw(self, n, key):
        g = torch.Generator().manual_seed(key)
        ctx = torch.randn(n, self.dim, generator=g)
        utility = ctx @ self.items.T / self.dim**0.5 + 0.2 * torch.randn(n, len(self.items), generator=g)
        return ctx, utility

    def train(self, n):
        self.draws += 1
        return self.draw(n, 5_000_000 + self.draws)


class Ranker(nn.Module):
    def __init__(self, dim=12, items=6, width=32):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(dim, width), nn.Linear(width, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, items)

    def forward(self, x):
        for i, layer in enumerate(self.body):
            x = F.elu(layer(x)) + (x if i else 0)
        return self.head(x)


def listwise(logits, utility):
    return -(F.softmax(2 * utility, -1) * F.log_softmax(logits, -1)).sum(-1).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(71)
    model = Ranker()
    for layer in model.body[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.Adam(model.parameters(), lr=6e-3, amsgrad=True)

    source, step = Reservoir(), 0
    if args.resume:
        info = restore(args.resume, model, optim)
        step, source.draws = info["step"], info["draws"]
    saver = BackgroundSaver(args.out) if args.out else None
    held = [t[rank::world] for t in source.draw(96, key=1)]

    while step < args.steps:
        ctx, utility = (t[rank::world] for t in source.train(args.batch))
        loss = listwise(model(ctx), utility)
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % 3 == 0:
            with torch.no_grad():
                both = torch.stack([loss.detach(), listwise(model(held[0]), held[1])]) / world
            dist.all_reduce(both)
            score = both[1].item()
            if rank == 0:
                print(f"step {step:3d} train {both[0].item():.4f} held-out {score:.4f}", flush=True)
            if saver and args.save_every and step % args.save_every == 0:
                saver.submit(step, model, optim, {"step": step, "draws": source.draws}, score)
        elif saver and args.save_every and step % args.save_every == 0:
            saver.submit(step, model, optim, {"step": step, "draws": source.draws})
    if saver:
        saver.settle()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
