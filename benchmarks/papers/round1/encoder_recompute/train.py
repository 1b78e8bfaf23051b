"""Sentence-pair similarity: one shared encoder, two padded inputs, cosine regression.

Every encoder layer recomputes its activations in the backward pass, so the
memory of a step doesn't grow with depth.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

PAD = 0


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, recompute):
        super().__init__()
        self.heads = heads
        self.recompute = recompute
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def _run(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, d))
        return x + self.ffn(self.norm2(x))

    def forward(self, x, mask):
        if self.recompute and self.training:
            return checkpoint(self._run, x, mask, use_reentrant=False)
        return self._run(x, mask)


class PairModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.dim, padding_idx=PAD)
        self.positions = nn.Embedding(args.max_len, args.dim)
        self.layers = nn.ModuleList(
            EncoderLayer(args.dim, args.heads, not args.no_recompute) for _ in range(args.layers)
        )
        self.norm = nn.LayerNorm(args.dim)
        self.project = nn.Linear(args.dim, args.dim)

    def encode(self, ids):
        mask = ids.ne(PAD)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        weight = mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * weight).sum(1) / weight.sum(1)
        return self.project(pooled)

    def forward(self, left, right):
        return F.cosine_similarity(self.encode(left), self.encode(right))


class PairData:
    """Pairs over a toy vocabulary; the label is the overlap of the two token sets."""

    def __init__(self, args, size, seed):
        g = torch.Generator().manual_seed(seed)
        half = args.vocab // 2
        self.left, self.right, self.score = [], [], []
        for _ in range(size):
            topic = torch.randint(0, 2, (2,), generator=g)
            sides = []
            for t in topic.tolist():
                n = int(torch.randint(3, args.max_len + 1, (1,), generator=g))
                ids = torch.zeros(args.max_len, dtype=torch.long)
                ids[:n] = torch.randint(1, half, (n,), generator=g) + t * (half - 1)
                sides.append(ids)
            self.left.append(sides[0])
            self.right.append(sides[1])
            a, b = (set(s[s > 0].tolist()) for s in sides)
            self.score.append(len(a & b) / len(a | b) + (0.5 if topic[0] == topic[1] else -0.5))
        self.left, self.right = torch.stack(self.left), torch.stack(self.right)
        self.score = torch.tensor(self.score)

    def pick(self, idx, device):
        return self.left[idx].to(device), self.right[idx].to(device), self.score[idx].to(device)


@torch.no_grad()
def validate(model, data, rank, world, device):
    model.eval()
    idx = torch.arange(len(data.score)).view(-1, world)[:, rank]
    left, right, score = data.pick(idx, device)
    err = (model(left, right) - score).square().sum()
    dist.all_reduce(err)
    model.train()
    return err.item() / len(data.score)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=60)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--heads", type=int, default=2)
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--max-len", type=int, default=12)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--no-recompute", action="store_true")
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(0)
    model = PairModel(args).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    train, val = PairData(args, 256, seed=1), PairData(args, 64, seed=2)
    per_rank = args.batch // world
    order = torch.Generator().manual_seed(5)
    perm = torch.randperm(256, generator=order)
    cursor = 0

    for step in range(1, args.steps + 1):
        if cursor + args.batch > len(perm):
            perm, cursor = torch.randperm(256, generator=order), 0
        mine = perm[cursor + rank * per_rank: cursor + (rank + 1) * per_rank]
        cursor += args.batch

        left, right, score = train.pick(mine, device)
        loss = F.mse_loss(model(left, right), score)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

        if step % 8 == 0:
            dist.all_reduce(loss.detach_())
            v = validate(model, val, rank, world, device)
            if rank == 0:
                print(f"step {step:3d} train {loss.item() / world:.6f} val {v:.6f}", flush=True)

    model.reshard()
    total = sum(q.full_tensor().square().sum() for q in model.parameters())
    if rank == 0:
        print(f"weights |w|^2 = {total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
