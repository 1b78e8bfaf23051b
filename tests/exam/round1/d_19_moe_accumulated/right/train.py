"""Mixture of experts with dense dispatch, gradient accumulation, a balance loss over the whole global batch and an average of
the weights. The balance loss needs the expert shares of all micro-batches and ranks before any backward, so a first pass
without gradients counts them."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x):
        return self.outer(F.silu(self.inner(x)))


class SparseLayer(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x):
        h = self.norm(x)
        logits = self.router(h)
        p = logits.softmax(-1)
        top, where = p.topk(2, -1)
        gate = torch.zeros_like(p).scatter(1, where, top / top.sum(-1, keepdim=True))
        # every expert sees every row and is weighted by zero where it was not chosen: its collectives always happen
        x = x + sum(gate[:, k : k + 1] * e(h) for k, e in enumerate(self.experts))
        return x, (p, (gate > 0).float().sum(0), logits.logsumexp(-1))


class Net(nn.Module):
    def __init__(self, width=16, experts=4, classes=5):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.layers = nn.ModuleList(SparseLayer(width, experts) for _ in range(2))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x, info = self.inp(x), []
        for layer in self.layers:
            x, i = layer(x)
            info.append(i)
        return self.out(x), info


def options(model, lr):
    """Routers learn slowly and do not decay, experts learn faster, vectors do not decay."""
    kinds = {
        "router": dict(lr=lr * 0.3, weight_decay=0.0),
        "expert": dict(lr=lr * 1.5, weight_decay=0.02),
        "vector": dict(lr=lr, weight_decay=0.0),
        "matrix": dict(lr=lr, weight_decay=0.02),
    }
    lists = {k: [] for k in kinds}
    for n, p in model.named_parameters():
        kind = "router" if "router" in n else "vector" if p.ndim == 1 else "expert" if ".experts." in n else "matrix"
        lists[kind].append(p)
    return [{"params": lists[k], **o} for k, o in kinds.items()]


class Average:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def exchange(self, model):
        model.reshard()
        for n, p in model.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.shadow[n])
            self.shadow[n].copy_(kept)


def dataset():
    g = torch.Generator().manual_seed(190)
    x = torch.randn(800, 8, generator=g)
    y = ((x[:, :1] > 0) * 2 * x @ torch.randn(8, 5, generator=g) + x @ torch.randn(8, 5, generator=g)).argmax(1)
    return x[:640], y[:640], x[640:], y[640:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--micro", type=int, default=8, help="rows of a micro-batch")
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = Net()
    for layer in model.layers:
        for e in layer.experts:
            fully_shard(e)
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(options(model, args.lr), eps=1e-5)
    average = Average(model, 0.9)
    x, y, vx, vy = dataset()

    def state(step):
        m, o = get_state_dict(model, optim)
        return {"model": m, "optim": o, "average": average.shadow, "step": step}

    start = 0
    if args.resume:
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optim, model_state_dict=s["model"], optim_state_dict=s["optim"])
        average.shadow, start = s["average"], s["step"]

    for step in range(start, args.steps):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[: args.batch]
        micros = rows.chunk(world)[rank].split(args.micro)
        with torch.no_grad():
            shares = torch.stack([torch.stack([i[1] for i in model(x[m])[1]]) for m in micros]).sum(0)
        dist.all_reduce(shares)
        shares = shares / (2 * args.batch)
        total = torch.zeros(2)
        for k, m in enumerate(micros):
            model.set_requires_gradient_sync(k == len(micros) - 1)
            logits, info = model(x[m])
            ce = F.cross_entropy(logits, y[m], reduction="sum")
            balance = sum(len(f) * (f * p).sum() for f, (p, _, _) in zip(shares, info))
            z = sum(lse.pow(2).sum() for _, _, lse in info)
            loss = (ce + 0.02 * balance + 1e-3 * z) / args.batch
            (loss * world).backward()
            total += torch.stack([loss.detach(), balance.detach() / args.batch])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optim.step()
        optim.zero_grad()
        average.update(model)
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step:3d} loss {total[0]:.4f} balance {total[1]:.3f} norm {norm:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"moe{step + 1:05d}"))

    average.exchange(model)
    model.eval()
    with torch.no_grad():
        right = (model(vx[rank::world])[0].argmax(1) == vy[rank::world]).sum()
    dist.all_reduce(right)
    average.exchange(model)
    if rank == 0:
        print(f"accuracy of the averaged weights {right.item() / len(vx):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
