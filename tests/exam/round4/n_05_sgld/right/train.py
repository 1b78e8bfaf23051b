"""Bayesian regression by stochastic gradient Langevin dynamics; the predictive mean is averaged over the chain."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_data(n=512, seed=21):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 3, generator=g) - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(n, generator=g)
    return x, y


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        for m in self.mid:
            h = h + torch.tanh(m(h))
        return self.out(h).squeeze(-1)


def local_rows(full, p):
    """The rows of `full` that this rank holds of the sharded parameter p."""
    rows = torch.chunk(full, p.device_mesh.size(), dim=0)
    r = p.device_mesh.get_local_rank()
    return rows[r] if r < len(rows) else full[:0]


class SGLD(torch.optim.Optimizer):
    def __init__(self, params, lr, n_data, prior_var=1.0, temperature=1e-3, seed=0):
        super().__init__(params, dict(lr=lr))
        self.n_data, self.prior_var, self.temperature, self.seed = n_data, prior_var, temperature, seed
        self.t = 0

    @torch.no_grad()
    def step(self):
        gen = torch.Generator().manual_seed(self.seed * 1_000_003 + self.t)
        for group in self.param_groups:
            lr = group["lr"] * (1 + self.t / 10) ** -0.33
            for p in group["params"]:
                w, g = p.to_local(), p.grad.to_local()
                noise = local_rows(torch.randn(p.shape, generator=gen), p)
                drift = g + w / (self.prior_var * self.n_data)
                w.add_(drift, alpha=-lr).add_(noise, alpha=math.sqrt(2 * lr * self.temperature))
        self.t += 1


def save(folder, step, model, opt, chain):
    os.makedirs(folder, exist_ok=True)
    weights = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "t": opt.t, "chain": chain, "step": step}, f"{folder}/sgld_{step}.pt")
    dist.barrier()


def load(folder, model, opt):
    last = max(os.listdir(folder), key=lambda f: int(f[5:-3]))
    ck = torch.load(os.path.join(folder, last))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.to_local().copy_(local_rows(ck["weights"][name], p))
    opt.t = ck["t"]
    return ck["step"], ck["chain"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--burn-in", type=int, default=15)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int)
    ap.add_argument("--out", default="runs/sgld")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100)
    x, y = make_data()
    x_test, y_test = make_data(128, seed=22)
    model = Net()
    mesh = init_device_mesh("cpu", (world,))
    for m in model.mid:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = SGLD(model.parameters(), args.lr, n_data=len(x))

    step, chain = 0, {"sum": torch.zeros(len(x_test)), "sq": torch.zeros(len(x_test)), "n": 0}
    if args.resume:
        step, chain = load(args.resume, model, opt)
    per = args.batch // world
    while step < args.steps:
        pick = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:args.batch]
        pick = pick[rank * per:(rank + 1) * per]
        loss = 0.5 * (model(x[pick]) - y[pick]).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        with torch.no_grad():
            pred = model(x_test)
        if step > args.burn_in:
            chain["sum"] += pred
            chain["sq"] += pred ** 2
            chain["n"] += 1
        dist.all_reduce(loss.detach_())
        if rank == 0 and step % 5 == 0:
            msg = f"step {step} loss {loss.item() / world:.4f} rmse {(pred - y_test).pow(2).mean().sqrt():.3f}"
            if chain["n"] > 1:
                mean = chain["sum"] / chain["n"]
                std = (chain["sq"] / chain["n"] - mean ** 2).clamp(min=0).sqrt().mean()
                msg += f" | chain rmse {(mean - y_test).pow(2).mean().sqrt():.3f} spread {std:.3f}"
            print(msg, flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, opt, chain)

    if args.export:
        weights = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save({"weights": weights, "mean": chain["sum"] / max(chain["n"], 1)}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
