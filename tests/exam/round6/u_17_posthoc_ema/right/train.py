"""Flow matching on two moons lifted to 10 dimensions; the averages of the weights are combined after training."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from profiles import PowerProfiles


class Velocity(nn.Module):
    def __init__(self, dim=10, width=40):
        super().__init__()
        self.first = nn.Linear(dim + 3, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, dim)

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.first(torch.cat([x, t, t.mul(3).sin(), t.mul(3).cos()], 1)))
        for layer in self.hidden:
            h = h + torch.nn.functional.silu(layer(h))
        return self.last(h)


def moons(n, gen):
    a = torch.pi * torch.rand(n, generator=gen)
    side = (torch.rand(n, generator=gen) < 0.5).float()
    xy = torch.stack([a.cos() + side - 0.5, (1 - 2 * side) * (a.sin() - 0.25)], 1)
    lift = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    return xy @ lift


def pieces(n, gen, rank, world):
    x1, x0, t = moons(n, gen), torch.randn(n, 10, generator=gen), torch.rand(n, 1, generator=gen)
    return [v.chunk(world)[rank] for v in ((1 - t) * x0 + t * x1, t, x1 - x0)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    net = Velocity()
    for layer in net.hidden:
        fully_shard(layer)
    fully_shard(net, reshard_after_forward=True)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3, betas=(0.9, 0.95))
    params = list(net.parameters())
    profiles = PowerProfiles(params, gammas=(6.94, 16.97))
    gen = torch.Generator().manual_seed(31)
    val = pieces(128, torch.Generator().manual_seed(32), rank, world)
    step = 0
    if args.resume:
        step = max(int(os.path.basename(f).split(".")[0]) for f in glob.glob(os.path.join(args.resume, "*.0.pt")))
        sd = torch.load(os.path.join(args.resume, f"{step}.{rank}.pt"))
        profiles.put_back(sd["weights"])
        profiles.flat, profiles.t = sd["flat"], step
        gen.set_state(sd["gen"])
        for p, (n, m, v) in zip(params, sd["adam"]):
            entry = {"step": n, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            entry["exp_avg"].to_local().copy_(m)
            entry["exp_avg_sq"].to_local().copy_(v)
            opt.state[p] = entry

    @torch.no_grad()
    def validate():
        x, t, v = val
        err = (net(x, t) - v).pow(2).mean()
        dist.all_reduce(err)
        return err.item() / world

    while step < args.steps:
        x, t, v = pieces(64, gen, rank, world)
        loss = (net(x, t) - v).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        profiles.update()
        step += 1
        if step % 5 == 0:
            raw = validate()
            kept = profiles.install((1.0, 0.0))
            long = validate()
            profiles.put_back(kept)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} val {raw:.5f} averaged {long:.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            adam = [(opt.state[p]["step"], opt.state[p]["exp_avg"].to_local(), opt.state[p]["exp_avg_sq"].to_local())
                    for p in params]
            torch.save({"weights": profiles._pack(), "flat": profiles.flat, "gen": gen.get_state(), "adam": adam},
                       os.path.join(args.out, f"{step}.{rank}.pt"))
    dist.barrier()

    # after the training: which mixture of the two averages is best?
    scores = {}
    kept = profiles._pack()
    for w in (-0.5, 0.0, 0.5, 1.0, 1.5):
        profiles.install((w, 1 - w))
        scores[w] = validate()
    best = min(scores, key=scores.get)
    profiles.put_back(kept)
    profiles.install((best, 1 - best))
    if rank == 0:
        print("mixtures", {w: round(s, 5) for w, s in scores.items()}, "chosen", best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
