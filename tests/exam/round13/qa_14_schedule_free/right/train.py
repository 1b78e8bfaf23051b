import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from lm import LM
from schedule_free import ScheduleFreeAdam

VOCAB, CONTEXT, ROWS = 30, 12, 8


def counting(seed, rows):
    """Counts up or down, with a slip now and then."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (rows, 1), generator=g)
    way = torch.randint(0, 2, (rows, 1), generator=g) * 2 - 1
    slip = (torch.rand(rows, CONTEXT + 1, generator=g) < 0.1).long().cumsum(1)
    return (start + way * torch.arange(CONTEXT + 1) + slip) % VOCAB


def nll(model, ids, rank, world):
    ids = ids[rank::world]
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


@torch.no_grad()
def held_out(model, rank, world):
    loss = nll(model, counting(10**6, 32), rank, world) / world
    dist.all_reduce(loss)
    return loss.item()


def pack(model, opt):
    return {
        "weights": {n: p.detach().to_local() for n, p in model.named_parameters()},
        "optim": {n: opt.state[p] for n, p in model.named_parameters()},
        "count": opt.count,
        "weight_sum": opt.weight_sum,
    }


@torch.no_grad()
def unpack(box, model, opt):
    for n, p in model.named_parameters():
        p.to_local().copy_(box["weights"][n])
        opt.state[p] = box["optim"][n]
    opt.count, opt.weight_sum = box["count"], box["weight_sum"]
    return opt.count


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = LM(VOCAB, CONTEXT)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model, reshard_after_forward=True)
    opt = ScheduleFreeAdam(model.parameters(), lr=1e-2)
    part = f"{rank}of{world}.pt"
    if a.resume:
        unpack(torch.load(os.path.join(a.resume, max(os.listdir(a.resume)), part)), model, opt)

    while opt.count < a.steps:
        loss = nll(model, counting(opt.count, ROWS), rank, world)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if opt.count % a.eval_every == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            opt.averaged()
            result = held_out(model, rank, world)
            opt.resume()
            if rank == 0:
                print(f"step {opt.count} train {shown:.4f} held out {result:.4f}", flush=True)
        if a.save_every and opt.count % a.save_every == 0 and opt.count < a.steps:
            folder = os.path.join(a.out, f"{opt.count:05d}")
            os.makedirs(folder, exist_ok=True)
            torch.save(pack(model, opt), os.path.join(folder, part))
            dist.barrier()
    opt.averaged()
    result = held_out(model, rank, world)
    if rank == 0:
        print(f"final held out {result:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
