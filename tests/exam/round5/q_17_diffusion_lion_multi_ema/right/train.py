"""EDM on 2-D points: Lion, two power EMAs, per-rank checkpoint files (to be resumed with the same number of ranks)."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from denoiser import EDM
from lion import Lion
from power_ema import PowerEMA, local


def draw(step, batch):
    g = torch.Generator().manual_seed(step)
    y = torch.randint(1, 4, (batch,), generator=g)
    a = y * 2.1 + 0.3 * torch.randn(batch, generator=g)
    x = torch.stack([a.cos(), a.sin()], 1)
    sigma = (torch.randn(batch, generator=g) * 1.0 - 0.8).exp()
    drop = torch.rand(batch, generator=g) < 0.15
    return x, y.masked_fill(drop, 0), sigma, torch.randn(batch, 2, generator=g)


def denoise_loss(model, x, y, sigma, noise):
    weight = (sigma**2 + 0.49) / (sigma * 0.7) ** 2
    return (weight[:, None] * (model(x + sigma[:, None] * noise, sigma, y) - x).square()).mean()


class RankFiles:
    def __init__(self, model, opt, ema, rank, world):
        self.model, self.opt, self.ema, self.rank, self.world = model, opt, ema, rank, world

    def _optim(self):
        return [local(self.opt.state[p]["exp_avg"]) for p in self.model.parameters()]

    def save(self, folder, step):
        path = os.path.join(folder, f"step{step:05d}")
        os.makedirs(path, exist_ok=True)
        torch.save({
            "world": self.world,
            "step": step,
            "params": [local(p.detach()) for p in self.model.parameters()],
            "exp_avg": self._optim(),
            "ema": self.ema.avg,
        }, os.path.join(path, f"rank{self.rank}.pt"))
        dist.barrier()
        if self.rank == 0:
            open(os.path.join(path, "COMPLETE"), "w").close()
        dist.barrier()

    @torch.no_grad()
    def load(self, folder):
        good = sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "COMPLETE")))
        blob = torch.load(os.path.join(folder, good[-1], f"rank{self.rank}.pt"))
        assert blob["world"] == self.world, "resume with the same number of ranks"
        for p, v, m in zip(self.model.parameters(), blob["params"], blob["exp_avg"]):
            local(p).copy_(v)
            self.opt.state[p]["exp_avg"] = torch.zeros_like(p)
            local(self.opt.state[p]["exp_avg"]).copy_(m)
        self.ema.avg = blob["ema"]
        return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = EDM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model, reshard_after_forward=True)
    opt = Lion(model.parameters(), lr=args.lr, weight_decay=0.01)
    ema = PowerEMA(model)
    files = RankFiles(model, opt, ema, rank, world)
    start = files.load(args.resume) if args.resume else 0

    for step in range(start, args.steps):
        loss = denoise_loss(model, *(t.chunk(world)[rank] for t in draw(step, args.batch)))
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update(step + 1)
        if args.save_every and (step + 1) % args.save_every == 0:
            files.save(args.out, step + 1)
        if (step + 1) % 6 == 0:
            held = [t.chunk(world)[rank] for t in draw(10**6, 128)]
            vals = []
            with torch.no_grad():
                vals.append(denoise_loss(model, *held))
                for g in ema.gammas:
                    with ema.use(g):
                        vals.append(denoise_loss(model, *held))
            vals = torch.stack(vals) / world
            dist.all_reduce(vals)
            if rank == 0:
                print(f"step {step + 1} held-out: raw {vals[0]:.4f} " + " ".join(f"gamma{g:g} {v:.4f}" for g, v in zip(ema.gammas, vals[1:])), flush=True)

    if args.export:
        o = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {"raw": get_model_state_dict(model, options=o)}
        for g in ema.gammas:
            with ema.use(g):
                out[f"ema{g:g}"] = {k: v.clone() for k, v in get_model_state_dict(model, options=o).items()}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
