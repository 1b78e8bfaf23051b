"""Tiny character model: hidden matrices by Muon (one owner rank each), everything else by AdamW."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from muon import OwnerMuon


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 3, groups=dim)
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        return x + self.down(F.gelu(self.up(self.conv(h).transpose(1, 2))))


class CharLM(nn.Module):
    def __init__(self, vocab=27, dim=36, depth=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def text(step, n=16, length=24):
    g = torch.Generator().manual_seed(step + 200)
    ids = torch.randint(27, (n, 2), generator=g)
    for _ in range(length - 1):
        nxt = (ids[:, -1] * 5 + ids[:, -2] + torch.randint(2, (n,), generator=g)) % 27
        ids = torch.cat([ids, nxt[:, None]], dim=1)
    return ids


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = CharLM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    hidden = [p for b in model.blocks for p in (b.up.weight, b.down.weight)]
    known = {id(p) for p in hidden}
    optims = [OwnerMuon(hidden, lr=0.03), torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], lr=5e-3)]

    step = 0
    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, str(step), f"{rank}.pt"), weights_only=False)
        model.load_state_dict(ck["model"])
        for o, s in zip(optims, ck["optims"]):
            o.load_state_dict(s)
    while step < args.steps:
        ids = text(step).chunk(world)[rank]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        # linear decay over the last half
        left = min(1.0, 2 * (args.steps - step) / args.steps)
        for o, base in zip(optims, (0.03, 5e-3)):
            o.param_groups[0]["lr"] = base * left
            o.step()
            o.zero_grad()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(os.path.join(args.out, str(step)), exist_ok=True)
            torch.save({"model": model.state_dict(), "optims": [o.state_dict() for o in optims]},
                       os.path.join(args.out, str(step), f"{rank}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
