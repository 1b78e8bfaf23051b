"""Masked autoencoding of sequences with variable length in three phases: decoder only, everything, averaging.
Losses are sums; FSDP sums gradients too and the division by the global number of masked values is done once, after the reduction."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from averaging import SWA, Lookahead
from phases import PLAN


class AutoEncoder(nn.Module):
    def __init__(self, feats=6, width=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(2 * feats, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.dec = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, feats))
        self.dec_scale = nn.Parameter(torch.ones(feats))

    def forward(self, x, hide, valid):
        h = self.enc(torch.cat([x * ~hide, hide.float()], -1)) * valid[..., None]
        pooled = h.sum(1, keepdim=True) / valid.sum(1)[:, None, None]
        return self.dec(torch.cat([h, pooled.expand_as(h)], -1)) * self.dec_scale


def batch(step, size, feats=6, length=14):
    g = torch.Generator().manual_seed(2000 + step)
    n = torch.randint(3, length + 1, (size, 1), generator=g)
    height = torch.randn(size, 1, 1, generator=g)
    x = height * torch.linspace(0.5, 1.5, feats) + 0.1 * torch.randn(size, length, feats, generator=g)
    hide = torch.rand(x.shape, generator=g) < 0.3
    return x, hide, torch.arange(length)[None] < n


class Session:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(31)
        self.model = AutoEncoder()
        fully_shard(self.model.enc)
        fully_shard(self.model)
        for m in (self.model.enc, self.model):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
        self.swa, self.step = SWA(self.model), 0
        self.phase = self.left = self.look = None

    def enter(self, phase):
        self.phase = phase
        for n, p in self.model.named_parameters():
            p.requires_grad_(n.startswith(phase.train))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.look = Lookahead(torch.optim.NAdam(trained, lr=phase.lr, eps=1e-6))

    def train_step(self):
        x, hide, valid = batch(self.step, self.args.batch)
        count = (hide & valid[..., None]).sum()
        x, hide, valid = (t.chunk(self.world)[self.rank] for t in (x, hide, valid))
        err = (self.model(x, hide, valid) - x).pow(2)
        loss = err[hide & valid[..., None]].sum()
        loss.backward()
        with torch.no_grad():
            for p in self.look.params():
                p.grad.div_(count)
        self.look.step()
        self.look.opt.zero_grad()
        self.step += 1
        if self.phase.swa and self.step % 2 == 0:
            self.swa.collect(self.model)
        total = loss.detach()
        dist.all_reduce(total)
        return (total / count).item()

    def save(self):
        os.makedirs(self.args.out, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "opt": self.look.opt.state_dict(), "slow": self.look.slow,
                    "count": self.look.count, "swa": (self.swa.n, self.swa.mean), "step": self.step},
                   f"{self.args.out}/step{self.step}-rank{self.rank}.pt")

    def resume(self, folder):
        last = max(int(n.split("-")[0][4:]) for n in os.listdir(folder))
        ck = torch.load(f"{folder}/step{last}-rank{self.rank}.pt", weights_only=False)
        self.model.load_state_dict(ck["model"])
        self.swa.n, self.swa.mean = ck["swa"]
        self.step = ck["step"]
        return ck

    def run(self):
        ck = self.resume(self.args.resume) if self.args.resume else None
        end = 0
        for phase in PLAN:
            begin, end = end, end + phase.steps
            if self.step >= end:
                continue
            self.enter(phase)
            if ck is not None and self.step > begin:
                self.look.opt.load_state_dict(ck["opt"])
                self.look.slow, self.look.count = ck["slow"], ck["count"]
            while self.step < end:
                loss = self.train_step()
                if self.rank == 0 and self.step % 4 == 0:
                    print(f"{phase.name:8s} {self.step:3d} loss {loss:.4f}")
                if self.args.save_every and self.step % self.args.save_every == 0:
                    self.save()

    def export(self, path):
        out = {"last." + n: p.detach().full_tensor() for n, p in self.model.named_parameters()}
        out |= {"swa." + n: t.full_tensor() for n, t in self.swa.mean.items()}
        if self.rank == 0:
            torch.save(out, path)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    session = Session(args)
    session.run()
    if args.export:
        session.export(args.export)
    dist.destroy_process_group()
