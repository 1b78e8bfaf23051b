"""Tabular regression with early stopping; the best epoch's weights are the result."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from best import BestKeeper
from data import make_table, my_part
from model import TabularNet


@torch.no_grad()
def squared_error(model, part):
    x, c, y = part
    return torch.stack([(model(x, c) - y).square().sum(), torch.tensor(float(len(y)))])


def evaluate(model, part):
    total = squared_error(model, part)
    return (total[0] / total[1]).item()


def save(folder, epoch, model, optimizer, keeper, rank):
    os.makedirs(folder, exist_ok=True)
    state = {
        "epoch": epoch,
        "model": {n: p.to_local() for n, p in model.named_parameters()},
        "optim": [{k: v.to_local() if hasattr(v, "to_local") else v for k, v in optimizer.state[p].items()}
                  for p in model.parameters()],
        "best": keeper.state_dict(),
    }
    torch.save(state, os.path.join(folder, f"epoch{epoch:03d}_rank{rank}.pt"))
    dist.barrier()


@torch.no_grad()
def load(folder, model, optimizer, keeper, rank):
    path = sorted(glob.glob(os.path.join(folder, f"epoch*_rank{rank}.pt")))[-1]
    state = torch.load(path)
    for n, p in model.named_parameters():
        p.to_local().copy_(state["model"][n])
    for p, saved in zip(model.parameters(), state["optim"]):
        optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        optimizer.state[p]["momentum_buffer"].to_local().copy_(saved["momentum_buffer"])
    keeper.load_state_dict(state["best"])
    return state["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--patience", type=int, default=12)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = TabularNet()
    for layer in (model.first, model.second, model.out):
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    keeper = BestKeeper(model, args.patience)

    train = make_table(256, seed=1)
    val = my_part(make_table(96, seed=35), rank, world)
    test = my_part(make_table(1024, seed=3), rank, world)

    start = load(args.resume, model, optimizer, keeper, rank) if args.resume else 0
    for epoch in range(start, args.epochs):
        if keeper.should_stop():
            break
        order = torch.randperm(256, generator=torch.Generator().manual_seed(100 + epoch))
        for batch in order.split(64):
            x, c, y = (t[batch.chunk(world)[rank]] for t in train)
            loss = (model(x, c) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        val_mse = evaluate(model, val)
        keeper.update(val_mse)
        loss = loss.detach() / world
        dist.all_reduce(loss)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {loss:.5f} val {val_mse:.5f}", flush=True)
        if args.save_every and (epoch + 1) % args.save_every == 0:
            save(args.out, epoch + 1, model, optimizer, keeper, rank)

    keeper.restore()
    val_mse, test_mse = evaluate(model, val), evaluate(model, test)
    if rank == 0:
        print(f"best val {keeper.score:.5f}; restored: val {val_mse:.5f} test {test_mse:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
