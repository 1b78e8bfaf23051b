"""x2 super-resolution of small grey images, SGDR schedule; the best validation weights are exported."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CYCLE = 12


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, padding=1)
        self.b = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.b(F.relu(self.a(x)))


class Upscaler(nn.Module):
    def __init__(self, width=12, depth=1):
        super().__init__()
        self.head = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.tail = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, low):
        h = self.head(low)
        for block in self.body:
            h = block(h)
        return F.interpolate(low, scale_factor=2, mode="nearest") + F.pixel_shuffle(self.tail(h), 2)


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    c = torch.rand(n, 2, 1, 1, generator=g) * 1.2 - 0.6
    s = 0.1 + 0.3 * torch.rand(n, 1, 1, generator=g)
    high = torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / s).unsqueeze(1)
    return F.avg_pool2d(high, 2), high


def learning_rate(step, base):
    pos = (step % CYCLE) / CYCLE
    return base * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * pos)))


@torch.no_grad()
def validate(model, low, high, rank, world):
    n = len(low) // world
    part = slice(rank * n, (rank + 1) * n)
    se = F.mse_loss(model(low[part]), high[part], reduction="sum")
    dist.all_reduce(se)
    return -10 * math.log10(se.item() / high.numel())


def snapshot(model):
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    model = Upscaler()
    for block in model.body:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=a.lr)

    low, high = blobs(128, 1)
    vlow, vhigh = blobs(32, 2)
    best, best_psnr, best_step, start = snapshot(model), -1e9, -1, 0

    if a.resume:
        state = {
            "model": model.state_dict(),
            "optim": get_optimizer_state_dict(model, opt),
            "best": best,
            "meta": {"step": 0, "psnr": 0.0, "best_step": 0},
        }
        dcp.load(state, checkpoint_id=os.path.join(a.resume, "last"))
        set_optimizer_state_dict(model, opt, state["optim"])
        start = state["meta"]["step"]
        best_psnr, best_step = state["meta"]["psnr"], state["meta"]["best_step"]

    for step in range(start, a.steps):
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, a.lr)
        pick = torch.randint(len(low), (8,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = F.mse_loss(model(low[pick]), high[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()

        if (step + 1) % 3 == 0:
            psnr = validate(model, vlow, vhigh, rank, world)
            if psnr > best_psnr:
                best, best_psnr, best_step = snapshot(model), psnr, step + 1
            if rank == 0:
                print(f"step {step + 1:3d} loss {loss.item():.6f} val psnr {psnr:.3f} (best {best_psnr:.3f} at {best_step})")
        if a.save_every and (step + 1) % a.save_every == 0:
            state = {
                "model": model.state_dict(),
                "optim": get_optimizer_state_dict(model, opt),
                "best": best,
                "meta": {"step": step + 1, "psnr": best_psnr, "best_step": best_step},
            }
            dcp.save(state, checkpoint_id=os.path.join(a.out, "last"))

    folder = a.out or a.resume
    if folder:
        export = {k: v.full_tensor().cpu() for k, v in best.items()}
        if rank == 0:
            os.makedirs(folder, exist_ok=True)
            torch.save({"weights": export, "psnr": best_psnr, "step": best_step}, os.path.join(folder, "best.pt"))
    if rank == 0:
        print(f"best validation psnr {best_psnr:.3f} at step {best_step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
