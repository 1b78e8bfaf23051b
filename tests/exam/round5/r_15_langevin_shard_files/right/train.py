"""Bayesian regression by stochastic gradient Langevin dynamics; every rank writes its own shards with torch.save."""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class Langevin(torch.optim.Optimizer):
    """Preconditioned (RMSprop) Langevin dynamics. The noise of a parameter is drawn whole, from a generator keyed by step and
    parameter number, and then cut like the parameter: it does not depend on the number of ranks."""

    def __init__(self, params, lr, temperature, beta=0.95, seed=0):
        super().__init__(params, dict(lr=lr, temperature=temperature, beta=beta))
        self.seed, self.t = seed, 0

    @torch.no_grad()
    def step(self):
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                st = self.state[p]
                if "v" not in st:
                    st["v"] = torch.zeros_like(p)
                st["v"].mul_(group["beta"]).addcmul_(p.grad, p.grad, value=1 - group["beta"])
                scale = st["v"].sqrt().add_(1e-3).reciprocal_()
                g = torch.Generator().manual_seed(self.seed + 1009 * self.t + number)
                noise = torch.randn(p.shape, generator=g)
                if isinstance(p, DTensor):
                    noise = distribute_tensor(noise, p.device_mesh, p.placements)
                p.sub_(scale * p.grad, alpha=group["lr"])
                p.add_(scale.sqrt() * noise, alpha=math.sqrt(2 * group["lr"] * group["temperature"]))
        self.t += 1


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class ShardFiles:
    """step_N/rank_R.pt holds the local pieces of rank R, meta.json how many ranks wrote. The folder gets its final name when
    all are done."""

    def __init__(self, model, opt, posterior):
        self.model, self.opt, self.posterior = model, opt, posterior

    def pieces(self):
        out = {}
        for n, p in self.model.named_parameters():
            out[f"p/{n}"] = local(p.detach())
            if "v" not in self.opt.state[p]:
                self.opt.state[p]["v"] = torch.zeros_like(p)
            out[f"v/{n}"] = local(self.opt.state[p]["v"])
            out[f"sum/{n}"] = local(self.posterior[n])
        return out

    def write(self, root, step, samples):
        tmp = os.path.join(root, f".writing_{step}")
        os.makedirs(tmp, exist_ok=True)
        torch.save(self.pieces(), os.path.join(tmp, f"rank_{dist.get_rank()}.pt"))
        dist.barrier()
        if dist.get_rank() == 0:
            with open(os.path.join(tmp, "meta.json"), "w") as f:
                json.dump({"world": dist.get_world_size(), "step": step, "samples": samples, "t": self.opt.t}, f)
            os.rename(tmp, os.path.join(root, f"step_{step:06d}"))
        dist.barrier()

    @torch.no_grad()
    def read(self, root):
        folder = os.path.join(root, max(d for d in os.listdir(root) if d.startswith("step_")))
        with open(os.path.join(folder, "meta.json")) as f:
            meta = json.load(f)
        if meta["world"] != dist.get_world_size():
            raise SystemExit(f"checkpoint of {meta['world']} ranks cannot be read by {dist.get_world_size()}")
        saved = torch.load(os.path.join(folder, f"rank_{dist.get_rank()}.pt"), weights_only=True)
        for key, piece in self.pieces().items():
            piece.copy_(saved[key])
        self.opt.t = meta["t"]
        return meta["step"], meta["samples"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--burn-in", type=int, default=15)
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    g = torch.Generator().manual_seed(31)
    x = torch.randn(1024, 8, generator=g)
    y = torch.sin(0.4 * (x @ torch.randn(8, 1, generator=g))) + 0.1 * torch.randn(1024, 1, generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    fully_shard(model[2])
    fully_shard(model)
    opt = Langevin(model.parameters(), lr=4e-3, temperature=1e-4)
    posterior = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    files = ShardFiles(model, opt, posterior)
    step = samples = 0
    if args.resume:
        step, samples = files.read(args.resume)

    while step < args.steps:
        pick = torch.randint(0, len(x), (args.global_batch,), generator=torch.Generator().manual_seed(500 + step))
        pick = pick.chunk(world)[rank]
        loss = F.mse_loss(model(x[pick]), y[pick])
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step > args.burn_in:
            samples += 1
            with torch.no_grad():
                for n, q in model.named_parameters():
                    posterior[n].add_(q)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} mse {mean.item() / world:.4f} samples {samples}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            files.write(args.out, step, samples)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        average = {n: (t / max(samples, 1)) for n, t in posterior.items()}
        average = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in average.items()}
        if rank == 0:
            torch.save({"last": full, "posterior_mean": average}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
