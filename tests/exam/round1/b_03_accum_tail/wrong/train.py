"""Denoising autoencoder with gradient accumulation over micro-batches.

An epoch has 10 micro-batches; with --accum 4 it is cut into windows of 4, 4 and 2.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Stripes(Dataset):
    """12x12 sinusoidal gratings of random angle and frequency."""

    def __init__(self, n=320, seed=3):
        g = torch.Generator().manual_seed(seed)
        ang = torch.rand(n, generator=g) * 3.1416
        freq = 0.4 + 0.8 * torch.rand(n, generator=g)
        yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
        phase = freq[:, None, None] * (ang.cos()[:, None, None] * xx + ang.sin()[:, None, None] * yy)
        self.clean = phase.sin()[:, None]
        self.noise = 0.4 * torch.randn(self.clean.shape, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.clean[i] + self.noise[i], self.clean[i]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 2 * d)
        self.fc2 = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class PatchMixer(nn.Module):
    def __init__(self, d=32, depth=2):
        super().__init__()
        self.embed = nn.Conv2d(1, d, 3, stride=3)
        self.mix = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.ConvTranspose2d(d, 1, 3, stride=3)

    def forward(self, x):
        h = self.embed(x).flatten(2)
        h = h + self.mix(h)
        h = h.transpose(1, 2)
        for b in self.blocks:
            h = b(h)
        return self.head(h.transpose(1, 2).unflatten(2, (4, 4)))


def save(path, model, opt, epoch, updates):
    msd, osd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"model": msd, "opt": osd, "epoch": epoch, "updates": updates}, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--micro-batch", type=int, default=32, help="over all ranks")
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0, help="in updates; written at the next epoch end")
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = PatchMixer()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    data = Stripes()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=args.micro_batch // world, sampler=sampler)

    epoch0, updates, saved_at = 0, 0, 0
    if args.resume:
        name = sorted(f for f in os.listdir(args.resume) if f.endswith(".pt"))[-1]
        ck = torch.load(os.path.join(args.resume, name), weights_only=False)
        set_state_dict(
            model,
            opt,
            model_state_dict=ck["model"],
            optim_state_dict=ck["opt"],
            options=StateDictOptions(full_state_dict=True),
        )
        epoch0, updates = ck["epoch"], ck["updates"]
        saved_at = updates

    n = len(loader)
    for epoch in range(epoch0, args.epochs):
        sampler.set_epoch(epoch)
        window_loss = 0.0
        for i, (noisy, clean) in enumerate(loader):
            window_start = i - i % args.accum
            window = min(args.accum, n - window_start)
            boundary = (i + 1) % args.accum == 0 or i + 1 == n
            model.set_requires_gradient_sync((i + 1) % args.accum == 0)
            loss = F.mse_loss(model(noisy), clean) / window
            loss.backward()
            window_loss += loss.item()
            if boundary:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad(set_to_none=True)
                updates += 1
                if rank == 0:
                    print(f"epoch {epoch} update {updates} loss {window_loss:.4f}", flush=True)
                window_loss = 0.0
        if args.save_every and updates - saved_at >= args.save_every:
            save(os.path.join(args.out, f"u{updates:05d}.pt"), model, opt, epoch + 1, updates)
            saved_at = updates

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
