"""Hinge GAN on 2-D Gaussians ring; generator and discriminator are sharded separately."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

Z = 8


def mlp(i, h, o, act):
    return nn.Sequential(nn.Linear(i, h), act(), nn.Linear(h, h), act(), nn.Linear(h, o))


def shard(net):
    for m in net:
        if isinstance(m, nn.Linear) and m.out_features > 2:
            fully_shard(m)
    return fully_shard(net)


def real_batch(n, g):
    k = torch.randint(0, 8, (n,), generator=g)
    a = k * (2 * torch.pi / 8)
    return torch.stack([2 * a.cos(), 2 * a.sin()], -1) + 0.1 * torch.randn(n, 2, generator=g)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.G = shard(mlp(Z, 48, 2, nn.ReLU))
        self.D = shard(mlp(2, 48, 1, lambda: nn.LeakyReLU(0.2)))
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=cfg.lr_g, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=cfg.lr_d, betas=(0.5, 0.99))
        self.step = 0

    def local(self, x):
        return x.chunk(self.world)[self.rank]

    def d_step(self, g):
        real = self.local(real_batch(self.cfg.batch, g))
        z = self.local(torch.randn(self.cfg.batch, Z, generator=g))
        with torch.no_grad():
            fake = self.G(z)
        loss = F.relu(1 - self.D(real)).mean() + F.relu(1 + self.D(fake)).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def g_step(self, g):
        z = self.local(torch.randn(self.cfg.batch, Z, generator=g))
        loss = -self.D(self.G(z)).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.item()

    def state(self):
        gm, go = get_state_dict(self.G, self.opt_g)
        dm, do = get_state_dict(self.D, self.opt_d)
        return {"G": gm, "opt_g": go, "D": dm, "opt_d": do, "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.cfg.out, f"iter_{self.step:06d}"))

    def load(self, folder):
        newest = sorted(glob.glob(os.path.join(folder, "iter_*")))[-1]
        st = self.state()
        dcp.load(st, checkpoint_id=newest)
        set_state_dict(self.G, self.opt_g, model_state_dict=st["G"], optim_state_dict=st["opt_g"])
        set_state_dict(self.D, self.opt_d, model_state_dict=st["D"], optim_state_dict=st["opt_d"])
        self.step = st["step"]

    @torch.no_grad()
    def radius(self):
        g = torch.Generator().manual_seed(99)
        out = self.G(self.local(torch.randn(512, Z, generator=g)))
        s = torch.stack([out.norm(dim=-1).sum(), torch.tensor(float(len(out)))])
        dist.all_reduce(s)
        return (s[0] / s[1]).item()

    def fit(self):
        while self.step < self.cfg.steps:
            g = torch.Generator().manual_seed(self.cfg.seed * 1_000_003 + self.step)
            ld = self.d_step(g)
            lg = self.g_step(g)
            self.step += 1
            if self.step % 4 == 0:
                r = self.radius()
                if self.rank == 0:
                    print(f"{self.step:4d} d {ld:.3f} g {lg:.3f} mean radius {r:.3f} (target 2)", flush=True)
            if self.cfg.save_every and self.step % self.cfg.save_every == 0:
                self.save()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--lr-g", type=float, default=2e-3)
    ap.add_argument("--lr-d", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="gan_ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    tr = Trainer(cfg)
    if cfg.resume:
        tr.load(cfg.resume)
    tr.fit()
    if cfg.export:
        full = {f"{n}.{k}": v.full_tensor() for n, m in (("G", tr.G), ("D", tr.D)) for k, v in m.state_dict().items()}
        if tr.rank == 0:
            torch.save(full, cfg.export)
    dist.destroy_process_group()
