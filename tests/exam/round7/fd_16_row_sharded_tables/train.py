"""DLRM-like click model: tables split by rows with a hand-written exchange, dense part under FSDP2.
Checkpoints hold whole tables and can be read at any number of ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tables import RowShardedTable, RowWiseAdagrad, gather_rows, own_rows

SIZES, DIM, NUM = (101, 57, 30), 16, 7
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(NUM, 32), nn.ReLU(), nn.Linear(32, DIM))
        n = len(SIZES) + 1
        self.top = nn.Sequential(nn.Linear(DIM + n * (n - 1) // 2, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, num, emb):
        z = self.bottom(num)
        v = torch.cat([z[:, None], emb], 1)
        i, j = torch.triu_indices(v.shape[1], v.shape[1], 1)
        inter = (v @ v.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([z, inter], 1))


class Impressions:
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.taste = [torch.randn(n, generator=g) for n in SIZES]

    def batch(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        num = torch.randn(n, NUM, generator=g)
        # a long tail: small ids are frequent
        ids = torch.stack([(torch.rand(n, generator=g) ** 2 * s).long() for s in SIZES], 1)
        t = [self.taste[k][ids[:, k]] for k in range(len(SIZES))]
        logit = t[0] * t[1] + t[2] + 0.7 * num[:, 0] - 0.5
        return num, ids, (torch.rand(n, generator=g) < torch.sigmoid(2 * logit)).float()


class ClickModel:
    """Tables and the dense network, with their two optimizers."""

    def __init__(self):
        self.tables = [RowShardedTable(n, DIM, 50 + k) for k, n in enumerate(SIZES)]
        torch.manual_seed(0)
        self.dense = Dense()
        fully_shard(self.dense.bottom)
        fully_shard(self.dense.top)
        fully_shard(self.dense)
        self.sparse_opt = RowWiseAdagrad(self.tables, lr=0.05)
        self.dense_opt = torch.optim.AdamW(self.dense.parameters(), lr=4e-3)

    def __call__(self, num, ids):
        emb = torch.stack([t(ids[:, k].contiguous()) for k, t in enumerate(self.tables)], 1)
        return self.dense(num, emb).squeeze(-1)

    def step(self):
        self.sparse_opt.step()
        self.dense_opt.step()
        self.dense_opt.zero_grad()

    def state(self):
        model, optim = get_state_dict(self.dense, self.dense_opt, options=FULL)
        return {
            "dense": model, "dense_opt": optim,
            "tables": [gather_rows(t.weight, t.rows) for t in self.tables],
            "row_acc": [gather_rows(a, t.rows) for a, t in zip(self.sparse_opt.acc, self.tables)],
        }

    @torch.no_grad()
    def load(self, st):
        set_state_dict(self.dense, self.dense_opt, model_state_dict=st["dense"], optim_state_dict=st["dense_opt"],
                       options=FULL)
        for t, acc, w, a in zip(self.tables, self.sparse_opt.acc, st["tables"], st["row_acc"]):
            t.weight.copy_(own_rows(w))
            acc.copy_(own_rows(a))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--batch", type=int, default=192)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--save-to")
    p.add_argument("--resume-from")
    p.add_argument("--model-file")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data, model = Impressions(), ClickModel()

    step = 0
    if a.resume_from:
        step = max(int(f[5:-3]) for f in os.listdir(a.resume_from) if f.startswith("click"))
        model.load(torch.load(f"{a.resume_from}/click{step}.pt", weights_only=True))

    while step < a.steps:
        num, ids, y = [t.chunk(world)[rank] for t in data.batch(a.batch, 1000 + step)]
        loss = F.binary_cross_entropy_with_logits(model(num, ids), y)
        loss.backward()
        model.step()
        step += 1
        if step % 9 == 0:
            l = loss.detach()
            dist.all_reduce(l)
            if rank == 0:
                print(f"step {step} logloss {l.item() / world:.4f}")
        if a.save_every and step % a.save_every == 0:
            st = model.state()
            if rank == 0:
                torch.save(st, f"{a.save_to}/click{step}.pt")
            dist.barrier()

    with torch.no_grad():
        num, ids, y = [t.chunk(world)[rank] for t in data.batch(2048, 3)]
        test = F.binary_cross_entropy_with_logits(model(num, ids), y)
        dist.all_reduce(test)
    st = model.state()
    if rank == 0:
        print(f"test logloss {test.item() / world:.4f}")
        if a.model_file:
            torch.save({"dense": st["dense"], "tables": st["tables"]}, a.model_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
