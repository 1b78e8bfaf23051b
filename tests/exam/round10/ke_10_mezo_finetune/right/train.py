"""Fine-tuning with forward passes only. There is no autograd graph and no torch optimizer."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from mezo import MeZO


class Scorer(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 3)

    def forward(self, bags):
        return self.out(torch.tanh(self.hidden(self.emb(bags))))


def batch(step, rank, world, n=32):
    g = torch.Generator().manual_seed(step + 400)
    y = torch.randint(0, 3, (n,), generator=g)
    ids = torch.where(
        torch.rand(n, 10, generator=g) < 0.6,
        y[:, None] * 10 + torch.randint(0, 10, (n, 10), generator=g),
        torch.randint(0, 32, (n, 10), generator=g),
    )
    return ids.chunk(world)[rank], y.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = Scorer().requires_grad_(False)
    # no backward follows that would free the gathered weights, so the root reshards after forward too
    fully_shard(model.hidden, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    opt = MeZO(model, lr=0.02)

    start = 0
    if args.resume:
        newest = max(args.resume.glob("step*"), key=lambda p: int(p.name[4:]))
        saved = torch.load(newest / f"{rank}.pt")
        for n, p in model.named_parameters():
            opt._local(p).copy_(saved["weights"][n])
        opt.buf = saved["momentum"]
        start = saved["step"]

    for step in range(start, args.steps):
        x, y = batch(step, rank, world)
        loss = opt.step(lambda: F.cross_entropy(model(x), y), seed=step)
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            folder = args.out / f"step{step + 1}"
            folder.mkdir(parents=True, exist_ok=True)
            weights = {n: opt._local(p) for n, p in model.named_parameters()}
            torch.save({"weights": weights, "momentum": opt.buf, "step": step + 1}, folder / f"{rank}.pt")
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
