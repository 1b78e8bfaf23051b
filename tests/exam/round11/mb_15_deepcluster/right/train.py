"""DeepCluster: features of all images -> k-means over all ranks -> new head -> some steps on the pseudo-labels."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from kmeans import kmeans

N, K, BATCH, ROUNDS, STEPS_PER_ROUND = 160, 8, 16, 4, 6


class Net(nn.Module):
    def __init__(self, ch=12, dim=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, ch, 3, 2, 1), nn.GroupNorm(3, ch), nn.ReLU(),
                                   nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.GroupNorm(3, 2 * ch), nn.ReLU(),
                                   nn.Flatten(), nn.Linear(2 * ch * 9, dim))
        self.head = nn.Linear(dim, K)

    def forward(self, x, features=False):
        h = self.trunk(x)
        return F.normalize(h, dim=1) if features else self.head(F.relu(h))


def images():
    g = torch.Generator().manual_seed(40)
    proto = torch.randn(K, 1, 12, 12, generator=g)
    y = torch.arange(N) % K
    return proto[y] + 0.3 * torch.randn(N, 1, 12, 12, generator=g), y


def share(n, rank, world):
    return torch.arange(n).chunk(world)[rank]


def new_head(model, opt, round_no):
    """Head and its optimizer state start afresh; the same whole tensor is drawn on every rank and then divided."""
    g = torch.Generator().manual_seed(1000 + round_no)
    whole = {"head.weight": 0.05 * torch.randn(K, 24, generator=g), "head.bias": torch.zeros(K)}
    model.load_state_dict(whole_to_sharded(model, whole), strict=False)
    for p in model.head.parameters():
        opt.state.pop(p, None)


def whole_to_sharded(model, whole):
    out = {}
    for name, p in model.named_parameters():
        if name in whole:
            if isinstance(p, DTensor):
                out[name] = distribute_tensor(whole[name], p.device_mesh, p.placements)
            else:
                out[name] = whole[name]
    return out


@torch.no_grad()
def assign(model, x, rank, world):
    """pseudo-labels of all images, on all ranks"""
    ids = share(N, rank, world)
    feats = model(x[ids], features=True)
    model.reshard()
    _, owner = kmeans(feats, K)
    parts = [torch.empty_like(owner) for _ in range(world)]
    dist.all_gather(parts, owner)
    return torch.cat(parts)


def purity(labels, y):
    table = torch.zeros(K, K)
    table.index_put_((labels, y), torch.ones(N), accumulate=True)
    return (table.max(1).values.sum() / N).item()


def balanced_order(labels, round_no):
    """images drawn so that all clusters come equally often"""
    g = torch.Generator().manual_seed(2000 + round_no)
    weight = 1.0 / torch.bincount(labels, minlength=K).clamp(min=1)[labels].double()
    return torch.multinomial(weight, BATCH * STEPS_PER_ROUND, replacement=True, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="dc")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.trunk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    x, y = images()

    first_round, first_i, labels = 0, 0, None
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "labels": torch.zeros(N, dtype=torch.long), "round": 0, "i": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        first_round, first_i, labels = state["round"], state["i"], state["labels"]

    for r in range(first_round, ROUNDS):
        if first_i == 0:        # otherwise we are in the middle of a round whose labels have been read
            labels = assign(model, x, rank, world)
            new_head(model, opt, r)
            if rank == 0:
                print(f"round {r} purity {purity(labels, y):.3f} clusters {len(labels.unique())}")
        order = balanced_order(labels, r)
        for i in range(first_i, STEPS_PER_ROUND):
            ids = order[i * BATCH:(i + 1) * BATCH].chunk(world)[rank]
            loss = F.cross_entropy(model(x[ids]), labels[ids])
            opt.zero_grad()
            loss.backward()
            opt.step()
            done = r * STEPS_PER_ROUND + i + 1
            log = loss.detach().clone()
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {done} loss {log.item() / world:.5f}")
            if args.save_every and done % args.save_every == 0:
                m, o = get_state_dict(model, opt)
                nxt = (r, i + 1) if i + 1 < STEPS_PER_ROUND else (r + 1, 0)
                dcp.save({"model": m, "optim": o, "labels": labels, "round": nxt[0], "i": nxt[1]},
                         checkpoint_id=os.path.join(args.out, f"{done:04d}"))
        first_i = 0

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
