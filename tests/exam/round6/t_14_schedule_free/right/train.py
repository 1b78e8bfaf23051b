import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sfree import ScheduleFreeAdamW

VOCAB = 36


class MixBlock(nn.Module):
    """Attention-free block: causal mean pooling at several scales and an MLP."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(4 * dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = self.norm(x).transpose(1, 2)
        views = [F.avg_pool1d(F.pad(h, (k - 1, 0)), k, stride=1) for k in (1, 2, 3, 5)]
        return x + self.down(F.gelu(self.up(torch.cat(views, 1).transpose(1, 2))))


class PoolLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.mix = nn.ModuleList([MixBlock(dim) for _ in range(3)])
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for m in self.mix:
            h = m(h)
        return self.head(h)


def sample(seed, n=16, length=20):
    g = torch.Generator().manual_seed(seed)
    x = [torch.randint(0, VOCAB, (n,), generator=g) for _ in range(2)]
    for _ in range(length - 1):
        x.append((x[-1] + x[-2]) % VOCAB)
    return torch.stack(x, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    model = PoolLM()
    for m in model.mix:
        fully_shard(m)
    fully_shard(model)
    opt = ScheduleFreeAdamW(model.parameters())
    step = 0
    if args.resume:
        step = max(int(f.stem.split("-")[0]) for f in args.resume.iterdir())
        ck = torch.load(args.resume / f"{step}-{rank}.pt", weights_only=False)
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        opt.train()

    def loss_of(seed):
        ids = sample(seed).chunk(world)[rank]
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def mean(v):
        v = v.detach().clone()
        dist.all_reduce(v)
        return v.item() / world

    while step < args.steps:
        loss = loss_of(step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 4 == 0:
            train_loss = mean(loss)
            opt.eval()
            with torch.no_grad():
                held_out = mean(loss_of(10_000))
            # the outer parameters stay gathered after a forward without backward
            model.reshard()
            opt.train()
            if rank == 0:
                print(f"step {step} train {train_loss:.4f} held out {held_out:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            # the weights that a reader of the checkpoint wants are x; y goes along in the optimizer's state
            opt.eval()
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, args.out / f"{step}-{rank}.pt")
            opt.train()
            dist.barrier()

    opt.eval()
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
