"""Full-batch nonlinear conjugate gradients (Polak-Ribiere) with an Armijo search, for a small surrogate model.

The search is driven by a closure; all decisions rest on numbers that were summed over the ranks.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)


class Surrogate(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 2)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for lin in self.hidden:
            h = h + torch.tanh(lin(h))
        return self.last(h)


def simulate(n=240, seed=78):
    """Steady state of a made-up reactor: four settings, two outputs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=g)
    rate = torch.exp(2 * x[:, 0] - 1) * x[:, 1]
    a = rate / (rate + 0.5 + x[:, 2])
    return 2 * x - 1, torch.stack([a, torch.sqrt(x[:, 3] + 0.1) * (1 - a)], 1)


class ConjugateGradient:
    def __init__(self, model, c=1e-4, tries=12):
        self.params = dict(model.named_parameters())
        self.c, self.tries, self.t = c, tries, 0.5
        self.d = {k: torch.zeros_like(p) for k, p in self.params.items()}
        self.g = {k: torch.zeros_like(p) for k, p in self.params.items()}

    @staticmethod
    def dot(a, b):
        s = sum((a[k].to_local() * b[k].to_local()).sum() for k in a)
        dist.all_reduce(s)
        return s.item()

    def shift(self, alpha):
        for k, p in self.params.items():
            p.data.add_(self.d[k], alpha=alpha)

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            f0 = closure(True)
        new = {k: p.grad.detach().clone() for k, p in self.params.items()}
        old = self.dot(self.g, self.g)
        beta = max(0.0, (self.dot(new, new) - self.dot(new, self.g)) / old) if old else 0.0
        for k in self.d:
            self.d[k].mul_(beta).sub_(new[k])
        slope = self.dot(new, self.d)
        if slope >= 0:
            for k in self.d:
                self.d[k].copy_(-new[k])
            slope = -self.dot(new, new)
        t, at = 2 * self.t, 0.0
        for _ in range(self.tries):
            self.shift(t - at)
            at = t
            f = closure(False)
            if f <= f0 + self.c * t * slope:
                break
            t /= 2
        else:
            self.shift(-at)
            f = f0
        self.t, self.g = t, new
        return f

    def state(self):
        return {"d": self.d, "g": self.g, "t": self.t}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/cg")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    x, y = simulate()
    n = len(x)
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    model = Surrogate()
    mesh = init_device_mesh("cpu", (world,))
    for lin in model.hidden:
        fully_shard(lin, mesh=mesh, reshard_after_forward=True)
    # the search moves the weights between two forwards that have no backward, so the root must not stay gathered
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for m in (*model.hidden, model):
        m.set_gradient_divide_factor(1.0)  # the closure's loss is already divided by the global count

    def closure(backward):
        loss = (model(x) - y).pow(2).sum() / n
        if backward:
            model.zero_grad()
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    cg, step = ConjugateGradient(model), 0
    if args.resume:
        sd = {"model": get_model_state_dict(model), "cg": cg.state(), "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_model_state_dict(model, sd["model"])
        cg.t, step = sd["cg"]["t"], sd["step"]
        for k in cg.d:
            cg.d[k].copy_(sd["cg"]["d"][k])
            cg.g[k].copy_(sd["cg"]["g"][k])

    while step < args.steps:
        f = cg.step(closure)
        step += 1
        if rank == 0 and (step % 5 == 0 or step == 1):
            print(f"iteration {step} mse {f:.6f} step length {cg.t:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "cg": cg.state(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"it{step:05d}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
