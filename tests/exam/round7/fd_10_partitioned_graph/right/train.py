"""Full-batch GNN on a graph divided by nodes: every rank owns a block of rows, neighbours come by all-gather."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import PartitionedSage

NODES, FEATS, CLASSES = 240, 12, 5


def make_graph():
    g = torch.Generator().manual_seed(8)
    y = torch.sort(torch.randint(0, CLASSES, (NODES,), generator=g)).values
    p = torch.where(y[:, None] == y[None], 0.10, 0.01)
    adj = (torch.rand(NODES, NODES, generator=g) < p).float()
    adj = adj / adj.sum(1, keepdim=True).clamp_min(1)
    x = torch.randn(CLASSES, FEATS, generator=g)[y] * 0.4 + torch.randn(NODES, FEATS, generator=g)
    # labels are scarce and not evenly spread over the nodes
    labelled = torch.rand(NODES, generator=g) < torch.linspace(0.15, 0.6, NODES)
    return x, adj, y, labelled


def full_options():
    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=40)
    ap.add_argument("--save-dir")
    ap.add_argument("--save-every", type=int, default=15)
    ap.add_argument("--resume-dir")
    ap.add_argument("--weights")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, adj, y, labelled = make_graph()
    per = NODES // world
    rows = slice(rank * per, (rank + 1) * per)
    x, y, train, test = x[rows], y[rows], labelled[rows], ~labelled[rows]
    adj = adj[rows].to_sparse_coo().coalesce()
    n_train = train.sum().float()
    dist.all_reduce(n_train)

    torch.manual_seed(5)
    model = PartitionedSage(FEATS, CLASSES)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    first = 0
    if args.resume_dir:
        newest = max(glob.glob(args.resume_dir + "/*.pt"), key=lambda f: int(os.path.basename(f)[:-3]))
        st = torch.load(newest, weights_only=True)
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"], options=full_options())
        first = st["iter"]

    for it in range(first, args.iters):
        opt.zero_grad()
        logits = model(x, adj)
        # The gradient that arrives through the gather is already the sum of all ranks' losses with respect to
        # our rows. FSDP averages over ranks, so the loss is the global mean times the number of ranks.
        local = F.cross_entropy(logits[train], y[train], reduction="sum") / n_train
        (local * world).backward()
        opt.step()
        loss = local.detach().clone()
        dist.all_reduce(loss)
        if rank == 0 and it % 8 == 7:
            print(f"iter {it + 1} loss {loss.item():.4f}")
        if args.save_dir and (it + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt, options=full_options())
            if rank == 0:
                torch.save({"model": m, "optim": o, "iter": it + 1}, f"{args.save_dir}/{it + 1}.pt")
            dist.barrier()

    with torch.no_grad():
        hits = (model(x, adj).argmax(-1) == y)[test].float()
        score = torch.stack([hits.sum(), torch.tensor(float(hits.numel()))])
        dist.all_reduce(score)
    m, _ = get_state_dict(model, opt, options=full_options())
    if rank == 0:
        print(f"accuracy of unlabelled nodes {(score[0] / score[1]).item():.4f}")
        if args.weights:
            torch.save(m, args.weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
