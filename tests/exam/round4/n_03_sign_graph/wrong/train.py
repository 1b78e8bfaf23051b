"""SIGN node classifier: neighbourhood averages are computed once, then an MLP is trained on [X, AX, A^2 X].

Nodes are partitioned over the ranks; each rank keeps the incoming edges of its own nodes only.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def make_graph(nodes=512, classes=4, feats=16, degree=6, seed=2):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, (nodes,), generator=g)
    centre = torch.randn(classes, feats, generator=g)
    x = centre[label] * 0.6 + torch.randn(nodes, feats, generator=g)
    # skewed degrees: a few hubs receive many edges
    popularity = torch.rand(nodes, generator=g).pow(3) + 0.02
    src = torch.arange(nodes).repeat_interleave(degree * 4)
    dst = torch.multinomial(popularity, len(src), replacement=True, generator=g)
    keep = (label[src] == label[dst]) | (torch.rand(len(src), generator=g) < 0.15)
    src, dst = src[keep], dst[keep]
    loops = torch.arange(nodes)
    edges = torch.stack([torch.cat([src, dst, loops]), torch.cat([dst, src, loops])])
    return x, label, torch.unique(edges, dim=1)


class Partition:
    def __init__(self, nodes, rank, world):
        self.size = nodes // world
        self.lo, self.hi = rank * self.size, (rank + 1) * self.size

    def owns(self, idx):
        return (idx >= self.lo) & (idx < self.hi)

    def gather(self, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)


def propagate(x, edges, part, hops):
    """Symmetrically normalised propagation, one halo exchange per hop; returns the rows of this rank."""
    src, dst = edges
    mine = part.owns(dst)
    src, dst = src[mine], dst[mine]
    deg = torch.bincount(dst, minlength=len(x)).clamp(min=1)
    weight = (deg[src] * deg[dst]).float().rsqrt()
    out, h = [x[part.lo:part.hi]], x
    for _ in range(hops):
        local = torch.zeros(part.size, x.shape[1])
        local.index_add_(0, dst - part.lo, h[src] * weight[:, None])
        out.append(local)
        h = part.gather(local)
    return torch.cat(out, dim=1)


class Sign(nn.Module):
    def __init__(self, d_in, classes, width=48, depth=2):
        super().__init__()
        self.stem = nn.Linear(d_in, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                                    for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        h = self.stem(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--hops", type=int, default=2)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, label, edges = make_graph()
    part = Partition(len(x), rank, world)
    feats = propagate(x, edges, part, args.hops)
    y = label[part.lo:part.hi]
    train = torch.rand(len(x), generator=torch.Generator().manual_seed(9))[part.lo:part.hi] < 0.3
    n_train = train.sum()
    dist.all_reduce(n_train)

    model = Sign(feats.shape[1], 4)
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    for step in range(args.steps):
        logits = model(feats)
        # labelled nodes are unevenly spread: sum here, divide by the global count, undo the mean over ranks
        loss = F.cross_entropy(logits[train], y[train], reduction="sum") * world / n_train
        loss.backward()
        opt.step()
        opt.zero_grad()
        hits = torch.stack([((logits.argmax(1) == y) & ~train).sum().float(), (~train).sum().float(), loss.detach() / world])
        dist.all_reduce(hits)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {hits[2]:.4f} test acc {hits[0] / hits[1]:.3f}", flush=True)

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
