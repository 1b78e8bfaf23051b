import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zo import Mezo

VOCAB, LENGTH, DIM = 32, 8, 16


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.mixers = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids):
        x = self.emb(ids)
        for m in self.mixers:
            x = x + m(x).cumsum(1) / LENGTH
        return self.head(x.mean(1))


def batch(step, n):
    g = torch.Generator().manual_seed(300 + step)
    ids = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    return ids, (ids % 3).float().mean(1).mul(1.5).round().long().clamp(0, 2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = Classifier().requires_grad_(False)
    # float32 weights; the forward is in float64 because a finite difference of two float32 losses is mostly rounding.
    # There is no backward that would free the gathered weights, so the root must reshard after each forward as well.
    kw = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64), reshard_after_forward=True)
    for m in model.mixers:
        fully_shard(m, **kw)
    fully_shard(model, **kw)
    zo = Mezo(model, lr=5e-3, eps=1e-3, seed=12)

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("_")[1]))
        st = {"model": model.state_dict(), "zo": zo.state_dict()}
        dcp.load(st, checkpoint_id=os.path.join(args.resume, newest))
        model.load_state_dict(st["model"])
        zo.load_state_dict(st["zo"])
        start = zo.step_no

    n = args.batch // world
    for step in range(start, args.steps):
        ids, y = (t[rank * n:(rank + 1) * n] for t in batch(step % 4, args.batch))

        def closure():
            loss = F.cross_entropy(model(ids).double(), y, reduction="sum")
            dist.all_reduce(loss)
            return loss.item() / args.batch
        loss = zo.step(closure)
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} loss {loss:.5f} |g| {zo.scalar:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save({"model": model.state_dict(), "zo": zo.state_dict()}, checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
