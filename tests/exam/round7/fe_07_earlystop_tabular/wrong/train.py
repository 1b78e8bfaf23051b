import argparse
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from callbacks import EarlyStopping, Export, RankCheckpoint
from engine import Engine

TRAIN, VAL, DIM, BATCH = 128, 256, 20, 32


def make_table(seed=4):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(TRAIN + VAL, DIM, generator=g)
    w = torch.randn(DIM, 2, generator=g) / DIM ** 0.5
    y = (x @ w).tanh().sum(1) + 0.6 * torch.randn(TRAIN + VAL, generator=g)
    return x, y


def train_epoch(model, optimizer, epoch, table):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table
    order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
    total = torch.zeros(())
    for batch in order.split(BATCH):
        mine = batch[rank::world]
        loss = (model(x[mine]).squeeze(-1) - y[mine]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(mine)
    dist.all_reduce(total)
    return total.item() / TRAIN


@torch.no_grad()
def validate(model, table):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = (part[TRAIN:].chunk(world)[rank] for part in table)
    model.eval()
    error = (model(x).squeeze(-1) - y).square().sum()
    model.train()
    dist.all_reduce(error)
    return error.item() / VAL


def build_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--patience", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    parser.add_argument("--export")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    table = make_table()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    check = partial(validate, table=table)
    callbacks = [EarlyStopping(args.patience), RankCheckpoint(args.out, args.save_every), Export(check, args.export)]
    engine = Engine(model, optimizer, partial(train_epoch, table=table), check, callbacks)
    if args.resume:
        RankCheckpoint.restore(engine, args.resume)
    engine.fit(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
