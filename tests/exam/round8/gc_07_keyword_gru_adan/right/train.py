import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import checkpoint
from adan import Adan
from sounds import Keywords


class Spotter(nn.Module):
    def __init__(self, bands=16, hidden=32, words=6):
        super().__init__()
        self.front = nn.Sequential(nn.Linear(bands, hidden), nn.GELU())
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, words))

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for frame in self.front(x).unbind(1):
            h = self.cell(frame, h)
        return self.head(h)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    words = Keywords()
    test_x, test_y = words.draw(400, torch.Generator().manual_seed(77))
    data_gen = torch.Generator().manual_seed(6)
    torch.manual_seed(2)
    model = Spotter()
    fully_shard(model.front)
    fully_shard(model.head)
    fully_shard(model)
    optim = Adan(model.parameters(), lr=args.lr)
    step = checkpoint.load(args.resume, model, optim, data_gen) if args.resume else 0

    while step < args.steps:
        x, y = words.draw(args.batch, data_gen)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.cross_entropy(model(x), y)
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        step += 1
        if step % 6 == 0:
            with torch.no_grad():
                s = F.cross_entropy(model(test_x.chunk(world)[rank]), test_y.chunk(world)[rank]).detach().clone()
            dist.all_reduce(s)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} test {s.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            checkpoint.save(args.out, step, model, optim, data_gen)

    full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
