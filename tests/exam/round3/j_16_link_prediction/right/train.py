"""Graph model for link prediction. Every rank propagates over the whole (small) graph; the scored pairs are
divided. The encoder and the scorer are methods of one root module, registered as FSDP forward methods."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

NODES, GROUPS = 72, 6
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def community_graph(seed=8):
    g = torch.Generator().manual_seed(seed)
    block = torch.randint(0, GROUPS, (NODES,), generator=g)
    same = block[:, None] == block[None, :]
    prob = torch.where(same, 0.45, 0.03)
    upper = torch.triu(torch.rand(NODES, NODES, generator=g) < prob, 1)
    edges = upper.nonzero()
    edges = edges[torch.randperm(len(edges), generator=g)]
    held = len(edges) // 5
    train, test = edges[held:], edges[:held]
    adj = torch.eye(NODES)
    adj[train[:, 0], train[:, 1]] = 1
    adj[train[:, 1], train[:, 0]] = 1
    d = adj.sum(1).rsqrt()
    return d[:, None] * adj * d[None, :], train, test, upper | upper.T


class Conv(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, adj, h):
        return h + F.elu(self.norm(self.lin(adj @ h)))


class LinkModel(nn.Module):
    def __init__(self, d=16, layers=2):
        super().__init__()
        self.node = nn.Embedding(NODES, d)
        self.convs = nn.ModuleList(Conv(d) for _ in range(layers))
        self.rel = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(1))

    def encode(self, adj):
        h = self.node.weight
        for conv in self.convs:
            h = conv(adj, h)
        return F.normalize(h, dim=-1)

    def score(self, h, pairs):
        return 5 * (h[pairs[:, 0]] * self.rel * h[pairs[:, 1]]).sum(-1) + self.bias


def pairs_of_step(step, pos, size, rank, world):
    g = torch.Generator().manual_seed(60 + step)
    some = pos[torch.randperm(len(pos), generator=g)[: size // 2]]
    neg = torch.randint(0, NODES, (size // 2, 2), generator=g)
    pairs = torch.stack([some, neg], 1).flatten(0, 1)
    label = torch.tensor([1.0, 0.0]).repeat(size // 2)
    return pairs.chunk(world)[rank], label.chunk(world)[rank]


@torch.no_grad()
def auc(model, adj, test, known, rank, world):
    """Ranks score interleaved parts; the area is computed once over all scores."""
    g = torch.Generator().manual_seed(5)
    neg = torch.randint(0, NODES, (4 * len(test), 2), generator=g)
    neg = neg[~known[neg[:, 0], neg[:, 1]]]
    pairs = torch.cat([test, neg])
    n = len(pairs)
    scores = torch.zeros(n)
    scores[rank::world] = model.score(model.encode(adj), pairs[rank::world])
    dist.all_reduce(scores)
    p, q = scores[: len(test)], scores[len(test) :]
    return (p[:, None] > q[None, :]).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--pairs", type=int, default=128)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="graph")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    adj, train, test, known = community_graph()
    torch.manual_seed(21)
    model = LinkModel()
    for conv in model.convs:
        fully_shard(conv)
    fully_shard(model)
    for name in ("encode", "score"):
        register_fsdp_forward_method(model, name)
    slow = [p for n, p in model.named_parameters() if not n.startswith("node")]
    optim = torch.optim.AdamW([{"params": [model.node.weight], "weight_decay": 0.0}, {"params": slow}], lr=1e-2)

    step = 0
    if args.resume:
        blob = torch.load(os.path.join(args.resume, max(os.listdir(args.resume))), weights_only=False)
        set_model_state_dict(model, blob["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(model, optim, blob["optim"], options=StateDictOptions(full_state_dict=True))
        step = blob["step"]

    while step < args.steps:
        pairs, label = pairs_of_step(step, train, args.pairs, rank, world)
        loss = F.binary_cross_entropy_with_logits(model.score(model.encode(adj), pairs), label)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        area = auc(model, adj, test, known, rank, world) if step % 10 == 0 else None
        if rank == 0:
            print(f"step {step:3d}  bce {shown.item() / world:.4f}" + (f"  auc {area:.4f}" if area else ""), flush=True)
        if args.save_every and step % args.save_every == 0:
            blob = {
                "model": get_model_state_dict(model, options=FULL),
                "optim": get_optimizer_state_dict(model, optim, options=FULL),
                "step": step,
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(blob, os.path.join(args.out, f"graph{step:05d}.pt"))
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
