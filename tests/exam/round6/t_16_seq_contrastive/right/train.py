"""Contrastive pairs of sequences (two noisy readings of one source) with negatives from all ranks.

The gathering op sums the gradient over ranks itself, so the loss on each rank is the share of its own rows."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        lo = dist.get_rank() * ctx.n
        return g[lo : lo + ctx.n]


class ReaderBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.norm = nn.GroupNorm(4, d)

    def forward(self, x):
        return x + F.gelu(self.norm(self.conv(x)))


class Reader(nn.Module):
    def __init__(self, vocab=24, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.Sequential(ReaderBlock(d), ReaderBlock(d), ReaderBlock(d))
        self.proj = nn.Linear(d, 16)
        self.log_temp = nn.Parameter(torch.tensor([2.0]))

    def forward(self, a, b):
        def read(ids):
            h = self.blocks(self.emb(ids).transpose(1, 2))
            return F.normalize(self.proj(h.mean(-1)), dim=-1)

        return read(a), read(b), self.log_temp.exp()


def pairs(step, n=24, length=16, vocab=24):
    g = torch.Generator().manual_seed(12345 + step)
    src = torch.randint(0, vocab // 2, (n, length // 4), generator=g).repeat(1, 4)

    def reading():
        hit = torch.rand(src.shape, generator=g) < 0.3
        return torch.where(hit, torch.randint(0, vocab, src.shape, generator=g), src)

    return reading(), reading()


def contrastive(za, zb, scale):
    """Mean over the rank's rows of the symmetric InfoNCE loss against everybody's columns."""
    all_a, all_b = GatherRows.apply(za), GatherRows.apply(zb)
    rows = dist.get_rank() * len(za) + torch.arange(len(za))
    return 0.5 * (F.cross_entropy(scale * za @ all_b.T, rows) + F.cross_entropy(scale * zb @ all_a.T, rows))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    model = Reader()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.NAdam(model.parameters(), lr=4e-3, eps=1e-5)
    first = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda f: int(f.split(".")[0]))
        ck = torch.load(os.path.join(args.resume, newest), weights_only=False)
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=StateDictOptions(full_state_dict=True))
        first = ck["step"]
    for step in range(first, args.steps):
        a, b = (z.chunk(world)[rank] for z in pairs(step))
        loss = contrastive(*model(a, b))
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for n, p in model.named_parameters():
                if n == "log_temp":
                    p.clamp_(max=4.0)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"{step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "opt": o, "step": step + 1}, os.path.join(args.out, f"{step + 1}.pt"))
            dist.barrier()
    weights, _ = get_state_dict(model, opt, options=FULL)
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
