"""MLP-Mixer on synthetic textures with stochastic depth and activation checkpointing."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from mixer import DropPath, Mixer


def textures(n, seed, classes=5):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(classes, (n,), generator=g)
    angle = label * (3.14159 / classes) + 0.1 * torch.randn(n, generator=g)
    phase = 6.28 * torch.rand(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    wave = xx[None] * angle.cos()[:, None, None] + yy[None] * angle.sin()[:, None, None]
    return torch.sin(1.2 * wave + phase[:, None, None]) + 0.3 * torch.randn(n, 16, 16, generator=g), label


def evaluate(model, rank, world):
    images, labels = textures(256, seed=123_456)
    model.eval()
    with torch.no_grad():
        total = F.cross_entropy(model(images[rank::world]), labels[rank::world], reduction="sum")
    model.train()
    dist.all_reduce(total)
    return total / 256


def rank_file(folder, rank):
    return os.path.join(folder, f"shard_{rank:03d}.pt")


def save(folder, rank, model, opt, generator, step):
    os.makedirs(folder, exist_ok=True)
    moments = [{k: opt.state[p][k].to_local().clone() for k in ("exp_avg", "exp_avg_sq")} for p in model.parameters()]
    torch.save(
        {
            "weights": [p.detach().to_local().clone() for p in model.parameters()],
            "moments": moments,
            "generator": generator.get_state(),
            "step": step,
        },
        rank_file(folder, rank),
    )
    dist.barrier()


@torch.no_grad()
def restore(folder, rank, model, opt, generator):
    saved = torch.load(rank_file(folder, rank))
    for p, w, m in zip(model.parameters(), saved["weights"], saved["moments"]):
        p.to_local().copy_(w)
        state = {"step": torch.tensor(float(saved["step"]))}
        for key, value in m.items():
            state[key] = torch.zeros_like(p)
            state[key].to_local().copy_(value)
        opt.state[p] = state
    generator.set_state(saved["generator"])
    return saved["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--drop-path", type=float, default=0.25)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mixer")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(41)
    model = Mixer(DropPath(args.drop_path, generator, rank, world))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    step = 0
    if args.resume:
        step = restore(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]), rank, model, opt, generator)

    local = args.batch // world
    while step < args.steps:
        images, labels = (t[rank * local : (rank + 1) * local] for t in textures(args.batch, seed=step))
        loss = F.cross_entropy(model(images), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(os.path.join(args.out, f"step_{step:05d}"), rank, model, opt, generator, step)

    score = evaluate(model, rank, world)
    if rank == 0:
        print(f"held-out loss {score:.4f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
