"""Denoising sequence-to-sequence model with FSDP2; the best weights by validation are kept."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH, DIM = 30, 14, 32


class DenoiseBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.ff_norm = nn.LayerNorm(DIM)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.ff_norm(x))


class Denoiser(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(DenoiseBlock() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def corrupted(seed, n):
    g = torch.Generator().manual_seed(seed)
    clean = (torch.randint(VOCAB, (n, 1), generator=g) + torch.arange(LENGTH)) % VOCAB
    noise = torch.randint(VOCAB, (n, LENGTH), generator=g)
    return torch.where(torch.rand(n, LENGTH, generator=g) < 0.3, noise, clean), clean


def shard_of(batch, rank, world, device):
    n = batch[0].size(0) // world
    return [t[rank * n : (rank + 1) * n].to(device) for t in batch]


def train_epoch(model, optimizer, epoch, args, rank, world, device):
    model.train()
    stats = torch.zeros(2, device=device)
    for i in range(args.steps_per_epoch):
        noisy, clean = shard_of(corrupted(1000 + epoch * args.steps_per_epoch + i, args.batch), rank, world, device)
        loss = F.cross_entropy(model(noisy).flatten(0, 1), clean.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stats += torch.stack([loss.detach(), torch.ones_like(loss)])
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return (stats[0] / stats[1]).item()


@torch.no_grad()
def validation(model, args, rank, world, device):
    model.eval()
    stats = torch.zeros(2, device=device)
    noisy, clean = shard_of(corrupted(7, args.val_size), rank, world, device)
    stats[0] = F.cross_entropy(model(noisy).flatten(0, 1), clean.flatten())
    stats[1] = 1
    dist.all_reduce(stats, op=dist.ReduceOp.SUM)
    return (stats[0] / stats[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--steps-per-epoch", type=int, default=2)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--val-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--best-path", default=None, help="write the best weights here at the end")
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))
    torch.manual_seed(6)
    model = Denoiser().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    best_val, best_state = float("inf"), None
    full_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for epoch in range(args.epochs):
        train_loss = train_epoch(model, optimizer, epoch, args, rank, world, device)
        val_loss = validation(model, args, rank, world, device)
        improved = val_loss < best_val
        if improved:
            best_val = val_loss
            best_state = get_model_state_dict(model, options=full_cpu)
        if rank == 0:
            mark = "  <- best" if improved else ""
            print(f"epoch {epoch} train {train_loss:.6f} val {val_loss:.6f}{mark}", flush=True)

    if rank == 0:
        size = sum(v.numel() for v in best_state.values())
        print(f"best validation loss {best_val:.6f}, {size} parameters", flush=True)
        if args.best_path:
            Path(args.best_path).mkdir(parents=True, exist_ok=True)
            torch.save(best_state, Path(args.best_path) / "best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
