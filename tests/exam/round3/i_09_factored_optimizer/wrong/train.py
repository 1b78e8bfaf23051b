import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from factored import Factored


class Encoder(nn.Module):
    def __init__(self, vocab=32, dim=24, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru_in = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, classes)

    def forward(self, ids):
        x = self.emb(ids)
        for lin in self.gru_in:
            x = x + F.silu(lin(x)) * x.mean(1, keepdim=True)
        return self.cls(self.norm(x.mean(1)))


def sample(step, size, rank, world):
    """Which of the four topics do the tokens come from?"""
    g = torch.Generator().manual_seed(step * 13 + 1)
    topic = torch.randint(0, 4, (size,), generator=g)
    own = torch.randint(0, 8, (size, 10), generator=g) + 8 * topic[:, None]
    other = torch.randint(0, 32, (size, 10), generator=g)
    ids = torch.where(torch.rand(size, 10, generator=g) < 0.45, own, other)
    return ids[rank::world], topic[rank::world]


def param_groups(model, wd):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": wd}, {"params": vectors, "weight_decay": 0.0}]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(12)
    model = Encoder()
    for lin in model.gru_in:
        fully_shard(lin, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = Factored(param_groups(model, 0.01), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=args.steps)

    for step in range(args.steps):
        ids, topic = sample(step, args.batch, rank, world)
        logits = model(ids)
        loss = F.cross_entropy(logits, topic)
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        sched.step()
        stats = torch.stack([loss.detach(), (logits.argmax(-1) == topic).float().mean()])
        dist.all_reduce(stats)
        if rank == 0 and step % 5 == 4:
            print("step %d loss %.4f acc %.3f" % (step + 1, *(stats / world).tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
