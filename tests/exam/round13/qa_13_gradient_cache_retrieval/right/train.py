import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import cached
from pairs import VOCAB, batch
from towers import Tower


class Retriever:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.query, self.passage = Tower(VOCAB), Tower(VOCAB)
        for tower in (self.query, self.passage):
            fully_shard(tower, reshard_after_forward=True)
        # one number; every rank sees the global loss, so that its gradient is the same everywhere
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))
        weights = [*self.query.parameters(), *self.passage.parameters()]
        self.opt = torch.optim.AdamW([{"params": weights}, {"params": [self.log_scale], "weight_decay": 0.0, "lr": 2e-2}], lr=1e-2, eps=1e-6, foreach=False)

    def named(self):
        yield "log_scale", self.log_scale
        for side in ("query", "passage"):
            for n, p in getattr(self, side).named_parameters():
                yield f"{side}.{n}", p


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


def save(path, r, step):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    data = {n: {"w": local(p.detach()), **{k: local(v) for k, v in r.opt.state[p].items()}} for n, p in r.named()}
    torch.save({"step": step, "data": data}, path)


@torch.no_grad()
def load(path, r):
    box = torch.load(path)
    for n, p in r.named():
        d = box["data"][n]
        local(p.detach()).copy_(d["w"])
        r.opt.state[p] = {"step": d["step"], "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for k in ("exp_avg", "exp_avg_sq"):
            local(r.opt.state[p][k]).copy_(d[k])
    return box["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=16, help="pairs on all ranks together")
    ap.add_argument("--chunk", type=int, default=4)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    r = Retriever(seed=14)
    name = f"retriever.{rank}.{world}.pt"
    begin = load(os.path.join(a.resume, name), r) if a.resume else 0
    share = a.batch // world
    mine = slice(rank * share, (rank + 1) * share)
    for step in range(begin, a.steps):
        inputs = [tuple(t[mine] for t in side) for side in batch(step, a.batch)]
        loss = cached.backward((r.query, r.passage), inputs, r.log_scale, a.chunk)
        r.opt.step()
        r.opt.zero_grad()
        if rank == 0 and (step + 1) % 3 == 0:
            print(f"step {step + 1} nce {loss:.4f} scale {r.log_scale.exp().item():.4f}", flush=True)
        if step + 1 == a.save_at:
            save(os.path.join(a.out, name), r, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
