"""Star rating of token reviews with a small encoder; early stopping on validation error."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH = 24, 18
PAD, NOT, START = 0, 1, 2


class FusedAttention(nn.Module):
    """Attention through the fused kernel."""

    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        drop = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :], dropout_p=drop)
        return self.out(a.transpose(1, 2).reshape(b, t, d))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = FusedAttention(dim, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(dropout / 2)

    def forward(self, x, keep):
        x = x + self.drop(self.attn(self.norm1(x), keep))
        return x + self.drop(self.mlp(self.norm2(x)))


class RatingModel(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, args.dim, padding_idx=PAD)
        self.layers = nn.ModuleList(EncoderLayer(args.dim, 4, args.dropout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.score = nn.Linear(args.dim, 1)

    def forward(self, ids):
        keep = ids != PAD
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, keep)
        return 3.0 + self.score(self.norm(x[:, 0])).squeeze(-1)


def reviews(count, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=g)
    ids[torch.rand(ids.shape, generator=g) < 0.1] = NOT
    ids[:, 0] = START
    length = torch.randint(8, LENGTH + 1, (count, 1), generator=g)
    ids[torch.arange(LENGTH) >= length] = PAD
    mood = torch.where(ids > START, (ids % 3).float() - 1.0, -0.5 * (ids == NOT))
    stars = 3.0 + 2.0 * torch.tanh(4 * mood.sum(1) / length.squeeze(1))
    return ids, stars


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.since = patience, float("inf"), 0

    def update(self, value):
        if value < self.best - 1e-4:
            self.best, self.since = value, 0
        else:
            self.since += 1
        return self.since >= self.patience


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--dropout", type=float, default=0.3)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--train-size", type=int, default=256)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--patience", type=int, default=2)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(5)
    model = RatingModel(args).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1000 + rank)  # every rank drops its own units
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    stop = EarlyStopping(args.patience)

    x, y = (t.to(device) for t in reviews(args.train_size, 1))
    vx, vy = (t.to(device) for t in reviews(96, 2))
    n = args.batch // world

    def validate():
        model.eval()
        with torch.no_grad():
            err = (model(vx[rank::world]) - vy[rank::world]).abs().sum()
        dist.all_reduce(err)
        return err.item() / len(vy)

    for epoch in range(args.epochs):
        model.train()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros((), device=device)
        steps = len(x) // args.batch
        for i in range(steps):
            own = order[i * args.batch + rank * n:i * args.batch + (rank + 1) * n].to(device)
            loss = F.mse_loss(model(x[own]), y[own])
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        error = validate()
        if rank == 0:
            print(f"epoch {epoch} mse {total.item() / (steps * world):.5f} valid mae {error:.5f}", flush=True)
        if stop.update(error):
            break
    if rank == 0:
        print(f"best valid mae {stop.best:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
