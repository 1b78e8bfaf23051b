"""Fits an implicit neural representation (SIREN) to an image."""
import argparse
import math
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from siren import build_siren


def target_image(size=32):
    c = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(c, c, indexing="ij")
    r = (x**2 + y**2).sqrt()
    rgb = torch.stack([torch.sin(9 * r), torch.cos(7 * x) * y, torch.sign(torch.sin(8 * x) * torch.sin(8 * y)) * 0.5])
    coords = torch.stack([x, y], -1).reshape(-1, 2)
    return coords, rgb.reshape(3, -1).T


class Fit:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.coords, self.rgb = target_image()
        self.model = build_siren(args.seed)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.it = 0

    def sample(self):
        g = torch.Generator().manual_seed(self.args.seed + 13 * self.it)
        idx = torch.randperm(len(self.coords), generator=g)[: self.args.points]
        idx = idx[self.rank::self.world]
        return self.coords[idx], self.rgb[idx]

    def step(self):
        xy, rgb = self.sample()
        loss = (self.model(xy) - rgb).square().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.it += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item() / self.world

    @torch.no_grad()
    def psnr(self):
        part = slice(self.rank, None, self.world)
        err = (self.model(self.coords[part]) - self.rgb[part]).square().sum()
        dist.all_reduce(err)
        return -10 * math.log10(err.item() / self.rgb.numel() / 4)

    def save(self):
        state = {"model": self.model.state_dict(), "opt": self.optim_state(), "it": self.it}
        dcp.save(state, checkpoint_id=f"{self.args.out}/it_{self.it:05d}")

    def optim_state(self):
        """Adam's state with the parameters' names, so that DCP can shard it as it does the weights."""
        names = {p: n for n, p in self.model.named_parameters()}
        return {names[p]: dict(s) for p, s in self.opt.state.items()}

    def load(self, root):
        for p in self.model.parameters():
            self.opt.state[p] = {
                "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)
            }
        state = {"model": self.model.state_dict(), "opt": self.optim_state(), "it": 0}
        dcp.load(state, checkpoint_id=sorted(pathlib.Path(root).glob("it_*"))[-1])
        self.model.load_state_dict(state["model"])
        for n, p in self.model.named_parameters():
            self.opt.state[p].update(state["opt"][n])
        self.it = state["it"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=40)
    p.add_argument("--points", type=int, default=256)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()

    dist.init_process_group("gloo")
    fit = Fit(args)
    if args.resume:
        fit.load(args.resume)
    while fit.it < args.iters:
        loss = fit.step()
        if fit.rank == 0 and fit.it % 5 == 0:
            print(f"it {fit.it:3d} loss {loss:.5f}")
        if args.save_every and fit.it % args.save_every == 0:
            fit.save()
    psnr = fit.psnr()
    if fit.rank == 0:
        print(f"psnr {psnr:.4f} dB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
