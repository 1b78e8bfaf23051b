"""Probabilistic load forecasting (quantiles) with a variance-reduced optimizer (SVRG) on two sharded models.

Per round: the anchor takes a copy of the weights, and its gradient over the whole data set is computed. Then each
inner step uses   g(w; batch) - g(anchor; batch) + full gradient(anchor).
"""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


@dataclass
class Config:
    samples: int = 160
    batch: int = 20
    rounds: int = 4
    lr: float = 0.25
    chunk: int = 40          # global size of one piece of the full-gradient pass
    seed: int = 3

    @property
    def inner_steps(self):
        return self.samples // self.batch


class QuantileNet(nn.Module):
    def __init__(self, length=24, width=40):
        super().__init__()
        self.trend = nn.Linear(length, width)
        self.shape = nn.Sequential(nn.Linear(length, width), nn.Tanh(), nn.Linear(width, width))
        self.out = nn.Linear(width, len(QUANTILES))

    def forward(self, x):
        return self.out(torch.tanh(self.trend(x)) + self.shape(x))


def load_curves(n, seed, length=24):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + 1)
    base = torch.sin(t * 0.5 + 6.28 * torch.rand(n, 1, generator=g)) * (0.5 + torch.rand(n, 1, generator=g))
    y = base + 0.2 * torch.randn(n, length + 1, generator=g)
    return y[:, :-1], y[:, -1:]


def pinball(pred, y):
    e = y - pred
    return torch.maximum(QUANTILES * e, (QUANTILES - 1) * e).mean()


class SVRG:
    def __init__(self, cfg):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model, self.anchor = QuantileNet(), QuantileNet()
        for net in (self.model, self.anchor):
            fully_shard(net.shape)
            fully_shard(net)
        self.full = [torch.zeros_like(p) for p in self.model.parameters()]
        self.x, self.y = load_curves(cfg.samples, seed=1)
        self.order = torch.Generator().manual_seed(cfg.seed)
        self.step = 0

    def gradient(self, net, ids):
        mine = ids.chunk(self.world)[self.rank]
        for p in net.parameters():
            p.grad = None
        loss = pinball(net(self.x[mine]), self.y[mine])
        loss.backward()
        return loss.detach(), [p.grad for p in net.parameters()]

    @torch.no_grad()
    def _copy_weights(self):
        for a, p in zip(self.anchor.parameters(), self.model.parameters()):
            a.copy_(p)

    def refresh_anchor(self):
        self._copy_weights()
        for f in self.full:
            f.zero_()
        pieces = torch.arange(self.cfg.samples).split(self.cfg.chunk)
        for ids in pieces:
            _, grads = self.gradient(self.anchor, ids)
            for f, g in zip(self.full, grads):
                f.add_(g, alpha=1 / len(pieces))

    def inner_step(self):
        ids = torch.randperm(self.cfg.samples, generator=self.order)[: self.cfg.batch]
        loss, now = self.gradient(self.model, ids)
        _, then = self.gradient(self.anchor, ids)
        with torch.no_grad():
            for p, a, b, f in zip(self.model.parameters(), now, then, self.full):
                p.sub_(a - b + f, alpha=self.cfg.lr)
        self.step += 1
        return loss

    def state(self):
        return {"model": self.model.state_dict(), "anchor": self.anchor.state_dict(),
                "full": {str(i): f for i, f in enumerate(self.full)},
                "order": self.order.get_state(), "step": torch.tensor(self.step)}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=os.path.join(folder, f"svrg_{self.step}"))

    def restore(self, folder):
        newest = max(os.listdir(folder), key=lambda d: int(d.split("_")[1]))
        state = self.state()       # the tensors of the models and of the full gradient are filled in place
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        self.order.set_state(state["order"])
        self.step = int(state["step"])

    def run(self, save_every, out):
        while self.step < self.cfg.rounds * self.cfg.inner_steps:
            if self.step % self.cfg.inner_steps == 0:
                self.refresh_anchor()
            loss = self.inner_step()
            dist.all_reduce(loss)
            if self.rank == 0 and self.step % 4 == 0:
                print(f"step {self.step} pinball {loss.item() / self.world:.5f}", flush=True)
            if save_every and self.step % save_every == 0:
                self.save(out)

    @torch.no_grad()
    def test(self):
        x, y = load_curves(400, seed=2)
        pred = self.model(x)
        cover = ((y > pred[:, :1]) & (y < pred[:, 2:])).float().mean()
        return pinball(pred, y).item(), cover.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    job = SVRG(Config())
    if args.resume:
        job.restore(args.resume)
    job.run(args.save_every, args.out)
    error, cover = job.test()
    if job.rank == 0:
        print(f"test pinball {error:.5f} coverage of the 80% band {cover:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
