"""CTR ranker: embedding tables split by columns, dense part split by rows."""
import argparse
import glob
import os
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from model import ClickLog, Ranker
from rowwise import RowWiseAdagrad


@dataclass
class Config:
    steps: int = 42
    batch: int = 256
    lr_table: float = 0.1
    lr_dense: float = 1e-2


def build(cfg):
    torch.manual_seed(11)
    model = Ranker()
    tables = {id(t) for t in model.tables()}
    # columns: every rank holds a part of every row, so a popular row doesn't load one rank
    fully_shard(model, shard_placement_fn=lambda p: Shard(1) if id(p) in tables else None)
    sparse = RowWiseAdagrad(model.tables(), lr=cfg.lr_table)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=cfg.lr_dense)
    return model, sparse, dense


def rank_file(folder, step):
    return os.path.join(folder, f"{step:06d}", f"rank{dist.get_rank()}.pt")


def save(folder, step, model, opts, log):
    path = rank_file(folder, step)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save({
        "model": {n: p.to_local() for n, p in model.named_parameters()},
        "opts": [[{k: v.to_local() if hasattr(v, "to_local") else v for k, v in o.state[p].items()}
                  for g in o.param_groups for p in g["params"]] for o in opts],
        "log": log.g.get_state(),
    }, path)
    dist.barrier()


def load(folder, model, opts, log):
    step = max(int(re.search(r"(\d+)$", d).group(1)) for d in glob.glob(os.path.join(folder, "[0-9]*")))
    ck = torch.load(rank_file(folder, step))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(ck["model"][n])
    for o, states in zip(opts, ck["opts"]):
        params = [p for g in o.param_groups for p in g["params"]]
        for p, s in zip(params, states):
            for k, v in s.items():
                if torch.is_tensor(v) and hasattr(p, "placements") and v.shape == p.to_local().shape:
                    full_like = p.detach().clone()
                    full_like.to_local().copy_(v)
                    v = full_like
                o.state[p][k] = v
    log.g.set_state(ck["log"])
    return step


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--save-every", type=int, default=0)
    a.add_argument("--out", default="ckpt")
    a.add_argument("--resume", default=None)
    a = a.parse_args()
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, sparse, dense = build(cfg)
    log = ClickLog()
    start = load(a.resume, model, [sparse, dense], log) if a.resume else 0
    for step in range(start + 1, cfg.steps + 1):
        user, item, label = (t.chunk(world)[rank] for t in log.draw(cfg.batch))
        loss = F.binary_cross_entropy_with_logits(model(user, item), label)
        loss.backward()
        sparse.step()
        dense.step()
        sparse.zero_grad()
        dense.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 6 == 0:
            print(f"{step}: bce {total.item() / world:.4f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            save(a.out, step, model, [sparse, dense], log)
    acc = [sparse.state[t]["sum"].sum().item() for t in model.tables()]
    print(f"rank {rank} accumulators {acc[0]:.6f} {acc[1]:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
