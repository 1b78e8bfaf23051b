"""Default-risk classifier on tabular data, with patience and the best epoch kept in memory."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--patience", type=int, default=5)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--save-every", type=int, default=0, help="epochs between checkpoints")
parser.add_argument("--out", default="ckpt")
parser.add_argument("--resume", default=None)
parser.add_argument("--export", default=None)
args = parser.parse_args()


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.relu(self.a(self.norm(x))))


class TabNet(nn.Module):
    def __init__(self, n_features, d=64, depth=2):
        super().__init__()
        self.inp = nn.Linear(n_features, d)
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(F.relu(x))


def make_data(n, seed, n_features=24):
    g = torch.Generator().manual_seed(99)
    w = torch.randn(n_features, generator=g)
    g.manual_seed(seed)
    x = torch.randn(n, n_features, generator=g)
    logit = x @ w * 0.35 + x[:, 0] * x[:, 1]
    y = (torch.rand(n, generator=g) < torch.sigmoid(logit)).float()[:, None]
    return x, y


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
train_x, train_y = make_data(512, seed=1)
val_x, val_y = make_data(1000, seed=2)
test_x, test_y = make_data(2000, seed=3)

torch.manual_seed(4)
model = TabNet(train_x.shape[1])
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
shuffler = torch.Generator().manual_seed(5)


@torch.no_grad()
def evaluate(x, y):
    logits = model(x.tensor_split(world)[rank])
    total = F.binary_cross_entropy_with_logits(logits, y.tensor_split(world)[rank], reduction="sum").double()
    dist.all_reduce(total)
    return total.item() / len(y)


def snapshot():
    return {name: local(t).detach().clone() for name, t in model.state_dict().items()}


def restore(shards):
    with torch.no_grad():
        for name, t in model.state_dict().items():
            local(t).copy_(shards[name])


epoch, best_loss, best_epoch, best_weights = 0, float("inf"), -1, None

if args.resume:
    newest = max(os.listdir(args.resume), key=lambda d: int(re.sub(r"\D", "", d)))
    ck = torch.load(os.path.join(args.resume, newest, f"shard{rank}of{world}.pt"))
    restore(ck["weights"])
    by_name = dict(model.named_parameters())
    for name, s in ck["optimizer"].items():
        p = by_name[name]
        optimizer.state[p] = {"step": s["step"]}
        for k in ("exp_avg", "exp_avg_sq"):
            optimizer.state[p][k] = torch.zeros_like(p)
            local(optimizer.state[p][k]).copy_(s[k])
    shuffler.set_state(ck["shuffler"])
    epoch, best_loss, best_epoch, best_weights = ck["epoch"], ck["best_loss"], ck["best_epoch"], ck["best_weights"]

while epoch < args.epochs and epoch - best_epoch <= args.patience:
    order = torch.randperm(len(train_x), generator=shuffler)
    running = 0.0
    for rows in order.split(args.batch):
        rows = rows.tensor_split(world)[rank]
        loss = F.binary_cross_entropy_with_logits(model(train_x[rows]), train_y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    val = evaluate(val_x, val_y)
    if val < best_loss:
        best_loss, best_epoch = val, epoch
        best_weights = snapshot()
    if rank == 0:
        print(f"epoch {epoch}: train {running / 8:.4f} val {val:.4f} best {best_loss:.4f} (epoch {best_epoch})", flush=True)
    epoch += 1
    if args.save_every and epoch % args.save_every == 0:
        folder = os.path.join(args.out, f"epoch{epoch}")
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "weights": snapshot(),
                "optimizer": {n: {k: local(v) for k, v in optimizer.state[p].items()} for n, p in model.named_parameters()},
                "shuffler": shuffler.get_state(),
                "epoch": epoch,
                "best_loss": best_loss,
                "best_epoch": best_epoch,
                "best_weights": best_weights,
            },
            os.path.join(folder, f"shard{rank}of{world}.pt"),
        )
        dist.barrier()

restore(best_weights)
val, test = evaluate(val_x, val_y), evaluate(test_x, test_y)
if rank == 0:
    print(f"kept epoch {best_epoch}: val {val:.4f} test {test:.4f}", flush=True)
if args.export:
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
    if rank == 0:
        torch.save(full, args.export)
dist.destroy_process_group()
