"""Node classification on one graph: all ranks see the graph, the labelled nodes are divided among them."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from best import BestKeeper
from graph import GCN, make_graph


def node_loss(model, adj, x, label, nodes):
    """Mean over the given nodes, and the loss to call backward on (FSDP averages its gradient over the ranks)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = nodes.tensor_split(world)[rank]
    total = F.cross_entropy(model(adj, x)[mine], label[mine], reduction="sum")
    value = total.detach().clone()
    dist.all_reduce(value)
    return value.item() / len(nodes), total * world / len(nodes)


def save(path, model, optim, best, epoch):
    os.makedirs(path, exist_ok=True)
    local = {k: {n: v.to_local() if hasattr(v, "to_local") else v for n, v in s.items()}
             for k, s in optim.state_dict()["state"].items()}
    torch.save({"model": [p.to_local() for p in model.parameters()], "optim": local, "epoch": epoch,
                "best": (best.loss, best.epoch, best.shards)}, f"{path}/shard{dist.get_rank()}.pt")
    dist.barrier()


@torch.no_grad()
def load(path, model, optim, best):
    ck = torch.load(f"{path}/shard{dist.get_rank()}.pt")
    for p, v in zip(model.parameters(), ck["model"]):
        p.to_local().copy_(v)
    for p, s in zip(model.parameters(), ck["optim"].values()):
        optim.state[p] = {}
        for k, v in s.items():
            if v.ndim:
                like = torch.zeros_like(p)
                like.to_local().copy_(v)
                v = like
            optim.state[p][k] = v
    best.loss, best.epoch, best.shards = ck["best"]
    return ck["epoch"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    adj, x, label, split = make_graph()
    torch.manual_seed(0)
    model = GCN()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=5e-2)
    best = BestKeeper(model)
    epoch = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d[1:]))
        epoch = load(os.path.join(args.resume, newest), model, optim, best)

    while epoch < args.epochs:
        value, loss = node_loss(model, adj, x, label, split["train"])
        loss.backward()
        optim.step()
        optim.zero_grad()
        epoch += 1
        with torch.no_grad():
            valid, _ = node_loss(model, adj, x, label, split["valid"])
        for m in reversed(list(model.modules())):
            if hasattr(m, "reshard"):
                m.reshard()
        best.offer(valid, epoch)
        if rank == 0 and epoch % 5 == 0:
            print(f"epoch {epoch} train {value:.4f} valid {valid:.4f}", flush=True)
        if args.save_every and epoch % args.save_every == 0:
            save(os.path.join(args.out, f"e{epoch}"), model, optim, best, epoch)

    best.restore()
    with torch.no_grad():
        valid, _ = node_loss(model, adj, x, label, split["valid"])
        test, _ = node_loss(model, adj, x, label, split["test"])
    print(f"rank {rank}: best epoch {best.epoch}, its valid loss {best.loss:.4f}; restored valid {valid:.4f} test {test:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
