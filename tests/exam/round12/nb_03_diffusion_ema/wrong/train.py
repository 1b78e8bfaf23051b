import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from config import Config
from denoiser import Diffusion, build_denoiser
from ema import ShardedEMA


def stripes(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    angle, phase = 3.14 * torch.rand(n, 1, 1, generator=g), 6.28 * torch.rand(n, 1, 1, generator=g)
    return torch.sin(0.9 * (xx * angle.cos() + yy * angle.sin()) + phase)


def draw(cfg, images, step, rank, world):
    g = torch.Generator().manual_seed(90_000 + step)
    idx = torch.randint(len(images), (cfg.batch,), generator=g)
    t = torch.randint(cfg.timesteps, (cfg.batch,), generator=g)
    noise = torch.randn(cfg.batch, cfg.image, cfg.image, generator=g)
    return images[idx][rank::world], t[rank::world], noise[rank::world]


@torch.no_grad()
def evaluate(net, diffusion, cfg, held_out, rank, world):
    g = torch.Generator().manual_seed(4)
    t = torch.randint(cfg.timesteps, (len(held_out),), generator=g)
    noise = torch.randn(held_out.shape, generator=g)
    part = slice(rank, None, world)
    value = diffusion.loss(net, held_out[part], t[part], noise[part])
    net.reshard()
    dist.all_reduce(value)
    return value.item() / world


def collect(net, opt, ema, step):
    return {"net": net.state_dict(), "opt": get_optimizer_state_dict(net, opt), "ema": ema.shadow, "step": step}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume")
    args = parser.parse_args()
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    net, diffusion = build_denoiser(cfg), Diffusion(cfg.timesteps)
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr, eps=1e-6)
    ema = ShardedEMA(net, cfg.ema_decay, cfg.ema_dtype)
    images, held_out = stripes(128, cfg.image, 1), stripes(32, cfg.image, 2)

    first = 0
    if args.resume:
        path = sorted(glob.glob(os.path.join(args.resume, "ckpt-*")))[-1]
        state = collect(net, opt, ema, 0)
        dcp.load(state, checkpoint_id=path)
        net.load_state_dict(state["net"])
        set_optimizer_state_dict(net, opt, state["opt"])
        ema.shadow = state["ema"]
        first = state["step"]

    for step in range(first, cfg.steps):
        x0, t, noise = draw(cfg, images, step, rank, world)
        loss = diffusion.loss(net, x0, t, noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        if (step + 1) % 8 == 0:
            online = evaluate(net, diffusion, cfg, held_out, rank, world)
            with ema.applied(net):
                averaged = evaluate(net, diffusion, cfg, held_out, rank, world)
            if rank == 0:
                print(f"step {step + 1} held-out loss {online:.5f} averaged weights {averaged:.5f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(collect(net, opt, ema, step + 1), checkpoint_id=os.path.join(args.out, f"ckpt-{step + 1:05d}"))

    if args.out or args.resume:
        full = {n: s.full_tensor().float() for n, s in ema.shadow.items()}
        if rank == 0:
            torch.save(full, os.path.join(args.out or args.resume, "sampler_weights.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
