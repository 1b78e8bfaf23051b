"""Decoder-only LM with dropout and activation checkpointing of every block under FSDP2.

torchrun --standalone --nproc-per-node 2 train.py --steps 24
"""

import argparse
import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

VOCAB, SEQ, DIM = 37, 20, 32

remat = functools.partial(checkpoint, use_reentrant=False)


class DecoderBlock(nn.Module):
    def __init__(self, dim=DIM, heads=4, p=0.2):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_m = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Dropout(p), nn.Linear(3 * dim, dim))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        b, t, d = x.shape
        h = self.norm_a(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.o(a))
        return x + self.drop(self.mlp(self.norm_m(x)))


class Decoder(nn.Module):
    def __init__(self, depth=3, checkpointing=True):
        super().__init__()
        self.checkpointing = checkpointing
        self.emb, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = remat(block, x) if self.checkpointing and self.training else block(x)
        return self.head(self.norm(x))


def batch_of(step, size):
    """Repeated motifs: the second half of a row copies the first half."""
    g = torch.Generator().manual_seed(31337 + step)
    base = torch.randint(0, 12, (size, 1), generator=g) + torch.arange(SEQ // 2 + 1) * torch.randint(
        1, 3, (size, 1), generator=g
    )
    row = torch.cat([base, base], 1)[:, : SEQ + 1] % VOCAB
    return row[:, :-1], row[:, 1:]


def lr_at(step, steps, peak, warmup=4, tail=8):
    """Warm-up, plateau, linear decay to zero (WSD)."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * min(1.0, (steps - step) / tail)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--no-checkpointing", action="store_true")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = Decoder(checkpointing=not args.no_checkpointing)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    local = args.batch // world

    for step in range(args.steps):
        torch.manual_seed(1_000_000 * rank + step)  # dropout of this step, different on every rank
        for group in opt.param_groups:
            group["lr"] = lr_at(step, args.steps, args.lr)
        x, y = (t[rank * local : (rank + 1) * local] for t in batch_of(step, args.batch))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        opt.step()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item() / world:.4f} grad norm {norm.item():.3f}", flush=True)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
