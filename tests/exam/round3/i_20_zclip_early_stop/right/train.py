import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onefile
from config import Config
from control import Patience, ZClip


def data_at(step, size):
    """Linear-ish regression with a heavy-tailed batch now and then."""
    w = torch.randn(16, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(80_000 + step)
    x = torch.randn(size, 16, generator=g)
    y = x @ w + torch.relu(x[:, 0] * 2)
    if step % 7 == 6:
        y = y + 12 * torch.randn(size, generator=g)
    return x, y


def build(mesh):
    torch.manual_seed(29)
    model = nn.Sequential()
    model.add_module("encoder", nn.Sequential(nn.Linear(16, 36), nn.Mish(), nn.Linear(36, 36), nn.Mish()))
    model.add_module("readout", nn.Linear(36, 1))
    fully_shard(model.encoder, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def held_out(model, rank, world):
    x, y = (t[rank::world] for t in data_at(-5, 120))
    total = F.mse_loss(model(x).squeeze(1), y, reduction="sum")
    model.reshard()
    dist.all_reduce(total)
    return total.item() / 120


def main():
    cfg = Config.from_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(init_device_mesh("cpu", (world,)))
    optim = torch.optim.SGD(model.parameters(), lr=cfg.lr / 4, momentum=0.85)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optim, T_0=10, T_mult=2)
    clip, patience = ZClip(cfg.z_limit, cfg.warmup), Patience(cfg.patience)
    parts = {"sched": sched, "clip": clip, "patience": patience}

    step = 0
    if cfg.resume:
        step = onefile.load(cfg.resume, cfg.identity(), model, optim, parts)
        for group, lr in zip(optim.param_groups, sched.get_last_lr()):
            group["lr"] = lr

    stop = False
    while step < cfg.steps and not stop:
        x, y = (t[rank::world] for t in data_at(step, cfg.batch))
        loss = F.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        norm = clip(model.parameters())
        optim.step()
        optim.zero_grad()
        sched.step()
        step += 1
        if step % cfg.check_every == 0:
            value = held_out(model, rank, world)
            stop = patience.give_up(value)
            if rank == 0:
                print(
                    f"step {step:3d} held-out {value:8.4f} norm {norm:7.2f} clipped so far {clip.clipped}", flush=True
                )
        if cfg.out and cfg.save_every and step % cfg.save_every == 0:
            onefile.save(cfg.out, step, cfg.identity(), model, optim, parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
