import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from models import Discriminator, Generator


class LSGANTrainer:
    """Least squares GAN: one discriminator update, then one generator update."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.G, self.D = Generator(cfg.z_dim), Discriminator()
        for net in (self.G, self.D):
            for child in net.children():
                if sum(p.numel() for p in child.parameters()) > 1000:
                    fully_shard(child)
            fully_shard(net)
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=cfg.lr_g, betas=(0.5, 0.99))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=cfg.lr_d, betas=(0.5, 0.99))
        self.gen = torch.Generator().manual_seed(cfg.seed + 1)
        self.step = 0

    def draw(self):
        """Global batch of real images and latents, the local part of it returned."""
        b = self.cfg.global_batch
        hue = torch.rand(b, 3, 1, 1, generator=self.gen)
        phase = torch.rand(b, 1, 1, 1, generator=self.gen) * 6.28
        xx = torch.arange(8.0).view(1, 1, 1, 8)
        real = (hue * torch.sin(xx * 0.8 + phase)).expand(b, 3, 8, 8) * 0.9
        z_d = torch.randn(b, self.cfg.z_dim, generator=self.gen)
        z_g = torch.randn(b, self.cfg.z_dim, generator=self.gen)
        return [v.chunk(self.world)[self.rank] for v in (real, z_d, z_g)]

    def d_step(self, real, z):
        with torch.no_grad():
            fake = self.G(z)
        self.opt_d.zero_grad()
        n = len(real)
        score = self.D(torch.cat([real, fake]))
        loss = 0.5 * ((score[:n] - 1).pow(2).mean() + score[n:].pow(2).mean())
        loss.backward()
        self.opt_d.step()
        return loss.detach()

    def g_step(self, z):
        self.opt_g.zero_grad()
        # D only passes the gradient on to G here, its own gradients are not needed
        self.D.requires_grad_(False)
        loss = 0.5 * (self.D(self.G(z)) - 1).pow(2).mean()
        loss.backward()
        self.D.requires_grad_(True)
        self.opt_g.step()
        return loss.detach()

    def train(self):
        while self.step < self.cfg.steps:
            real, z_d, z_g = self.draw()
            losses = torch.stack([self.d_step(real, z_d), self.g_step(z_g)])
            self.step += 1
            if self.step % self.cfg.log_every == 0:
                dist.all_reduce(losses)
                losses /= self.world
                if self.rank == 0:
                    print(f"step {self.step:3d}  D {losses[0]:.4f}  G {losses[1]:.4f}")
            if self.cfg.save_every and self.step % self.cfg.save_every == 0:
                self.save()

    def state(self):
        gm, go = get_state_dict(self.G, self.opt_g)
        dm, do = get_state_dict(self.D, self.opt_d)
        return {"G": gm, "opt_g": go, "D": dm, "opt_d": do, "step": self.step, "rng": self.gen.get_state()}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.cfg.out, f"{self.step:06d}"))

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
        set_state_dict(self.G, self.opt_g, model_state_dict=state["G"], optim_state_dict=state["opt_g"])
        set_state_dict(self.D, self.opt_d, model_state_dict=state["D"], optim_state_dict=state["opt_d"])
        self.step = state["step"]
        self.gen.set_state(state["rng"])
