"""Bayesian classifier by preconditioned stochastic-gradient Langevin dynamics (pSGLD), with a posterior average of predictions.

The injected noise is defined on the FULL parameters from (seed, step, parameter number), and each rank keeps its own part:
the trajectory does not depend on the number of ranks.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 5 --out ckpt
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

D, C, N_TRAIN, N_TEST = 12, 4, 512, 90


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.first = nn.Linear(D, width)
        self.mid = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(width, C)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for m in self.mid:
            x = x + m(x)
        return self.last(x)


def like(full, p):
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)


class PSGLD:
    def __init__(self, params, n_data, prior_std=1.0, alpha=0.9, eps=1e-3, seed=0, temperature=0.2):
        self.params = list(params)
        self.n, self.prior, self.alpha, self.eps, self.seed, self.temp = (
            n_data,
            prior_std,
            alpha,
            eps,
            seed,
            temperature,
        )
        self.v = [torch.full_like(p, 0.01) for p in self.params]

    def noise(self, k, step):
        g = torch.Generator().manual_seed((self.seed * 100_003 + step) * 1_009 + k)
        return like(torch.randn(self.params[k].shape, generator=g), self.params[k])

    @torch.no_grad()
    def step(self, lr, step):
        """Gradients are those of the MEAN log-likelihood; the prior gradient is scaled alike."""
        for k, (p, v) in enumerate(zip(self.params, self.v)):
            g = p.grad + p / (self.prior**2 * self.n)
            v.mul_(self.alpha).addcmul_(p.grad, p.grad, value=1 - self.alpha)
            precond = 1.0 / (v.sqrt() + self.eps)
            p.sub_(lr * precond * g)
            p.add_((2 * lr * self.temp / self.n * precond).sqrt() * self.noise(k, step))
            p.grad = None


def data():
    g = torch.Generator().manual_seed(9)
    a, b = torch.randn(D, C, generator=g), torch.randn(D, C, generator=g)
    x = torch.randn(N_TRAIN + N_TEST, D, generator=g)
    y = (x @ a + 0.5 * (x @ b) ** 2 + 0.5 * torch.randn(len(x), C, generator=g)).argmax(-1)
    return (x[:N_TRAIN], y[:N_TRAIN]), (x[N_TRAIN:], y[N_TRAIN:])


class Posterior:
    """Running sum of predicted probabilities on the test set; the test set is padded to the same length on every rank."""

    def __init__(self, test, rank, world):
        x, self.y = test
        n = -(-len(x) // world)
        self.idx = torch.arange(rank * n, (rank + 1) * n)
        self.real = self.idx < len(x)
        self.x = x[self.idx.clamp(max=len(x) - 1)]
        self.total, self.count = torch.zeros(len(x), C), 0

    @torch.no_grad()
    def add(self, model):
        prob = F.softmax(model(self.x), -1)
        model.reshard()
        whole = torch.zeros_like(self.total)
        whole[self.idx[self.real]] = prob[self.real]
        dist.all_reduce(whole)
        self.total += whole
        self.count += 1

    def score(self):
        mean = self.total / self.count
        return (mean.argmax(-1) == self.y).float().mean().item(), F.nll_loss(mean.log(), self.y).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--burn-in", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = Net()
    for m in model.mid:
        fully_shard(m)
    fully_shard(model)
    train, test = data()
    sampler = PSGLD(model.parameters(), N_TRAIN)
    posterior = Posterior(test, rank, world)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)

    step = 0
    if args.resume:
        name = max(f for f in os.listdir(args.resume) if f.endswith(".pt"))
        ck = torch.load(os.path.join(args.resume, name), weights_only=True)
        set_model_state_dict(model, ck["model"], options=StateDictOptions(full_state_dict=True))
        sampler.v = [like(v, p) for v, p in zip(ck["v"], sampler.params)]
        posterior.total, posterior.count, step = ck["total"], ck["count"], ck["step"]

    while step < args.steps:
        idx = torch.randperm(N_TRAIN, generator=torch.Generator().manual_seed(40_000 + step))[: args.batch].chunk(
            world
        )[rank]
        loss = F.cross_entropy(model(train[0][idx]), train[1][idx])
        loss.backward()
        sampler.step(args.lr * (1 + step / 10) ** -0.33, step)
        step += 1
        if step > args.burn_in:
            posterior.add(model)
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.4f} posterior samples {posterior.count}", flush=True)
        if args.save_every and step % args.save_every == 0:
            weights = get_model_state_dict(model, options=full)
            v = [t.full_tensor() for t in sampler.v]
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                path = os.path.join(args.out, f"sample_{step:06d}")
                torch.save(
                    {"model": weights, "v": v, "total": posterior.total, "count": posterior.count, "step": step}, path
                )
                os.replace(path, path + ".pt")
            dist.barrier()

    if rank == 0 and posterior.count:
        acc, nll = posterior.score()
        print(f"posterior predictive accuracy {acc:.4f} nll {nll:.4f}")
    if args.export:
        weights = get_model_state_dict(model, options=full)
        if rank == 0:
            torch.save({"model": weights, "predictive": posterior.total / max(1, posterior.count)}, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
