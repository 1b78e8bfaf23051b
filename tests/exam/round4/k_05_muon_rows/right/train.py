"""GPT with Muon for the matrices of the blocks and AdamW for all other parameters."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from corpus import VOCAB, sample
from model import GPT
from muon import Muon


def evaluate(model, rank, world, seq_len):
    model.eval()
    rows = sample(32, seq_len + 1, seed=777)[rank::world]
    with torch.no_grad():
        nll = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    total = torch.tensor([nll.item(), rows[:, 1:].numel()], dtype=torch.float64)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--seq-len", type=int, default=24)
    ap.add_argument("--muon-lr", type=float, default=0.02)
    ap.add_argument("--adam-lr", type=float, default=5e-3)
    ap.add_argument("--eval-every", type=int, default=10)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = GPT(VOCAB, args.seq_len)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)

    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [Muon(matrices, lr=args.muon_lr, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 3) * (1 - 0.9 * s / args.steps))
                 for o in optimizers]

    per = args.batch // world
    for step in range(args.steps):
        rows = sample(args.batch, args.seq_len + 1, seed=step)[rank * per:(rank + 1) * per]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
        for s in schedules:
            s.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1} train {shown.item():.4f}", flush=True)
        if (step + 1) % args.eval_every == 0:
            val = evaluate(model, rank, world, args.seq_len)
            if rank == 0:
                print(f"step {step + 1} valid {val:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
