import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from callbacks import Cosine, Ema, Logger, Saver
from data import images, mixup
from trainer import Trainer


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 5),
    )
    fully_shard(model[2])
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tr = Trainer(
        model,
        opt,
        lambda m, x, y: F.cross_entropy(m(x), y),
        [Cosine(3e-3, a.steps), Ema(0.9), Logger(), Saver(a.out, a.save_every)],
    )
    if a.resume:
        tr.resume(a.resume)
    X, Y = images()

    def batch(step):
        idx = torch.randint(0, len(X), (a.batch,), generator=torch.Generator().manual_seed(step))
        return [t.chunk(world)[rank] for t in mixup(X[idx], Y[idx], step)]

    tr.fit(batch, a.steps)
    full = {n: t.full_tensor() for n, t in tr.extra["ema"].items()}
    if rank == 0 and a.export:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
