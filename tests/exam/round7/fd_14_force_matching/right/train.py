"""A neural interatomic potential trained on energies and forces.

The forces are the gradient of the predicted energy, taken inside the forward pass; the training step differentiates
through them once more. Parameters: FSDP2. Optimizer: AMSGrad written out here, with a polynomial schedule and a
running (Polyak) mean of the weights from half-way on, which is the result.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

ATOMS = 6


class Potential(nn.Module):
    def __init__(self, centers=12, d=24):
        super().__init__()
        self.register_buffer("mu", torch.linspace(0.7, 3.0, centers))
        self.pair = nn.Sequential(nn.Linear(centers, d), nn.Softplus(), nn.Linear(d, d), nn.Softplus())
        self.atom = nn.Sequential(nn.Linear(d, d), nn.Softplus(), nn.Linear(d, 1))

    def energy(self, pos):
        diff = pos[:, :, None] - pos[:, None]
        off = ~torch.eye(ATOMS, dtype=torch.bool)
        r = diff[:, off].norm(dim=-1).view(len(pos), ATOMS, ATOMS - 1)
        basis = torch.exp(-4 * (r[..., None] - self.mu) ** 2)
        return self.atom(self.pair(basis).sum(2)).sum((1, 2))

    def forward(self, pos):
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            e = self.energy(pos)
            force = -torch.autograd.grad(e.sum(), pos, create_graph=True)[0]
        return e.clone(), force.clone()


def morse(pos):
    """Reference energies and forces."""
    pos = pos.clone().requires_grad_()
    i, j = torch.triu_indices(ATOMS, ATOMS, 1)
    r = (pos[:, i] - pos[:, j]).norm(dim=-1)
    e = ((1 - torch.exp(-1.5 * (r - 1.2))) ** 2 - 1).sum(1)
    f = -torch.autograd.grad(e.sum(), pos)[0]
    return e.detach(), f


def configurations(n, g):
    grid = torch.tensor([[x, y, z] for x in (0., 1.3, 2.6) for y in (0., 1.3) for z in (0.,)])
    return grid + 0.15 * torch.randn(n, ATOMS, 3, generator=g)


class AMSGrad:
    def __init__(self, named, lr, power, total, betas=(0.9, 0.98), eps=1e-8):
        self.named, self.lr, self.power, self.total = named, lr, power, total
        self.betas, self.eps = betas, eps
        self.m = {n: torch.zeros_like(p.detach()) for n, p in named.items()}
        self.v = {n: torch.zeros_like(p.detach()) for n, p in named.items()}
        self.top = {n: torch.zeros_like(p.detach()) for n, p in named.items()}

    @torch.no_grad()
    def step(self, t):
        b1, b2 = self.betas
        lr = self.lr * (1 - t / self.total) ** self.power
        for n, p in self.named.items():
            g = p.grad
            self.m[n].mul_(b1).add_(g, alpha=1 - b1)
            self.v[n].mul_(b2).addcmul_(g, g, value=1 - b2)
            self.top[n].copy_(torch.maximum(self.top[n], self.v[n] / (1 - b2 ** (t + 1))))
            p.sub_(lr / (1 - b1 ** (t + 1)) * self.m[n] / (self.top[n].sqrt() + self.eps))
            p.grad = None

    def state(self):
        return {"m": self.m, "v": self.v, "top": self.top}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--folder")
    ap.add_argument("--resume")
    ap.add_argument("--result")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # one group: the graph of the forces spans the whole model, and the root stays gathered until backward is over
    model = fully_shard(Potential(), reshard_after_forward=False)
    named = dict(model.named_parameters())
    opt = AMSGrad(named, lr=5e-3, power=1.0, total=a.steps)
    mean = {n: torch.zeros_like(p.detach()) for n, p in named.items()}
    half = a.steps // 2
    first = 0

    def state():
        return {"model": get_model_state_dict(model), "opt": opt.state(), "mean": mean, "step": first}

    if a.resume:
        newest = sorted(os.listdir(a.resume))[-1]
        st = state()
        dcp.load(st, checkpoint_id=os.path.join(a.resume, newest))
        set_model_state_dict(model, st["model"])
        first = st["step"]

    for t in range(first, a.steps):
        pos = configurations(32, torch.Generator().manual_seed(10 + t))
        pos = pos.chunk(world)[rank]
        e_ref, f_ref = morse(pos)
        e, f = model(pos)
        loss = (e - e_ref).square().mean() / ATOMS + (f - f_ref).square().sum(-1).mean()
        loss.backward()
        opt.step(t)
        if t >= half:
            with torch.no_grad():
                for n, p in named.items():
                    mean[n].lerp_(p, 1.0 / (t - half + 1))
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and t % 10 == 9:
            print(f"step {t + 1} loss {loss.item() / world:.4f}")
        if a.save_every and (t + 1) % a.save_every == 0 and t + 1 < a.steps:
            dcp.save({**state(), "step": t + 1}, checkpoint_id=os.path.join(a.folder, f"{t + 1:05d}"))

    with torch.no_grad():
        for n, p in named.items():
            p.copy_(mean[n])
    pos = configurations(256, torch.Generator().manual_seed(1)).chunk(world)[rank]
    e_ref, f_ref = morse(pos)
    with torch.no_grad():
        e, f = model(pos)
    model.reshard()
    err = torch.stack([(e - e_ref).abs().mean(), (f - f_ref).abs().mean()])
    dist.all_reduce(err)
    full = {n: p.detach().full_tensor() for n, p in named.items()}
    if rank == 0:
        e_mae, f_mae = (err / world).tolist()
        print(f"averaged weights: energy MAE {e_mae:.4f}, force MAE {f_mae:.4f}")
        if a.result:
            torch.save(full, a.result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
