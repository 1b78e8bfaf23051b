import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from callbacks import BestWeights, Validation
from model import Mixer


def make_data(n, seed, noise_labels=0.0):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(99))
    y = torch.randint(5, (n,), generator=g)
    x = 0.5 * proto[y] + torch.randn(n, 3, 12, 12, generator=g)
    flip = torch.rand(n, generator=g) < noise_labels
    y = torch.where(flip, torch.randint(5, (n,), generator=g), y)
    return x, y


def rank_file(folder, epoch):
    return os.path.join(folder, f"epoch{epoch:03d}", f"rank{dist.get_rank()}.pt")


def save(folder, epoch, model, optimizer, best):
    path = rank_file(folder, epoch)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save({"model": {n: p.to_local().detach() for n, p in model.named_parameters()},
                "optimizer": {n: {k: (v.to_local() if hasattr(v, "to_local") else v) for k, v in optimizer.state[p].items()}
                              for n, p in model.named_parameters()},
                "best": best.state_dict(), "epoch": epoch}, path)
    dist.barrier()


@torch.no_grad()
def load(folder, model, optimizer, best):
    epoch = max(int(d[5:]) for d in os.listdir(folder) if d.startswith("epoch"))
    state = torch.load(rank_file(folder, epoch))
    for n, p in model.named_parameters():
        p.to_local().copy_(state["model"][n])
        moments = {}
        for k, v in state["optimizer"][n].items():
            if k == "step":
                moments[k] = v
            else:
                moments[k] = torch.zeros_like(p)
                moments[k].to_local().copy_(v)
        optimizer.state[p] = moments
    best.load_state_dict(state["best"])
    return state["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--folder", default="runs")
    ap.add_argument("--resume", action="store_true")
    ap.add_argument("--export", default=None, help="file for the full weights of the best epoch")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Mixer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    x, y = make_data(96, seed=1, noise_labels=0.2)
    validation = Validation(model, *make_data(48, seed=2))
    best = BestWeights(model)
    first = load(args.folder, model, optimizer, best) if args.resume else 0

    for epoch in range(first, args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        running = torch.zeros(())
        for idx in order.split(args.batch):
            idx = idx[rank::world]
            loss = F.cross_entropy(model(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach() / (len(x) // args.batch)
        dist.all_reduce(running)
        val_loss, val_acc = validation.run()
        best.update(val_loss, epoch)
        if rank == 0:
            print(f"epoch {epoch} train {running.item() / world:.4f} val {val_loss:.4f} acc {val_acc:.3f}")
        if args.save_every and (epoch + 1) % args.save_every == 0:
            save(args.folder, epoch + 1, model, optimizer, best)

    best.restore()
    val_loss, val_acc = validation.run()
    if rank == 0:
        print(f"best epoch {best.epoch}: val {val_loss:.4f} acc {val_acc:.3f}")
    if args.export:
        full = {n: p.full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
