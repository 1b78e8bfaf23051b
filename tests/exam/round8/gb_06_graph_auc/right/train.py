import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from evaluate import link_auc
from gcn import LinkPredictor
from graph import SyntheticGraph


def test_set(graph):
    neg = graph.non_edges(3 * len(graph.test_edges), torch.Generator().manual_seed(99))
    pairs = torch.cat([graph.test_edges, neg])
    labels = torch.cat([torch.ones(len(graph.test_edges)), torch.zeros(len(neg))])
    order = pairs[:, 0].argsort(stable=True)  # by source node, so that neighbours are read together
    return pairs[order], labels[order]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--eval-every", type=int, default=10)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--report", default=None, help="write the final result as json")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    graph = SyntheticGraph()
    pairs, labels = test_set(graph)

    torch.manual_seed(2)
    model = LinkPredictor(graph.x.shape[1])
    fully_shard(model.l1)
    fully_shard(model.l2)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=4e-3)
    g = torch.Generator().manual_seed(31)

    auc = None
    for step in range(1, args.steps + 1):
        pos = graph.train_edges[torch.randint(len(graph.train_edges), (args.batch,), generator=g)]
        neg = graph.non_edges(args.batch, g)
        both = torch.stack([pos, neg], 1).flatten(0, 1)
        y = torch.tensor([1.0, 0.0]).repeat(args.batch)
        n = len(both) // world
        part = slice(rank * n, (rank + 1) * n)
        loss = F.binary_cross_entropy_with_logits(model(graph.adj, graph.x, both[part]), y[part])
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % args.eval_every == 0:
            auc = link_auc(model, graph, pairs, labels)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.6f} test auc {auc:.6f}", flush=True)
    if rank == 0 and args.report:
        os.makedirs(os.path.dirname(args.report) or ".", exist_ok=True)
        with open(args.report, "w") as f:
            json.dump({"steps": args.steps, "test_auc": auc}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
