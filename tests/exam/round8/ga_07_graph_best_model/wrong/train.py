"""Node classification with a GCN; the weights with the best validation loss are what we keep."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from graph import CLASSES, FEATS, make_graph


class GCN(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.l1 = nn.Linear(FEATS, hidden)
        self.l2 = nn.Linear(hidden, hidden)
        self.l3 = nn.Linear(hidden, CLASSES)

    def forward(self, a, x):
        h = F.relu(self.l1(a @ x))
        h = F.relu(self.l2(a @ h))
        return self.l3(a @ h)


class BestKeeper:
    """Remembers the (sharded) weights of the best validation loss so far."""

    def __init__(self):
        self.loss, self.step, self.weights = float("inf"), -1, None

    def offer(self, loss, step, model):
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.weights = {n: p.to_local().detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def restore(self, model):
        for n, p in model.named_parameters():
            p.to_local().copy_(self.weights[n])


def part(idx, rank, world):
    return idx.chunk(world)[rank]


def validate(model, graph, rank, world):
    a, x, y, _, val, _ = graph
    mine = part(val, rank, world)
    model.eval()
    with torch.no_grad():
        total = F.cross_entropy(model(a, x)[mine], y[mine], reduction="sum")
    model.train()
    return (total / len(mine)).item()


def evaluate(model, graph, idx):
    a, x, y = graph[:3]
    with torch.no_grad():
        out = model(a, x)[idx]
        return F.cross_entropy(out, y[idx]).item(), (out.argmax(-1) == y[idx]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    graph = make_graph()
    a, x, y, tr, val, test = graph
    torch.manual_seed(1)
    model = GCN()
    for layer in (model.l1, model.l2, model.l3):
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=0.008)
    best, step = BestKeeper(), 0

    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, str(step), f"{rank}.pt"), weights_only=False)
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        best.__dict__.update(ck["best"])

    while step < args.steps:
        gen = torch.Generator().manual_seed(100 + step)
        idx = part(tr[torch.randperm(len(tr), generator=gen)[:32]], rank, world)
        loss = F.cross_entropy(model(a, x)[idx], y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        best.offer(validate(model, graph, rank, world), step, model)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 9 == 0:
            print(f"{step} train {mean.item():.4f} best val {best.loss:.4f} at {best.step}")
        if args.save_every and step % args.save_every == 0:
            os.makedirs(os.path.join(args.out, str(step)), exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "best": best.__dict__},
                       os.path.join(args.out, str(step), f"{rank}.pt"))

    best.restore(model)
    test_loss, acc = evaluate(model, graph, test)
    if rank == 0:
        print(f"test loss {test_loss:.4f} accuracy {acc:.4f}")
    if args.export:
        full = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
