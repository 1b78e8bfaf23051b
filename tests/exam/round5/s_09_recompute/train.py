"""Residual net with dropout; blocks are recomputed in the backward pass to save memory."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 2 * d)
        self.fc2 = nn.Linear(2 * d, d)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.fc2(self.drop(F.gelu(self.fc1(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, vocab=24, ctx=6, d=24, depth=3, p=0.2, remat=True):
        super().__init__()
        self.remat = remat
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(0.02 * torch.randn(ctx, d))
        self.blocks = nn.ModuleList(Block(d, p) for _ in range(depth))
        self.head = nn.Linear(ctx * d, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for block in self.blocks:
            if self.remat and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x.flatten(1))


def get_batch(step, n, vocab=24, ctx=6):
    g = torch.Generator().manual_seed(4000 + step)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    seq = (start + stride * torch.arange(ctx + 1)) % vocab
    return seq[:, :-1], seq[:, -1]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--no-remat", action="store_true")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    model = Net(remat=not args.no_remat)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 6))
    torch.manual_seed(1000 + rank)  # different dropout on every rank

    for step in range(args.steps):
        ids, target = get_batch(step, args.batch)
        ids, target = ids.chunk(world)[rank], target.chunk(world)[rank]
        loss = F.cross_entropy(model(ids), target)
        loss.backward()
        opt.step()
        warm.step()
        opt.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {mean.item() / world:.4f}", flush=True)

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
