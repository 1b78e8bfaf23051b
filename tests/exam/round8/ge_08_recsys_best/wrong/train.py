"""Click model (DeepFM); the weights of the best epoch are put back at the end."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from best import BestModel
from data import SIZES, interactions
from model import DeepFM


def train_epoch(model, optimizer, data, batch, epoch, rank, world):
    fields, clicks = data
    order = torch.randperm(len(clicks), generator=torch.Generator().manual_seed(100 + epoch))
    total = torch.zeros(())
    for chunk in order.split(batch):
        mine = chunk.chunk(world)[rank]
        loss = F.binary_cross_entropy_with_logits(model(fields[mine]), clicks[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(mine)
    dist.all_reduce(total)
    return total.item() / len(clicks)


@torch.no_grad()
def evaluate(model, data, rank, world):
    fields, clicks = data
    logits = model(fields[rank::world])
    loss = F.binary_cross_entropy_with_logits(logits, clicks[rank::world], reduction="sum")
    return loss.item() / len(logits)


def save(folder, epoch, model, optimizer, best, rank):
    os.makedirs(f"{folder}/{epoch}", exist_ok=True)
    torch.save({
        "weights": {n: p.to_local().detach() for n, p in model.named_parameters()},
        "adagrad": {n: (optimizer.state[p]["sum"].to_local(), optimizer.state[p]["step"])
                    for n, p in model.named_parameters()},
        "best": best.state_dict(),
    }, f"{folder}/{epoch}/{rank}.pt")
    dist.barrier()


@torch.no_grad()
def load(folder, model, optimizer, best, rank):
    epoch = max(int(name) for name in os.listdir(folder))
    state = torch.load(f"{folder}/{epoch}/{rank}.pt")
    for n, p in model.named_parameters():
        p.to_local().copy_(state["weights"][n])
        total, step = state["adagrad"][n]
        optimizer.state[p]["sum"].to_local().copy_(total)
        optimizer.state[p]["step"].copy_(step)
    best.load_state_dict(state["best"])
    return epoch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(14)
    model = DeepFM(SIZES)
    fully_shard(model.mlp)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr, initial_accumulator_value=0.01)
    best = BestModel(model)
    train, valid, test = interactions(768, 61), interactions(64, 62), interactions(512, 63)

    done = load(args.resume, model, optimizer, best, rank) if args.resume else 0
    for epoch in range(done + 1, args.epochs + 1):
        train_loss = train_epoch(model, optimizer, train, args.batch, epoch, rank, world)
        valid_loss = evaluate(model, valid, rank, world)
        best.offer(valid_loss, epoch)
        if rank == 0:
            print(f"epoch {epoch} train {train_loss:.5f} valid {valid_loss:.5f}", flush=True)
        if args.save_every and epoch % args.save_every == 0:
            save(args.save_dir, epoch, model, optimizer, best, rank)

    best.restore()
    test_loss = evaluate(model, test, rank, world)
    if rank == 0:
        print(f"best epoch {best.epoch} valid {best.loss:.5f} test {test_loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
