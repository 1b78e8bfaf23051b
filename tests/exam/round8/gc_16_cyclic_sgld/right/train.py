"""Bayesian regression by cyclic stochastic gradient Langevin dynamics with a diagonal preconditioner.

Each cycle of the step size starts with exploration (no noise) and ends with sampling (noise of the right variance). The
samples of the posterior are kept as shards; the result is the mean prediction of all of them.
"""
import argparse
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass
class Chain:
    """Everything that the chain needs to go on, in this rank's shards."""

    step: int = 0
    square: dict = field(default_factory=dict)
    samples: list = field(default_factory=list)
    noise_gen: torch.Generator = field(default_factory=torch.Generator)
    data_gen: torch.Generator = field(default_factory=torch.Generator)


class Hetero(nn.Module):
    """Predicts a mean and a log scale."""

    def __init__(self, dim=6, hidden=32):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh())
        self.out = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.out(self.second(self.first(x)))


def nll(out, y):
    mean, log_scale = out.unbind(-1)
    log_scale = 2 * torch.tanh(log_scale / 2)
    return 0.5 * ((y - mean) / log_scale.exp()).square() + log_scale + 0.5 * math.log(2 * math.pi)


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3]
    return x, y + torch.randn(n, generator=g) * (0.1 + 0.2 * x[:, 4].abs())


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def whole_noise_shard(p, gen):
    """Every rank draws the noise of the whole tensor and keeps its part, so the chain is the same at any number of ranks."""
    z = torch.randn(p.shape, generator=gen)
    return local(distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None)) if isinstance(p, DTensor) else z


class Sampler:
    def __init__(self, model, chain, args, n_data):
        self.model, self.chain, self.args, self.n_data = model, chain, args, n_data
        for name, p in model.named_parameters():
            chain.square.setdefault(name, torch.zeros_like(local(p)))

    @torch.no_grad()
    def update(self):
        a, c = self.args, self.chain
        place = (c.step % a.cycle) / a.cycle
        rate = 0.5 * a.rate * (math.cos(math.pi * place) + 1)
        sampling = place >= 0.5
        for name, p in self.model.named_parameters():
            # gradient of the negative log posterior per data point, prior of unit variance
            w, v = local(p), c.square[name]
            g = local(p.grad) + w / self.n_data
            v.mul_(0.95).addcmul_(g, g, value=0.05)
            precond = 1 / (v / (1 - 0.95 ** (c.step + 1))).sqrt().add(1e-2)
            w.sub_(rate * precond * g)
            if sampling:
                w.add_((2 * rate / self.n_data * precond).sqrt() * whole_noise_shard(p, c.noise_gen))
            p.grad = None
        c.step += 1
        if sampling and c.step % a.thin == 0:
            c.samples.append({name: local(p).clone() for name, p in self.model.named_parameters()})


@torch.no_grad()
def posterior_nll(model, samples, x, y, rank, world):
    """Log of the mean likelihood over the samples; afterwards the model has the weights it had before."""
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    logs = []
    for sample in (*samples, before):
        for name, p in model.named_parameters():
            local(p).copy_(sample[name])
        logs.append(-nll(model(x), y))
    last = -logs.pop()
    mixed = math.log(max(1, len(logs))) - torch.logsumexp(torch.stack(logs), 0) if logs else last
    s = torch.stack([mixed.sum(), last.sum(), torch.tensor(float(len(y)))]).double()
    dist.all_reduce(s)
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def newest(folder):
    found = [(int(m.group(1)), p) for p in Path(folder).iterdir() if (m := re.fullmatch(r"chain(\d+)", p.name))]
    return max(found)[1]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--cycle", type=int, default=20)
    ap.add_argument("--thin", type=int, default=2)
    ap.add_argument("--rate", type=float, default=1e-2)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make(400, 70)
    test = make(500, 71)
    torch.manual_seed(72)
    model = Hetero()
    fully_shard(model.first)
    fully_shard(model.second)
    # evaluation changes the weights between forward passes without any backward, so the root must be resharded too
    fully_shard(model, reshard_after_forward=True)
    chain = Chain()
    chain.noise_gen.manual_seed(73)
    chain.data_gen.manual_seed(74)

    if args.resume:
        ck = torch.load(newest(args.resume) / f"{rank}-of-{world}.pt")
        with torch.no_grad():
            for name, p in model.named_parameters():
                local(p).copy_(ck["weights"][name])
        chain.step, chain.square, chain.samples = ck["step"], ck["square"], ck["samples"]
        chain.noise_gen.set_state(ck["noise_gen"])
        chain.data_gen.set_state(ck["data_gen"])

    sampler = Sampler(model, chain, args, len(x))
    while chain.step < args.steps:
        rows = torch.randperm(len(x), generator=chain.data_gen)[: args.batch].chunk(world)[rank]
        loss = nll(model(x[rows]), y[rows]).mean()
        loss.backward()
        sampler.update()
        if chain.step % 10 == 0:
            mixture, last = posterior_nll(model, chain.samples, *test, rank, world)
            if rank == 0:
                print(f"{chain.step} loss {loss.item():.3f} | test nll: last {last:.3f}, {len(chain.samples)} samples {mixture:.3f}", flush=True)
        if args.save_every and chain.step % args.save_every == 0:
            folder = Path(args.out) / f"chain{chain.step}"
            folder.mkdir(parents=True, exist_ok=True)
            state = {
                "weights": {name: local(p).detach().clone() for name, p in model.named_parameters()},
                "step": chain.step, "square": chain.square, "samples": chain.samples,
                "noise_gen": chain.noise_gen.get_state(), "data_gen": chain.data_gen.get_state(),
            }
            torch.save(state, folder / f"{rank}-of-{world}.pt")
            dist.barrier()

    if args.export:
        params = dict(model.named_parameters())
        whole = [{n: params[n].full_tensor().detach().clone() for n in params}]
        for sample in chain.samples:
            with torch.no_grad():
                for n, p in params.items():
                    local(p).copy_(sample[n])
            whole.append({n: p.full_tensor().detach().clone() for n, p in params.items()})
        if rank == 0:
            torch.save(whole, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
