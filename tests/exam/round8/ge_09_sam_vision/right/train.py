import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from data import augment, blobs
from sam import SAM


class PatchNet(nn.Module):
    def __init__(self, classes=5, width=32):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.mix = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.Conv2d(width, width, 5, padding=2, groups=width),
                          nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
            for _ in range(2))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.mix:
            x = x + block(x)
        return self.out(x.amax((2, 3)))


def save(path, step, model, optimizer, rng, rank):
    folder = os.path.join(path, f"s{step:04d}")
    os.makedirs(folder, exist_ok=True)
    torch.save({
        "step": step,
        "rng": rng.get_state(),
        "shards": [p.to_local().detach() for p in model.parameters()],
        "velocity": [optimizer.state[p]["velocity"] for p in model.parameters()],
    }, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()


def load(path, model, optimizer, rng, rank):
    newest = max(os.listdir(path))
    saved = torch.load(os.path.join(path, newest, f"{rank}.pt"))
    with torch.no_grad():
        for p, shard, velocity in zip(model.parameters(), saved["shards"], saved["velocity"]):
            p.to_local().copy_(shard)
            optimizer.state[p]["velocity"] = velocity
    rng.set_state(saved["rng"])
    return saved["step"]


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=24)
    cli.add_argument("--batch", type=int, default=32)
    cli.add_argument("--lr", type=float, default=0.03)
    cli.add_argument("--rho", type=float, default=0.1)
    cli.add_argument("--save-every", type=int, default=0)
    cli.add_argument("--save-dir")
    cli.add_argument("--resume")
    args = cli.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(15)
    model = PatchNet()
    for block in model.mix:
        fully_shard(block)
    fully_shard(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = SAM([{"params": matrices, "weight_decay": 1e-3, "adaptive": True, "rho": 5 * args.rho},
                     {"params": vectors}], lr=args.lr, rho=args.rho)
    images, labels = blobs(480, 71)
    held_images, held_labels = blobs(160, 72)
    rng = torch.Generator().manual_seed(73)
    step = load(args.resume, model, optimizer, rng, rank) if args.resume else 0

    n = args.batch // world
    mine = slice(rank * n, (rank + 1) * n)
    while step < args.steps:
        index = torch.randint(480, (args.batch,), generator=rng)
        x, y = augment(images[index], rng)[mine], labels[index][mine]

        def closure():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        loss, worst, norm = optimizer.step(closure)
        step += 1
        shown = torch.stack([loss, worst]) / world
        dist.all_reduce(shown)
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {shown[0]:.5f} at the worst point {shown[1]:.5f} norm {norm:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.save_dir, step, model, optimizer, rng, rank)

    with torch.no_grad():
        n = 160 // world
        logits = model(held_images[rank * n:(rank + 1) * n])
        stats = torch.stack([F.cross_entropy(logits, held_labels[rank * n:(rank + 1) * n], reduction="sum"),
                             (logits.argmax(1) == held_labels[rank * n:(rank + 1) * n]).float().sum()])
    dist.all_reduce(stats)
    if rank == 0:
        print(f"held-out loss {stats[0] / 160:.5f} accuracy {stats[1] / 160:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
