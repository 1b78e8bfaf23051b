"""Train a small encoder to sort sequences of digits.

    torchrun --nproc-per-node 2 train.py --ckpt runs/sorter --save-every 8
    torchrun --nproc-per-node 2 train.py --ckpt runs/sorter --resume
"""
import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Sorter(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.digit = nn.Embedding(10, args.dim)
        self.place = nn.Embedding(args.length, args.dim)
        self.layers = nn.ModuleList(Layer(args.dim, 4) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.dim)
        self.head = nn.Linear(args.dim, 10)

    def forward(self, ids):
        x = self.digit(ids) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class HostStaging:
    """Brings sharded tensors to the host one at a time through a pinned buffer."""

    def __init__(self, state):
        largest = max(t.numel() for t in state.values())
        self.buffer = torch.empty(largest, pin_memory=torch.cuda.is_available())

    def fetch(self, t):
        full = t.full_tensor() if isinstance(t, DTensor) else t
        if dist.get_rank() != 0:
            return None
        host = self.buffer[: full.numel()].view(full.shape)
        host.copy_(full, non_blocking=True)
        if full.is_cuda:
            torch.cuda.current_stream().synchronize()
        return host.clone()


def safe_checkpoint(folder, model, opt, sched, step):
    """Whole state in one file on rank 0; a crash while writing leaves the last file as it was."""
    state = model.state_dict()
    staging = HostStaging(state)
    weights = {name: staging.fetch(t) for name, t in state.items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optim = get_optimizer_state_dict(model, opt, options=options)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "last.pt.part"
        with open(unfinished, "wb") as f:
            torch.save({"model": weights, "optim": optim, "sched": sched.state_dict(), "step": step}, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(unfinished, folder / "last.pt")
    dist.barrier()


def resume(folder, model, opt, sched):
    saved = torch.load(folder / "last.pt", map_location="cpu", weights_only=True)
    options = StateDictOptions(full_state_dict=True, strict=True)
    set_model_state_dict(model, saved["model"], options=options)
    set_optimizer_state_dict(model, opt, saved["optim"], options=options)
    sched.load_state_dict(saved["sched"])
    return saved["step"]


def batch(args, index):
    g = torch.Generator().manual_seed(555 + index)
    ids = torch.randint(0, 10, (args.batch, args.length), generator=g)
    return ids, ids.sort(1).values


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--length", type=int, default=8)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=6e-3)
    p.add_argument("--log-every", type=int, default=4)
    p.add_argument("--ckpt", type=pathlib.Path)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(23)
    model = Sorter(args).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 6))

    first = 0
    if args.resume:
        first = resume(args.ckpt, model, opt, sched)
        if rank == 0:
            print(f"resumed at step {first}")

    n = args.batch // world
    own = slice(rank * n, (rank + 1) * n)
    for step in range(first, args.steps):
        ids, target = (t[own].to(device) for t in batch(args, step))
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        done = step + 1
        if done % args.log_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {done:3d} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            safe_checkpoint(args.ckpt, model, opt, sched, done)

    model.eval()
    with torch.no_grad():
        ids, target = (t[own].to(device) for t in batch(args, 1_000_000))
        hit = (model(ids).argmax(-1) == target).float().mean()
    dist.all_reduce(hit)
    if rank == 0:
        print(f"digits in place {hit.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
