"""VAE on synthetic 8x8 images. Reparametrisation noise comes from a generator of each rank."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from vae import VAE


def images(n, g):
    """Gaussian blobs at random places."""
    yy, xx = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    c = torch.rand(n, 2, generator=g) * 7
    w = 0.8 + torch.rand(n, generator=g) * 1.5
    d = (yy[None] - c[:, 0, None, None]) ** 2 + (xx[None] - c[:, 1, None, None]) ** 2
    return torch.exp(-d / (2 * w[:, None, None] ** 2)).flatten(1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = VAE()
        fully_shard(self.model.encoder)
        fully_shard(self.model.decoder)
        fully_shard(self.model)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.noise = torch.Generator().manual_seed(args.seed + 1000 * (self.rank + 1))
        self.step = 0

    def state(self):
        model, optim = get_state_dict(self.model, self.opt)
        return {
            "model": model,
            "optim": optim,
            "step": self.step,
            "noise_rng": self.noise.get_state(),
        }

    def save(self):
        dcp.save(self.state(), checkpoint_id=Path(self.args.out) / f"{self.step:06d}")

    def load(self, root):
        state = self.state()
        dcp.load(state, checkpoint_id=max(Path(root).iterdir()))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]
        self.noise.set_state(state["noise_rng"])

    def batch(self):
        g = torch.Generator().manual_seed(self.args.seed * 7919 + self.step)
        return images(self.args.batch_size, g).chunk(self.world)[self.rank]

    def train_step(self):
        beta = min(1.0, (self.step + 1) / self.args.kl_warmup) * 0.2
        rec, kl = self.model(self.batch(), self.noise)
        loss = rec + beta * kl
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.step += 1
        log = torch.stack([rec.detach(), kl.detach()])
        dist.all_reduce(log)
        return (log / self.world).tolist()

    def fit(self):
        while self.step < self.args.steps:
            rec, kl = self.train_step()
            if self.rank == 0:
                print(f"step {self.step:3d} rec {rec:.5f} kl {kl:.5f}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--kl-warmup", type=int, default=10)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
