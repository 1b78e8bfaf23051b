import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from grad_clip import clip_gradients
from model import Denoiser, shard

CONFIG = dict(steps=30, batch=256, timesteps=100, lr=0.15, momentum=0.9, max_norm=0.25, warmup=5, seed=0)


class Diffusion:
    def __init__(self, timesteps):
        betas = torch.linspace(1e-4, 0.05, timesteps)
        self.alpha_bar = torch.cumprod(1 - betas, dim=0)
        self.timesteps = timesteps

    def loss(self, model, x0, t, noise):
        a = self.alpha_bar[t].unsqueeze(-1)
        return (model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).square().mean()


def two_moons(n, g):
    angle = torch.rand(n, generator=g) * torch.pi
    side = torch.randint(2, (n,), generator=g)
    x = torch.stack([angle.cos() + side, angle.sin() * (1 - 2 * side) + 0.3 * side], dim=-1)
    return x + 0.05 * torch.randn(n, 2, generator=g)


def global_batch(step, cfg):
    g = torch.Generator().manual_seed(cfg["seed"] * 77_777 + step)
    x0 = two_moons(cfg["batch"], g)
    t = torch.randint(cfg["timesteps"], (cfg["batch"],), generator=g)
    noise = torch.randn(cfg["batch"], 2, generator=g)
    return x0, t, noise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    cfg = CONFIG

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(cfg["seed"])
    model = shard(Denoiser(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=cfg["momentum"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / cfg["warmup"]))
    diffusion = Diffusion(cfg["timesteps"])

    def snapshot(step):
        model_sd, optim_sd = get_state_dict(model, optimizer)
        return {"model": model_sd, "optim": optim_sd, "scheduler": scheduler.state_dict(), "step": step}

    step = 0
    if args.resume:
        state = snapshot(0)
        newest = max(os.listdir(args.resume), key=lambda name: int(name.split("_")[-1]))
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]

    while step < cfg["steps"]:
        x0, t, noise = (part.chunk(world)[rank] for part in global_batch(step, cfg))
        loss = diffusion.loss(model, x0, t, noise)
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(list(model.parameters()), cfg["max_norm"], mesh)
        optimizer.step()
        scheduler.step()
        step += 1
        if step % 5 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f} grad norm {norm.item():.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(step), checkpoint_id=os.path.join(args.out, f"step_{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
