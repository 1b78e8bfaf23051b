"""Bayes by backprop on a noisy one-dimensional regression.

The weight noise of a step comes from a generator seeded by the step, so all ranks look at the same draw of the
network; the KL term is the same number on every rank, and the mean that FSDP takes over the ranks leaves it alone.
Checkpoints are written in the background.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class BayesLinear(nn.Module):
    def __init__(self, i, o, prior=1.0):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(o, i + 1) / math.sqrt(i + 1))
        self.rho = nn.Parameter(torch.full((o, i + 1), -4.0))
        self.prior = prior

    def forward(self, x, gen):
        sigma = F.softplus(self.rho)
        w = self.mu
        if gen is not None:
            w = w + sigma * torch.randn(sigma.shape, generator=gen)
        kl = (math.log(self.prior) - sigma.log() + (sigma**2 + self.mu**2) / (2 * self.prior**2) - 0.5).sum()
        return F.linear(x, w[:, :-1], w[:, -1]), kl


class BayesNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.ModuleList([BayesLinear(2, width), BayesLinear(width, width), BayesLinear(width, 1)])

    def forward(self, x, gen=None):
        h, kl = x, 0.0
        for i, layer in enumerate(self.layers):
            h, k = layer(h, gen)
            kl = kl + k
            if i + 1 < len(self.layers):
                h = torch.tanh(h)
        return h.squeeze(-1), kl


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, 1, generator=g) - 2
    y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 0] + 0.1 * torch.randn(n, generator=g)
    return torch.cat([x, x**2 - 1], 1), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--draws", type=int, default=2, help="weight draws per step, accumulated")
    ap.add_argument("--noise", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/bbb")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    x, y = data(512, seed=1)
    model = BayesNet()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=0.02)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    saving = dist.new_group(backend="gloo")  # the background thread must not share the training's group
    step, pending = 0, None
    if args.resume:
        sd = state(0)
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        step = sd["step"]

    while step < args.steps:
        pick = torch.randint(len(x), (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        shown = torch.zeros(2)
        for draw in range(args.draws):
            gen = torch.Generator().manual_seed(step * 97 + draw)
            out, kl = model(x[pick], gen)
            nll = (out - y[pick]).pow(2).mean() / (2 * args.noise**2)
            # per-example ELBO: the likelihood is a mean over the batch, so the KL is spread over all N examples
            ((nll + kl / len(x)) / args.draws).backward()
            shown += torch.stack([nll.detach(), kl.detach() / len(x)]) / args.draws
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} nll {shown[0] / world:.4f} kl/N {shown[1] / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            if pending is not None:
                pending.result()
            pending = dcp.async_save(state(step), checkpoint_id=os.path.join(args.out, f"{step:06d}"), process_group=saving)
    if pending is not None:
        pending.result()

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
