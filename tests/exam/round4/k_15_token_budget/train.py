"""Training with a token budget per micro batch: ranks may need different numbers of micro batches per step."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from batching import IGNORE, VOCAB, collate, plan
from model import Llamalet


def write(folder, step, model, opt, rank, world):
    """One file per rank with its own shards; resuming needs the same number of ranks."""
    path = os.path.join(folder, f"step{step:05d}")
    os.makedirs(path, exist_ok=True)
    shards = [p.to_local().clone() for p in model.parameters()]
    moments = [{k: (v.to_local().clone() if hasattr(v, "to_local") else v) for k, v in opt.state[p].items()}
               for p in model.parameters()]
    torch.save({"world": world, "shards": shards, "moments": moments}, os.path.join(path, f"rank{rank}.pt"))
    dist.barrier()
    if rank == 0:
        open(os.path.join(path, "COMPLETE"), "w").close()
    dist.barrier()


def read(folder, model, opt, rank, world):
    names = sorted(n for n in os.listdir(folder) if os.path.exists(os.path.join(folder, n, "COMPLETE")))
    ck = torch.load(os.path.join(folder, names[-1], f"rank{rank}.pt"))
    assert ck["world"] == world, f"checkpoint of {ck['world']} ranks"
    with torch.no_grad():
        for p, s in zip(model.parameters(), ck["shards"]):
            p.to_local().copy_(s)
            p.grad = torch.zeros_like(p)
        lrs = [g["lr"] for g in opt.param_groups]
        for g in opt.param_groups:
            g["lr"] = 0.0
        opt.step()                       # makes the optimizer build its state; the weights do not move
        opt.zero_grad()
        for g, lr in zip(opt.param_groups, lrs):
            g["lr"] = lr
        for p, m in zip(model.parameters(), ck["moments"]):
            for k, v in m.items():
                mine = opt.state[p][k]
                (mine.to_local() if hasattr(mine, "to_local") else mine).copy_(v)
    return int(names[-1][4:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--docs", type=int, default=16)
    ap.add_argument("--budget", type=int, default=96)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(14)
    model = Llamalet(VOCAB, dim=16, heads=2, depth=2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.0)
    first = read(a.resume, model, opt, rank, world) if a.resume else 0

    for step in range(first, a.steps):
        micro = [collate(ids) for ids in plan(step, a.docs, a.budget, world)[rank]]
        tokens = torch.tensor(float(sum((y != IGNORE).sum() for _, y in micro)))
        dist.all_reduce(tokens)
        nll = torch.zeros(())
        for k, (x, y) in enumerate(micro):
            last = k == len(micro) - 1
            model.set_requires_gradient_sync(last)
            total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
            (total * (world / tokens)).backward()
            nll += total.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(nll)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"step {step + 1} loss {(nll / tokens).item():.4f} micro batches {len(micro)} tokens {int(tokens)}", flush=True)
        if a.out and a.save_every and (step + 1) % a.save_every == 0:
            write(a.out, step + 1, model, opt, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
