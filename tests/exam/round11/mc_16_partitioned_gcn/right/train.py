"""Full-graph training of a GCN, the nodes divided over the ranks and the weights sharded."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import keeper as ckpt
from gcn import GCN, citation_graph, drop_edges


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--patience", type=int, default=6)
    ap.add_argument("--drop", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, adj, y, train, val = citation_graph()
    own = torch.arange(len(x)).chunk(world)[rank]
    torch.manual_seed(6)
    model = GCN(x.shape[1], 4)
    # validation forwards have no backward, the weights are exchanged afterwards
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-4, weight_decay=5e-4)
    keeper = ckpt.BestKeeper(args.patience)
    start = ckpt.load(args.resume, model, opt, keeper) if args.resume else 0
    last = start if keeper.exhausted(start) else args.epochs

    plain = drop_edges(adj, 0.0, 0)[own]
    train_nodes = train.sum()
    for epoch in range(start + 1, last + 1):
        a = drop_edges(adj, args.drop, 3000 + epoch)[own]
        logits = model(x[own], a)
        nll = F.cross_entropy(logits, y[own], reduction="none")
        loss = (nll * train[own]).sum() / train_nodes * world
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            right = ((model(x[own], plain).argmax(1) == y[own]) & val[own]).sum()
        report = torch.stack([loss.detach().double() / world, right.double()])
        dist.all_reduce(report)
        score = report[1].item() / val.sum().item()
        stop = keeper.offer(model, score, epoch)
        if rank == 0 and (epoch % 4 == 0 or stop):
            print(f"epoch {epoch} loss {report[0].item():.6f} val {score:.4f} best {keeper.score:.4f}@{keeper.epoch}")
        if args.save_every and epoch % args.save_every == 0:
            ckpt.save(args.out, model, opt, keeper, epoch)
        if stop:
            break
    keeper.restore(model)
    if rank == 0:
        print(f"kept epoch {keeper.epoch} val {keeper.score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
