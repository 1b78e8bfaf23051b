"""Sharpness-aware minimisation (SAM) with FSDP2: an optimizer with a closure that runs two full passes per step.

torchrun --standalone --nproc-per-node 2 train.py --rho 0.05
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def global_norm(grads):
    total = torch.nn.utils.get_total_norm(grads)
    return total.full_tensor() if isinstance(total, DTensor) else total


class SAM(torch.optim.Optimizer):
    """step(closure): gradient at w, climb to w + rho g/|g|, gradient there, go back, momentum SGD with that gradient.

    The perturbation needs the norm over ALL parameters and all shards; everything else is elementwise on the shards.
    """

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0, rho=0.05):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, rho=rho))

    @torch.no_grad()
    def step(self, closure):
        first = closure()
        live = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = global_norm([p.grad for _, p in live]) + 1e-12
        old = []
        for g, p in live:
            old.append(p.detach().clone())
            p.add_(p.grad, alpha=g["rho"] / norm.item())
        second = closure()
        for (g, p), w in zip(live, old):
            p.copy_(w)
            d = p.grad.add(p, alpha=g["weight_decay"]) if g["weight_decay"] and p.ndim > 1 else p.grad
            buf = self.state[p].get("momentum")
            if buf is None:
                buf = self.state[p]["momentum"] = torch.zeros_like(p)
            buf.mul_(g["momentum"]).add_(d)
            p.add_(buf, alpha=-g["lr"])
        return first, second


class Net(nn.Module):
    def __init__(self, d=18, width=48, classes=6):
        super().__init__()
        self.stem = nn.Linear(d, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def data(n, seed):
    centres = torch.randn(6, 2, 18, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    mode = torch.randint(0, 2, (n,), generator=g)
    return centres[y, mode] + 0.8 * torch.randn(n, 18, generator=g), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = SAM(model.parameters(), lr=args.lr, weight_decay=5e-4, rho=args.rho)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps, cycle_momentum=False)
    x, y = data(768, 2)
    # inverse-frequency class weights from the whole training set: the weighted mean needs a global denominator
    weight = len(y) / (6 * torch.bincount(y, minlength=6).float())

    for step in range(args.steps):
        idx = torch.randperm(len(y), generator=torch.Generator().manual_seed(step))[: args.batch]
        denom = weight[y[idx]].sum()
        mine = idx.chunk(world)[rank]

        def closure():
            with torch.enable_grad():
                opt.zero_grad()
                loss = F.cross_entropy(model(x[mine]), y[mine], weight=weight, reduction="sum") / denom
                (loss * world).backward()
            return loss.detach()

        losses = torch.stack(opt.step(closure))
        sched.step()
        dist.all_reduce(losses)
        if rank == 0:
            print(f"step {step + 1} loss {losses[0]:.4f} at the climbed point {losses[1]:.4f}", flush=True)

    with torch.no_grad():
        vx, vy = (t.chunk(world)[rank] for t in data(400, 3))
        hits = torch.tensor([(model(vx).argmax(-1) == vy).sum().item(), len(vy)])
        dist.all_reduce(hits)
    if rank == 0:
        print(f"validation accuracy {hits[0].item() / hits[1].item():.4f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
