"""Video action classifier. Only the heavy blocks are sharded; the small frame embedding and the head stay whole on every
rank, and their gradients are averaged in one flat all-reduce after the backward pass. There is no root wrapper.

Checkpoints: one .npz per rank with the rank's own pieces (same number of ranks on resume).
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

FRAMES, SIDE, CLASSES = 6, 8, 5


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.temporal = nn.Conv1d(d, d, 3, padding=1)
        self.wide = nn.Linear(d, 4 * d)
        self.narrow = nn.Linear(4 * d, d)

    def forward(self, h):
        n = self.norm(h)
        h = h + self.temporal(n.transpose(1, 2)).transpose(1, 2)
        return h + self.narrow(torch.nn.functional.gelu(self.wide(h)))


class Classifier(nn.Module):
    def __init__(self, d=24, depth=3):
        super().__init__()
        self.embed = nn.Linear(SIDE * SIDE, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, CLASSES)

    def forward(self, clip):
        h = self.embed(clip.flatten(2))
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def average_whole(params):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(piece.view_as(p))


def clip_all(sharded, whole, limit):
    square = torch.stack([p.grad.to_local().pow(2).sum() for p in sharded]).sum()
    dist.all_reduce(square)
    square += torch.stack([p.grad.pow(2).sum() for p in whole]).sum()
    factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in sharded:
        p.grad.to_local().mul_(factor)
    for p in whole:
        p.grad.mul_(factor)


def movies(n=80):
    g = torch.Generator().manual_seed(55)
    label = torch.arange(n) % CLASSES
    shift = torch.tensor([[0, 0], [0, 1], [0, -1], [1, 0], [-1, 0]])[label]
    first = torch.randn(n, SIDE, SIDE, generator=g)
    frames = [torch.stack([torch.roll(first[i], (shift[i] * t).tolist(), (0, 1)) for i in range(n)])
              for t in range(FRAMES)]
    return torch.stack(frames, 1) + 0.1 * torch.randn(n, FRAMES, SIDE, SIDE, generator=g), label


def pieces(model, adam, sgd):
    """Every tensor a rank owns, by name: weights, Adam moments and SGD momentum."""
    out = {}
    for name, p in model.named_parameters():
        out[f"weight/{name}"] = p.detach().to_local() if name.startswith("blocks.") else p.detach()
        opt, keys = (adam, ("exp_avg", "exp_avg_sq")) if name.startswith("blocks.") else (sgd, ("momentum_buffer",))
        for key in keys:
            if opt.state[p].get(key) is None:
                opt.state[p][key] = torch.zeros_like(p)
            t = opt.state[p][key]
            out[f"{key}/{name}"] = t.to_local() if name.startswith("blocks.") else t
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Classifier()
    for block in model.blocks:
        fully_shard(block)
    sharded = list(model.blocks.parameters())
    whole = [*model.embed.parameters(), *model.head.parameters()]
    adam = torch.optim.Adam(sharded, lr=2e-3, eps=1e-6)
    sgd = torch.optim.SGD(whole, lr=0.05, momentum=0.9)
    x, y = movies()

    start = 0
    if args.resume:
        stored = np.load(os.path.join(args.resume, f"pieces_{rank}of{world}.npz"))
        start = int(stored["step"])
        for name, t in pieces(model, adam, sgd).items():
            t.copy_(torch.from_numpy(stored[name]))
        for p in sharded:
            adam.state[p]["step"] = torch.tensor(float(start))

    for step in range(start, args.steps):
        idx = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:16][rank::world]
        loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
        loss.backward()
        average_whole(whole)
        clip_all(sharded, whole, limit=1.0)
        adam.step()
        sgd.step()
        adam.zero_grad()
        sgd.zero_grad()
        if step % 5 == 4:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item():.5f} head {model.head.weight.norm().item():.7f}", flush=True)
        if args.out and step + 1 == args.save_at:
            arrays = {name: t.numpy() for name, t in pieces(model, adam, sgd).items()}
            np.savez(os.path.join(args.out, f"pieces_{rank}of{world}.npz"), step=step + 1, **arrays)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
