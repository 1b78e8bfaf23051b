"""Survival model; the epoch with the best validation C-index is reported and kept."""
import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from cohort import make_cohort, split
from metrics import evaluate
from model import DiscreteHazard


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=120)
    ap.add_argument("--save-every", type=int, default=0, help="in epochs")
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, time, event = make_cohort()
    train, val = split(len(x))
    edges = torch.quantile(time[train], torch.linspace(0.1, 0.95, 10))
    torch.manual_seed(8)
    model = DiscreteHazard(x.shape[1], edges)
    fully_shard(model.trunk)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-2, eps=1e-6)

    best = {"cindex": 0.0, "epoch": -1, "weights": None}
    start = 0
    if args.resume:
        names = sorted(n for n in os.listdir(args.resume) if n.endswith(f".{rank}.pt"))
        state = torch.load(os.path.join(args.resume, names[-1]), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        best, start = state["best"], state["epoch"]

    for epoch in range(start, args.epochs):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        running = torch.zeros(())
        for rows in order.split(args.batch):
            rows = rows[rank::world]
            loss = model(x[rows], time[rows], event[rows])
            loss.backward()
            opt.step()
            opt.zero_grad()
            running += loss.detach()
        dist.all_reduce(running)
        cindex = evaluate(model, x[val], time[val], event[val])
        if cindex > best["cindex"]:
            best = {"cindex": cindex, "epoch": epoch,
                    "weights": {k: v.detach().clone() for k, v in model.state_dict().items()}}
        if rank == 0:
            n = len(order) // args.batch * world
            print(f"epoch {epoch} nll {running.item() / n:.5f} val C-index {cindex:.6f}")
        if args.save_every and (epoch + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "best": best, "epoch": epoch + 1},
                       os.path.join(args.out, f"e{epoch + 1:03d}.{rank}.pt"))

    model.load_state_dict(best["weights"])
    if rank == 0:
        print(json.dumps({"best_epoch": best["epoch"], "val_cindex": round(best["cindex"], 6)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
