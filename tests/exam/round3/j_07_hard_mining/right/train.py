"""Classifier with hard-example mining: samples are drawn in proportion to their recent loss."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from dataset import TwoSpirals
from miner import HardMiner
from mlp import FourierMLP


def gather(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous())
    return torch.cat(out)


@torch.no_grad()
def accuracy(model, data, rank, world):
    mine = torch.arange(rank, len(data), world)
    hits = (model(data.x[mine]).argmax(1) == data.y[mine]).sum()
    count = torch.tensor([hits.item(), len(mine)])
    dist.all_reduce(count)
    return (count[0] / count[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup", type=int, default=4)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = TwoSpirals()
    miner = HardMiner(len(data), seed=12)

    torch.manual_seed(0)
    model = FourierMLP()
    for layer in model.mid:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)

    per = args.batch // world
    for step in range(args.steps):
        idx, weight = miner.draw(args.batch)
        part = slice(rank * per, (rank + 1) * per)
        idx, weight = idx[part], weight[part]

        each = F.cross_entropy(model(data.x[idx]), data.y[idx], reduction="none")
        loss = (weight * each).mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step >= args.warmup:
            miner.update(gather(idx), gather(each.detach()))

        mean = each.detach().mean()
        dist.all_reduce(mean)
        if rank == 0:
            print(
                f"step {step:3d}  ce of the drawn {mean.item() / world:.4f}  "
                f"peak p*n {miner.probabilities().max().item() * len(data):.2f}",
                flush=True,
            )

    acc = accuracy(model, data, rank, world)
    if rank == 0:
        print(f"accuracy {acc:.4f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
