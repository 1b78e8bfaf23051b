"""Full-graph training with the nodes spread over the ranks.

There are no batches: every step sees the whole graph. Each rank holds the states of its own nodes and fetches the
others' messages in every layer. The parameters are sharded with FSDP2.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import PartitionedGCN


def citation_graph(nodes=240, classes=5, features=24, seed=6):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (nodes,), generator=g)
    x = torch.randn(classes, features, generator=g)[y] * 0.5 + torch.randn(nodes, features, generator=g)
    chance = torch.where(y[:, None] == y[None], 0.06, 0.008)
    adj = torch.triu((torch.rand(nodes, nodes, generator=g) < chance).float(), 1)
    adj = adj + adj.T + torch.eye(nodes)
    scale = adj.sum(1).rsqrt()
    split = torch.rand(nodes, generator=g)
    return x, y, scale[:, None] * adj * scale[None], split < 0.4, split > 0.6


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y, adj, train, test = citation_graph()
    own = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    n_train, n_test = train.sum(), test.sum()
    x, y, rows, train, test = x[own], y[own], adj[own], train[own], test[own]

    torch.manual_seed(1)
    model = PartitionedGCN(24, 32, 5)
    for conv in [*model.convs, model.last]:
        fully_shard(conv)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)

    start = 0
    if args.resume:
        start = max(int(d.split("-")[1]) for d in os.listdir(args.resume))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "sched": sched.state_dict()}
        dcp.load(state, checkpoint_id=f"{args.resume}/step-{start}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])

    for step in range(start + 1, args.steps + 1):
        logits = model(x, rows)
        # this rank's part of the mean over all training nodes; FSDP averages the gradients, so undo its division
        part = F.cross_entropy(logits[train], y[train], reduction="sum") / n_train
        opt.zero_grad()
        (part * world).backward()
        opt.step()
        sched.step()
        shown = part.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {shown.item():.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "sched": sched.state_dict()}, checkpoint_id=f"{args.out}/step-{step}")

    with torch.no_grad():
        hits = (model(x, rows).argmax(1) == y)[test].sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits.item() / n_test.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
