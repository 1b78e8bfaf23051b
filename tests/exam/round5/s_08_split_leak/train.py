"""Small tabular table: random train/validation split, best epoch by validation loss."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler


class Table(Dataset):
    def __init__(self, rows=160, cols=20):
        g = torch.Generator().manual_seed(2024)
        self.x = torch.randn(rows, cols, generator=g)
        w = torch.randn(cols, generator=g)
        self.y = self.x @ w / cols ** 0.5 + 0.7 * torch.randn(rows, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


class Net(nn.Module):
    def __init__(self, cols=20, d=48):
        super().__init__()
        self.a = nn.Linear(cols, d)
        self.b = nn.Linear(d, d)
        self.c = nn.Linear(d, 1)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))).squeeze(-1)


def sums(v):
    t = torch.tensor(v, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--seed", type=int, default=17)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = Net()
    for m in (model.a, model.b, model.c):
        fully_shard(m)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    torch.manual_seed(args.seed + rank)
    split_gen = torch.Generator().manual_seed(args.seed)
    train_set, val_set = random_split(Table(), [128, 32], generator=split_gen)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, batch_size=args.batch // world, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(rank, 32, world)), batch_size=16)

    best, best_epoch = float("inf"), -1
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        run = [0.0, 0]
        for x, y, _ in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            run = [run[0] + loss.item() * len(y), run[1] + len(y)]
        held = [0.0, 0]
        with torch.no_grad():
            for x, y, _ in val_loader:
                held = [held[0] + (model(x) - y).square().sum().item(), held[1] + len(y)]
        tr, n, va, m = sums(run + held)
        if va / m < best:
            best, best_epoch = va / m, epoch
        if rank == 0:
            print(f"epoch {epoch} train {tr / n:.4f} val {va / m:.4f}", flush=True)
    if rank == 0:
        print(f"best epoch {best_epoch} val {best:.4f}", flush=True)
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
