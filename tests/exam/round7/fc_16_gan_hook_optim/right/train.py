"""Least-squares GAN on a ring of Gaussians. The optimizers run inside of backward, by a hook on every parameter, so no gradient outlives its use."""
import argparse
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

ZDIM = 6


def mlp(i, o, width=28):
    net = nn.Sequential(nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, o))
    for m in net:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(net)


class BackwardAdam:
    """Adam that updates a parameter as soon as its (reduced, sharded) gradient has arrived, and frees the gradient."""

    def __init__(self, net, lr, betas=(0.5, 0.9), eps=1e-8):
        self.lr, self.betas, self.eps = lr, betas, eps
        self.slots = {}
        for n, p in net.named_parameters():
            self.slots[n] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": torch.zeros(())}
            p.register_post_accumulate_grad_hook(self._hook(self.slots[n]))

    def _hook(self, slot):
        @torch.no_grad()
        def update(p):
            b1, b2 = self.betas
            slot["t"] += 1
            t = slot["t"].item()
            slot["m"].lerp_(p.grad, 1 - b1)
            slot["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
            denom = (slot["v"] / (1 - b2 ** t)).sqrt().add_(self.eps)
            p.addcdiv_(slot["m"], denom, value=-self.lr / (1 - b1 ** t))
            p.grad = None
        return update


@contextmanager
def frozen(net):
    """Gradients flow through the net, but none are made for its own parameters."""
    net.requires_grad_(False)
    try:
        yield
    finally:
        net.requires_grad_(True)


class Sampler:
    """Real points and latents of the global batch; one generator, the same on every rank, of which a rank keeps its rows."""

    def __init__(self, batch, rank, world):
        self.gen = torch.Generator().manual_seed(77)
        self.batch = batch
        n = batch // world
        self.rows = slice(rank * n, (rank + 1) * n)

    def real(self):
        k = torch.randint(0, 8, (self.batch,), generator=self.gen) * (2 * torch.pi / 8)
        x = 2 * torch.stack([k.cos(), k.sin()], 1) + 0.1 * torch.randn(self.batch, 2, generator=self.gen)
        return x[self.rows]

    def latent(self):
        return torch.randn(self.batch, ZDIM, generator=self.gen)[self.rows]


class Gan:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(61)
        self.G, self.D = mlp(ZDIM, 2), mlp(2, 1)
        self.opt = {"G": BackwardAdam(self.G, 2e-3), "D": BackwardAdam(self.D, 4e-3)}
        self.avg = {n: p.detach().clone() for n, p in self.G.named_parameters()}
        self.data = Sampler(args.batch, self.rank, self.world)
        self.args = args

    def train_d(self):
        with torch.no_grad():
            fake = self.G(self.data.latent())
        score = self.D(torch.cat([self.data.real(), fake]))
        n = len(fake)
        loss = ((score[:n] - 1) ** 2).mean() + (score[n:] ** 2).mean()
        loss.backward()
        return loss.detach()

    def train_g(self):
        with frozen(self.D):
            loss = ((self.D(self.G(self.data.latent())) - 1) ** 2).mean()
            loss.backward()
        with torch.no_grad():
            for n, p in self.G.named_parameters():
                self.avg[n].lerp_(p, 0.1)
        return loss.detach()

    def state(self, step):
        return {"G": self.G.state_dict(), "D": self.D.state_dict(), "avg": self.avg, "adam": {k: o.slots for k, o in self.opt.items()},
                "rng": self.data.gen.get_state(), "step": torch.tensor(step)}

    def restore(self, path):
        st = self.state(0)
        dcp.load(st, checkpoint_id=path)
        self.G.load_state_dict(st["G"])
        self.D.load_state_dict(st["D"])
        self.data.gen.set_state(st["rng"])
        return int(st["step"])

    def run(self):
        args, start = self.args, 0
        if args.resume:
            last = max(os.listdir(args.resume), key=lambda d: int(d.removeprefix("gan")))
            start = self.restore(os.path.join(args.resume, last))
        for step in range(start, args.steps):
            for _ in range(2):
                d = self.train_d()
            g = self.train_g()
            log = torch.stack([d, g]) / self.world
            dist.all_reduce(log)
            if self.rank == 0 and step % 4 == 3:
                print(f"step {step + 1} D {log[0]:.5f} G {log[1]:.5f}", flush=True)
            if args.save_every and (step + 1) % args.save_every == 0:
                dcp.save(self.state(step + 1), checkpoint_id=os.path.join(args.out, f"gan{step + 1}"))

    def export(self, path):
        out = {"G": self.G.state_dict(), "D": self.D.state_dict(), "avg": self.avg}
        out = {k: {n: t.full_tensor() for n, t in sd.items()} for k, sd in out.items()}
        if self.rank == 0:
            torch.save(out, path)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    gan = Gan(args)
    gan.run()
    if args.export:
        gan.export(args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
