"""Fine-tuning-like run on heavy-tailed data; gradient clipping keeps it calm."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Tower(nn.Module):
    def __init__(self, d_in=16, d=32, layers=3):
        super().__init__()
        self.embed = nn.Linear(d_in, d)
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.head = nn.Linear(d, 1)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return self.head(h).squeeze(-1)


def batch(step, n):
    g = torch.Generator().manual_seed(500 + step)
    x = torch.randn(n, 16, generator=g)
    w = torch.linspace(-1, 1, 16)
    tail = torch.randn(n, generator=g) / (torch.randn(n, generator=g).abs() + 0.1)
    return x, x @ w + 0.5 * tail


def save(folder, step, model, opt):
    blob = {"model": get_model_state_dict(model, options=FULL),
            "opt": get_optimizer_state_dict(model, opt, options=FULL), "step": step}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(blob, os.path.join(folder, f"ckpt_{step:05d}.pth"))
    dist.barrier()


def load(folder, model, opt):
    path = sorted(glob.glob(os.path.join(folder, "ckpt_*.pth")))[-1]
    blob = torch.load(path, map_location="cpu") if dist.get_rank() == 0 else {"model": {}, "opt": {}, "step": 0}
    set_model_state_dict(model, blob["model"], options=FROM0)
    set_optimizer_state_dict(model, opt, blob["opt"], options=FROM0)
    step = torch.tensor(blob["step"])
    dist.broadcast(step, 0)
    return int(step)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--freeze-embed", action="store_true")
    ap.add_argument("--save-every", type=int)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = Tower()
    if args.freeze_embed:
        model.embed.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    first = load(args.resume, model, opt) if args.resume else 0
    n = args.batch_size // world
    for step in range(first, args.steps):
        x, y = batch(step, args.batch_size)
        x, y = x[rank * n:(rank + 1) * n], y[rank * n:(rank + 1) * n]
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, args.clip)
        opt.step()
        avg = loss.detach() / world
        dist.all_reduce(avg)
        if rank == 0 and step % 4 == 0:
            print(f"[{step:3d}] loss {avg.item():.3f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    final = get_model_state_dict(model, options=FULL)
    if args.export and rank == 0:
        torch.save(final, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
