"""Tiny GAN on images of Gaussian blobs.

Phases (D, G) are run one after the other for every batch; a batch is processed in
rounds of --batch-gpu images per rank.
"""
import argparse
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

RES, Z_DIM = 8, 12


def blob_images(n, seed):
    rng = torch.Generator().manual_seed(seed)
    cx, cy = (2 + 3 * torch.rand(n, 1, 1, generator=rng) for _ in range(2))
    width = 1 + torch.rand(n, 1, 1, generator=rng)
    yy, xx = torch.meshgrid(torch.arange(RES), torch.arange(RES), indexing="ij")
    img = torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / (2 * width ** 2))
    return (2 * img - 1).flatten(1)


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)

    def forward(self, x):
        return F.leaky_relu(self.lin(x), 0.2)


class Generator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stages = nn.ModuleList([Stage(Z_DIM, width), Stage(width, width)])
        self.to_img = nn.Linear(width, RES * RES)

    def forward(self, z):
        for stage in self.stages:
            z = stage(z)
        return torch.tanh(self.to_img(z))


class Discriminator(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stages = nn.ModuleList([Stage(RES * RES, width), Stage(width, width)])
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.score(x)


class Loss:
    def __init__(self, G, D):
        self.G, self.D = G, D

    def accumulate_gradients(self, phase, real, z, gain):
        if phase == "D":
            with torch.no_grad():
                fake = self.G(z)
            logits = self.D(torch.cat([real, fake]))
            on_real, on_fake = logits.chunk(2)
            loss = (F.softplus(on_fake) + F.softplus(-on_real)).mean()
        else:
            loss = F.softplus(-self.D(self.G(z))).mean()
        loss.mul(gain).backward()
        return loss.detach()


def training_loop(opts, device):
    rank, num_gpus = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(opts.seed)
    nets = {"G": Generator().to(device), "D": Discriminator().to(device)}
    for net in nets.values():
        for stage in net.stages:
            fully_shard(stage, reshard_after_forward=True)
        fully_shard(net, reshard_after_forward=True)
    loss = Loss(nets["G"], nets["D"])
    phases = [
        SimpleNamespace(name=name, module=nets[name], opt=torch.optim.SGD(nets[name].parameters(), lr=lr, momentum=0.8))
        for name, lr in (("D", opts.dlr), ("G", opts.glr))
    ]

    data = blob_images(512, seed=opts.seed + 1).to(device)
    per_rank = opts.batch // num_gpus
    batch_gpu = min(opts.batch_gpu, per_rank)
    if per_rank % batch_gpu:
        raise SystemExit("--batch must be a multiple of ranks times --batch-gpu")

    for step in range(opts.steps):
        rng = torch.Generator().manual_seed(opts.seed * 10000 + step)
        picks = torch.randint(0, len(data), (opts.batch,), generator=rng)
        all_z = torch.randn(len(phases), opts.batch, Z_DIM, generator=rng)
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        real = data[picks[mine].to(device)].split(batch_gpu)
        shown = {}

        for phase, phase_z in zip(phases, all_z):
            zs = phase_z[mine].to(device).split(batch_gpu)
            gain = batch_gpu * num_gpus / opts.batch
            for other in phases:
                other.opt.zero_grad(set_to_none=True)
            total = torch.zeros((), device=device)
            for real_img, z in zip(real, zs):
                total += loss.accumulate_gradients(phase.name, real_img, z, gain) * batch_gpu
            phase.opt.step()
            dist.all_reduce(total)
            shown[phase.name] = total.item() / opts.batch

        if rank == 0:
            print(f"tick {step:3d}  Loss/D {shown['D']:.6f}  Loss/G {shown['G']:.6f}", flush=True)

    with torch.no_grad():
        z = torch.randn(64, Z_DIM, generator=torch.Generator().manual_seed(0)).to(device)
        gap = (nets["G"](z).mean(0) - data.mean(0)).abs().mean().item()
    if rank == 0:
        print(f"mean image gap {gap:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32, help="images per step over all ranks")
    parser.add_argument("--batch-gpu", type=int, default=8, help="images per round and rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--glr", type=float, default=0.08)
    parser.add_argument("--dlr", type=float, default=0.04)
    parser.add_argument("--seed", type=int, default=4)
    opts = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    training_loop(opts, device)
    dist.barrier()
    dist.destroy_process_group()
