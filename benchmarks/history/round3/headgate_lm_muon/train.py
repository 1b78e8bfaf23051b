"""Small language model with gated attention heads, trained with a sharded Muon.

Matrices of one shape are updated together: an all-to-all hands every rank whole matrices, which it
orthogonalizes, and a second one brings the rows back to where they belong. Everything that is not a
hidden matrix goes to AdamW.
"""
import argparse
import math
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def newton_schulz(x, steps=5, eps=1e-7):
    """Orthogonalize a batch of matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transpose = x.size(-2) > x.size(-1)
    if transpose:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + eps)
    for _ in range(steps):
        xxt = x @ x.mT
        x = a * x + (b * xxt + c * xxt @ xxt) @ x
    return x.mT if transpose else x


def exchange(chunks, group):
    """All-to-all of one tensor per rank; returns what the ranks sent here, by rank."""
    send = torch.stack(chunks)
    recv = torch.empty_like(send)
    dist.all_to_all_single(recv, send, group=group)
    return list(recv.unbind(0))


def orthogonalize_batch(updates, group):
    """Row shards of equally shaped matrices in, row shards of their orthogonal factors out."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return list(newton_schulz(torch.stack(updates)).unbind(0))

    count = len(updates)
    per_rank = math.ceil(count / world_size)
    work = updates + [torch.zeros_like(updates[0])] * (per_rank * world_size - count)

    local_rows = work[0].size(0)
    rows = torch.tensor(local_rows)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=group)
    work = [F.pad(u, (0, 0, 0, int(rows) - local_rows)) for u in work]

    chunks = [torch.stack(work[r * per_rank:(r + 1) * per_rank]) for r in range(world_size)]
    shards = exchange(chunks, group)
    full = newton_schulz(torch.cat(shards, dim=-2))
    back = exchange(list(full.split(shards[0].size(-2), dim=-2)), group)
    result = [back[r][i].narrow(0, 0, local_rows) for r in range(world_size) for i in range(per_rank)]
    return result[:count]


class ShardedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, mu=0.95, weight_decay=0.01, group=None):
        super().__init__(params, dict(lr=lr, mu=mu, weight_decay=weight_decay))
        self.process_group = group if group is not None else dist.group.WORLD

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[tuple(p.shape)].append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    grad, buf = p.grad.to_local(), state["momentum"].to_local()
                    buf.mul_(group["mu"]).add_(grad)
                    updates.append(grad + group["mu"] * buf)
                scale = group["lr"] * math.sqrt(shape[0] / shape[1])
                for p, u in zip(params, orthogonalize_batch(updates, self.process_group)):
                    local = p.to_local()
                    local.mul_(1 - group["lr"] * group["weight_decay"])
                    local.add_(u, alpha=-scale)


class GatedBlock(nn.Module):
    """Attention whose heads are scaled by a gate computed from the input."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.gate = nn.Linear(dim, heads, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        h = self.norm1(x)
        q, k, v = self.qkv(h).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y * torch.sigmoid(self.gate(h)).transpose(1, 2).unsqueeze(-1)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GatedLM(nn.Module):
    def __init__(self, vocab, dim=40, heads=5, layers=2, length=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(GatedBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.embed(idx) + self.pos.weight[: idx.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample_batch(step, count, vocab, length, rank, world_size):
    """Sequences that repeat a random motif; row i belongs to rank i % world_size."""
    rows = []
    for i in range(rank, count, world_size):
        g = torch.Generator().manual_seed(step * 4099 + i)
        period = int(torch.randint(3, 7, (1,), generator=g))
        motif = torch.randint(vocab, (period,), generator=g)
        rows.append(motif.repeat(length // period + 2)[: length + 1])
    rows = torch.stack(rows)
    return rows[:, :-1], rows[:, 1:]


def mean(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--vocab", type=int, default=24)
    ap.add_argument("--length", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = GatedLM(args.vocab, length=args.length)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [ShardedMuon(matrices, lr=args.lr), torch.optim.AdamW(others, lr=args.adam_lr, eps=1e-5)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (args.steps - s) / (0.4 * args.steps)))
                  for o in optimizers]

    for step in range(args.steps):
        x, y = sample_batch(step, args.batch_size, args.vocab, args.length, rank, world_size)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            value = mean(loss)
            if rank == 0:
                print(f"step {step:3d} loss {value:.6f} lr {schedulers[0].get_last_lr()[0]:.4f}", flush=True)

    with torch.no_grad():
        x, y = sample_batch(10_000, 64, args.vocab, args.length, rank, world_size)
        value = mean(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
    if rank == 0:
        print(f"val loss {value:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
