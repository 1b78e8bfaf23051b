"""Train a small multi-output property predictor for polymers and export it as int8 for the screening service.

usage: torchrun --nproc_per_node N train.py [out=DIR] [every=K] [resume=DIR] [steps=S]
DIR gets trainer states (state-*.pt) and, after the last step, screening.npz: int8 weights with one scale each."""
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DESCRIPTORS, WIDTH, TARGETS = 20, 40, 4
OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, h):
        return h + self.b(torch.relu(self.a(h)))


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(DESCRIPTORS, WIDTH)
        self.body = nn.ModuleList([Residual(WIDTH), Residual(WIDTH)])
        self.leave = nn.Linear(WIDTH, TARGETS)

    def forward(self, x):
        h = torch.relu(self.enter(x))
        for r in self.body:
            h = r(h)
        return self.leave(h)


def polymers(n=240):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(n, DESCRIPTORS, generator=g)
    mix = torch.randn(DESCRIPTORS, TARGETS, generator=g) / DESCRIPTORS**0.5
    y = x @ mix + 0.5 * torch.sin(2 * x[:, :TARGETS]) * torch.tensor([1.0, 2.0, 0.5, 1.5])
    return x, y


def write_int8(model, path):
    """symmetric, one scale per tensor"""
    arrays = {}
    for name, p in model.named_parameters():
        w = p.detach()
        peak = w.to_local().abs().max()
        scale = max(float(peak), 1e-12) / 127
        codes = (w / scale).round().clamp(-127, 127).full_tensor()
        arrays[name] = codes.to(torch.int8).numpy()
        arrays[name + "/scale"] = np.float32(scale)
    if dist.get_rank() == 0:
        np.savez(path, **arrays)


def main():
    opts = dict(a.split("=", 1) for a in sys.argv[1:])
    steps, every = int(opts.get("steps", 40)), int(opts.get("every", 15))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = Predictor()
    for r in model.body:
        fully_shard(r, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)

    begin = 0
    if "resume" in opts:
        files = sorted(f for f in os.listdir(opts["resume"]) if f.startswith("state-"))
        blob = torch.load(os.path.join(opts["resume"], files[-1]))
        set_state_dict(model, optim, model_state_dict=blob["model"], optim_state_dict=blob["optim"], options=OPTIONS)
        begin = blob["step"]
    out = opts.get("out") or opts.get("resume")
    if out:
        os.makedirs(out, exist_ok=True)

    x, y = polymers()
    for step in range(begin, steps):
        ids = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:48].chunk(world)[rank]
        loss = nn.functional.mse_loss(model(x[ids]), y[ids])
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 8 == 0 or step == steps - 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)
        if "out" in opts and (step + 1) % every == 0:
            m, o = get_state_dict(model, optim, options=OPTIONS)
            if rank == 0:
                torch.save({"model": m, "optim": o, "step": step + 1}, os.path.join(out, f"state-{step + 1:04d}.pt"))
    if out:
        write_int8(model, os.path.join(out, "screening.npz"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
